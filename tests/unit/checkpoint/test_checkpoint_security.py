"""Checkpoints and folders from somebody with bad intent: refused, nothing executed, nothing read or written outside."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain import cli
from llmtrain.base.errors import CheckpointError, UserError
from llmtrain.checkpoint.format import MANIFEST, TRAINER, Manifest
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.storage.tensorfile import TensorFile, TensorFileError
from tests.helpers.checkpoints import SHAPES, resign, sign, write_checkpoint

RANK = "rank-00001.safetensors"
Say = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "run", 5, seed=1).parent.parent


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """Nothing here may wait for a pipe or read a device to its end."""

    def stop(*_: object) -> None:
        raise BaseException("it waits")  # what an `except Exception` does not swallow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """`llmtrain checkpoint ...`: exit code and all that it printed."""

    def call(*words: object) -> tuple[int, str]:
        code = cli.main(["checkpoint", *map(str, words)])
        told = capsys.readouterr()
        return code, told.out + told.err

    return call


def folder_of(run: Path) -> Path:
    return run / "checkpoints/step-00000005"


def change_manifest(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change it and sign it again."""
    raw = json.loads((folder_of(run) / MANIFEST).read_text())["manifest"]
    change(raw)
    (folder_of(run) / MANIFEST).write_text(sign(raw))


def everything_refuses(run: Path, out: Path, say: Say, told: str) -> None:
    """Each command that reads tensors ends with a message and without a result."""
    code, text = say("verify", run)
    assert code == 1 and told in text, text
    with pytest.raises(UserError, match=r".{20}"):
        reader = CheckpointReader(folder_of(run))
        for kind, name in reader.tensors():
            reader.read_kind(kind, name, 0, 1 if name == "model.norm.weight" else 64)
            reader.read_kind(kind, name, 4, 8)
            TrainerState.read(folder_of(run))
    intact = write_checkpoint(out / "intact", 5, seed=1)
    for words in (["diff", intact, run], ["average", intact, run, out / "made"], ["to-hf", run, out / "made"]):
        code, text = say(*words)
        assert code in (1, 2) and text.startswith("error: ") and not (out / "made/config.json").exists(), text


@pytest.mark.parametrize(
    "name", ["../canary.safetensors", "/etc/passwd", "a/b", "..", ".", "", "manifest.json", ".hidden", "a\0b", "a\\b\n"]
)
def test_a_file_name_that_leaves_the_folder(run: Path, tmp_path: Path, say: Say, name: str) -> None:
    shutil.copy(folder_of(run) / RANK, run / "checkpoints/canary.safetensors")
    change_manifest(run, lambda raw: raw["files"].update({name: raw["files"].pop(RANK)}))
    with pytest.raises(CheckpointError, match="cannot be the name of a file in a checkpoint"):
        Manifest.read(folder_of(run))
    everything_refuses(run, tmp_path, say, "cannot be the name of a file in a checkpoint")


@pytest.mark.parametrize("file", [RANK, TRAINER, MANIFEST])
@pytest.mark.parametrize("what", ["pipe", "device", "folder", "link to a device", "link to the same bytes"])
def test_something_that_is_no_file(run: Path, tmp_path: Path, say: Say, file: str, what: str) -> None:
    path = folder_of(run) / file
    shutil.move(path, tmp_path / "elsewhere")
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        try:
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("only root makes devices")
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if what == "link to a device" else tmp_path / "elsewhere")
    if file != MANIFEST:
        size = path.lstat().st_size
        change_manifest(run, lambda raw: raw["files"][file].update(bytes=size, pieces=[] if size == 0 else None))
        change_manifest(run, lambda raw: raw["files"][file].update(pieces=raw["files"][file]["pieces"] or []))
    code, text = say("verify", run)
    assert code == 1 and "DAMAGED" in text, text
    with pytest.raises(CheckpointError):
        reader = CheckpointReader(folder_of(run))
        reader.check(RANK)
        TrainerState.read(folder_of(run))
    assert "damaged" in say("ls", run)[1]


def test_a_pipe_as_a_weight_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(TensorFileError, match=r"model\.safetensors.* regular"):
        TensorFile(tmp_path / "model.safetensors")


