"""Model FLOPs, peaks and throughput against published figures and a clock that the test turns."""

from __future__ import annotations

import math

import pytest

from llmtrain.tracking.metrics import Throughput, TokenFlops, metric_of, metrics, peak_flops, perplexity


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_peaks(name, tflops):
    assert peak_flops(name, "bf16") == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cpu", "bf16"),
        ("NVIDIA GeForce GTX 1080", "fp16"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "bf16"),
        ("NVIDIA H100 80GB HBM3", "fp32"),
    ],
)
def test_unknown_peaks_are_none_and_not_a_guess(name, dtype):
    assert peak_flops(name, dtype) is None


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def throughput(clock: Clock, peak: float | None) -> Throughput:
    return Throughput(flops=TokenFlops(causal=1e9, noncausal=2e9), devices=2, peak=peak, clock=clock)


def test_throughput_leaves_out_evaluation_and_saving():
    clock = Clock()
    speed = throughput(clock, peak=1e13)
    for _ in range(4):
        clock.now += 1.0
        speed.step(tokens=1000, data_wait_s=0.1)
    with speed.pause():
        clock.now += 50.0
    with speed.checkpoint_stall():
        clock.now += 7.0
    row = speed.take()
    assert row["tokens_per_s"] == pytest.approx(1000)
    assert row["tokens_per_s_per_device"] == pytest.approx(500)
    assert row["model_tflops_per_s_causal"] == pytest.approx(1.0)
    assert row["model_tflops_per_s_noncausal"] == pytest.approx(2.0)
    assert row["mfu_causal"] == pytest.approx(0.05)
    assert row["mfu_noncausal"] == pytest.approx(0.10)
    assert row["data_wait_share"] == pytest.approx(0.1)
    assert row["checkpoint_stall_s"] == pytest.approx(7.0)
    assert row.keys() <= metrics().keys()


def test_throughput_starts_anew_after_take_and_gives_no_mfu_without_a_peak():
    clock = Clock()
    speed = throughput(clock, peak=None)
    clock.now += 1.0
    speed.step(tokens=1000)
    speed.take()
    clock.now += 2.0
    speed.step(tokens=500)
    row = speed.take()
    assert row["tokens_per_s"] == pytest.approx(250)
    assert row["checkpoint_stall_s"] == 0
    assert "mfu_causal" not in row


@pytest.mark.parametrize(
    ("key", "unit"),
    [
        ("eval/ema/loss", "nats/token"),
        ("eval/code/bits_per_byte", "bits/byte"),
        ("eval/arc/accuracy_norm", "0 to 1"),
        ("eval/ema/pairs/accuracy", "0 to 1"),
        ("moe/tokens_per_expert/3", "tokens"),
        ("eval/rare", None),
        ("norms/layer_0", None),
    ],
)
def test_keys_of_sets_choices_and_lists_have_the_units_of_their_figures(key, unit):
    found = metric_of(key)
    assert (found and found.unit) == unit


def test_perplexity_overflows_to_infinity():
    assert perplexity(math.log(50.0)) == pytest.approx(50.0)
    assert perplexity(1e6) == math.inf


def test_comm_share_is_of_the_steps_that_were_timed_since_the_last_log_point():
    speed = Throughput(flops=TokenFlops(causal=1.0, noncausal=1.0), devices=1, peak=None, clock=lambda: 0.0)
    speed.step(tokens=1)
    assert "comm_share" not in speed.take()
    speed.step(tokens=1, comm=(3.0, 0.5))
    speed.step(tokens=1, comm=(1.0, 0.5))
    assert speed.take()["comm_share"] == 0.25
    assert "comm_share" not in speed.take()
