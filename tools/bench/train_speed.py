"""Our loop, plain PyTorch and transformers.Trainer on the same model, data, batch and DeepSpeed JSON.

    python tools/bench/train_speed.py                        # CPU: a small Llama, one thread each
    python tools/bench/train_speed.py --preset 0.5b          # one GPU, bf16, sequence 4096
    python tools/bench/train_speed.py --preset nanogpt --only llmtrain nanogpt plain   # CPU: sizes of nanoGPT
    python tools/bench/train_speed.py --preset 0.5b --sequence 128 --micro-batch 1 --accumulation 1
                                                             # a step so short that host time is all there is

Each contestant is one process; they take turns, one round of steps at a time, so that a machine that is busy for a
while is busy for all. The first round warms up. Ratios are taken within a round, and their median is printed. Where a
GPU does not hold all of them, each is alone on it, one after another; one that does not fit alone is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from contestants import CLIP_NORM, FP8, SKIPPED, Need, Round, Task, fit_together, serve  # noqa: E402
from long_context import PRESETS as LONG  # noqa: E402
from machine import Card, about, gpu_gib, use, write  # noqa: E402

from llmtrain.base.imports import let_segments_grow  # noqa: E402
from llmtrain.config.run import ModelConfig  # noqa: E402

OURS = "llmtrain"
NAMES = (OURS, "plain", "trainer")
ANSWER_S = 900.0
"""A contestant that builds its model or runs a round for longer than this is given up."""

# 5.8 M parameters; one step takes about half a second on one core.
SMALL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
# launch/recipes/shakespeare.yaml: nanoGPT's run on a CPU.
NANOGPT = {
    "model_type": "gpt2",
    "vocab_size": 257,
    "n_positions": 64,
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 4,
    "activation_function": "gelu",
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "tie_word_embeddings": True,
}
# The shapes of Qwen2.5-0.5B.
QWEN_HALF_B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
# The shapes of Llama-3.2-1B.
LLAMA_1B = {**LONG["1b"], "max_position_embeddings": 131072}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model with a batch that suits it. The batches of the GPU presets leave room for the peers' fp32 logits."""

    model: dict[str, Any]
    sequence: int
    micro_batch: int
    accumulation: int
    steps: int
    recompute: bool = False
    """Layers are computed again in the backward pass: their activations beside the state would not fit."""
    needs: dict[str, Need] = field(default_factory=dict)
    """GPU memory by contestant, those of posttraining.py among them; empty: the preset is for the CPU."""


PRESETS = {
    "small": Preset(model=SMALL, sequence=256, micro_batch=4, accumulation=1, steps=4),
    # The head's share of the work grows with the vocabulary; most models of today have more than this.
    "small-32k": Preset(model={**SMALL, "vocab_size": 32768}, sequence=256, micro_batch=2, accumulation=1, steps=4),
    "nanogpt": Preset(model=NANOGPT, sequence=64, micro_batch=12, accumulation=1, steps=60),
    "0.5b": Preset(
        model=QWEN_HALF_B,
        sequence=4096,
        micro_batch=4,
        accumulation=2,
        steps=10,
        needs={
            OURS: Need(held=7.4, made=25.6),
            "plain": Need(held=7.4, made=57.3),
            "trainer": Need(held=7.4, made=55.9),
        },
    ),
    "1.2b": Preset(
        model=LLAMA_1B,
        sequence=4096,
        micro_batch=2,
        accumulation=4,
        steps=8,
        needs={
            OURS: Need(held=18.4, made=18.2),
            "plain": Need(held=18.4, made=31.7),
            "trainer": Need(held=18.4, made=29.7),
            "llmtrain lora": Need(held=2.4, made=13.9),
        },
    ),
    # The state alone fills 120 of an H200's 139 GiB (tests/unit/models/test_fake_steps.py): gradients are summed in
    # bf16.
    "8b": Preset(
        model=LONG["8b"],
        sequence=4096,
        micro_batch=1,
        accumulation=4,
        steps=4,
        recompute=True,
        needs={OURS: Need(held=119.7, made=6.8), "llmtrain lora": Need(held=15.3, made=24.1)},
    ),
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=1, help="ZeRO stage of llmtrain and Trainer")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: bf16 on CUDA, fp32 on CPU")
    parser.add_argument("--sequence", type=int, help="tokens per sequence (default: the preset's)")
    parser.add_argument("--micro-batch", type=int, help="sequences per forward pass (default: the preset's)")
    parser.add_argument("--accumulation", type=int, help="micro-batches per step (default: the preset's)")
    parser.add_argument("--steps", type=int, help="timed steps of a round (default: the preset's)")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9); one more warms up")
    parser.add_argument("--warm-steps", type=int, default=0, help="steps of the warm-up round (default: as the others)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each contestant (default 1)")
    parser.add_argument("--eager", action="store_true", help="llmtrain without compiled layers")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*NAMES, "nanogpt", *FP8),
        default=list(NAMES),
        help="these contestants; rowwise and tensorwise are llmtrain with that model.fp8, nanogpt is the model and "
        "loop of nanoGPT",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file, after each round")
    return parser.parse_args(argv)


