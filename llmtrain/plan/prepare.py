"""Makes a run ready for its rehearsal: made-up data of full rows, the target's kernels; and runs that take less."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from llmtrain.config.load import Parsed
from llmtrain.config.run import ResolvedRun
from llmtrain.config.stages import Stages
from llmtrain.models.run.check import check_model
from llmtrain.parity.tokens import Answers, Tokens
from llmtrain.plan.device import on_gpu as choices_on_gpu
from llmtrain.training.examine import Checked


class _FullRows(Tokens):
    """Every token counts, as in the fullest rows of a run."""

    def window(self, index: int) -> tuple[np.ndarray, int]:
        draw = np.random.default_rng(index)
        return draw.integers(0, self.vocab_size - 1, self.sequence_length + 1), self.sequence_length


def prepared(resolved: ResolvedRun, *, on_gpu: bool) -> Checked:
    """The run's largest stage over full rows. Raises UserError: its model cannot be built, or not so."""
    largest = max(resolved.stages, key=lambda stage: (stage.batch.micro_batch * stage.batch.sequence_length,
                                                      stage.batch.sequence_length))  # fmt: skip
    run = choices_on_gpu(resolved.run) if on_gpu else resolved.run
    data = replace(largest.data, isolate_documents=run.data.isolate_documents)
    run = replace(run, data=data)
    resolved = replace(resolved, run=run, stages=Stages((replace(largest, first_step=0, schedule_from=0, data=data),)))
    spec, _ = check_model(resolved)
    vocabulary = spec.facts.vocab_size
    rows = (
        _FullRows(data, vocabulary, run.objective.top_k) if run.objective.data == "texts" else Answers(run, vocabulary)
    )
    return Checked(resolved=resolved, spec=spec, data=rows)


def ahead(resolved: ResolvedRun) -> int:
    """Bytes of parameters that ZeRO 3 gathers ahead of their use where a device has a queue."""
    if resolved.zero_stage != 3:
        return 0
    usual = int(DeepSpeedZeroConfig.model_fields["prefetch_bucket_size"].default)
    elements = (resolved.deepspeed.get("zero_optimization") or {}).get("stage3_prefetch_bucket_size", usual)
    return int(elements) * (4 if resolved.precision == "fp32" else 2)


def changes(parsed: Parsed, resolved: ResolvedRun, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Ways to take less memory, those that cost least time first: (the change in words, more words of the run).

    `folder`: for JSONs with another value.
    """
    zero, batch = dict(resolved.deepspeed.get("zero_optimization") or {}), resolved.batch
    if resolved.run.model.recompute.layers != "all" and not resolved.mix.recomputes:
        yield "model.recompute.layers: all", ["--model.recompute.layers", "all"]
    if zero.get("stage", 0) < 3 and resolved.degrees.data > 1:
        more = {"stage": zero.get("stage", 0) + 1}
        yield f"zero_optimization.stage {more['stage']}", ["--deepspeed", _other_json(resolved, more, folder)]
    if batch.micro_batch > 1:
        half = [f"--train.micro_batch={batch.micro_batch // 2}"]
        if parsed.run.train.accumulation is not None:
            half.append(f"--train.accumulation={2 * batch.accumulation}")
        yield f"train.micro_batch: {batch.micro_batch // 2}", half
    if zero.get("stage", 0) > 0 and not resolved.mix.offload_optimizer:
        more = {"offload_optimizer": {"device": "cpu"}}
        yield "zero_optimization.offload_optimizer on the CPU", ["--deepspeed", _other_json(resolved, more, folder)]


def _other_json(resolved: ResolvedRun, zero: dict[str, Any], folder: Path) -> str:
    """Write the run's JSON with other values of zero_optimization; returns its path."""
    tree = json.loads(Path(resolved.run.deepspeed).read_text())
    tree["zero_optimization"] = {**(tree.get("zero_optimization") or {}), **zero}
    path = folder / f"{'-'.join(zero)}.json"
    path.write_text(json.dumps(tree))
    return str(path)
