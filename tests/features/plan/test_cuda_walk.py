"""The code that a run has for a GPU goes through without one, form by form: tests/features/plan/cuda_walk.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from llmtrain.features import features

ROOT = Path(__file__).parents[3]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
TWO_LAYERS = {"model": {"config": {**LLAMA, "num_hidden_layers": 2}}}


def form(
    stage: int, *, ranks: int = 2, rank: int = 0, recheck: bool = True, zero: Any = None, run: Any = None, **more: Any
) -> dict[str, Any]:
    return {
        "json": {"zero_optimization": {"stage": stage, **(zero or {})}, **more},
        "run": {"model": {"config": LLAMA}, **(run or {})},
        "ranks": ranks,
        "rank": rank,
        "recheck": recheck and "recheck" in features(),
    }


DOCUMENTS = {"data": {"path": "data", "sequence_length": 64, "isolate_documents": True}}
RECOMPUTED = {"model": {"config": LLAMA, "recompute": {"layers": "all"}}}
ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
OTHERS = {
    "stage 0, documents": form(0, run=DOCUMENTS),
    "stage 2, the second rank, recomputed": form(2, rank=1, zero={"overlap_comm": True}, run=RECOMPUTED),
    "stage 3": form(3, recheck=False),
    "LoRA, sums in fp32": form(
        1, ranks=1, run={"adapter": {"r": 4, "alpha": 8.0}}, data_types={"grad_accum_dtype": "fp32"}
    ),
    "optimizer in host memory": form(2, recheck=False, zero=ON_HOST),
    "the last of two stages": form(1, rank=1, recheck=False, run=TWO_LAYERS, pipeline={"stages": 2}),
}


def walked(folder: Path, forms: dict[str, Any]) -> dict[str, Any]:
    (folder / "forms.json").write_text(json.dumps(forms))
    words = [sys.executable, "-m", "tests.features.plan.cuda_walk", str(folder), str(folder / "forms.json")]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "walked.json").read_text())
    for name, one in found.items():
        assert isinstance(one, dict), f"{name}: {one[-4000:]}"
    return found


def test_steps_saves_and_looks_go_through_the_code_for_cuda(tmp_path: Path) -> None:
    """A save of each copies to many registrations of page-locked memory, and no step of ours waits for the device."""
    found = walked(tmp_path, {"stage 1": form(1)})
    one = found["stage 1"]
    assert one["devices"] == ["cuda"] and one["copies"] > one["pieces"] and one["pinned"] > 0, one
    assert (one["waits"], one["reads"]) == (0, 0)


def test_every_other_form_goes_through_it(tmp_path: Path) -> None:
    for name, one in walked(tmp_path, OTHERS).items():
        on_host = name == "optimizer in host memory"
        assert one["devices"] == (["cpu"] if on_host else ["cuda"]), name
        assert one["copies"] > one["pieces"] or on_host, name
        assert one["pinned"] > 0, name
        assert one["waits"] == 0 or name == "stage 3", "only DeepSpeed's stage 3 has waits"
        # ZeRO 0's norm, and DeepSpeed's own step with an optimizer on the host.
        assert one["reads"] == 0 or name in ("stage 0, documents", "stage 3") or on_host, (name, one["reads"])
