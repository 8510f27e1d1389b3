"""A run with the values that memory has decided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmtrain.config.resolve import resolve
from llmtrain.config.run import RecomputeConfig, Run


def in_words(chosen: dict[str, Any]) -> str:
    layers, keep = chosen["recompute"]["layers"], chosen["recompute"]["keep"]
    kept = " but their attention" if keep else ""
    return f"micro-batch {chosen['micro_batch']}, {layers or 'no'} layers recomputed{kept}"


def with_chosen(run: Run, micro_batch: int, recompute: RecomputeConfig) -> Run:
    """The run with these values where it has auto. Raises ConfigError: the micro-batch does not go with the run."""
    if run.config.train.micro_batch == "auto":
        run = _with_micro_batch(run, micro_batch)
    if run.config.model.recompute.layers != "auto":
        return run
    mix = replace(run.mix, recomputes=recompute.layers is not None, keep_attention=recompute.keep is not None)
    config = replace(run.config, model=replace(run.config.model, recompute=recompute))
    return replace(run, config=config, mix=mix)


def _with_micro_batch(run: Run, count: int) -> Run:
    """Return the run with a number for train.micro_batch auto. Raises ConfigError: the number does not go with it."""
    train = run.config.train
    given = replace(train, micro_batch=count, max_steps=run.max_steps, max_tokens=None, epochs=None)
    made = resolve(replace(run.config, train=given), run.mix.degrees.world_size, places=dict(run.places))
    train = replace(made.config.train, max_steps=train.max_steps, max_tokens=train.max_tokens, epochs=train.epochs)
    return replace(made, config=replace(made.config, train=train), notes=run.notes)
