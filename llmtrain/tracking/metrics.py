"""Names and units of the metrics, model FLOPs, peak FLOP/s of known devices, throughput.

No torch here: numbers come in as Python floats.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from llmtrain.features import features
from llmtrain.objectives.by_token import NextToken
from llmtrain.objectives.objective import Objective


@dataclass(frozen=True)
class MetricKey:
    """Definition of a key of metrics.jsonl."""

    unit: str
    meaning: str


_OF_A_RUN: dict[str, MetricKey] = {
    "step": MetricKey("optimizer steps", "Steps done in the run, resumes included."),
    "tokens": MetricKey("tokens", "Training tokens read so far by all ranks."),
    "epoch": MetricKey(
        "epochs", "Training sequences read, divided by those that are read in one pass over the first set of the data."
    ),
    "data/stage": MetricKey("1", "Stage of the step (`data.stages`), from 0; only in runs with several."),
    "time_unix_s": MetricKey("s", "Wall-clock time of the row (Unix)."),
    "elapsed_s": MetricKey("s", "Time since this launch began tracking."),
    "loss": MetricKey(
        "nats/token",
        "Training loss of the step: mean over the counted tokens, or pairs, of the global batch.",
    ),
    "lr": MetricKey(
        "1", "Learning rate that the step used, without the factors of `optim.layer_decay` and `optim.lr_factor_of`."
    ),
    "grad_norm": MetricKey("1", "Global L2 norm of the gradient before clipping; of the update with Muon under ZeRO."),
    "loss_scale": MetricKey("1", "Dynamic loss scale (fp16 only)."),
    "skipped_steps": MetricKey("steps", "Steps skipped so far: non-finite loss or gradient, or no counted token."),
    "tokens_per_s": MetricKey("tokens/s", "All ranks together, evaluation and checkpoint time left out."),
    "tokens_per_s_per_device": MetricKey("tokens/s", "`tokens_per_s` divided by the number of devices."),
    "model_tflops_per_s_causal": MetricKey(
        "TFLOP/s", "Model FLOP/s of all devices; attention counted as causal (half the square)."
    ),
    "model_tflops_per_s_noncausal": MetricKey(
        "TFLOP/s",
        "Model FLOP/s of all devices; attention counted as the full square (torchtitan, Megatron-LM).",
    ),
    "mfu_causal": MetricKey("0 to 1", "Causal model FLOP/s over the devices' dense peak; only for known devices."),
    "mfu_noncausal": MetricKey("0 to 1", "Non-causal model FLOP/s over the devices' dense peak."),
    "max_memory_gib": MetricKey("GiB", "Peak of rank 0: allocated device memory, or resident memory on CPU."),
    "data_wait_share": MetricKey("0 to 1", "Share of training time spent waiting for the next batch."),
    "checkpoint_stall_s": MetricKey("s", "Time since the last log point in which saving held up training."),
    "comm_share": MetricKey(
        "0 to 1",
        "Share of rank 0's steps spent inside collectives, waiting for slower ranks included; on CPU, several ranks.",
    ),
    "moe/aux_loss": MetricKey(
        "1",
        "Mixture of experts: load-balancing loss since the last log point, before its coefficient and not in `loss`; "
        "equal to the experts per token if all experts get equally many.",
    ),
    "moe/imbalance": MetricKey("1", "Tokens of the busiest expert over the mean, in the layer where this is largest."),
    "moe/imbalance_per_layer": MetricKey("1", "The imbalance of each layer with experts: a list."),
    "moe/idle_experts": MetricKey("experts", "Experts of all layers that got no token since the last log point."),
    "moe/tokens_per_expert": MetricKey("tokens", "Tokens of each expert since then, summed over layers: a list."),
    "eval/loss": MetricKey("nats/token", "Validation loss: mean over all counted validation tokens, or pairs."),
    "eval/perplexity": MetricKey("1", "exp(eval/loss); for the next-token loss only."),
    "eval/bits_per_byte": MetricKey(
        "bits/byte",
        "Validation loss of all counted tokens in bits, over the bytes of their text: comparable "
        "across tokenizers. For the next-token loss only.",
    ),
    "eval/mean/loss": MetricKey("nats/token", "Mean of the losses of named sets, weighted by `eval.mean`."),
    "eval/NAME/accuracy": MetricKey(
        "0 to 1", "Share of the questions of `eval.choices` whose likeliest choice is the right one (lm-eval's acc)."
    ),
    "eval/NAME/accuracy_norm": MetricKey(
        "0 to 1", "Accuracy with log-probabilities divided by the characters of their choice (lm-eval's acc_norm)."
    ),
    "eval/NAME/bits_per_byte": MetricKey(
        "bits/byte",
        "Negative log-likelihood of the right choices of `eval.choices`, over their bytes; for `eval.sets` as "
        "`eval/bits_per_byte`.",
    ),
}
OF_SET = "eval/NAME/FIGURE"
"""Row of the table that stands for the figures of named sets."""


def metrics() -> dict[str, MetricKey]:
    """Return every key of metrics.jsonl and the trackers, for any run and objective."""
    figures = {figure.name: figure for objective in Objective.CHOICES.values() for figure in objective.figures}
    return {
        **_OF_A_RUN,
        **{key: metric for feature in features().values() for key, metric in feature.metrics().items()},
        **{name: MetricKey(figure.unit, figure.meaning) for name, figure in figures.items()},
        **{f"eval/{name}": MetricKey(f.unit, f"`{name}` of the validation data.") for name, f in figures.items()},
        "eval/FIGURE": MetricKey("as `FIGURE`", "Each figure of the objective for the validation data."),
        OF_SET: MetricKey("as `eval/FIGURE`", "Each figure for the set NAME of `eval.sets`, such as `eval/code/loss`."),
    }


def metric_of(key: str) -> MetricKey | None:
    """Return the definition of a key, whatever set, task or place in a list it names; None: there is none."""
    kind, _, rest = key.partition("/")
    figure, definitions = rest.partition("/")[2], metrics()
    named = ("eval/NAME/", "eval/") if kind == "eval" and figure else ()
    keys = (key, *(prefix + figure for prefix in named), re.sub(r"/\d+$", "", key), f"{kind}/TASK/METRIC")
    return next((definitions[name] for name in keys if name in definitions), None)


def mode_of(metric: str) -> Literal["min", "max"] | None:
    """Return the direction in which a figure improves; None: unknown."""
    last = metric.rpartition("/")[2]
    if last in ("perplexity", "bits_per_byte", "divergence") or last.endswith("loss"):
        return "min"
    return "max" if last.endswith(("accuracy", "accuracy_norm", "margin")) else None


def loss_unit(row: Mapping[str, object]) -> str:
    """Return the unit of `loss` and `eval/loss` in a row of metrics, by the objective whose figures the row has."""
    names = {key.removeprefix("eval/") for key in row}
    units = (o.unit for o in Objective.CHOICES.values() if any(figure.name in names for figure in o.figures))
    return next(units, NextToken.unit)


def perplexity(loss: float) -> float:
    """Return exp(loss), for a loss in nats/token; infinity if that overflows a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def routing_metrics(aux_loss: float, tokens_LE: list[list[int]]) -> dict[str, float | list[float] | list[int]]:
    per_layer = [round(max(row) * len(row) / (sum(row) or math.nan), 3) for row in tokens_LE]
    return {
        "moe/aux_loss": aux_loss,
        "moe/imbalance": max(per_layer),
        "moe/imbalance_per_layer": per_layer,
        "moe/idle_experts": sum(row.count(0) for row in tokens_LE),
        "moe/tokens_per_expert": [sum(column) for column in zip(*tokens_LE, strict=True)],
    }


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """Training FLOPs (forward and backward) per token, in the two conventions of papers."""

    causal: float
    noncausal: float


