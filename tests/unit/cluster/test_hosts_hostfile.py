"""The hostfile: what is accepted DeepSpeed reads the same way, what is refused is named with its line and a remedy."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.base.errors import UserError
from llmtrain.cluster.hosts.hostfile import Host, HostfileError, read_hostfile, select

SEED = 20261121
GOOD = b"# training hosts\n\nnode-1 slots=4\nnode-2.rack_7.example.org\tslots=8   # the new one\r\n  10.0.0.7 slots=1\n"


@pytest.fixture(scope="module")
def runner():
    """DeepSpeed's launcher, which reads the same files."""
    from deepspeed.launcher import runner

    return runner


def read(folder: Path, raw: bytes) -> tuple[Host, ...]:
    path = folder / "hosts"
    path.write_bytes(raw)
    return read_hostfile(path)


def problems(folder: Path, raw: bytes) -> tuple[str, ...]:
    with pytest.raises(HostfileError) as refused:
        read(folder, raw)
    return refused.value.problems


def test_reads_names_slots_and_lines(tmp_path):
    hosts = read(tmp_path, GOOD)
    assert [(h.name, h.slots, h.devices, h.line) for h in hosts] == [
        ("node-1", 4, (0, 1, 2, 3), 3),
        ("node-2.rack_7.example.org", 8, tuple(range(8)), 4),
        ("10.0.0.7", 1, (0,), 5),
    ]


@pytest.mark.parametrize(
    ("line", "value", "remedy"),
    [
        (b"a slots=0", "slots=0", "write for example slots=8"),
        (b"a", "no slots after 'a'", "write `NAME slots=COUNT`"),
        (b"a slots=", "'slots='", "whole number from 1 to 1024"),
        (b"a slots=4#c", "slots=4#c", "nothing around it"),
        (b"a slots=1025", "slots=1025", "number of devices of this host"),
        (b"a slots=4 max_slots=8", "stray text 'max_slots=8'", "a comment starts with a blank and #"),
        (b"a slots = 4", "'slots'", "slots=COUNT"),
        (b"-oProxyCommand=touch${IFS}canary slots=2", "-oProxyCommand=touch", "write the name that `ssh NAME` reaches"),
        (b"$(touch canary) slots=2", "$(touch", "letters, digits"),
        (b"root@a slots=2", "'root@a'", "`User` for this host in ~/.ssh/config"),
        (b"fe80::1 slots=2", "'fe80::1'", "a name in /etc/hosts"),
        (b"10.0.0.1:2222 slots=2", "'10.0.0.1:2222'", "write 10.0.0.1, and `Port 2222` for this host in ~/.ssh/config"),
        (b"10.0.0.256 slots=2", "'10.0.0.256'", "four numbers"),
        (b"1 slots=2", "'1' would be read as an address", "write a name"),
        ("а slots=2".encode(), "\\u0430", "letters, digits"),  # a Cyrillic a
        (b"a." * 130 + b"a slots=2", "has 261 characters", "at most 253"),
        (b"a\0 slots=2", "control character '\\x00' in column 2", "remove it"),
        (b"a\xff slots=2", "byte 0xff in column 2 is not UTF-8", "save the file as UTF-8"),
        (b"\xef\xbb\xbfa slots=2", "host '\\ufeffa'", "letters, digits"),
    ],
)
def test_each_fault_is_named_with_line_value_and_remedy(tmp_path, line, value, remedy):
    (problem,) = problems(tmp_path, GOOD + line + b"\nlast slots=2\n")
    assert problem.startswith("line 6: ")
    assert value in problem and remedy in problem
    assert problem.isprintable()
    assert not (tmp_path / "canary").exists()


def test_a_byte_order_mark_is_named(tmp_path):
    (problem,) = problems(tmp_path, b"\xef\xbb\xbf" + GOOD)
    assert problem.startswith("line 1: ") and "BOM" in problem


def test_all_problems_come_at_once(tmp_path):
    raw = b"a slots=1\nA slots=2\nb\nc slots=0\nb slots=3\n\nd[1] slots=x y\n"
    found = problems(tmp_path, raw)
    assert [p.split(":")[0] for p in found] == ["line 2", "line 3", "line 4", "line 5", "line 7"]
    assert "'A'" in found[0] and "line 1 " in found[0] and "'b'" in found[3] and "line 3 " in found[3]
    assert all(word in found[4] for word in ("'d[1]'", "'slots=x'", "'y'"))


