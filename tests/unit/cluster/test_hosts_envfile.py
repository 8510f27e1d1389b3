"""Files of environment variables: what ours may say, and what is wrong with DeepSpeed's own."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from llmtrain.base.errors import UserError
from llmtrain.cluster.hosts.variables import EnvFileError, deepspeed_env_problems, read_env_file
from tests.unit.cluster.test_hosts_environment import PAYLOADS, SECRET, SEED
from tests.unit.cluster.test_hosts_environment import hosts as hosts  # the fixture


def env_file(folder: Path, raw: bytes | str) -> Path:
    path = folder / "env"
    path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
    return path


def test_reads_every_form(tmp_path):
    text = """# keys
export WANDB_PROJECT=llm   # a comment
  NCCL_IB_HCA==mlx5_0,mlx5_1
HF_HOME='/data/my cache'

A="say \\"hi\\" for \\$5 \\\\ \\n"
EMPTY=
B=''
"""
    assert read_env_file(env_file(tmp_path, text)) == {
        "WANDB_PROJECT": "llm",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        "HF_HOME": "/data/my cache",
        "A": 'say "hi" for $5 \\ \\n',
        "EMPTY": "",
        "B": "",
    }


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("FOO", "not NAME=VALUE"),
        ("1A=b", "'1A' cannot be a name"),
        ("A=b c", "A: ' ' needs quotes: write A='...'"),
        ("A=$(touch canary)", "A: '$' needs quotes"),
        ('A="$(touch canary)"', "a shell would expand $ and `, but launch does not"),
        ("A='x", "the quote ' is not closed"),
        ('A="x\\"', 'the quote " is not closed'),
        ("A='x'y", "text after the closing quote"),
        ("A=é", "needs quotes"),
        ("RANK=1", "RANK is set by the launcher"),
        ("CUDA_VISIBLE_DEVICES=0", "set by the launcher, from the hostfile"),
        ("HOME=/x", "set by each host"),
        ("A=\0", "control character '\\x00' in column 3"),
        ("A=1", None),
    ],
)
def test_each_fault_of_an_env_file_is_named_with_its_line(tmp_path, line, told):
    path = env_file(tmp_path, f"# one\nOK=1\n{line}\nLAST=2\n")
    if told is None:
        assert read_env_file(path)["A"] == "1"
        return
    with pytest.raises(EnvFileError) as refused:
        read_env_file(path)
    (problem,) = refused.value.problems
    assert problem.startswith("line 3: ") and told in problem and str(path) in str(refused.value)


def test_all_problems_at_once_and_never_a_value(tmp_path):
    path = env_file(
        tmp_path,
        f"TOKEN={SECRET} {SECRET}\nA=1\nA=2\nKEY='{SECRET}\n{SECRET}\nhf_{'a' * 30}=x y\n".encode() + b"\xff=1",
    )
    with pytest.raises(EnvFileError) as refused:
        read_env_file(path)
    assert [p.split(":")[0] for p in refused.value.problems] == [f"line {n}" for n in (1, 3, 4, 5, 6, 7)]
    assert "line 2 " in refused.value.problems[1]
    assert SECRET not in str(refused.value)
    with pytest.raises(EnvFileError, match="No such file"):
        read_env_file(tmp_path / "nowhere")


def random_env_file(rng: random.Random) -> str:
    lines = []
    for number in range(rng.randrange(1, 7)):
        quote = rng.choice(["'", '"', ""])
        text = "".join(rng.choices("abZ09 _-./:=@%+,^#$`\\é&|;<>*?~!\"'", k=rng.randrange(12)))
        if quote == "'":
            value = f"'{text.replace(quote, '')}'"
        elif quote == '"':
            value = '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
        else:
            value = re.sub(r"[^A-Za-z0-9_@%+:,./^=-]", "", text)
        export = rng.choice(["", "export ", "export  "])
        lines.append(f"{rng.choice(['', ' '])}{export}V{number}={value}{rng.choice(['', ' ', ' # c $x'])}")
        lines += rng.choice([[], [], [""], ["# a 'comment"]])
    return "\n".join(lines) + "\n"


def sourced(path: Path) -> dict[str, str]:
    """What a POSIX shell makes of a file."""
    run = ["sh", "-c", f'set -a; . "$1"; exec {shutil.which("env")} -0', "sh", str(path)]
    shown = subprocess.run(run, env={}, capture_output=True, check=True).stdout.decode()
    return {n: v for n, _, v in (item.partition("=") for item in shown.split("\0")) if n.startswith("V")}


def test_a_thousand_mutated_env_files(tmp_path, monkeypatch):
    print(f"seed {SEED}")
    monkeypatch.chdir(tmp_path)
    rng = random.Random(SEED)
    accepted = []
    for number in range(1000):
        raw = random_env_file(rng).encode()
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(raw) + 1)
            odd = rng.choice([rng.choice(PAYLOADS).encode()[:60], bytes([rng.randrange(256)]), b"\n", b"=", b"export "])
            raw = raw[:at] + odd + raw[at + rng.randrange(3) :]
        path = env_file(tmp_path, raw)
        try:
            variables = read_env_file(path)
        except UserError as error:
            assert isinstance(error, EnvFileError) and error.problems, number
            assert all(re.match(r"line \d+: ", problem) for problem in error.problems)
            continue
        accepted.append((raw, variables))
        assert all(re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) for name in variables)
    # The strict part of a shell's language: what is accepted runs nothing there either, and means the same.
    for raw, variables in accepted[::8]:
        path = env_file(tmp_path, raw)
        assert {n: v for n, v in variables.items() if n.startswith("V")} == sourced(path), raw
    assert {p.name for p in tmp_path.iterdir()} == {"env"}, "something ran"
    assert 100 < len(accepted) < 900


def test_deepspeeds_own_file_is_looked_at_before_it_breaks_a_launch(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert deepspeed_env_problems({}, here) == []
    (home / ".deepspeed_env").write_text("A=1\nB=a b\n")
    assert deepspeed_env_problems({}, here) == []
    (home / ".deepspeed_env").write_text(
        "A=1\n\n# c\n# A=1\nexport B=2\nWANDB_API_KEY=" + SECRET + "\nC=$(touch canary)\nD\n"
    )
    (here / ".deepspeed_env").write_text("PROXY=http://me:pass@proxy:80\n")
    found = deepspeed_env_problems({}, here)
    expected = (
        *((2, "a blank line ends DeepSpeed's launcher with a ValueError"), (3, "a comment ends DeepSpeed's launcher")),
        *((4, "the host's shell then ignores the command"), (5, "'export B' is no name")),
        *((6, "WANDB_API_KEY is a secret, and `ps` shows it on every host"), (7, "expands $"), (8, "text without =")),
    )
    for (line, told), problem in zip(expected, found, strict=False):
        assert problem.startswith(f"{home}/.deepspeed_env line {line}: ") and told in problem
    assert len(found) == 8 and found[7].startswith(f"{here}/.deepspeed_env line 1: ") and "PROXY" in found[7]
    assert SECRET not in str(found) and "pass@" not in str(found)
    (here / "mine").write_text("\n")
    assert len(deepspeed_env_problems({"DS_ENV_FILE": "mine"}, here)) == 1
