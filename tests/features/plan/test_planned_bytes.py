"""The ranks of a run hold as many bytes as its plan says, in its own loop, with all that its start has left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain import cli
from llmtrain.features import features
from tests.helpers import forked
from tests.helpers.launching import TINY, write_run

LIVE = '''
"""Counts the bytes of all tensors from the beginning of the process, by a mode that sees each operator."""
import functools, json, os, time, weakref
from dataclasses import dataclass
from pathlib import Path
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from llmtrain import Part
from tests.features.plan.test_plan_ranks import _routed

held, now, peak = {}, [0], [0]


class Counts(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                reference, before = held.get(key, (lambda: None, 0))
                if reference() is None:
                    reference, before = weakref.ref(storage, functools.partial(self.free, key)), 0
                held[key] = reference, size
                now[0] += size - before
        peak[0] = max(peak[0], now[0])
        return made

    @staticmethod
    def free(key, _):
        now[0] -= held.pop(key)[1]


Counts().__enter__()


def reduce_and_let_go(reduce, *args, **more):
    work = reduce(*args, **more)
    time.sleep(0.002)  # gloo's thread holds what it has reduced for a moment longer
    return work


dist.all_reduce = functools.partial(reduce_and_let_go, dist.all_reduce)


@dataclass(kw_only=True)
class Live(Part, entry="live"):
    out: str = ""

    def open(self, launch):
        for module in launch.setup.engine.module.modules():
            if isinstance(module, TokenChoiceTopKRouter):
                module.forward = functools.partial(_routed, module, 1)  # balanced, as the plan has it

    def after_step(self, done):
        if done.position.step == 2:
            peak[0] = 0
        if done.position.step == 3:
            Path(f"{self.out}-{os.environ['RANK']}.json").write_text(json.dumps({"peak": peak[0], "kept": now[0]}))
'''
MODEL = {**TINY, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_hidden_layers": 4}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 8}
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ema": (2, {"zero_optimization": {"stage": 2}}, {}, {"accumulation": 3}, {"ema": {"decay": 0.9}}),
    "pipeline": (
        3,
        {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 3}},
        {"tie_word_embeddings": False},
        {"accumulation": 6},
        {},
    ),
    "experts": (
        2,
        {"zero_optimization": {"stage": 1}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
        MIXTRAL,
        {},
        {},
    ),
}


@pytest.mark.parametrize("name", [name for name in RUNS if name != "ema" or name in features()])
def test_each_rank_of_a_run_holds_the_bytes_of_its_plan(
    small_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    ranks, tree, model, train, sections = RUNS[name]
    (plugin := tmp_path / "live.py").write_text(LIVE)
    recipe = write_run(
        tmp_path,
        small_data,
        {"bf16": {"enabled": True}, **tree},
        {"max_steps": 3, "micro_batch": 4, **train},
        model={"config": {**MODEL, **model}},
        **sections,
    )
    words = ["--plugin", str(plugin), "--parts.live.out", str(tmp_path / "live")]
    run = forked.Launch(recipe, *words, world_size=ranks)
    assert run.wait(240) == [0] * ranks, run.output()
    capsys.readouterr()
    assert cli.main(["plan", str(recipe), "--slots", str(ranks), "--device", "cpu", "--json"]) == 0
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    for kind in (each["rehearsed"] for each in kinds):
        live = json.loads((tmp_path / f"live-{kind['rank']}.json").read_text())
        copied = kind["phases"][kind["at"]]["copy for a save (host)"]  # lies in memory that a process shares
        for figure in ("peak", "kept"):
            assert live[figure] == pytest.approx(kind[figure] - copied, rel=0.005), (figure, live, kind)
