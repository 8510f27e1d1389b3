"""MLflow: one of its runs for all launches of a training run, in a local database or on a server."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.base.trees import leaves
from llmtrain.features import Feature
from llmtrain.tracking.local import rows_after, to_json
from llmtrain.tracking.sink import Sink, scalars

_TAG = "llmtrain_run_id"
_LONGEST = 5000
"""Characters of a parameter or tag; MLflow refuses more than 6,000."""
_AT_ONCE = 100
"""Parameters in one call; MLflow takes no more."""


@dataclass(kw_only=True)
class MLflow(Sink, entry="mlflow"):
    """Metrics, the configuration as parameters, events as tags, the run's end as its status.

    MLflow can only add points: for steps that a resume repeats it keeps the first values, as W&B does.
    """

    uri: str | None = None
    """The store or server. null = MLFLOW_TRACKING_URI, or mlflow.db next to the run's folder (sqlite)."""
    experiment: str | None = None
    """null = MLFLOW_EXPERIMENT_NAME, or llmtrain."""
    name: str | None = None
    """Name of MLflow's run. null = the run folder's."""

    MODULES = ("mlflow.tracking", "sqlalchemy", "alembic")
    OF_SECRETS = "the environment variable MLFLOW_TRACKING_URI"

    def open(self, run_dir: Path, run_id: str, config: dict[str, Any], start_step: int) -> None:
        """Find the run of earlier launches by its tag, or begin one; send missing rows."""
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        beside = f"sqlite:///{run_dir.resolve().parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=self.uri or os.environ.get("MLFLOW_TRACKING_URI") or beside)
        experiment = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "llmtrain"
        existing = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if existing is None else existing.experiment_id
        runs = self._client.search_runs([place], f"tags.`{_TAG}` = '{run_id}'", max_results=1)
        name = self.name or run_dir.resolve().name
        run = runs[0] if runs else self._client.create_run(place, run_name=name, tags={_TAG: run_id})
        self._id, self._resumed, self._stopped = run.info.run_id, bool(runs), False
        self._last: dict[str, int] = {}
        if runs:
            self._client.update_run(self._id, status="RUNNING")
        parameters = {}
        for key, value in leaves(config):
            text = value if isinstance(value, str) and value else json.dumps(to_json(value))
            parameters[_key(key)] = text[:_LONGEST]
        self._parameters(parameters, run.data.params)
        for row in rows_after(run_dir / "metrics.jsonl", -1, self._last_of("loss")) if runs else ():
            if row["step"] <= start_step:
                self.log(row, more=False)

    def log(self, row: dict[str, Any], *, more: bool) -> None:
        """Add a point to each metric that has none at this or a later step."""
        from mlflow.entities import Metric

        step, at_ms = row["step"], int(1000 * row.get("time_unix_s", time.time()))
        points = {_key(key): value for key, value in scalars(row).items() if step > self._last_of(_key(key))}
        self._last |= dict.fromkeys(points, step)
        self._client.log_batch(self._id, metrics=[Metric(key, value, at_ms, step) for key, value in points.items()])

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Set the tag of the event's kind to its fields; the last event of a kind wins."""
        if kind == "stop":
            self._stopped = not fields.get("complete")
        self._client.set_tag(self._id, f"event.{kind}", json.dumps(to_json(fields))[:_LONGEST])

    def close(self, *, exit_code: int) -> None:
        self._client.set_terminated(self._id, "FAILED" if exit_code else "KILLED" if self._stopped else "FINISHED")

    def _last_of(self, key: str) -> int:
        if key not in self._last:
            history = self._client.get_metric_history(self._id, key) if self._resumed else []
            self._last[key] = max((point.step for point in history), default=-1)
        return self._last[key]

    def _parameters(self, wanted: dict[str, str], logged: dict[str, str]) -> None:
        """Log missing parameters. MLflow allows no change: a changed one becomes a tag."""
        from mlflow.entities import Param, RunTag

        lacking = [Param(key, value) for key, value in wanted.items() if key not in logged]
        for begin in range(0, len(lacking), _AT_ONCE):
            self._client.log_batch(self._id, params=lacking[begin : begin + _AT_ONCE])
        changed = [RunTag(f"now.{key}", value) for key, value in wanted.items() if logged.get(key, value) != value]
        for begin in range(0, len(changed), _AT_ONCE):
            self._client.log_batch(self._id, tags=changed[begin : begin + _AT_ONCE])


def _key(name: str) -> str:
    return re.sub(r"[^\w./ -]", "_", name)[:250]


class MLflowFeature(Feature):
    entries = (MLflow,)


FEATURE = MLflowFeature()
