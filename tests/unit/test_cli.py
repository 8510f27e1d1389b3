"""The front door: help, version, unknown commands, exit codes; and that it imports only what was chosen."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain import cli
from llmtrain.base.errors import TrainingStopped, UserError
from llmtrain.base.threads import usable_cores


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert cli.main(argv) == 0
        told = capsys.readouterr().out
        assert all(name in told for name in cli.commands())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("llmtrain ")


@pytest.mark.parametrize(("word", "remedy"), [("trian", "llmtrain train"), ("xyz", "one of: init, config, prepare")])
def test_an_unknown_command(word: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 2
    told = capsys.readouterr().err
    assert repr(word) in told
    assert remedy in told


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("prepare --input a.txt --out d", "is no flag of `llmtrain prepare`\n    remedy: did you mean --source?"),
        ("prepare --source a.txt --output d", "did you mean --out?"),
        ("prepare --source a.txt --vocab_size=280 --out d", "did you mean --vocab-size?"),
        ("generate run --max_new_tokens 4", "did you mean --max-tokens?"),
        ("checkpoint to-hf run out --chek none", "did you mean --check?"),
        ("data show folder --spilt train", "did you mean --split?"),
    ],
)
def test_an_unknown_option(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    told = capsys.readouterr().err
    assert meant in told and "usage" not in told


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("key = 1: rule"), 2, "error: key = 1: rule"),
        (TrainingStopped("ten skipped steps"), 3, "error: ten skipped steps"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setitem(sys.modules, "llmtrain.commands.train", SimpleNamespace(main=fail))
    assert cli.main(["train"]) == code
    assert words in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setitem(sys.modules, "llmtrain.commands.train", SimpleNamespace(main=fail))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_the_door_imports_no_command() -> None:
    code = "import sys, llmtrain.cli; print(*[m for m in sys.modules if m.startswith('llmtrain')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    names = ("", ".cli", ".base", ".base.errors", ".base.untrusted", ".base.log", ".base.units", ".commands")
    light = {f"llmtrain{name}" for name in (*names, ".commands.completion")}
    assert set(done.stdout.split()) <= light


_SHOWS = """
import json, os, sys, types
from llmtrain import cli
os.sched_getaffinity = lambda _: range(8)
def main(argv):
    seen = {key: os.environ.get(key) for key in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
    print(json.dumps({**seen, "torch": "torch" in sys.modules}))
    return 0
sys.modules[cli.commands()[sys.argv[1]][0]] = types.SimpleNamespace(main=main)
cli.run(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("command", "given", "policy", "threads"),
    [
        *((name, {}, "PASSIVE", None) for name in ("train", "prepare", "parity", "reference", "generate")),
        ("train", {"LOCAL_SIZE": "4"}, "PASSIVE", "2"),
        ("train", {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "3"}, "ACTIVE", "3"),
        ("launch", {}, None, None),  # its ranks are commands, too
    ],
)
def test_threads_of_a_command_sleep_while_they_wait(
    command: str, given: dict[str, str], policy: str | None, threads: str | None
) -> None:
    """20 steps of the quickstart beside other work: 25 s of CPU time with threads that spin, 9 s without."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "LOCAL_"))} | given
    done = subprocess.run([sys.executable, "-c", _SHOWS, command], env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"OMP_WAIT_POLICY": policy, "OMP_NUM_THREADS": threads, "torch": False}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "250000 100000"}, 2),  # cgroup 2, as `docker run --cpus 2.5` writes it
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),  # cgroup 1
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({}, 8),
    ],
)
def test_cores_of_a_container(files: dict[str, str], cores: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize("words", [("--help",), ("train", "--help"), ("prepare", "--help")])
def test_a_reader_that_has_read_enough_gets_no_traceback(words: tuple[str, ...]) -> None:
    """`llmtrain ... | head`: the reading end is closed before a word is written."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "llmtrain", *words], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode in (0, 141) and done.stderr == ""  # argparse itself keeps silent of it


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("llmtrain ge", {"generate "}),
        ("llmtrain generate --te", {"--temperature "}),
        ("llmtrain train --schedule.na", {"--schedule.name "}),
        ("llmtrain train --optim.name ", {"adamw", "lion", "muon"}),
        ("llmtrain config ch", {"check "}),
        ("llmtrain launch --hostfile hosts --optim.dec", {"--optim.decay "}),
        ("llmtrain checkpoint ver", {"verify "}),
        ("llmtrain prepare --source stdlib --form", {"--format "}),
    ],
)
def test_the_shell_completes(line: str, offered: set[str]) -> None:
    """As argcomplete's shell function asks: the answer goes to file descriptor 8."""
    env = {**os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    command = f"{shlex.quote(sys.executable)} -m llmtrain 8>&1 9>/dev/null >/dev/null 2>&1"
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=120)
    assert set(done.stdout.splitlines()) == offered, done


