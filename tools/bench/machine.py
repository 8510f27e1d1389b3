"""What a benchmark runs on: versions, hardware, commit; clock and power of the GPU while it runs.

python tools/bench/machine.py    # the commit and a hash of the sources, as tools/gpu_wheels.sh keeps them
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import subprocess
import threading
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.config.run import AdapterConfig, ModelConfig

ROOT = Path(__file__).resolve().parents[2]
_KEPT = ROOT / ".wheels/COMMIT"
"""Commit and hash of a tree that travels without .git."""
_ASKED = ("clocks.sm", "power.draw", "utilization.gpu")
_BUSY = 50.0
"""Samples with a lower utilisation, %, are of pauses."""


def about() -> dict[str, str]:
    """Versions and hardware."""
    import torch

    packages = {name: version(name) for name in ("torch", "deepspeed", "transformers", "accelerate")}
    gpu = torch.cuda.is_available()
    return {
        **packages,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU",
        **({"memory": f"{gpu_gib():.1f} GiB"} if gpu else {}),
        "commit": commit(),
    }


def gpu_gib() -> float | None:
    """All memory of the first GPU; None without one."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else None


def commit() -> str:
    """The commit of this tree; of one without .git that of .wheels/COMMIT, with a word if its sources are others."""
    if (ROOT / ".git").exists() and (here := _git()):
        return here
    kept, _, known = _KEPT.read_text().strip().partition(" ") if _KEPT.is_file() else ("", "", "")
    return kept if known in ("", _sources()) else f"{kept} and changes"


def _git() -> str:
    try:
        words = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:  # not every machine has it
        return ""


def _sources() -> str:
    """Hash of what decides a figure."""
    found = hashlib.sha256()
    for folder in ("llmtrain", "tools/bench", "ds_configs", "launch"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".json", ".yaml"):
                found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def use(speed: float, model: ModelConfig, sequence: int, adapter: AdapterConfig | None = None) -> dict[str, float]:
    """What a speed in tokens/s is in model FLOP/s, and as a share of the data sheet's dense 16-bit peak, with attention
    counted causally and whole."""
    import torch

    from llmtrain.models.spec import ModelSpec
    from llmtrain.tracking.metrics import peak_flops

    facts = ModelSpec.of(model, adapter).facts
    peak = peak_flops(torch.cuda.get_device_name(), "bf16")
    flops = facts.flops(sequence)
    found = {"tflops_causal": speed * flops.causal / 1e12}
    return (
        found
        if peak is None
        else {**found, "mfu_causal": speed * flops.causal / peak, "mfu_noncausal": speed * flops.noncausal / peak}
    )


def write(path: Path | None, found: dict[str, Any]) -> None:
    """Replace the file at once: figures are copied while a benchmark runs."""
    if path is not None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(found, indent=2))
        new.replace(path)


class Card:
    """Clock and power of the first GPU within a `with`, sampled every second by one nvidia-smi."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []

    def __enter__(self) -> Card:
        words = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"]
        try:
            self._process = subprocess.Popen([*words, "-lms", "1000"], stdout=subprocess.PIPE, text=True)
        except OSError:  # no such program
            return self
        assert self._process.stdout is not None
        self._lines = []
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        return self

    def _read(self, samples: Iterable[str]) -> None:
        for line in samples:
            self._lines.append(line)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def figures(self) -> dict[str, Any]:
        """Medians so far, of the seconds in which the GPU worked; empty where there were none."""
        rows = []
        for line in list(self._lines):
            try:
                rows.append([float(value) for value in line.split(",")])
            except ValueError:  # "[N/A]" of a virtual GPU
                continue
        busy = [row for row in rows if row[2] >= _BUSY]
        if not busy:
            return {}
        clock, power, _ = (statistics.median(column) for column in zip(*busy, strict=True))
        return {"clock_mhz": clock, "power_w": power}


if __name__ == "__main__":
    print(_git(), _sources())
