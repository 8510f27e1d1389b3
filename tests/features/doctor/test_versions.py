"""`llmtrain doctor --versions`: what is off with another DeepSpeed, what does not hold, and what Ctrl-C leaves.

More than 20 CPU s: the proofs start ranks.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmtrain import cli
from llmtrain.features.doctor import versions
from tests.helpers.launching import environment, finish, gone, kill_tree, tree
from tests.helpers.other_library import other_library


def start(folder: Path, python: Path | str, *words: str) -> subprocess.Popen[str]:
    """The command, whose temporary files go to folder/tmp."""
    (folder / "tmp").mkdir()
    return subprocess.Popen(
        [str(python), "-m", "llmtrain", "doctor", "--versions", *words],
        cwd=folder,
        env=environment(TMPDIR=str(folder / "tmp")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def left_in(folder: Path) -> list[str]:
    return [path.name for path in (folder / "tmp").glob("llmtrain-*")]


def test_another_deepspeed_holds_and_what_is_off_is_told(tmp_path: Path) -> None:
    """A method whose code is another one that computes the same, and a comment, which is no other code."""
    was = "    def average_tensor(self, tensor: torch.Tensor, communication_data_type: torch.dtype):\n"
    more = "        # Another comment.\n        assert tensor is not None\n"
    python = other_library(tmp_path / "venv", "deepspeed/runtime/zero/stage_1_and_2.py", was, was + more)
    process = start(tmp_path, python, "--json")
    output, errors = process.communicate(timeout=500)
    report = json.loads(output)
    assert process.returncode == 0 and report["ok"], (report, errors)
    named = ("DeepSpeedZeroOptimizer", "average_tensor", "ZeRO 1 and 2", "2 bytes", "Muon with fp32")
    assert all(name in report["private"] for name in named), report["private"]
    figures = {proof["name"]: proof["figures"] for proof in report["proofs"]}
    forms = ["parity of ZeRO 1", "parity of ZeRO 3 with shared sequences", "parity of a pipeline with LoRA"]
    assert list(figures) == [*forms, "save and resume of ZeRO 1"]
    assert all(re.search(r"fp32 loss .*\d.*bf16 loss .*\d", figures[form]) for form in forms), figures
    assert figures["save and resume of ZeRO 1"].startswith("0 of 117 tensors after 4 steps differ")
    assert not left_in(tmp_path)


def test_a_proof_that_fails_is_named_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, was = "deepspeed/runtime/comm/coalesced_collectives.py", ".div_(world_sz)"
    python, every = other_library(tmp_path / "venv", file, was, ".div_(1.01 * world_sz)"), versions._proofs
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(versions, "_private", lambda: "private code is looked at in this process")
    monkeypatch.setattr(versions, "_proofs", lambda *given: (p for p in every(*given) if "ZeRO 3" in p[0]))
    assert cli.main(["doctor", "--versions"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.endswith("these do not hold: parity of ZeRO 3 with shared sequences")
    assert any(
        line.startswith("FAIL  parity of ZeRO 3 with shared sequences: 4 steps beside plain PyTorch, fp32 loss")
        for line in lines
    )
    assert any(line.startswith("          FAIL  fp32") for line in lines)  # its output


def test_a_resume_that_goes_on_otherwise_is_a_proof_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sums = iter([{("parameter", "a"): 1, ("parameter", "b"): 2}, {("parameter", "a"): 1, ("moment", "a"): 3}])

    class Saved:
        def checksums(self) -> dict[tuple[str, str], int]:
            return next(sums)

    monkeypatch.setattr(versions, "_command", lambda *_: (0, "output"))
    monkeypatch.setattr(versions.Manifest, "read", lambda _: Saved())
    ok, figures, output = versions._resume(tmp_path)
    assert not ok and figures.startswith("2 of 3 tensors") and output == "output"
    monkeypatch.setattr(versions, "_command", lambda _, *words: (3 * (words[0] == "launch"), "no ranks"))
    assert versions._resume(tmp_path) == (False, "`llmtrain launch` ended with exit code 3", "no ranks")


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, sys.executable)
    try:
        deadline = time.monotonic() + 120
        while len(ranks := [p for p in tree(process) if "llmtrain.parity.trainer" in words_of(p)]) < 2:
            assert process.poll() is None and time.monotonic() < deadline, finish(process)
            time.sleep(0.1)
        every = tree(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=90)
    finally:
        kill_tree(process)
    assert process.returncode == 130 and "interrupted" in errors, errors
    assert gone(ranks, 10) and gone(every, 10) and not left_in(tmp_path)


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_installed_versions_stand_beside_the_allowed_and_the_tested_ones() -> None:
    packages = {package: rest for package, *rest in versions._packages()}
    assert list(packages) == ["torch", "deepspeed", "transformers", "peft", "accelerate"]
    assert packages["deepspeed"] == [metadata.version("deepspeed"), ">=0.19.8,<0.20", "0.19"]
    assert packages["accelerate"][1:] == [">=1.10", "-"]


@pytest.mark.parametrize("words", [["--hostfile", "hosts"], ["run.yaml"], ["--quick"], ["--build-ops", "--json"]])
def test_what_belongs_to_hosts_or_a_run_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--versions", *words]) == 2
    told = capsys.readouterr().err
    assert f'command line = "{words[0]}"' in told and "--versions" in told, told


def test_packages_that_cannot_be_imported_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise ImportError("libgone.so: no such file")

    monkeypatch.setattr("llmtrain.engine.deepspeed.patches.check", missing)
    assert versions._private() == "DeepSpeed's private code cannot be examined: libgone.so: no such file"
