"""The longest sequence that one optimizer step takes within a fixed memory, ours against transformers' own.

    python tools/bench/long_context.py                            # CPU: a small Llama in fp32, peak resident memory
    python tools/bench/long_context.py --preset 1b                # one GPU, bf16, its memory
    python tools/bench/long_context.py --preset 8b --deepspeed mine.json
    python tools/bench/long_context.py --preset 1b --tokens 1048576  # no search: one step of ours at this length

Each attempt is a fresh process that builds the model and takes two optimizer steps: the first creates the optimizer's
state, the second has to fit beside it. The contestants, on the same model:

    llmtrain     our engine: recomputed layers (on a GPU their inputs wait in host memory), chunked loss, tiled MLP
    recompute    transformers' model, its own MLP and its own loss, with its recomputed layers, torch's AdamW
    plain        the same without recomputation

The search doubles the length until it does not fit, and then halves the gap until it is a sixteenth. On a CPU the limit
counts everything that the process holds (VmHWM); a process that passes it is ended at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

CONTESTANTS = ("llmtrain", "recompute", "plain")
TOO_MUCH = 77
"""Exit code of an attempt that does not fit."""
STEP = 64
"""Lengths are multiples of it."""

_LLAMA = {"model_type": "llama", "tie_word_embeddings": True}
PRESETS: dict[str, dict[str, Any]] = {
    # Llama-3.2-1B with everything an eighth as wide, and 4 of its 16 layers.
    "small": {
        **_LLAMA,
        "vocab_size": 16032,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
    "1b": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "8b": {
        **_LLAMA,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
STATE_GIB = {"1b": 18.4, "8b": 119.7}
"""16 bytes a parameter: weight 2, master 4, moments 8, gradient 2."""
CPU_JSON = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "activation_checkpointing": {}}


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What a process is to try."""

    name: str
    preset: str
    tokens: int
    limit_gib: float
    deepspeed: str
    mlp_tile_tokens: int
    loss_chunk_tokens: int


def attempt(task: Attempt) -> dict[str, float]:
    """Two optimizer steps in this process: seconds of the second, peak GiB, losses."""
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        threading.Thread(target=_end_above, args=(task.limit_gib,), daemon=True).start()
    torch.manual_seed(0)
    row = torch.randint(0, PRESETS[task.preset]["vocab_size"], (1, task.tokens + 1))
    step = ours(task) if task.name == "llmtrain" else theirs(task, recompute=task.name == "recompute")
    losses, elapsed_s = [], 0.0
    try:
        for _ in range(2):
            begin_s = time.monotonic()
            losses.append(step(row[:, :-1].contiguous(), row[:, 1:].contiguous()))
            elapsed_s = time.monotonic() - begin_s
    except torch.cuda.OutOfMemoryError:
        os._exit(TOO_MUCH)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else _resident_gib("VmHWM")
    if not on_gpu and peak > task.limit_gib:
        os._exit(TOO_MUCH)
    return {"step_s": elapsed_s, "peak_gib": peak, "first_loss": losses[0], "second_loss": losses[1]}


def ours(task: Attempt) -> Any:
    """A function (inputs, labels) -> loss that takes a step of our engine."""
    import torch

    from llmtrain.config.resolve import resolve
    from llmtrain.config.run import DataConfig, ModelConfig, RunConfig, TrainConfig
    from llmtrain.data.batches import MicroBatch
    from llmtrain.engine.deepspeed.build import build_engine, join_process_group
    from llmtrain.engine.weights import fill_parameters
    from llmtrain.models.parallel.mesh import mesh_of
    from llmtrain.models.run.build_for_rank import build_model
    from llmtrain.models.spec import ModelSpec
    from llmtrain.optim.optimizers import AdamW
    from llmtrain.optim.schedules import Constant

    model = ModelConfig(
        config={**PRESETS[task.preset], "max_position_embeddings": task.tokens},
        mlp_tile_tokens=task.mlp_tile_tokens,
        loss_chunk_tokens=task.loss_chunk_tokens,
    )
    config = RunConfig(
        deepspeed=task.deepspeed,
        model=model,
        data=DataConfig(path="(random)", sequence_length=task.tokens),
        optim=AdamW(lr=1e-4),
        schedule=Constant(),
        train=TrainConfig(micro_batch=1, accumulation=1, max_steps=2),
    )
    run = resolve(config, 1, "one process")
    ranks = join_process_group(3600.0)
    mesh = mesh_of(run.mix.degrees)
    spec = ModelSpec.of(model)
    language = build_model(run, spec, ranks.device, mesh)
    engine = build_engine(language, run, {}, ranks, mesh)
    fill_parameters(engine, spec.initial_weights(0, torch.device("cpu")))
    engine.refresh()

    def step(inputs: Any, labels: Any) -> float:
        micro = MicroBatch(inputs=inputs, labels=labels, sequences=[0])
        (loss,) = engine.forward_backward([micro], labels.numel)
        engine.update(1.0)
        return float(loss) / labels.numel()

    return step