def prepare(options: argparse.Namespace, folder: Path) -> Task:
    """Data and DeepSpeed JSON of the run in `folder`; needs no torch beyond asking for CUDA."""
    import torch

    from tests.helpers.prepared import write_prepared

    preset: Preset = PRESETS[options.preset]
    on_gpu = torch.cuda.is_available()
    task = Task(
        folder=str(folder),
        model=preset.model,
        sequence=options.sequence or preset.sequence,
        micro_batch=options.micro_batch or preset.micro_batch,
        accumulation=options.accumulation or preset.accumulation,
        bf16=(options.precision or ("bf16" if on_gpu else "fp32")) == "bf16",
        eager=options.eager,
        contestants=tuple(options.only),
        threads=options.threads,
        steps_per_round=options.steps or preset.steps,
        rounds=options.rounds + 1,
        warm_steps=options.warm_steps,
    )
    _write_deepspeed(task, options.zero, preset.recompute)
    windows = task.total_steps * task.micro_batch * task.accumulation + 1
    write_prepared(
        folder / "data",
        train=[_documents(windows * task.sequence, task.model["vocab_size"])],
        validation=[_documents(2 * task.sequence, task.model["vocab_size"])],
        vocab_size=task.model["vocab_size"],
    )
    return task


def _documents(tokens: int, vocab_size: int) -> list[list[int]]:
    """Documents of 20 to 1000 ids with Zipf's frequencies: the loss has something to learn and starts to fall."""
    import numpy as np

    random = np.random.default_rng(0)
    documents: list[list[int]] = []
    made = 0
    while made <= tokens:
        length = int(random.integers(20, 1000))
        ids = random.zipf(1.2, length) % (vocab_size - 1) + 1
        documents.append(ids.tolist())
        made += length + 1
    return documents


def _write_deepspeed(task: Task, stage: int, recompute: bool) -> None:
    config = {
        "train_batch_size": task.micro_batch * task.accumulation,
        "train_micro_batch_size_per_gpu": task.micro_batch,
        "gradient_accumulation_steps": task.accumulation,
        "gradient_clipping": CLIP_NORM,
        "bf16": {"enabled": task.bf16},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **({"activation_checkpointing": {}} if recompute else {}),
    }
    (Path(task.folder) / "deepspeed.json").write_text(json.dumps(config, indent=2))


def race(
    task: Any,
    after_round: Callable[[dict[str, list[Round]]], None],
    entry: Callable[..., None] = serve,
    *,
    together: bool = True,
) -> dict[str, list[Round]]:
    """All rounds of all contestants, taking turns, or each `alone` after another. A peer that fails is left out.

    The warm-up round is dropped; `after_round` gets those so far.
    """
    os.environ["OMP_NUM_THREADS"] = str(task.threads)  # read when torch is imported
    let_segments_grow()
    results: dict[str, list[Round]] = {}
    for names in [task.contestants] if together else [(name,) for name in task.contestants]:
        _turns(task, names, results, after_round, entry)
    return {name: rounds[1:] for name, rounds in results.items()}


