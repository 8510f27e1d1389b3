"""Checkpoints without a shared file system: each rank of these tests has a folder of its own, as hosts may have."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.base.errors import UserError
from llmtrain.checkpoint.format import MANIFEST, TRAINER, Manifest
from llmtrain.checkpoint.host_files import fetch_all
from llmtrain.checkpoint.listing import prune, rows
from llmtrain.checkpoint.retain import looks_good
from llmtrain.checkpoint.rundir import find_folder
from llmtrain.checkpoint.save import Outcome, Saver
from llmtrain.checkpoint.verify import verify
from llmtrain.config.run import CheckpointConfig, RunConfig
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.optim.optimizers import PARAM
from tests.helpers.training import Case, assembled, joined, make_engine, resolved_run, resume_from, train_steps

NOW = {"optimizer": "adamw", "vocab_size": 512, "data_fingerprint": "d", "run": {}, "deepspeed": {}, "versions": {}}
TRAINER_STATE = {**NOW, "tokens": 0, "layout": {}}
HOST = socket.gethostname()
KINDS = (PARAM, "exp_avg", "exp_avg_sq")


def run_of(case: Case, root: str, ranks: Ranks, mode: Any = "sync") -> tuple[RunConfig, str]:
    """The run as this rank's host has it, and its run folder."""
    host = Path(root) / f"host-{ranks.rank}"
    settings = CheckpointConfig(mode=mode, dir=str(host / "checkpoints"), keep=1)
    config = resolved_run(case, ranks.world_size).config
    return replace(config, checkpoint=settings), str(host / "run")


def save(case: Case, engine: Any, root: str, ranks: Ranks, steps: list[int], mode: str = "sync") -> list[Outcome]:
    run, _ = run_of(case, root, ranks, mode)
    mix = resolved_run(case, ranks.world_size).mix
    outcomes = []
    with Saver(
        engine, find_folder(Path(str(run.checkpoint.dir)), ranks, own=True), run.checkpoint, mix, ranks
    ) as saver:
        for step in steps:
            saver.begin(step, {**TRAINER_STATE, "step": step})
            outcome = saver.drain()
            assert outcome is not None
            outcomes.append(outcome)
    return outcomes


def state_of(engine: Any, ranks: Ranks) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: assembled(engine, ranks, kind) for kind in KINDS}


def train_and_save(case: Case, root: str, mode: str, steps: list[int]) -> tuple[Any, list[Outcome]]:
    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, 2)
    outcomes = save(case, engine, root, ranks, steps, mode)
    state = state_of(engine, ranks)
    engine.close()
    return state, outcomes


def load_and_gather(case: Case, root: str, gather: bool) -> Any:
    """(step, lines, tensors) after a resume, or the error."""
    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, 1)  # its own state is not the one that a new engine has
    run, folder = run_of(case, root, ranks)
    try:
        resumed = resume_from(engine, run, folder, {**NOW, "layout": {}}, ranks)
        assert resumed is not None
        if gather:
            fetch_all(resumed.folder, find_folder(resumed.folder.parent, ranks, own=True), ranks)
        return resumed.step, resumed.lines, state_of(engine, ranks)
    except UserError as error:
        return str(error)
    finally:
        engine.close()


def checkpoints(root: Path, host: int) -> list[str]:
    return sorted(os.listdir(root / f"host-{host}/checkpoints"))


def files(root: Path, host: int, step: int = 2) -> list[str]:
    return sorted(os.listdir(root / f"host-{host}/checkpoints/step-{step:08d}"))


