"""What sites save, and what they cost: the benchmark's figures of docs/sites.md, with a smaller model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import REPO
from tools.bench import sites as bench
from tools.lab.lab import why_not

pytestmark = pytest.mark.needs("torchft")

WAY = "streaming:sites.sync_every=128:sites.compress=int4:sites.outer_lr=0.9:sites.outer_momentum=0.6"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_streaming_of_4_bits_computes_nearly_all_the_time_and_loses_little(tmp_path: Path) -> None:
    """1/400 of the bytes, 95 % computing, 1.01 of the loss, all of plain data parallelism's, from one trained model.

    Every 128 steps, because the round after the last step is a larger part of 480 steps than of the page's 720.
    """
    size = ["--hidden", "192", "--start-steps", "400", "--steps", "480", "--lr", "4e-4", "--pace-s", "0.35"]
    options = bench.arguments(size)
    options.data, options.begin = str(tmp_path / "data"), ""
    words = ["prepare", "--source", "stdlib", "--vocab-size", "1024", "--out", options.data]
    subprocess.run([sys.executable, "-m", "llmtrain", *words], check=True, cwd=REPO)
    options.begin = bench.start(options, tmp_path)
    plain, rare = bench.ddp(options, tmp_path), bench.sites(WAY, options, tmp_path)
    assert rare.bytes_per_step <= plain.bytes_per_step / 400, (rare, plain)
    assert options.pace_s / plain.step_s < 0.5 and options.pace_s / rare.step_s >= 0.95, (rare, plain)
    assert rare.losses[0] <= 1.01 * plain.losses[0], (rare, plain)
