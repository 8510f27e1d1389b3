"""model.attention auto in a run: what its start says and records; a run that had sdpa goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from tests.helpers import forked
from tests.helpers.launching import losses, write_run
from tests.helpers.prepared import write_prepared

DOCUMENTS = [[(7 * step + seed) % 500 + 1 for step in range(11 + seed % 9)] for seed in range(300)]


def on_a_gpu(rank: int) -> None:
    """The start of a run takes its device for a GPU; what it chooses computes on the CPU."""
    from llmtrain.training import setup

    choose = setup.with_attention
    setup.with_attention = lambda run, spec, device: choose(run, spec, torch.device("cuda"))


def test_a_start_says_what_attention_it_has_and_an_older_run_goes_on(tmp_path: Path) -> None:
    data = str(write_prepared(tmp_path / "data", [DOCUMENTS], [DOCUMENTS[:20]], vocab_size=512))
    tree = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    recipe = write_run(tmp_path, data, tree, {"global_batch": 4, "micro_batch": 4, "max_steps": 6})
    words = ["--data.isolate_documents", "true", "--checkpoint.every_steps", "2"]

    def run(name: str, *more: str, gpu: bool = False) -> tuple[str, str, dict[int, float]]:
        folder = tmp_path / name
        code, output = forked.finish(
            recipe, *words, "--train.run_dir", str(folder), *more, world_size=1, before=on_a_gpu if gpu else None
        )
        assert code == 0, output
        return output, json.loads((folder / "environment.json").read_text())["attention"], losses(folder)

    named, attention, first = run("run", "--model.attention", "sdpa", "--train.max_steps", "4", gpu=True)
    assert attention == "sdpa" and re.search("model.attention sdpa: .*data.isolate_documents", named)
    resumed, attention, went_on = run("run", gpu=True)
    assert "model.attention auto: varlen" in resumed
    assert attention == "varlen, documents one by one" and set(went_on) == {1, 2, 3, 4, 5, 6}
    plain, attention, whole = run("whole")
    assert attention == "sdpa" and "model.attention auto: sdpa" in plain
    # The same function, but for bf16's rounding in another order: 2^-8 of scores of about 6 nats.
    assert all(abs(went_on[step] - whole[step]) < 0.02 for step in whole) and first.items() <= went_on.items()