def test_no_hosts_and_no_file_are_errors(tmp_path):
    (problem,) = problems(tmp_path, b"# nothing yet\n\n")
    assert "hosts" in problem
    for path, why in ((tmp_path / "nowhere", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(HostfileError, match=why) as refused:
            read_hostfile(path)
        assert str(path) in str(refused.value) and "--hostfile" in str(refused.value)
    (tmp_path / "huge").write_bytes(b"a slots=1\n" * 500_000)
    for name in (f"{tmp_path}/huge", "/dev/zero"):
        with pytest.raises(HostfileError, match=rf"(?s){name}.*4 MiB"):
            read_hostfile(name)


def random_name(rng: random.Random) -> str:
    if rng.random() < 0.15:
        return ".".join(str(rng.randrange(256)) for _ in range(4))
    letters = "abcYZ019"
    labels = [
        rng.choice(letters) + "".join(rng.choices(letters + "-_", k=rng.randrange(6))) + rng.choice("abcYZ")
        for _ in range(rng.randrange(1, 4))
    ]
    return ".".join(labels)


def random_file(rng: random.Random) -> tuple[str, dict[str, int]]:
    """A hostfile in the grammar, and what it says."""
    expected: dict[str, int] = {}
    lines = []
    taken = set()
    for _ in range(rng.randrange(1, 9)):
        name, slots = random_name(rng), rng.randrange(1, 20)
        if name.lower() in taken:
            continue
        taken.add(name.lower())
        expected[name] = slots
        around = [rng.choice(["", " ", "\t", "  "]) for _ in range(2)]
        comment = rng.choice(["", "", " # slots=9", "\t#x", " #"])
        lines.append(f"{around[0]}{name}{rng.choice([' ', '   ', chr(9)])}slots={slots}{comment}{around[1]}")
        lines += rng.choice([[], [], [""], ["# a comment, ünicode too"], ["   # x slots=3"], ["\t "]])
    end = rng.choice(["\n", "\r\n", "\r"])
    return end.join(lines) + rng.choice(["", end]), expected


def test_deepspeed_reads_the_same(tmp_path, runner):
    rng = random.Random(SEED)
    for _ in range(150):
        text, expected = random_file(rng)
        hosts = read(tmp_path, text.encode())
        assert {h.name: h.slots for h in hosts} == expected
        assert dict(runner.fetch_hostfile(str(tmp_path / "hosts"))) == expected, text
        assert [h.name for h in hosts] == list(expected)


# One expression for a whole line, written apart from the reader.
IN_GRAMMAR = re.compile(
    r"[ \t]*(?P<name>(?=[^ \t]{1,253}[ \t])[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
    r"(?:\.[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*)[ \t]+slots=(?P<slots>[1-9][0-9]{0,3})(?:[ \t]+#.*|[ \t]*)"
)
ADDRESS = re.compile(r"(?:(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)", re.ASCII)
INJECTED = (
    *("$(touch canary)", "`touch canary`", "-oProxyCommand=touch${IFS}canary", ";touch canary;", "|touch canary", "\n"),
    *("&", "[0-3]", "^/etc/passwd", ",", "@", ":", "%h", "\\", "'", '"', "\0", "\r", "\u2028", "\u0663", "\ufeff", "#"),
    *("slots=", "slots=0", " ", "\t", "0", "00", "9" * 12, "é", "\x1b[2J", "../", "*", "~", "!", "\xa0", ".", "-", "_"),
)


def in_grammar(raw: bytes) -> bool:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    if raw.startswith(b"\xef\xbb\xbf") or re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", text):
        return False
    names = []
    for line in re.split(r"\r\n|\r|\n", text):
        if re.fullmatch(r"[ \t]*(#.*)?", line):
            continue
        matched = IN_GRAMMAR.fullmatch(line)
        if matched is None or int(matched["slots"]) > 1024:
            return False
        ending = matched["name"].split(".")[-1]
        if re.fullmatch(r"[0-9]+|0[xX][0-9a-fA-F]*", ending) and not ADDRESS.fullmatch(matched["name"]):
            return False
        names.append(matched["name"].lower())
    return bool(names) and len(names) == len(set(names))


def mutated(rng: random.Random, text: str) -> bytes:
    raw = bytearray(text.encode())
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(raw) + 1)
        how = rng.randrange(5)
        if how == 0:
            raw[at:at] = rng.choice(INJECTED).encode()
        elif how == 1:
            del raw[at : at + rng.randrange(1, 4)]
        elif how == 2 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif how == 3:
            lines = raw.split(b"\n")
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
            raw = bytearray(b"\n".join(lines))
        else:
            raw[at:at] = bytes([rng.randrange(256)])
    return bytes(raw)


def test_a_thousand_mutated_hostfiles(tmp_path, runner, monkeypatch):
    print(f"seed {SEED}")
    monkeypatch.chdir(tmp_path)
    rng = random.Random(SEED)
    accepted = 0
    for number in range(1000):
        raw = mutated(rng, random_file(rng)[0])
        try:
            hosts = read(tmp_path, raw)
        except UserError as error:
            assert not in_grammar(raw), (number, raw, str(error))
            assert re.search(r"line \d+: |no hosts", str(error))
            assert all(line.isprintable() for line in str(error).splitlines())
            continue
        assert in_grammar(raw), (number, raw)
        accepted += 1
        assert dict(runner.fetch_hostfile(str(tmp_path / "hosts"))) == {h.name: h.slots for h in hosts}, raw
        for host in hosts:
            assert shlex.split(f"ssh {host.name} hostname") == ["ssh", host.name, "hostname"]
            assert not host.name.startswith("-")
    assert {p.name for p in tmp_path.iterdir()} == {"hosts"}, "something ran"
    assert 100 < accepted < 900, "the mutations leave no room for one of the two answers"


HOSTS = (
    Host(name="a", slots=4, devices=(0, 1, 2, 3), line=1),
    Host(name="b-1", slots=2, devices=(0, 1), line=2),
    Host(name="c.x", slots=1, devices=(0,), line=4),
)


def test_include_and_exclude():
    assert [h.name for h in select(HOSTS, "c.x@a", None)] == ["a", "c.x"]
    assert select(HOSTS, "a:3,1", None)[0].devices == (1, 3)
    assert select(HOSTS, None, "b-1@a:0")[0].slots == 3
    assert select(HOSTS, "", None) == select(HOSTS, None, None) == HOSTS


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("b1", None, "'b1'"),
        ("zzz", None, "it has a, b-1, c.x"),
        ("a:4", None, "no device '4' on host a: the hostfile gives it 0-3"),
        ("a:1,-1,x,", None, "'-1', 'x', ''"),
        ("a:٣", None, r"'\u0663'"),
        ("a@a:0", None, "named twice"),
        (None, "a@b-1@c.x", "no host is left"),
        ("a", "b-1", "both are given"),
        ("a@", None, "host '' is not in the hostfile"),
        ("$(touch x)", None, "'$(touch x)'"),
    ],
)
def test_a_wrong_choice_says_what_there_is(include, exclude, expected):
    with pytest.raises(HostfileError) as refused:
        select(HOSTS, include, exclude)
    assert expected in str(refused.value)


