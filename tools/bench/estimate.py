"""Tokens a second of a training on 8 H100 by count: what a step computes, moves and sends, over documented speeds.

    python tools/bench/estimate.py                     # rows of 8,192 tokens
    python tools/bench/estimate.py --tokens 4096

Nothing is measured. Products of matrices are counted by torch's FlopCounterMode on tensors without memory; attention,
passes over memory and messages by their sizes. Each is divided by a speed whose source is printed. The same count of a
configuration that torchtitan has published says how far off the method is, and the last column is corrected by that.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
PUBLISHED = 6667
"""Tokens a second of a GPU: torchtitan's docs/performance.md, table 1, FSDP + torch.compile."""
TARGET = 7000


@dataclass(frozen=True)
class Assumption:
    """A speed, and where it is from."""

    name: str
    value: float
    unit: str
    source: str


PRODUCTS = Assumption(
    "products of matrices, best shape",
    794.5,
    "TFLOP/s",
    "ml-engineering, maximum achievable matmul FLOPS, H100 SXM, torch 2.7",
)
SHAPES = Assumption("of that, the shapes of a training", 0.8, "share", "a guess: large products, not the best")
POWER = Assumption("clock at a limit of 500 W for 700", 0.894, "share", "a guess: power grows with the clock's cube")
FORWARD = Assumption(
    "attention forward",
    333.0,
    "TFLOP/s",
    "FlashAttention-3's paper, figure for FlashAttention-2: causal, heads of 128, 8k",
)
BACKWARD = Assumption(
    "attention backward", 318.0, "TFLOP/s", "the same paper, not causal; its FLOPs are 2.5 times the forward pass's"
)
MEMORY = Assumption("of the memory's bandwidth, passes over tensors", 0.85, "share", "a guess")
LINKS = Assumption(
    "messages between 8 GPUs, for each byte that a rank gets",
    360.0,
    "GB/s",
    "a guess: 0.8 of NVLink 4's 450 GB/s in a direction",
)
ASSUMPTIONS = (PRODUCTS, SHAPES, POWER, FORWARD, BACKWARD, MEMORY, LINKS)

LAYER_FORWARD, LAYER_BACKWARD = 44.0, 78.0
"""Bytes that a compiled Llama layer of 8B reads and writes beside products and attention, for each token and element
of the hidden state: each fused kernel's arguments and results once, in bf16."""
LOSS, HEAD, CHUNK = 6.0, 8.0, 2048
"""Bytes a logit that the loss's two kernels read and write; bytes of each weight of the head for each chunk of so many
tokens, whose gradient is added to the sum (docs/developers/benchmarks.md, bytes of the loss)."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A micro-batch and its share of a step, on 8 GPUs that share everything."""

    name: str
    rows: int
    tokens: int = 8192
    recomputed: float = 0.0
    """Layers whose forward pass runs twice; half a layer where every second product does."""
    attention_again: bool = True
    """Recomputed layers compute their attention again, too."""
    accumulation: int = 1
    reduced_bytes: int = 4
    """Of a gradient in messages."""
    watts: int = 700
    bandwidth: float = 3.35e12


@dataclass(frozen=True, kw_only=True)
class Count:
    """FLOPs of the products for one token, forward; the backward pass has twice as many."""

    layer: float
    head: float
    parameters: int


