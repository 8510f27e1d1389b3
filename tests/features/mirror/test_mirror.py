"""Checkpoints in an object store: complete or absent, whatever fails on the way."""

from __future__ import annotations

import math
import random
import re
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from llmtrain.base.child import of_module
from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.remote import download
from llmtrain.checkpoint.retain import Best
from llmtrain.checkpoint.verify import verify
from llmtrain.features.mirror.upload import Mirrored, _Mirroring, fetch_newest, refuse_other
from llmtrain.storage.object_store import Store
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.stores import Failing, contents
from tests.unit.base.test_child import to_the_end


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def mirroring(run: Path, store: Mirrored, keep: int = 2, best: Best | None = None) -> tuple[_Mirroring, list[Any]]:
    told: list[Any] = []
    found = _Mirroring(run / "checkpoints", store, keep, best, lambda kind, **fields: told.append((kind, fields)))
    return found, told


def test_what_is_mirrored_comes_back_and_old_ones_go(tmp_path: Path, url: str) -> None:
    store = Mirrored(url)
    mirror, told = mirroring(tmp_path, store)
    for step in (1, 2, 3):
        folder = write_checkpoint(tmp_path, step, seed=step)
        mirror.go_on()
        mirror.go_on()  # nothing new
    assert [(kind, fields["step"]) for kind, fields in told] == [("mirrored", 1), ("mirrored", 2), ("mirrored", 3)]
    assert list(store.complete()) == [3, 2]
    fetched = fetch_newest(url, tmp_path / "elsewhere", "run", lambda: None)
    assert fetched is not None and contents(fetched) == contents(folder)
    again, told = mirroring(tmp_path, store)
    again.go_on()
    assert told == [] and again.newest() is None  # it is there already
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.endswith(".tmp")] == []


def test_the_best_stay(tmp_path: Path, url: str) -> None:
    store = Mirrored(url)
    mirror, _ = mirroring(tmp_path, store, keep=1, best=Best(metric="eval/loss", keep=1, mode="min"))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
        evaluation, config = {"step": step, "figures": {"eval/loss": loss}}, {"time_step_limit": [0.0, math.inf]}
        write_checkpoint(tmp_path, step, seed=step, evaluation=evaluation, model_config=config)
        mirror.go_on()
    assert list(store.complete()) == [4, 2]


@pytest.mark.parametrize("how", ["before", "half", "behind"])
def test_a_fault_of_the_store_at_any_moment_leaves_whole_checkpoints_alone(how: str, tmp_path: Path, url: str) -> None:
    """The n-th transfer fails, for each n: what is listed is whole and comes back, and the next try mends."""
    write_checkpoint(tmp_path, 1, seed=1)
    mirroring(tmp_path, Mirrored(url), keep=1)[0].go_on()
    random.seed(0)
    for fails_at in range(1, 9):
        step = fails_at + 1
        write_checkpoint(tmp_path, step, seed=step)
        store = Mirrored(url)
        mirror, told = mirroring(tmp_path, store, keep=1)
        store.store._files = Failing(store.store._files, fails_at, how)
        mirror.go_on()
        listed = list(Mirrored(url).complete())
        assert listed and listed[0] in (step, step - 1)
        for each in listed:
            whole = tmp_path / f"{how}-{fails_at}-{each}"
            download(Mirrored(url).store, each, whole)
            assert verify(whole) == []
        if told and told[0][0] == "mirror_failed":
            assert told[0][1]["error"] == "CutOffError: connection reset"
            mirror.go_on(now=True)
        assert max(Mirrored(url).complete()) == step
    files = fsspec.filesystem("memory")
    assert {path.split("/")[2] for path in files.find(url.removeprefix("memory:/"))} <= {
        f"step-{step:08d}" for step in (8, 9)
    }