def assert_equal(got: Any, want: Any) -> None:
    for kind in KINDS:
        assert want[kind] and got[kind].keys() == want[kind].keys()
        assert all(torch.equal(got[kind][name], values) for name, values in want[kind].items()), kind


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_host_keeps_its_own_files_and_all_have_the_manifest(pools, small_data, tmp_path, mode):
    case = Case(data=small_data, stage=1)
    found = pools(2).run(train_and_save, case, str(tmp_path), mode, [1, 2])
    for host, (_, outcomes) in enumerate(found):
        assert [outcome.error for outcome in outcomes] == [None, None]
        assert checkpoints(tmp_path, host) == ["step-00000002"], "keep: 1"
        assert files(tmp_path, host) == [MANIFEST, f"rank-{host:05d}.safetensors", TRAINER]
        assert looks_good(outcomes[1].path)
        (row,) = rows(outcomes[1].path.parent)
        assert (row.state, row.detail) == ("part", f"1 of its files are on {HOST}")
    first, second = (tmp_path / f"host-{host}/checkpoints/step-00000002" for host in (0, 1))
    for name in (MANIFEST, TRAINER):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert verify(first) == [f"rank-00001.safetensors (rank 1): is missing: it is on {HOST}"]
    assert verify(first, whole=False) == []
    assert "1 checkpoint" in prune(tmp_path / "host-1", 1, dry_run=False).lines[-1]
    shutil.copytree(second, first, dirs_exist_ok=True)  # what docs/cluster.md says: copy the hosts' folders together
    assert verify(first) == [] and rows(first.parent)[0].state == "complete"


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(1, 1), (3, 3), (0, 0), (1, 3)],
    ids=lambda stage: f"ZeRO-{stage}",
)
def test_a_resume_fetches_what_its_ranks_read_and_no_more(pools, small_data, tmp_path, saved, loaded):
    want, _ = pools(2).run(train_and_save, Case(data=small_data, stage=saved), str(tmp_path), "sync", [2])[0]
    results = pools(2).run(load_and_gather, Case(data=small_data, stage=loaded), str(tmp_path), False)
    for step, lines, state in results:
        assert step == 2 and "step 2" in lines[0], lines
        assert_equal(state, want)
    both = ["rank-00000.safetensors", "rank-00001.safetensors"]
    for host in (0, 1):
        has = [name for name in files(tmp_path, host) if name.startswith("rank")]
        assert has == ([both[host]] if saved == loaded and saved > 0 else both)
    assert Manifest.read(tmp_path / "host-0/checkpoints/step-00000002").step == 2


@pytest.fixture(scope="module")
def saved_once(pools, small_data, tmp_path_factory) -> tuple[Path, Any]:
    """The folders of two hosts with a checkpoint of step 2 under ZeRO 1, and its tensors."""
    root = tmp_path_factory.mktemp("saved")
    return root, pools(2).run(train_and_save, Case(data=small_data, stage=1), str(root), "sync", [2])[0][0]


@pytest.fixture
def saved(saved_once, tmp_path) -> Any:
    """The tensors of the checkpoint that is in `tmp_path`."""
    root, tensors = saved_once
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    return tensors


def test_all_files_come_to_rank_0_and_a_new_host_gets_what_it_lacks(pools, small_data, tmp_path, saved):
    case = Case(data=small_data, stage=1)
    pools(2).run(load_and_gather, case, str(tmp_path), True)
    whole = tmp_path / "host-0/checkpoints/step-00000002"
    assert verify(whole) == []
    shutil.rmtree(tmp_path / "host-1")
    assert_equal(pools(2).run(load_and_gather, case, str(tmp_path), False)[1][2], saved)
    assert files(tmp_path, 1) == [MANIFEST, "rank-00001.safetensors", TRAINER]


def test_the_hosts_may_come_in_another_order(pools, small_data, tmp_path, saved):
    case = Case(data=small_data, stage=1)
    (tmp_path / "host-0").rename(tmp_path / "other")
    (tmp_path / "host-1").rename(tmp_path / "host-0")
    (tmp_path / "other").rename(tmp_path / "host-1")
    assert_equal(pools(2).run(load_and_gather, case, str(tmp_path), False)[1][2], saved)


def test_two_ranks_of_a_host_that_has_nothing_get_what_they_read(pools, small_data, tmp_path):
    """Its leader alone makes the folder; of the part that it had before, a file is only a beginning."""
    case = Case(data=small_data, stage=1)
    for name in ("host-1", "host-3"):  # ranks 0 and 1 on one host, 2 and 3 on the other
        (tmp_path / name).symlink_to(tmp_path / f"host-{int(name[-1]) - 1}")
    for name in ("host-0", "host-2"):
        (tmp_path / name).mkdir()
    want, _ = pools(4).run(train_and_save, case, str(tmp_path), "sync", [2])[0]
    assert files(tmp_path, 2) == [MANIFEST, "rank-00002.safetensors", "rank-00003.safetensors", TRAINER]
    pools(4).run(load_and_gather, case, str(tmp_path), True)  # rank 0's host has all files now
    shutil.rmtree(tmp_path / "host-2/checkpoints")
    assert_equal(pools(4).run(load_and_gather, case, str(tmp_path), False)[3][2], want)
    assert files(tmp_path, 2) == [MANIFEST, "rank-00002.safetensors", "rank-00003.safetensors", TRAINER]
    assert checkpoints(tmp_path, 2) == ["step-00000002"]
    cut = tmp_path / "host-2/checkpoints/step-00000002/rank-00003.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    assert_equal(pools(4).run(load_and_gather, case, str(tmp_path), False)[3][2], want)