# Dense bf16/fp16 tensor-core peaks in TFLOP/s (fp32 accumulation) from the vendors' data sheets; where a
# sheet states the sparse figure, half of it. A longer name comes before the shorter one that it contains.
_PEAK_TFLOPS_16BIT: tuple[tuple[str, float], ...] = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("RTX A6000", 154.8),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 5090", 209.5),
    ("MI355X", 2500.0),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak FLOP/s of a device, by the name that its driver gives it, for dtype "bf16" or "fp16".

    None if unknown: another device, a MIG slice, or fp32, whose peak depends on TF32.
    """
    if dtype not in ("bf16", "fp16") or " MIG " in device_name:
        return None
    # Spaces and hyphens both separate words: "A100-SXM4-80GB" is an A100, "L40S" is not an L4.
    name = f" {device_name.replace('-', ' ').upper()} "
    for name_part, tflops in _PEAK_TFLOPS_16BIT:
        if f" {name_part.upper()} " in name:
            return tflops * 1e12
    return None


class Throughput:
    """Measures the speed between two log points.

    Call `step` once per optimizer step, `pause` around evaluation and `checkpoint_stall` around saving (their time is
    left out), and `take` at a log point, after the loss was read (which waits for the device, so that the time is right
    on CUDA).
    """

    def __init__(
        self,
        *,
        flops: TokenFlops,
        devices: int,
        peak: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.flops = flops
        """FLOPs per token, for the tokens from now on."""
        self._devices = devices
        self._peak = peak
        self._clock = clock
        self._reset()

    def _reset(self) -> None:
        self._began_s = self._clock()
        self._tokens = 0
        self._data_wait_s = 0.0
        self._step_s = self._comm_s = 0.0
        self._paused_s = 0.0
        self._stall_s = 0.0

    def step(self, *, tokens: int, data_wait_s: float = 0.0, comm: tuple[float, float] | None = None) -> None:
        """Count an optimizer step with `tokens` tokens of all ranks, which waited `data_wait_s` for its batch.

        `comm`: (seconds of the step, seconds inside collectives), if known.
        """
        self._tokens += tokens
        if comm is not None:
            self._step_s, self._comm_s = self._step_s + comm[0], self._comm_s + comm[1]
        self._data_wait_s += data_wait_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context whose time does not count as training time."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - began_s

    @contextmanager
    def checkpoint_stall(self) -> Iterator[None]:
        """Like `pause`; the time is also reported as `checkpoint_stall_s`."""
        before_s = self._paused_s
        try:
            with self.pause():
                yield
        finally:
            self._stall_s += self._paused_s - before_s

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call, by their keys in `metrics`, and start the next interval."""
        busy_s = max(self._clock() - self._began_s - self._paused_s, 1e-9)
        tokens_per_s = self._tokens / busy_s
        causal = tokens_per_s * self.flops.causal
        noncausal = tokens_per_s * self.flops.noncausal
        row = {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / self._devices,
            "model_tflops_per_s_causal": causal / 1e12,
            "model_tflops_per_s_noncausal": noncausal / 1e12,
            "data_wait_share": min(self._data_wait_s / busy_s, 1.0),
            "checkpoint_stall_s": self._stall_s,
        }
        if self._step_s > 0:
            row["comm_share"] = min(self._comm_s / self._step_s, 1.0)
        if self._peak is not None:
            row["mfu_causal"] = causal / (self._peak * self._devices)
            row["mfu_noncausal"] = noncausal / (self._peak * self._devices)
        self._reset()
        return row