def test_a_damaged_one_is_passed_over_and_none_intact_is_said(tmp_path: Path, url: str) -> None:
    store = Mirrored(url)
    mirror, _ = mirroring(tmp_path, store)
    for step in (1, 2):
        write_checkpoint(tmp_path, step, seed=step)
        mirror.go_on()
    files = fsspec.filesystem("memory")

    def spoil(step: int) -> None:
        path = store.store._path(f"step-{step:08d}/rank-00001.safetensors")
        data = bytearray(files.cat_file(path))
        data[-3] ^= 1
        files.pipe_file(path, bytes(data))

    spoil(2)
    fetched = fetch_newest(url, tmp_path / "a", "run", lambda: None)
    assert fetched is not None and fetched.name == "step-00000001"
    spoil(1)
    with pytest.raises(CheckpointError, match=r"\b2 checkpoints"):
        fetch_newest(url, tmp_path / "b", "run", lambda: None)
    assert list((tmp_path / "b").iterdir()) == []
    assert fetch_newest(f"{url}/nothing", tmp_path / "c", "run", lambda: None) is None


@pytest.mark.parametrize("how", ["cut", "404", "not listed"])
def test_a_manifest_that_cannot_be_read_is_no_empty_mirror(
    tmp_path: Path, url: str, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Mirrored(url)
    mirror, _ = mirroring(tmp_path, store)
    write_checkpoint(tmp_path, 1, seed=1)
    mirror.go_on()
    manifest = "step-00000001/manifest.json"
    with monkeypatch.context() as patch:
        if how == "cut":
            store.store.write(store.store.read(manifest)[:-9], manifest)
        elif how == "404":
            get = Store.get
            missing = lambda self, name, path: get(self, name if name != manifest else "nowhere", path)  # noqa: E731
            patch.setattr(Store, "get", missing)
        else:
            files = Store.files
            patch.setattr(Store, "files", lambda self: {k: v for k, v in files(self).items() if k != manifest})
        with pytest.raises(CheckpointError, match="--resume none"):
            fetch_newest(url, tmp_path / "a", "run", lambda: None)
    store.store.write(b"{", manifest)
    write_checkpoint(tmp_path, 2, seed=2)
    mirror.go_on()
    store.store.write(b"{", manifest)  # beside a whole one that is newer
    assert fetch_newest(url, tmp_path / "b", "run", lambda: None) is not None
    store.store.write(b"{", "step-00000003/manifest.json")
    assert fetch_newest(url, tmp_path / "c", "run", lambda: None) is not None
    assert re.search(r"step-00000003 .*\bstep 2\b", capsys.readouterr().err)


def test_checkpoints_that_have_lost_their_manifests_are_no_empty_mirror(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step without a manifest is the first upload, cut off; several had a complete one before."""
    store = Mirrored(url)
    mirror, _ = mirroring(tmp_path, store)
    for step in (4, 8):
        write_checkpoint(tmp_path, step, seed=step)
        mirror.go_on()
    store.store.remove([f"step-{step:08d}/manifest.json" for step in (4, 8)])
    with pytest.raises(CheckpointError, match=r"step-00000004, step-00000008 .*resume none"):
        fetch_newest(url, tmp_path / "a", "run", lambda: None)
    store.drop(lambda step: step == 8)
    assert fetch_newest(url, tmp_path / "b", "run", lambda: None) is None
    assert "step-00000004" in capsys.readouterr().err


def test_first_uploads_that_are_cut_off_leave_one_step(tmp_path: Path, url: str) -> None:
    """A restart on another host begins the run again then; several without a manifest would be refused."""
    store = Mirrored(url)
    mirror, told = mirroring(tmp_path, store)
    for step in (4, 8):
        write_checkpoint(tmp_path, step, seed=step)
        files, store.store._files = store.store._files, Failing(store.store._files, 3 if step == 4 else 6, "half")
        mirror.go_on(now=True)
        store.store._files = files
    assert [kind for kind, _ in told] == ["mirror_failed"] * 2
    assert {step for step, _, _ in store._files()} == {8} and not store.complete()


def test_a_mirror_on_a_disk_keeps_no_empty_folders(tmp_path: Path) -> None:
    mirror, _ = mirroring(tmp_path, Mirrored(f"file://{tmp_path}/store"), keep=1)
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, seed=step)
        mirror.go_on()
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["step-00000003"]


def test_a_store_with_another_runs_checkpoints_is_refused(tmp_path: Path, url: str) -> None:
    """Their step 2 would pass for this run's, and this run's step 1 would be deleted as an older one."""
    mirror, _ = mirroring(tmp_path / "theirs", Mirrored(url))
    theirs = write_checkpoint(tmp_path / "theirs", 2, seed=2)
    mirror.go_on()
    mine = tmp_path / "mine/checkpoints"
    for continues in (True, False):
        with pytest.raises(CheckpointError, match="step-00000002"):
            refuse_other(url, mine, continues=continues)
    write_checkpoint(tmp_path / "mine", 1, seed=1, run_id="mine")
    with pytest.raises(CheckpointError, match="step-00000002"):
        refuse_other(url, mine, continues=True)
    mirror, told = mirroring(tmp_path / "mine", Mirrored(url))
    mirror.go_on()
    assert told[0][0] == "mirror_failed" and "another run" in told[0][1]["error"]
    refuse_other(url, tmp_path / "theirs/checkpoints", continues=True)
    fetched = fetch_newest(url, tmp_path / "elsewhere", "run", lambda: None)
    assert fetched is not None and contents(fetched) == contents(theirs)


def test_a_run_below_another_ones_address_is_left_alone(tmp_path: Path, url: str) -> None:
    one, below = tmp_path / "one", tmp_path / "below"
    for step in (1, 2):
        write_checkpoint(below, step, seed=step, run_id="another")
        mirroring(below, Mirrored(f"{url}/below"))[0].go_on()
    for step in (3, 4):
        write_checkpoint(one, step, seed=step)
        mirror, told = mirroring(one, Mirrored(url), keep=1)
        mirror.go_on()
        assert [kind for kind, _ in told] == ["mirrored"]
    assert list(Mirrored(url).complete()) == [4] and list(Mirrored(f"{url}/below").complete()) == [2, 1]


def test_a_run_of_another_name_is_not_taken_for_this_one(tmp_path: Path, url: str) -> None:
    write_checkpoint(tmp_path, 1, seed=1, run={"train": {"run_dir": "runs/first"}})
    mirroring(tmp_path, Mirrored(url))[0].go_on()
    with pytest.raises(CheckpointError, match=r"(?s)runs/first.*runs/second"):
        fetch_newest(url, tmp_path / "a", "runs/second", lambda: None)
    assert list((tmp_path / "a").iterdir()) == []
    assert fetch_newest(url, tmp_path / "a", "/scratch/first", lambda: None) is not None


def test_a_course_that_was_given_up_goes(tmp_path: Path, url: str) -> None:
    """A run that went back to step 1 writes other steps 2: the store's are not taken for them."""
    first = tmp_path / "first"
    mirror, _ = mirroring(first, Mirrored(url))
    for step in (1, 2, 3):
        write_checkpoint(first, step, seed=step)
        mirror.go_on()
    back = tmp_path / "back"
    write_checkpoint(back, 1, seed=1)
    with pytest.raises(CheckpointError, match=r"step-00000003 .*step-00000001"):
        refuse_other(url, back / "checkpoints", continues=True)
    folder = write_checkpoint(back, 2, seed=22)
    mirror, told = mirroring(back, Mirrored(url))
    mirror.go_on()
    assert [kind for kind, _ in told] == ["mirrored"] and list(Mirrored(url).complete()) == [2]
    fetched = fetch_newest(url, tmp_path / "elsewhere", "run", lambda: None)
    assert fetched is not None and contents(fetched) == contents(folder)


def test_its_program_ends_without_a_word(tmp_path: Path) -> None:
    words = of_module("llmtrain.features.mirror.upload", str(tmp_path), f"file://{tmp_path}/store", "2", "null")
    assert to_the_end(words, "finish") == ([], 0, "")