@pytest.mark.parametrize("claimed", [4, 2**43])
def test_a_claim_that_the_file_does_not_keep(tmp_path: Path, say: Say, claimed: int) -> None:
    """A signed manifest with fewer elements than the header has, or with 32 TiB: refused before memory is taken."""
    run = write_checkpoint(tmp_path / "run", 5, seed=1, ranks=1).parent.parent
    name = "model.norm.weight"

    def claim(raw: dict[str, Any]) -> None:
        raw["tensors"][name] = [claimed]
        entry = raw["files"]["rank-00000.safetensors"]
        entry["bytes"] = max(entry["bytes"], 8 * claimed)
        entry["pieces"] = [[*p[:3], claimed if p[1] == name else p[3], p[4]] for p in entry["pieces"]]

    change_manifest(run, claim)
    with pytest.raises(CheckpointError, match=f"does not hold what the manifest says: see param/{name}"):
        CheckpointReader(folder_of(run)).read(name, 0, claimed)
    assert say("verify", run)[0] == 1


UP = "model.layers.0.mlp.up_proj.weight"  # [16, 8]


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ([0, 64, 2**62, 0, [[0, 4]]], [4, 64, 2**62, 0, [[0, 4]]], "ends at element"),
        ([0, 64, 8, 0, [[0, 4]]], [0, 64, 8, 0, [[0, 4]]], "has an overlap at element 0"),
        ([0, 64, 8, 0, [[0, 4]]], [0, 64, 8, 0, [[3, 4]]], "has an overlap at element 3"),
        ([0, 64, 8, 0, [[0, 4]]], [64, 64, 0, 0, []], "has an overlap at element 64"),
        ([0, 60, 8, 0, [[0, 4]]], [0, 64, 8, 0, [[4, 4]]], "has a gap: its pieces hold 124 of 128 elements"),
        ([0, 64, 8, 0, [[0, 4]]], [0, 64, 16, 0, [[4, 4], [12, 4]]], "has pieces with strides of 8 and 16 elements"),
        ([0, 64, 8, 4, [[0, 4]]], [0, 64, 8, 0, [[4, 4]]], "it skips 4 elements, more than a period holds"),
        ([0, 64, 3, 0, [[0, 4]]], [0, 64, 8, 0, [[4, 4]]], "its runs are longer than its stride of 3 elements"),
        ([0, 64, 0, 0, [[0, 4]]], [0, 64, 8, 0, [[4, 4]]], "its runs are longer than its stride of 0 elements"),
        ([0, 64, 8, 0, [[4, 2], [0, 2]]], [0, 64, 8, 0, [[4, 4]]], "its runs are empty, overlap, or are not in order"),
        ([0, 64, 8, 0, [[0, 0]]], [0, 64, 8, 0, [[4, 4]]], "its runs are empty, overlap, or are not in order"),
        ([0, 64, 8, 0, []], [64, 64], "it has a stride, but no runs"),
        ([0, 64, 8], [64, 64], "cannot be read as a manifest"),
        ([0, 64, 8, 0, [[-1, 4]]], [64, 64], "is not a whole number"),
        ([0, 64, 8, 0, [[2**70, 4]]], [64, 64], "is not a whole number"),
        ([0, 64, 8, 0, {"0": 4}], [64, 64], "cannot be read as a manifest"),
        ([0, 0, 8, 0, [[0, 4]]], [0, 128], "it is empty"),
        ([0, 64, 2**20, 0, [[2 * index, 1] for index in range(5000)]], [0, 128], "it has more than 4096 runs"),
    ],
)
def test_strided_pieces_that_cannot_be(run: Path, first: list[Any], second: list[Any], says: str) -> None:
    """Signed, refused with the reason, and soon: nothing is counted element by element."""

    def claim(raw: dict[str, Any]) -> None:
        for entry, where in zip(
            (raw["files"]["rank-00000.safetensors"], raw["files"][RANK]), (first, second), strict=True
        ):
            for piece in entry["pieces"]:
                if piece[1] == UP:
                    piece[2:4], piece[5:] = where[:2], where[2:]

    change_manifest(run, claim)
    with pytest.raises(CheckpointError, match=re.escape(says)):
        Manifest.read(folder_of(run))