def test_parameters_alone_are_refused_as_a_resume_in_words(pools, small_data, tmp_path, saved):
    """What the ranks would read is not there: no rank waits for another."""
    muon = Case(data=small_data, stage=1, optimizer="muon")
    for told in pools(2).run(load_and_gather, muon, str(tmp_path), False):
        assert "optimizer" in told and "momentum" in told, told


def test_a_checkpoint_that_one_host_did_not_complete_is_passed_over(pools, small_data, tmp_path):
    case = Case(data=small_data, stage=1)
    pools(2).run(train_and_save, case, str(tmp_path / "a"), "sync", [1])
    pools(2).run(train_and_save, case, str(tmp_path / "b"), "sync", [2])
    newer = "host-0/checkpoints/step-00000002"  # its other half never got its name
    shutil.copytree(tmp_path / "b" / newer, tmp_path / "a" / newer)
    step, lines, _ = pools(2).run(load_and_gather, case, str(tmp_path / "a"), False)[0]
    assert step == 1
    assert re.match(f"skipped step-00000002: .*rank-00001.safetensors.* {HOST}$", lines[0])
    assert checkpoints(tmp_path / "a", 0) == ["step-00000001", "step-00000002.damaged"]


def test_without_a_hosts_files_nothing_begins(pools, small_data, tmp_path, saved):
    case = Case(data=small_data, stage=1)
    shutil.rmtree(tmp_path / "host-1")
    for told in pools(2).run(load_and_gather, case, str(tmp_path), False):
        assert "rank-00001.safetensors" in told and HOST in told, told
    assert checkpoints(tmp_path, 0) == ["step-00000002"], "nothing is renamed when nothing was resumed"


def test_a_file_that_changed_on_its_way_is_not_believed(pools, small_data, tmp_path, saved):
    path = tmp_path / "host-1/checkpoints/step-00000002/rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    for told in pools(2).run(load_and_gather, Case(data=small_data, stage=0), str(tmp_path), False):
        assert "rank-00001.safetensors" in told and "manifest" in told, told
    assert files(tmp_path, 0) == [MANIFEST, "rank-00000.safetensors", TRAINER]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_all_or_none(pools, small_data, tmp_path, mode):
    """A checkpoint that one host cannot complete is left on no host, and the one before stays."""
    case = Case(data=small_data, stage=1)
    pools(2).run(train_and_save, case, str(tmp_path), mode, [1])
    blocked = tmp_path / "host-1/checkpoints/step-00000002"  # in the way, and a mount cannot be renamed
    blocked.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(blocked)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        for _, (outcome,) in pools(2).run(train_and_save, case, str(tmp_path), mode, [2]):
            assert outcome.path is None
            assert re.fullmatch(
                r"rank 1 could not complete .*/step-00000002: Device or resource busy .*", outcome.error
            )
    finally:
        subprocess.run(["umount", str(blocked)], check=True)
    assert checkpoints(tmp_path, 0) == ["step-00000001"]
    assert checkpoints(tmp_path, 1) == ["step-00000001", "step-00000002"] and os.listdir(blocked) == []


def look(roots: list[str], own: bool) -> Any:
    """Who leads the folder that each rank sees, or the error."""
    ranks = joined()
    try:
        found = find_folder(Path(roots[ranks.rank]), ranks, own=own)
        return found.leaders, found.split, found.members
    except UserError as error:
        return str(error)


def test_who_shares_a_folder(pools, tmp_path):
    same, a, b, c = (str(tmp_path / name / "run/checkpoints") for name in ("same", "a", "b", "c"))
    assert pools(4).run(look, [same] * 4, False) == [((0, 0, 0, 0), False, [0, 1, 2, 3])] * 4
    assert pools(4).run(look, [same] * 4, True)[3] == ((0, 0, 0, 0), False, [0, 1, 2, 3])
    found = pools(4).run(look, [a, b, b, a], True)
    leaders, split, members = found[1]
    assert leaders[0] == leaders[3] == 0 and leaders[1] == leaders[2] in (1, 2) and split and members == [1, 2]
    for told in pools(4).run(look, [c, c, a, c], False):
        assert HOST in told and "checkpoint.dir" in told, told
    assert not list(tmp_path.rglob(".seen-*")), "marks are left"
    (tmp_path / "file").write_text("")
    for told in pools(4).run(look, [a, a, str(tmp_path / "file/checkpoints"), a], True):
        assert re.search(f"file/checkpoints .*{os.strerror(errno.ENOTDIR)}", told)
    assert not list(tmp_path.rglob(".seen-*"))
