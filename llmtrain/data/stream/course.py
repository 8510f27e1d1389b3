"""The data of a run by its steps: the sequences of each step, their data set and their batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.config.stages import Batch, DataConfig, Stage, Stages
from llmtrain.data.stream.train_data import TrainData
from llmtrain.optim.schedules import Constant

RECORD = "data_stages"
"""Entry of trainer.json: the stages trained so far."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The data and the batch of a step."""

    stage: int
    data: TrainData
    index: int
    """Its first sequence, in the order of the data."""
    batch: Batch


class Course:
    """The stages of a run with their data. A step is named by the number of earlier steps.

    Each data set continues where an earlier stage or the checkpoint stopped. The future is a function of the step; the
    past is in `record`, which a checkpoint holds.
    """

    def __init__(self, stages: Stages, data: Sequence[TrainData]) -> None:
        """`data`: per stage, the same object for the same data."""
        assert len(stages) == len(data)
        self.stages, self.data = stages, tuple(data)
        self._sharing = [[other for other, each in enumerate(data) if each is own] for own in data]
        self._ahead = [0] * len(data)
        """Sequences of a data set beyond the plan, by the first stage with the data set."""
        self._since, self._before = 0, list[dict[str, Any]]()
        """The first step of this launch, and the record of earlier steps."""
        self.first_number = 0
        """Number of the first stage: above 0 in a run that continues another one with other data."""

    @classmethod
    def of_one(cls, data: TrainData, batch: Batch) -> Course:
        stage = Stage(first_step=0, data=DataConfig(), batch=batch, schedule=Constant(), schedule_from=0)
        return cls(Stages((stage,)), [data])

    def at(self, step: int) -> Reading:
        stage = self.stages.number(step)
        return Reading(
            stage=stage, data=self.data[stage], index=self._index(stage, step), batch=self.stages[stage].batch
        )

    def done(self, step: int) -> Reading:
        """The data and batch of the last step before `step`; for step 0 those of the first one."""
        return self.at(max(0, step - 1))

    def seek(self, step: int, index: int) -> None:
        """Continue the data of a step's stage at sequence `index`."""
        stage = self.stages.number(step)
        self._ahead[self._sharing[stage][0]] += index - self._index(stage, step)

    def go_on(self, step: int, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. `saved`: its trainer.json; without a data record, assume this run's data."""
        record = [dict(entry) for entry in saved.get(RECORD) or ()]
        if not record and step:
            data = (saved.get("run") or {}).get("data") or {}
            folders = {data["path"]: 1.0} if data.get("path") else data.get("mixture") or {}
            fingerprint = saved.get("data_fingerprint") or self.done(step).data.fingerprint
            record = [{"stage": 0, "from_step": 0, "folders": folders, "fingerprint": fingerprint,
                       "next": saved.get("sample_index") or 0}]  # fmt: skip
        left = {entry["fingerprint"]: entry["next"] for entry in record}
        for first in {sharing[0] for sharing in self._sharing}:
            planned = self.stages.sequences(step, self._sharing[first])
            self._ahead[first] = left.get(self.data[first].fingerprint, 0) - planned
        if record:
            last, trained = record[-1], self.done(step)
            goes_on = last["fingerprint"] == trained.data.fingerprint
            self.first_number = last["stage"] - trained.stage if goes_on else last["stage"] + 1 - self.at(step).stage
        self._since, self._before = step, record

    def describe(self, stage: int) -> dict[str, Any]:
        batch, number = self.stages[stage].batch, self.first_number + stage
        first = max(self._since, self.stages[stage].first_step)
        return {
            "stage": number,
            "from_step": next((entry["from_step"] for entry in self._before if entry["stage"] == number), first),
            "folders": self.stages[stage].data.folders,
            "fingerprint": self.data[stage].fingerprint,
            "sequence_length": batch.sequence_length,
            "global_batch": batch.global_batch,
            **({"rope": self.stages[stage].rope} if self.stages[stage].rope else {}),
        }

    def record(self, step: int, index: int) -> list[dict[str, Any]]:
        """The stages before a step, for a checkpoint. `index`: the first sequence of the step."""
        found = [dict(entry) for entry in self._before]
        if step <= self._since:
            return found
        for number in range(self.stages.number(self._since), self.stages.number(step - 1) + 1):
            what = self.describe(number)
            end = self.stages[number + 1].first_step if number + 1 < len(self.stages) else step
            if found and found[-1]["stage"] == what["stage"]:
                found.pop()
            found.append({**what, "next": self._index(number, min(step, end))})
        for entry in reversed(found):
            if entry["fingerprint"] == self.at(step).data.fingerprint:
                entry["next"] = index
                break
        return found

    def _index(self, stage: int, step: int) -> int:
        sharing = self._sharing[stage]
        return self.stages.sequences(step, sharing) + self._ahead[sharing[0]]
