"""trainer.json: the state that a resume needs beside the tensors, and the settings that it compares."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from llmtrain.base import untrusted
from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.format import MANIFEST, TRAINER, Manifest, differences, read_file, step_of

_SETTINGS = ("run", "deepspeed", "model_config", "versions", "layout")
_WORDS = {int: "a number", str: "text", dict: "a map", list: "a list"}


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The content of trainer.json. A value that is None or empty is not known: a conversion knows less than a run."""

    step: int = 0
    tokens: int = 0
    """Training tokens read by all ranks."""
    sample_index: int = 0
    """Global index of the next sequence."""
    skipped_steps: int = 0
    optimizer_step: int | None = None
    """Updates that the optimizer has applied; None: one for each step."""
    loss_scale: dict[str, Any] = field(default_factory=dict)
    run_id: str | None = None
    """The same in every launch of the run."""
    began_from: dict[str, Any] | None = None
    """The checkpoint of another run from which this one started: `origin`, and the checkpoint's folder."""
    model_config: dict[str, Any] | None = None
    """config.json of the model, as the current stage has changed it."""
    data_fingerprint: str | None = None
    data_stages: list[dict[str, Any]] = field(default_factory=list)
    """Record of the stages trained so far, from `Course.record`."""
    entries: dict[str, Any] = field(default_factory=dict)
    """Entries of the run's parts, by key, and of conversions."""
    optimizer: str | None = None
    vocab_size: int | None = None
    epoch_sequences: int | None = None
    plan: list[list[Any]] = field(default_factory=list)
    """For each stage (first step, data fingerprint, fields of the rope, tokens of a sequence)."""
    orders: dict[str, str] = field(default_factory=dict)
    """Fingerprint of data with exclusions -> fingerprint of its order, which is that of the data without exclusions."""
    reference: list[str] | None = None
    """Hashes of the reference's weights."""
    teacher: str | None = None
    teacher_config: dict[str, Any] | None = None
    separator_id: int | list[int] | None = None
    tokenizer_dir: str | None = None
    tokenizer: str | None = None
    """Fingerprint of the tokenizer."""
    sampling: dict[str, Any] | None = None
    """The base model's sampling defaults."""
    run: dict[str, Any] | None = None
    """The run's configuration."""
    deepspeed: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None
    plugins: dict[str, Any] = field(default_factory=dict)
    """Hashes of the plugins' files."""
    layout: dict[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> TrainerState:
        """Raises CheckpointError."""
        path = folder / TRAINER
        try:
            return cls.parse(read_file(path), path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. Take another checkpoint.") from error

    @classmethod
    def parse(cls, content: bytes, file: Path) -> TrainerState:
        """`file`: named in messages. Raises CheckpointError."""
        try:
            tree = untrusted.loads(content, infinite=True)
        except ValueError as error:
            raise CheckpointError(f"{file} cannot be read: {error}. Take another checkpoint.") from error
        return cls.from_json(tree, file)

    @classmethod
    def from_json(cls, tree: Any, file: Path) -> TrainerState:
        """`file`: named in messages. Raises CheckpointError."""
        if not isinstance(tree, dict):
            raise _wrong(file, "its content", tree, "a map")
        for key in ("step", "tokens"):
            if type(number := tree.get(key)) is not int or not 0 <= number < 2**63:
                raise _wrong(file, key, number, "a whole number, 0 or more")
        kinds = _kinds()
        values = {key: value for key, value in tree.items() if key in kinds and value is not None}
        for key, value in values.items():
            if not any(_fits(value, kind) for kind in kinds[key]):
                names = [_WORDS[get_origin(kind) or kind] for kind in kinds[key] if kind is not type(None)]
                raise _wrong(file, key, value, " or ".join(names))
        return cls(**values, entries={key: value for key, value in tree.items() if key not in kinds})

    def to_json(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            tree |= value if entry.name == "entries" else {entry.name: value}
        return tree

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the run's configuration; empty if it is not recorded."""
        section = (self.run or {}).get(name)
        return section if isinstance(section, dict) else {}

    @property
    def source(self) -> dict[str, Any] | None:
        """What `from-hf` has recorded of the imported Hugging Face folder; None for other checkpoints."""
        source = self.entries.get("source")
        return source if isinstance(source, dict) else None

    @property
    def order(self) -> str | None:
        """Fingerprint of the order of the data's sequences, which exclusions do not change."""
        return self.data_fingerprint and self.orders.get(self.data_fingerprint, self.data_fingerprint)

    def with_names_of(self, now: TrainerState) -> TrainerState:
        """Return the state with this run's fingerprints if the order, which exclusions do not change, is the same."""
        if self.order != now.order:
            return self
        named, record = {order: name for name, order in now.orders.items()}, []
        for entry in self.data_stages:
            order = entry.get("order") or entry["fingerprint"]
            record.append({**entry, "fingerprint": named.get(order, order)})
        return replace(self, data_fingerprint=now.data_fingerprint, data_stages=record)

    def record(self, fingerprint: str) -> list[dict[str, Any]]:
        """Return `data_stages`; without them one stage, of the checkpoint's data or else that of `fingerprint`."""
        if self.data_stages or not self.step:
            return self.data_stages
        data = self.section("data")
        folders = {data["path"]: 1.0} if data.get("path") else data.get("mixture") or {}
        data_of = self.data_fingerprint or fingerprint
        return [{"stage": 0, "from_step": 0, "folders": folders, "fingerprint": data_of, "next": self.sample_index}]

    def differences(self, other: TrainerState, keys: Sequence[str] = _SETTINGS) -> list[str]:
        """Return a line `key: self -> other` for each setting that both record and that differs."""
        lines = []
        for key in sorted(keys):
            saved, current = getattr(self, key), getattr(other, key)
            if saved is None or current is None:
                continue
            if key == "run":
                saved, current = _in_todays_form(saved), _in_todays_form(current)
            lines += differences({key: saved}, {key: current})
        return lines

    def disagreements(self, folder: Path, manifest: Manifest) -> list[str]:
        """Return a line for each mismatch of step among the folder's name, the manifest and trainer.json."""
        problems = []
        named = step_of(folder)
        if named is not None and named != manifest.step:
            problems.append(f"{MANIFEST} is of step {manifest.step}, the folder of step {named}")
        if self.step != manifest.step:
            problems.append(f"{TRAINER} is of step {self.step}, {MANIFEST} of step {manifest.step}")
        return problems


@cache
def _kinds() -> dict[str, tuple[Any, ...]]:
    """Return key -> the types that its value may have."""
    hints = get_type_hints(TrainerState)
    del hints["entries"]
    return {key: get_args(kind) if isinstance(kind, UnionType) else (kind,) for key, kind in hints.items()}


def _fits(value: Any, kind: Any) -> bool:
    """Return True if the value has the type `kind`: a type, or a list or map with a type of its elements."""
    of = [argument for argument in get_args(kind) if argument is not Any]
    if get_origin(kind) is list:
        return type(value) is list and (not of or all(_fits(element, of[0]) for element in value))
    return type(value) is (get_origin(kind) or kind)


def _wrong(file: Path, key: str, value: Any, rule: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {key} is {value!r:.100}, but it must be {rule}. The file was changed or is damaged: "
        "take another checkpoint."
    )


def _in_todays_form(run: dict[str, Any]) -> dict[str, Any]:
    """Return the run with the fields that a checkpoint from another tool may lack, at their defaults."""
    from llmtrain import features
    from llmtrain.config.reader import read_saved  # imported here: many processes read only the state
    from llmtrain.config.run import FaultConfig, TrainConfig
    from llmtrain.config.stages import DataConfig

    run = {**{name: json.loads(json.dumps(asdict(section))) for name, section in features.defaults().items()}, **run}
    for section, cls in (("fault", FaultConfig), ("train", TrainConfig), ("data", DataConfig)):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # another tool wrote the section
            run[section] = json.loads(json.dumps(asdict(read_saved(cls, run[section]))))
    return run