def _turns(
    task: Any,
    names: tuple[str, ...],
    results: dict[str, list[Round]],
    after_round: Callable[[dict[str, list[Round]]], None],
    entry: Callable[..., None],
) -> None:
    """The rounds of some contestants, into `results`."""
    context = mp.get_context("spawn")
    processes: dict[str, Any] = {}
    pipes: dict[str, Any] = {}
    here = list(names)

    def ask(name: str, word: str | None) -> Any:
        if word is not None:
            pipes[name].send(word)
        try:
            return _answer(name, pipes[name])
        except _GoneError as error:
            if name == task.contestants[0]:
                raise SystemExit(str(error)) from None
            print(f"{error}: left out", flush=True)
            here.remove(name)
            results.pop(name, None)
            return None

    try:
        for name in names:
            pipes[name], theirs = context.Pipe()
            processes[name] = context.Process(target=entry, args=(name, theirs, task), daemon=True)
            processes[name].start()
            theirs.close()
            ask(name, None)  # one after another: building two at a time would set the peak memory
        for done in range(task.rounds):
            for name in list(here):
                if (one := ask(name, "go")) is not None:
                    results.setdefault(name, []).append(one)
            if done:
                after_round({name: rounds[1:] for name, rounds in results.items() if len(rounds) > 1})
        for name in list(here):
            ask(name, "go")
            processes[name].join(timeout=60)
    finally:
        for process in processes.values():
            process.kill()
            process.join()


class _GoneError(Exception):
    """A contestant does not answer."""


def _answer(name: str, pipe: Any) -> Any:
    try:
        if pipe.poll(ANSWER_S):
            return pipe.recv()
    except (EOFError, ConnectionError):
        raise _GoneError(f"{name}: its process died; its own output above says why") from None
    raise _GoneError(f"{name}: no answer within {ANSWER_S:.0f} s")


def arrange(preset: Preset, name: str, task: Task, total_gib: float | None) -> tuple[tuple[str, ...], bool]:
    """(the contestants that the GPU holds, whether all at a time); ours not among them: the part cannot be measured."""
    share = task.sequence * task.micro_batch / (preset.sequence * preset.micro_batch)
    known = {**preset.needs, **{each: preset.needs[OURS] for each in FP8 if OURS in preset.needs}}
    needs = {each: known[each].of(share) for each in task.contestants if each in known}
    if total_gib is None:
        return task.contestants, True
    for each, need in needs.items():
        if need.alone > total_gib:
            print(f"{name}: {each} needs {need.alone:.0f} GiB, this GPU has {total_gib:.0f}: skipped", flush=True)
    left = tuple(each for each in task.contestants if each not in needs or needs[each].alone <= total_gib)
    together = fit_together([needs[each] for each in left if each in needs], total_gib)
    if not together:
        print(f"{name}: {total_gib:.0f} GiB do not hold {', '.join(left)} at a time: each alone", flush=True)
    return left, together


def figures(task: Task, results: dict[str, list[Round]], on_gpu: bool) -> dict[str, Any]:
    """Rates, peaks and ratios. On CPU a second is a CPU-second, which another process on the machine cannot take."""

    def seconds(one: Round) -> float:
        return one.wall_s if on_gpu else one.cpu_s

    tokens = task.steps_per_round * task.micro_batch * task.accumulation * task.sequence
    contestants: dict[str, Any] = {
        name: {
            "tokens_per_s": statistics.median(tokens / seconds(one) for one in rounds),
            "ms_per_step": statistics.median(1000 * seconds(one) / task.steps_per_round for one in rounds),
            "peak_gib": max(one.peak_bytes for one in rounds) / 2**30,
            "attention": rounds[-1].attention,
            "compiled": rounds[-1].compiled,
        }
        for name, rounds in results.items()
    }
    if on_gpu:
        for one in contestants.values():
            one |= use(one["tokens_per_s"], ModelConfig(config=task.model), task.sequence)
    for name in contestants if "plain" in results else ():
        contestants[name]["ms_per_step_over_plain"] = statistics.median(
            1000 * (seconds(one) - seconds(plain)) / task.steps_per_round
            for one, plain in zip(results[name], results["plain"], strict=False)
        )
    ours = results.get(OURS, [])
    peers = [name for name in results if ours and name != OURS]
    return {
        "contestants": contestants,
        "speed_of_ours_over": {
            peer: statistics.median(seconds(b) / seconds(a) for a, b in zip(ours, results[peer], strict=False))
            for peer in peers
        },
        "spread_of_ratio": {
            peer: _spread([seconds(b) / seconds(a) for a, b in zip(ours, results[peer], strict=False)])
            for peer in peers
        },
        "largest_loss_difference": {peer: _loss_difference(ours, results[peer]) for peer in peers},
        "losses": [loss for one in ours for loss in one.losses],
    }