def test_a_choice_names_all_its_problems():
    with pytest.raises(HostfileError) as refused:
        select(HOSTS, "x@a:9@b-1", None)
    assert len(refused.value.problems) == 2


def test_deepspeed_chooses_the_same(tmp_path, runner):
    rng = random.Random(SEED)
    pool = {h.name: h.slots for h in HOSTS}
    agreed = 0
    for _ in range(1000):
        parts = []
        for _ in range(rng.randrange(1, 4)):
            part = rng.choice(["a", "b-1", "c.x", "nope"][: rng.choice([3, 3, 4])])
            if rng.random() < 0.7:
                part += ":" + ",".join(rng.choice("0123") for _ in range(rng.randrange(1, 4)))
            parts.append(part)
        text = "@".join(parts)
        include, exclude = (text, "") if rng.random() < 0.5 else ("", text)
        try:
            expected = dict(runner.parse_inclusion_exclusion(pool, include, exclude))
        except ValueError:
            expected = {}
        try:
            chosen = select(HOSTS, include, exclude)
        except HostfileError as error:
            assert not expected or "twice" in str(error), text
            continue
        agreed += 1
        assert {h.name: list(h.devices) for h in chosen} == expected, text
        assert [h.name for h in chosen] == list(expected), text
    assert agreed > 200


@pytest.mark.parametrize("there", [False, True])
def test_a_misspelt_hostfile_of_deepspeed_ends_the_ranks_that_it_starts_here(tmp_path: Path, there: bool) -> None:
    """DeepSpeed warns of it among its other lines, and trains on one host."""
    (tmp_path / "deepspeed").write_text("import subprocess, sys; sys.exit(subprocess.call(sys.argv[3:]))")
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    rank = [sys.executable, "-m", "llmtrain", "train", "--config", "none.yaml"]
    command = [sys.executable, "deepspeed", "--hostfile", "hosts" if there else "hostz", *rank]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "LOCAL_RANK": "0"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    said = "--hostfile hostz: no such file" in done.stderr and "started this host alone" in done.stderr
    assert said is not there, done.stderr