RUN_COMMANDS = [
    "train",
    "config check",
    "config show",
    "reference",
    "parity",
    "launch --hostfile hosts",
    "launch --hostfile hosts --",
]


@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_every_command_takes_a_run_alike(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's YAML with or without --config, before or behind its overrides; one answer to each mistake."""
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("localhost slots=2\n")
    Path("run.yaml").write_text("optim: {lrr: 1}\n")
    told = set()
    forms = ("run.yaml --optim.beta 1", "--config run.yaml --optim.beta 1", "--optim.beta=1 --config=run.yaml")
    for words in (*forms, "--optim.beta 1 run.yaml"):
        assert cli.main([*command.split(), *words.split()]) == 2
        told.add(capsys.readouterr().err)
    [told_once] = told
    assert "optim.lrr = 1  (run.yaml, line 1)" in told_once and "did you mean optim.lr?" in told_once
    assert "--optim.beta" in told_once and "(command line)" in told_once
    Path("more.yaml").write_text("optim: {lrrr: 1}\n")
    assert cli.main([*command.split(), "run.yaml", "--config", "more.yaml"]) == 2
    error = capsys.readouterr().err
    assert "optim.lrr = 1  (run.yaml, line 1)" in error and "optim.lrrr = 1  (more.yaml, line 1)" in error


def test_help_and_a_wrong_word_need_no_torch() -> None:
    """`llmtrain reference --help` took 4.5 s, with a warning of DeepSpeed's."""
    code = """
import sys
from llmtrain import cli
for words in (["reference", "--help"], ["parity", "--help"], ["reference", "no.yaml"], ["parity", "no.yaml"]):
    try:
        cli.main(words)
    except SystemExit:
        pass
    assert "torch" not in sys.modules, words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "WARNING" not in done.stdout + done.stderr, done.stderr


@pytest.mark.parametrize(
    ("line", "rule", "remedy"),
    [
        ("launch --hostfile hosts -- run.yaml --dry-run", "is a flag of `llmtrain launch`", "write --dry-run before"),
        ("launch --hostfile hosts --dry-runn run.yaml", "is no flag of `llmtrain launch`", "did you mean --dry-run?"),
        ("parity run.yaml --rank 2", "is no flag of `llmtrain parity`", "did you mean --ranks?"),
        ("parity", "the run's YAML is missing", "write RUN.yaml, or --config RUN.yaml"),
    ],
)
def test_flags_of_a_command_and_of_its_run(
    line: str,
    rule: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("localhost slots=2\n")
    Path("run.yaml").write_text("{}\n")
    assert cli.main(line.split()) == 2
    error = capsys.readouterr().err
    assert rule in error and remedy in error


@pytest.mark.parametrize(("ending", "code"), [("7", 7), ("print(1 / 0)", 1), ("interrupt()", 130)])
def test_a_process_ends_well_though_a_thread_is_in_torch(ending: str, code: int) -> None:
    """The thread wants the interpreter back while it ends; torch would abort the process."""
    program = f"""
import sys, threading, torch
from llmtrain import cli

def compute():
    while True:
        torch.ones(100_000).sum()

def interrupt():
    raise KeyboardInterrupt

def command(words):
    for _ in range(4):
        threading.Thread(target=compute, daemon=True).start()
    print("computed", flush=False)
    return {ending}

cli._command = lambda name: command
sys.argv = ["llmtrain", "generate"]
cli.run()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (code, "computed\n"), ended.stderr
    assert ("ZeroDivisionError" in ended.stderr) == (code == 1)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WORLD_SIZE", ""),
        ("WORLD_SIZE", "two"),
        ("RANK", "x"),
        ("LOCAL_RANK", "-1"),
        ("LOCAL_SIZE", "1.5"),
        ("LOCAL_WORLD_SIZE", "\u0663"),
        ("MASTER_PORT", "9" * 5000),
    ],
)
def test_a_launchers_variable_that_is_no_number_is_refused(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert cli.main(["train", "run.yaml"]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"error: {variable} is {value!a}: it must be a whole number") and "unset" in said