def counted(model: dict[str, Any], tokens: int) -> Count:
    """Torch's count of one layer and of two, of which the difference is a layer's."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from llmtrain.config.run import ModelConfig
    from llmtrain.models.skeleton import construct, load_config
    from llmtrain.models.spec import ModelSpec

    products = {}
    for layers in (1, 2):
        config = load_config(ModelConfig(config={**model, "num_hidden_layers": layers}))
        config.use_cache = False
        with FakeTensorMode():
            module = construct(config, "sdpa", torch.bfloat16)
            with FlopCounterMode(display=False) as counter:
                module(input_ids=torch.zeros(1, tokens, dtype=torch.int64)).logits.sum().backward()
        of_torch = counter.get_flop_counts()["Global"]
        products[layers] = sum(n for op, n in of_torch.items() if str(op) in ("aten.mm", "aten.addmm")) / tokens
    layer = products[2] - products[1]
    parameters = ModelSpec.of(ModelConfig(config=model)).facts.parameters
    return Count(layer=layer / 3, head=(products[1] - layer) / 3, parameters=parameters)


def parts(model: dict[str, Any], training: Training, count: Count) -> dict[str, float]:
    """Seconds of a micro-batch."""
    layers, width = model["num_hidden_layers"], model["hidden_size"]
    tokens = training.rows * training.tokens
    again = training.recomputed
    clock = 1.0 if training.watts == 700 else POWER.value
    products = tokens * ((3 * layers + again) * count.layer + 3 * count.head)
    square = 2.0 * width * training.tokens * tokens  # of a layer, forward: two products over half a square
    twice = again if training.attention_again else 0.0
    memory = training.bandwidth * MEMORY.value
    fused = tokens * width * ((layers + again) * LAYER_FORWARD + layers * LAYER_BACKWARD)
    received = count.parameters * 7 / 8
    messages = (2 * 2 + training.reduced_bytes) * received / (LINKS.value * 1e9)
    own = count.parameters / 8
    found = {
        "products": products / (PRODUCTS.value * 1e12 * SHAPES.value * clock),
        "attention": square * ((layers + twice) / FORWARD.value + 2.5 * layers / BACKWARD.value) / 1e12 / clock,
        "fused kernels": fused / memory,
        "loss": model["vocab_size"] * (tokens * LOSS + tokens / CHUNK * width * HEAD) / memory,
        "optimizer": own * 30 / memory / training.accumulation,  # fp32 master, two moments, gradient; bf16 weights
    }
    found["messages, not hidden"] = max(0.0, messages - sum(found.values())) + messages / layers
    return found


def speed(model: dict[str, Any], training: Training, count: Count) -> float:
    """Tokens a second of a GPU."""
    return training.rows * training.tokens / sum(parts(model, training, count).values())


PEER = Training(
    name="torchtitan: 2 rows, every second product again",
    rows=2,
    recomputed=16,
    attention_again=False,
    watts=500,
    bandwidth=2.4e12,
)


def ours(tokens: int) -> tuple[Training, ...]:
    """The recipe as it ships, with the layers that `auto` recomputes on 79 GiB (tests/features/plan),
    and with more rows, for which all have to be."""
    train = yaml.safe_load((ROOT / "launch/recipes/sft_8b.yaml").read_text())["train"]
    rows, batch = train["micro_batch"], train["global_batch"] // 8
    return (
        Training(
            name=f"sft_8b.yaml: ZeRO 3, {rows} row, 2 of 32 layers again",
            rows=rows,
            tokens=tokens,
            recomputed=2,
            accumulation=batch // rows,
        ),
        Training(
            name="the same with 4 rows, all layers again", rows=4, tokens=tokens, recomputed=32, accumulation=batch // 4
        ),
    )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of a row, which is one document")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    """Print assumptions, parts, and the table."""
    warnings.filterwarnings("ignore")
    count = counted(LLAMA_8B, args.tokens)
    print(f"8B of Llama 3 ({count.parameters:,}), 8 x H100, bf16, rows of {args.tokens:,} tokens, each one document")
    print(f"products of a token, forward: {count.layer / 1e6:,.1f} MFLOP a layer, {count.head / 1e6:,.1f} the head")
    print("\n| assumption | value | source |\n|---|---|---|")
    for each in ASSUMPTIONS:
        print(f"| {each.name} | {each.value:g} {each.unit} | {each.source} |")
    names = list(parts(LLAMA_8B, PEER, count))
    print(f"\n| ms of a micro-batch | {' | '.join(names)} | tokens/s a GPU |\n|---|{'---|' * len(names)}---|")
    for training in (PEER, *ours(args.tokens)):
        of_micro_batch = parts(LLAMA_8B, training, count)
        cells = " | ".join(f"{1000 * of_micro_batch[name]:.0f}" for name in names)
        print(f"| {training.name} | {cells} | {speed(LLAMA_8B, training, count):,.0f} |")
    ratio = speed(LLAMA_8B, PEER, count) / PUBLISHED
    print(f"\ntorchtitan has published {PUBLISHED:,}: the method is {ratio:.2f} times that")
    print(f"\n| | by count | corrected by {ratio:.2f} | target | measured on |\n|---|---|---|---|---|")
    for training in ours(args.tokens):
        found = speed(LLAMA_8B, training, count)
        print(f"| {training.name} | {found:,.0f} | {found / ratio:,.0f} | {TARGET:,} | |")


if __name__ == "__main__":
    main(arguments())
