"""The kernels that a micro-batch becomes on an H100, compiled on a machine without one (tests/helpers/hopper.py).

Fused kernels wait for memory and for nothing else, so a graph has a budget of bytes. `make test-kernels`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from tests.helpers.launching import REPO, environment
from tests.runs.test_bench import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("triton", "torchao"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs torch's build for the CPU"),
    pytest.mark.timeout(900),
]

estimate = load("estimate")
TOKENS, WORDS, CHUNK = 8192, estimate.LLAMA_8B["vocab_size"], 2048
LLAMA = {**estimate.LLAMA_8B, "num_hidden_layers": 1}
EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 8192,
}
FLASH = "_scaled_dot_product_flash_attention"


def case(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tokens": TOKENS, "model": {"config": config, "compile_layers": True, **more}}


CASES = {
    "dense": case(LLAMA),
    "recomputed": case(LLAMA, recompute={"layers": "all"}),
    "experts": case(EXPERTS),
    "fp8": case(LLAMA, fp8="rowwise"),
}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of each case, in order: the layer's forward, the loss's sums and its gradient, the layer's backward."""
    folder = tmp_path_factory.mktemp("hopper")
    (folder / "cases.json").write_text(json.dumps(CASES))
    argv = [sys.executable, "-m", "tests.helpers.hopper", str(folder), str(folder / "cases.json")]
    subprocess.run(argv, cwd=REPO, env=environment(), check=True, timeout=800)
    return json.loads((folder / "kernels.json").read_text())


def called(graph: Any) -> dict[str, int]:
    """Operators that inductor does not write, without the parts of their results."""
    names = [name.removesuffix(".default").rpartition(".")[2] for name in graph["externs"]]
    return Counter(name for name in names if name != "MultiOutput")


def a_hidden_element(graph: Any, model: dict[str, Any]) -> float:
    """Bytes that the fused kernels read and write for each token and element of the hidden state."""
    return graph["fused_bytes"] / TOKENS / model["hidden_size"]


@pytest.mark.parametrize("name", CASES)
def test_a_run_compiles_four_graphs_whose_kernels_spill_nothing(graphs, name):
    """A spilled register is a way to memory and back for each thread. Of a multiprocessor's 65,536 registers, 128 a
    thread leave 512 threads; norms over the heads hold a row in registers and have 255, as many as there are."""
    assert [graph["backward"] for graph in graphs[name]] == [False, False, False, True]
    for graph in graphs[name]:
        for kernel in graph["kernels"]:
            print(name, kernel)
            assert kernel["local_bytes"] == 0, kernel
            assert kernel["registers"] <= (255 if name == "experts" else 128), kernel


def test_the_loss_reads_the_logits_and_reads_and_writes_them(graphs):
    """Two bytes a logit, and four; what a token has beside its logits is nothing to their number."""
    sums, gradient = graphs["dense"][1:3]
    assert len(sums["kernels"]) == 2 and len(gradient["kernels"]) == 1  # the first picks the label's logits, too
    assert sums["fused_bytes"] / (CHUNK * WORDS) == pytest.approx(2, rel=1e-3)
    assert gradient["fused_bytes"] / (CHUNK * WORDS) == pytest.approx(4, rel=1e-3)


def test_a_dense_layer(graphs):
    """Forward: two norms, one with the sum before it, q's and k's rotation, SwiGLU, the last sum. The count of bytes is
    that of tools/bench/estimate.py, which takes each argument and result once."""
    forward, *_, backward = graphs["dense"]
    assert called(forward) == {"mm": 7, FLASH: 1} and len(forward["kernels"]) <= 6
    assert called(backward) == {"mm": 14, f"{FLASH}_backward": 1} and len(backward["kernels"]) <= 6
    assert a_hidden_element(forward, LLAMA) == pytest.approx(estimate.LAYER_FORWARD, rel=0.01)
    assert a_hidden_element(backward, LLAMA) == pytest.approx(estimate.LAYER_BACKWARD, rel=0.01)


def test_a_recomputed_layer_is_computed_once_more_within_its_backward_pass(graphs):
    """All of it but the last product and the last sum, which nothing in the backward pass asks for. Attention is called
    with a state of random numbers, as it may have dropout."""
    forward, *_, backward = graphs["recomputed"]
    again = {"graphsafe_run_with_rng_state": 1}
    assert called(forward) == {"mm": 7, **again}
    assert called(backward) == {"mm": 14 + 6, **again, f"{FLASH}_backward": 1}
    assert a_hidden_element(forward, LLAMA) == pytest.approx(estimate.LAYER_FORWARD, rel=0.01)
    assert a_hidden_element(backward, LLAMA) < 101


def test_experts_are_grouped_products(graphs):
    """Two forward and four backward, whatever their number. The rows that are sent to eight experts each are 8 x 2048
    wide: gathered, weighted and summed, they are most of the bytes."""
    forward, *_, backward = graphs["experts"]
    assert called(forward)["_grouped_mm"] == 2 and called(backward)["_grouped_mm"] == 4
    assert called(forward)["mm"] == 5 and called(backward)["mm"] == 10
    assert len(forward["kernels"]) <= 11 and len(backward["kernels"]) <= 18
    assert a_hidden_element(forward, EXPERTS) < 80 and a_hidden_element(backward, EXPERTS) < 215


def test_maps_in_fp8_have_their_scales_fused(graphs):
    """All products are in fp8. Rows are scaled in the kernels that make them, which adds little to a forward pass; what
    a backward pass scales by columns is read twice."""
    forward, *_, backward = graphs["fp8"]
    assert called(forward) == {"_scaled_mm": 7, FLASH: 1}
    assert called(backward) == {"_scaled_mm": 14, f"{FLASH}_backward": 1}
    assert a_hidden_element(forward, LLAMA) < 64 and a_hidden_element(backward, LLAMA) < 212