def _spread(values: list[float]) -> tuple[float, float]:
    """Lower and upper quartile."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return low, high


def _loss_difference(ours: list[Round], theirs: list[Round]) -> float:
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=False) for a, b in zip(x.losses, y.losses, strict=True)]
    worst = max(abs(a - b) for a, b in pairs)
    return worst if all(math.isfinite(a) and math.isfinite(b) for a, b in pairs) else math.inf


def table(found: dict[str, Any], on_gpu: bool) -> str:
    """The figures for a reader."""
    unit = "tokens/s" if on_gpu else "tokens/CPU-s"
    ms = "ms/step" if on_gpu else "CPU-ms/step"
    peak = "peak GiB (allocated)" if on_gpu else "peak GiB (VmHWM)"
    lines = [f"{'':<10}{unit:>14}{ms:>14}{'over plain':>12}{peak:>22}"]
    for name, one in found["contestants"].items():
        over = f"{one['ms_per_step_over_plain']:+.1f}" if "ms_per_step_over_plain" in one else ""
        lines.append(
            f"{name:<10}{one['tokens_per_s']:>14,.0f}{one['ms_per_step']:>14.1f}{over:>12}{one['peak_gib']:>22.2f}"
        )
    for peer in found["speed_of_ours_over"]:
        low, high = found["spread_of_ratio"][peer]
        lines.append(
            f"llmtrain / {peer}: {found['speed_of_ours_over'][peer]:.3f} x the speed (quartiles {low:.3f} to "
            f"{high:.3f}), largest loss difference {found['largest_loss_difference'][peer]:.2e}"
        )
    if losses := found["losses"]:
        lines.append(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} over {len(losses)} steps after the warm-up")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the race and print the table."""
    options = arguments(argv)
    import torch

    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as folder:
        task = prepare(options, Path(folder))
        left, together = arrange(PRESETS[options.preset], options.preset, task, gpu_gib())
        if task.contestants[0] not in left:
            return SKIPPED
        task = replace(task, contestants=left)
        machine = about()
        print(", ".join(f"{key} {value}" for key, value in machine.items()))
        precision = "bf16, gradients summed in bf16" if task.bf16 else "fp32"
        print(
            f"{options.preset}: {task.micro_batch} x {task.accumulation} sequences of {task.sequence} tokens a step, "
            f"{precision}, ZeRO {options.zero}, {options.rounds} rounds of "
            f"{task.steps_per_round} timed steps{', without compiled layers' if task.eager else ''}",
            flush=True,
        )

        head = {
            "machine": machine,
            "task": asdict(replace(task, folder="")),
            "zero": options.zero,
            "gradient_sums": "bf16" if task.bf16 else "fp32",
        }

        with Card() as card:

            def keep(rounds: dict[str, list[Round]]) -> None:
                write(options.json, {**head, **card.figures(), **figures(task, rounds, on_gpu)})

            found = figures(task, race(task, keep, together=together), on_gpu)
    print(table(found, on_gpu))
    if len(found["contestants"]) < len(task.contestants):
        return 1
    return 0 if all(math.isfinite(d) for d in found["largest_loss_difference"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