def test_runs_without_number_cost_no_time(run: Path) -> None:
    """Two pieces of 4,000 runs each, at every line of a tensor that is larger than the disk."""
    many = [[2 * index, 1] for index in range(4000)]

    def claim(raw: dict[str, Any]) -> None:
        raw["tensors"][UP] = [2**20, 8000]
        for index, name in enumerate(("rank-00000.safetensors", RANK)):
            entry = raw["files"][name]
            entry["bytes"] = 2**50
            for piece in entry["pieces"]:
                if piece[1] == UP:
                    piece[2:4], piece[5:] = [index, 2**20 * 4000], [8000, 0, many]

    change_manifest(run, claim)
    began_s = time.process_time()
    reader = CheckpointReader(folder_of(run))
    with pytest.raises(CheckpointError, match=f"does not hold what the manifest says: see param/{UP}"):
        reader.read(UP, 0, 2**20 * 8000)
    assert time.process_time() - began_s < 10


class Gadget:
    """Unpickling it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def test_a_pickle_is_never_loaded(run: Path, tmp_path: Path, say: Say) -> None:
    canary = tmp_path / "canary"
    raw = pickle.dumps(Gadget(canary))
    pickle.loads(raw)
    assert canary.exists()  # the gadget works
    canary.unlink()
    archive = tmp_path / "x.pt"
    torch.save({"module": Gadget(canary)}, archive)
    assert zipfile.is_zipfile(archive)
    for data in (raw, archive.read_bytes(), len(raw).to_bytes(8, "little") + raw):
        (folder_of(run) / RANK).write_bytes(data.ljust(5000, b"\0"))
        resign(folder_of(run))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        everything_refuses(run, tmp_path / "out", say, "rank-00001.safetensors (rank 1): its header is damaged")
    shutil.copy(archive, folder_of(run) / TRAINER)
    resign(folder_of(run))
    assert say("verify", run)[0] == 1 and "damaged" in say("ls", run)[1]
    assert not canary.exists()


def test_names_that_a_terminal_obeys(run: Path, say: Say) -> None:
    """A tensor's name cannot clear the screen or end the program with half a surrogate pair."""
    for name in ("\x1b[2J", "\ud800"):
        change_manifest(run, lambda raw, name=name: raw["tensors"].update({name: [1]}))
        for command in ("verify", "ls"):
            text = say(command, run)[1]
            assert "is not a printable text" in text and text.replace("\n", "").isprintable(), text


def test_a_name_that_is_a_path_stays_a_name(tmp_path: Path, say: Say) -> None:
    shapes = {**SHAPES, "../../../canary": (4,), "/tmp/canary": (4,)}
    run = write_checkpoint(tmp_path / "deep/er/run", 5, seed=1, shapes=shapes).parent.parent
    other = write_checkpoint(tmp_path / "deep/er/other", 5, seed=2, shapes=shapes).parent.parent
    before = set(tmp_path.rglob("*"))
    assert say("average", run, other, tmp_path / "deep/er/mean")[0] == 0
    code, text = say("to-hf", run, tmp_path / "deep/er/hf")
    assert code in (1, 2) and text.startswith("error: "), text
    made = {path for path in set(tmp_path.rglob("*")) - before if path.is_file()}
    assert made and all(path.is_relative_to(tmp_path / "deep/er/mean") for path in made)


@contextlib.contextmanager
def somebody_else() -> Iterator[None]:
    """Root may read everything; nobody may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_permissions(say: Say) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        run = write_checkpoint(Path(place) / "run", 5, seed=1).parent.parent
        for file in folder_of(run).iterdir():
            file.chmod(0 if file.name == RANK else 0o644)
        with somebody_else():
            code, text = say("verify", run)
            assert code == 1 and "rank-00001.safetensors (rank 1): " in text and "Permission denied" in text
            code, text = say("diff", run, run)
            assert code == 2 and RANK in text and "Permission denied" in text
            code, text = say("average", run, run / "checkpoints/step-00000005", Path(place) / "mean")
            assert code == 2
        (run / "checkpoints").chmod(0)
        with somebody_else():
            for words in (["ls", run], ["verify", run], ["prune", run, "--keep", "1"]):
                code, text = say(*words)
                assert code == 2 and "Permission denied" in text, text
        (run / "checkpoints").chmod(0o755)
