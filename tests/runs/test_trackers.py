"""Several trackers of one run: what TensorBoard's own reader and MLflow's own client find over two launches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.forked import train
from tests.helpers.launching import rows, write_recipe
from tests.helpers.wandb_files import read_back

DEAD = """
from dataclasses import dataclass
from llmtrain import Sink

@dataclass(kw_only=True)
class Dead(Sink, entry="dead"):
    why: str = "nobody answers"

    def log(self, row, *, more):
        raise OSError(self.why)
"""
WORDS = ("--trackers.tensorboard.path", "tensorboard", "--trackers.mlflow.experiment", "mine", "--trackers.dead.why",
         "it is gone", "--tracking.wandb", "offline", "--tracking.group", "sweep", "--tracking.job_type", "pretrain",
         "--ema.decay", "0.9", "--train.log_every", "1", "--train.eval_every", "4", "--checkpoint.every_steps", "4",
         "--schedule.name", "constant")  # fmt: skip


@pytest.mark.needs("tensorboard", "mlflow", "sqlalchemy", "alembic")
@pytest.mark.timeout(300)
def test_tensorboard_and_mlflow_go_on_over_a_resume_that_repeats_steps(small_data: str, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (mine := tmp_path / "mine.py").write_text(DEAD)
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    words = (*WORDS, "--plugin", str(mine))
    output = train(recipe, *words, "--train.max_steps", "8")
    assert "trackers.dead is given up" in output and "OSError: it is gone" in output
    before = {row["step"]: row["loss"] for row in rows(run) if "loss" in row}
    shutil.rmtree(run / "checkpoints/step-00000008")
    train(recipe, *words, "--train.max_steps", "10", "--optim.lr", "2e-3")
    after = {row["step"]: row["loss"] for row in rows(run) if "loss" in row}
    assert sorted(after) == list(range(1, 11)) and after[5] == before[5] and after[6] != before[6]

    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    reader.Reload()
    found = {key: [(each.step, each.value) for each in reader.Scalars(key)] for key in ("loss", "eval/loss")}
    assert found["loss"] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in sorted(after.items())]
    assert [step for step, _ in found["eval/loss"]] == [4, 8, 10]
    for key in ("loss", "eval/ema/loss"):
        assert "[nats/token]" in reader.SummaryMetadata(key).summary_description
    texts = {tag: reader.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in reader.Tags()["tensors"]}
    assert (
        '"complete": true' in texts["events/stop"] and '"lr": 0.002' in texts["config"] and "ended" in texts["status"]
    )

    launches = [read_back(folder) for folder in (run / "wandb").glob("offline-run-*")]
    assert [(sent["group"], sent["job_type"]) for sent in launches] == [("sweep", "pretrain")] * 2

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (place,) = client.search_experiments(filter_string="name = 'mine'")
    (found_run,) = client.search_runs([place.experiment_id])  # both launches are one
    history = client.get_metric_history(found_run.info.run_id, "loss")
    kept = {**after, **before}  # points cannot be replaced: the first ones stay
    assert [(point.step, point.value) for point in sorted(history, key=lambda point: point.step)] == sorted(
        kept.items()
    )
    assert sorted(p.step for p in client.get_metric_history(found_run.info.run_id, "eval/loss")) == [4, 8, 10]
    assert found_run.info.run_name == "run" and found_run.info.status == "FINISHED"
    assert found_run.data.params["run.train.log_every"] == "1" and found_run.data.params["run.optim.lr"] != "0.002"
    assert found_run.data.tags["now.run.optim.lr"] == "0.002"
    assert json.loads(found_run.data.tags["event.stop"])["step"] == 10
