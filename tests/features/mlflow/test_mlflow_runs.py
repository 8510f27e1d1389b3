"""What MLflow's own client finds over two launches of a run, of which the second repeats steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs.test_trackers import two_launches


@pytest.mark.needs("mlflow", "sqlalchemy", "alembic")
@pytest.mark.timeout(300)
def test_mlflow_goes_on_over_a_resume_that_repeats_steps(small_data: str, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    _, before, after = two_launches(tmp_path, small_data, "--trackers.mlflow.experiment", "mine")
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
