"""Checkpoints that a launch tries, from what `resume` says and what the run folder holds, and what it compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.load import refuse_other_run
from llmtrain.checkpoint.rundir import RunDirectory
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.run import RunConfig
from llmtrain.training.start import candidates_of
from tests.helpers.checkpoints import write_checkpoint


def chosen(where: Path, resume: str | Path, weights_only: bool = False) -> tuple[list[str], bool]:
    config = RunConfig(deepspeed="x", resume=str(resume), resume_weights_only=weights_only)
    found = candidates_of(config, RunDirectory(where))
    return [str(path.relative_to(where.parent)) for path in found.paths], found.own


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of another run."""
    return write_checkpoint(tmp_path / "source", 7, 0)


def test_auto_takes_this_runs_own_newest_first(tmp_path):
    where = tmp_path / "run"
    assert chosen(where, "auto") == ([], True)
    for step in (5, 20, 10):
        write_checkpoint(where, step, step)
    assert chosen(where, "auto")[0] == [f"run/checkpoints/step-{step:08d}" for step in (20, 10, 5)]
    with pytest.raises(CheckpointError, match=rf"{where}.*train\.run_dir"):
        chosen(where, "none")


@pytest.mark.parametrize("weights_only", [False, True])
def test_the_same_command_goes_on_where_it_came_to(tmp_path, source, weights_only):
    """A restart after a crash must not begin again from the path, and lose what was trained since."""
    where = tmp_path / "run"
    assert chosen(where, source, weights_only) == (["source/checkpoints/step-00000007"], False)
    began_from = {"path": str(source.resolve()), "weights_only": weights_only}
    write_checkpoint(where, 2, 1, began_from=began_from)
    write_checkpoint(where, 4, 1, began_from=began_from)
    want = ["run/checkpoints/step-00000004", "run/checkpoints/step-00000002"]
    assert chosen(where, source, weights_only) == (want, True)
    assert chosen(where, "auto") == (want, True)
    (where / "checkpoints" / "step-00000004" / "trainer.json").write_text("{")  # damaged, as the look at it will say
    assert chosen(where, source, weights_only) == (want, True)
    with pytest.raises(CheckpointError, match="step-00000004"):
        chosen(where, source, not weights_only)


def test_a_path_does_not_begin_on_top_of_another_run(tmp_path, source):
    where = tmp_path / "run"
    write_checkpoint(where, 2, 1)
    with pytest.raises(CheckpointError, match=r"(?s)--resume auto.*train\.run_dir"):
        chosen(where, source)


def test_a_path_in_the_run_folder_is_its_newest_and_is_continued_in_full(tmp_path):
    where = tmp_path / "run"
    older, newest = (write_checkpoint(where, step, step) for step in (2, 4))
    assert chosen(where, newest) == (["run/checkpoints/step-00000004"], True)
    with pytest.raises(CheckpointError, match=r"step-00000002.*step-00000004"):
        chosen(where, older)
    with pytest.raises(CheckpointError, match=r"train\.run_dir"):
        chosen(where, newest, weights_only=True)


def test_the_run_folder_leads_to_checkpoints_elsewhere(tmp_path):
    where, there = tmp_path / "run", tmp_path / "disk"
    with RunDirectory(where, there) as folder:
        assert folder.checkpoints == there and there.is_dir()
        with pytest.raises(CheckpointError, match=r"checkpoint\.dir"):
            RunDirectory(tmp_path / "other", there).__enter__()
    write_checkpoint(where, 5, 0)
    assert (there / "step-00000005").is_dir() and chosen(where, "auto")[0] == ["run/checkpoints/step-00000005"]
    with RunDirectory(where):  # as the link leads
        pass
    with pytest.raises(CheckpointError, match=f"{there}"):
        RunDirectory(where, tmp_path / "another disk").__enter__()
    (there / "step-00000005/manifest.json").unlink()
    with RunDirectory(where, tmp_path / "another disk"):
        assert (where / "checkpoints").resolve() == tmp_path / "another disk"


def test_checkpoints_of_a_run_are_not_left_behind_by_an_option(tmp_path):
    write_checkpoint(tmp_path / "run", 5, 0)
    with pytest.raises(CheckpointError, match="/run/checkpoints"):
        RunDirectory(tmp_path / "run", tmp_path / "disk").__enter__()


def test_the_folder_of_a_run_means_the_newest_that_is_in_it(tmp_path: Path) -> None:
    for step in (3, 7):
        write_checkpoint(tmp_path / "source", step, step)
    where, both = tmp_path / "run", [f"source/checkpoints/step-{step:08d}" for step in (7, 3)]
    for name in ("source", "source/checkpoints"):
        assert chosen(where, tmp_path / name) == (both, False)
    assert chosen(where, tmp_path / "source/step-3") == (both[1:], False)
    began_from = {"path": str(tmp_path / "source"), "weights_only": False}
    write_checkpoint(where, 9, 9, began_from=began_from)
    own = (["run/checkpoints/step-00000009"], True)
    assert chosen(where, tmp_path / "source") == own  # the same command again
    assert chosen(where, where) == own  # its own folder: as auto


def test_another_reference_is_refused():
    def state(*hashes: str) -> TrainerState:
        return TrainerState.from_json({"step": 1, "tokens": 0, "reference": [*hashes]}, Path("trainer.json"))

    refuse_other_run(state("w"), state("w"), Path("step-1"))
    with pytest.raises(CheckpointError, match="another model"):
        refuse_other_run(state("v", "v"), state("w"), Path("step-1"))
