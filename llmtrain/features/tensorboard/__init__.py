"""TensorBoard: event files in the run's folder, written with the package `tensorboard`; one more per launch."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.features import Feature
from llmtrain.tracking.local import to_json
from llmtrain.tracking.metrics import metric_of
from llmtrain.tracking.sink import Sink, scalars


@dataclass(kw_only=True)
class TensorBoard(Sink, entry="tensorboard"):
    """Scalars with their units and meanings, events and configuration as text."""

    path: str = "tensorboard"
    """Folder of the event files, within the run's folder: `tensorboard --logdir RUN/tensorboard`, or `runs` for all."""

    MODULES = ("tensorboard.summary.writer.event_file_writer", "tensorboard.compat.proto.event_pb2")

    def open(self, run_dir: Path, run_id: str, config: dict[str, Any], start_step: int) -> None:
        """Begin an event file. Its readers forget the steps that the run repeats."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer, self._step = EventFileWriter(str(run_dir / self.path)), start_step
        purged = start_step + 1 if start_step else 0  # a run without a checkpoint repeats its step 0
        began = SessionLog(status=SessionLog.SessionStatus.START)
        self._writer.add_event(Event(wall_time=time.time(), step=purged, session_log=began))
        self._text("config", config)

    def log(self, row: dict[str, Any], *, more: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

        self._step = row["step"]
        values, plugin = [], SummaryMetadata.PluginData(plugin_name="scalars")
        for key, value in scalars(row).items():
            metric = metric_of(key)
            words = "" if metric is None else f"[{metric.unit}] {metric.meaning}"
            about = SummaryMetadata(summary_description=words, plugin_data=plugin)
            values.append(Summary.Value(tag=key, simple_value=value, metadata=about))
        summary = Summary(value=values)
        self._writer.add_event(Event(wall_time=row["time_unix_s"], step=self._step, summary=summary))
        self._writer.flush()  # a kill would take two minutes of rows with it

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        self._text(f"events/{kind}", fields)

    def close(self, *, exit_code: int) -> None:
        self._text("status", {"status": "failed" if exit_code else "ended"})
        self._writer.close()

    def _text(self, tag: str, tree: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.util.tensor_util import make_tensor_proto

        text = json.dumps(to_json(tree), indent=2, ensure_ascii=False)
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        code = "\n".join(f"    {line}" for line in text.splitlines())  # a block of code, in Markdown
        tensor = make_tensor_proto([code.encode()])
        value = Summary.Value(tag=tag, tensor=tensor, metadata=SummaryMetadata(plugin_data=plugin))
        step = tree.get("step")
        at = step if isinstance(step, int) else self._step
        self._writer.add_event(Event(wall_time=time.time(), step=at, summary=Summary(value=[value])))
        self._writer.flush()


class TensorBoardFeature(Feature):
    entries = (TensorBoard,)


FEATURE = TensorBoardFeature()