def theirs(task: Attempt, *, recompute: bool) -> Any:
    """The same with transformers' own loss and MLP, and torch's AdamW."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from llmtrain.config.run import ModelConfig
    from llmtrain.engine.process_memory import return_freed_memory
    from llmtrain.models.spec import ModelSpec

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    fields = {**PRESETS[task.preset], "max_position_embeddings": task.tokens}
    source = ModelSpec.of(ModelConfig(config=fields)).initial_weights(0, torch.device("cpu"))
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if not on_gpu:
        return_freed_memory()  # as ours
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(name, 0, parameter.numel()).view_as(parameter))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(inputs: Any, labels: Any) -> float:
        inputs, labels = inputs.to(device), labels.to(device)
        # transformers takes the labels already shifted under this name.
        loss = model(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _resident_gib(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 2**20
    raise AssertionError(field)


def _end_above(limit_gib: float) -> None:
    while _resident_gib("VmRSS") <= limit_gib:
        time.sleep(0.02)
    os._exit(TOO_MUCH)


def tried(task: Attempt, limit_s: float) -> dict[str, float] | None:
    """The attempt in a fresh process; None when it does not fit into the memory or the time."""
    words = [sys.executable, __file__, "--attempt", json.dumps(vars(task))]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode in (TOO_MUCH, -9):  # -9: the kernel ended it, for memory
        return None
    if done.returncode:
        raise SystemExit(f"{task.name} at {task.tokens} tokens failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def longest(task: Attempt, start: int, limit_s: float) -> tuple[int, dict[str, float]]:
    """(tokens, figures) of the longest sequence that fits; (0, {}) when not even the first does."""
    low, high, best = 0, start, {}
    while True:
        found = tried(Attempt(**{**vars(task), "tokens": high}), limit_s)
        print(f"  {task.name} {high:,}: {'-' if found is None else f'''{found['peak_gib']:.2f} GiB'''}", flush=True)
        if found is None:
            break
        low, best, high = high, found, 2 * high
    while high - low > max(STEP, low // 16):
        middle = (low + high) // 2 // STEP * STEP
        found = tried(Attempt(**{**vars(task), "tokens": middle}), limit_s)
        print(f"  {task.name} {middle:,}: {'-' if found is None else f'''{found['peak_gib']:.2f} GiB'''}", flush=True)
        if found is None:
            high = middle
        else:
            low, best = middle, found
    return low, best


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--limit-gib", type=float, default=1.25, help="CPU: largest resident memory of a process")
    parser.add_argument("--limit-s", type=float, default=1200.0, help="longest time of an attempt, its start included")
    parser.add_argument("--start", type=int, default=512, help="tokens of the first attempt")
    parser.add_argument("--tokens", type=int, help="one attempt of ours at this length instead of the search")
    parser.add_argument("--mlp-tile-tokens", type=int, help="default: 128 on a CPU, 4096 on a GPU")
    parser.add_argument("--loss-chunk-tokens", type=int, help="default: 128 on a CPU, 2048 on a GPU")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--deepspeed", help="default on a GPU: ds_configs/long_context.json on one rank")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--attempt", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def json_for(options: argparse.Namespace, on_gpu: bool, folder: Path) -> str:
    """The DeepSpeed file of our attempts: this process is the only rank."""
    tree: dict[str, Any] = dict(CPU_JSON)
    if options.deepspeed or on_gpu:
        tree = json.loads(Path(options.deepspeed or ROOT / "ds_configs/long_context.json").read_text())
        tree.pop("sequence_parallel_size", None)
    if on_gpu and not options.deepspeed:  # one micro-batch on one rank: no sum of gradients that fp32 could serve
        del tree["data_types"], tree["communication_data_type"]
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(tree))
    return str(path)


def keep(path: Path | None, results: dict[str, tuple[int, dict[str, float]]]) -> None:
    """Write the figures so far."""
    if path is not None:
        path.write_text(json.dumps({name: {"tokens": t, **one} for name, (t, one) in results.items()}, indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    """Search for each contestant and print the table."""
    options = arguments(argv)
    if options.attempt:
        print(json.dumps(attempt(Attempt(**json.loads(options.attempt)))))
        return 0
    import torch
    from contestants import PROCESS_GIB, SKIPPED
    from machine import Card, gpu_gib, use

    from llmtrain.config.run import ModelConfig

    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as folder:
        held, total = STATE_GIB.get(options.preset, 0.0), gpu_gib()
        if total is not None and held + PROCESS_GIB > total:
            print(
                f"{options.preset}: weights and optimizer alone take {held:.0f} GiB, this GPU has {total:.0f}: skipped"
            )
            return SKIPPED
        task = Attempt(
            name="llmtrain",
            preset=options.preset,
            tokens=options.tokens or 0,
            limit_gib=options.limit_gib,
            deepspeed=json_for(options, on_gpu, Path(folder)),
            mlp_tile_tokens=options.mlp_tile_tokens or (4096 if on_gpu else 128),
            loss_chunk_tokens=options.loss_chunk_tokens or (2048 if on_gpu else 128),
        )
        if options.tokens:
            with Card() as card:
                one = tried(task, options.limit_s) or {}
            if on_gpu and one:
                model, speed = ModelConfig(config=PRESETS[task.preset]), options.tokens / one["step_s"]
                one |= {**card.figures(), **use(speed, model, options.tokens)}
            results = {"llmtrain": (options.tokens, one)}
        else:
            results = {}
            for name in options.contestants:
                results[name] = longest(Attempt(**{**vars(task), "name": name}), options.start, options.limit_s)
                keep(options.json, results)
        keep(options.json, results)
    memory = f"{torch.cuda.get_device_name()}" if on_gpu else f"{options.limit_gib} GiB resident memory"
    print(f"longest sequence of one optimizer step, {options.preset}, {memory}")
    print(f"{'':<12}{'tokens':>10}{'peak GiB':>10}{'s/step':>9}{'loss':>9}{'ours over it':>14}")
    first = results.get("llmtrain", (0, {}))[0]
    for name, (tokens, one) in results.items():
        if not one:
            print(f"{name:<12}{tokens:>10,}  does not fit")
            continue
        ratio = f"{first / tokens:>13.1f}x" if first else ""
        print(
            f"{name:<12}{tokens:>10,}{one['peak_gib']:>10.2f}{one['step_s']:>9.1f}{one['second_loss']:>9.4f}{ratio:>14}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
