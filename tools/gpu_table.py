"""The figures that tools/gpu_check.sh has left in a folder, as the tables of docs/benchmarks.md.

python tools/gpu_table.py runs/gpu-check
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPEEDS = {"0.5b": "110,000", "1.2b": "58,000 (65,000)", "8b": "8,000 to 9,000", "1.2b-fp8": "", "8b-fp8": "",
          "host": ""}  # fmt: skip
"""Parts of train_speed.py, with the goal in tokens/s."""


def rows_of_speed(part: str, found: dict[str, Any]) -> Iterator[str]:
    for name, one in found["contestants"].items():
        ours = name == "llmtrain"
        ratio = "" if ours else f"{found['speed_of_ours_over'][name]:.2f}" if found["speed_of_ours_over"] else ""
        goal = SPEEDS[part] if ours else "1.5" if name == "trainer" and part != "host" else ""
        rounds = len(found["losses"]) // (found["task"]["steps_per_round"] + 1)
        yield (
            f"| {part} ({rounds} rounds) | {name} | {one['tokens_per_s']:,.0f} | {one['ms_per_step']:.1f} | "
            f"{one['peak_gib']:.1f} | {ratio} | {goal} |"
        )


def speeds(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    if found:
        yield "| preset | contestant | tokens/s | ms a step | peak, GiB | llmtrain over it | goal |"
        yield "|---|---|---|---|---|---|---|"
    for part, one in found.items():
        yield from rows_of_speed(part, one)


def tests(path: Path) -> str:
    suite = next(xml.parse(path).getroot().iter("testsuite"))
    bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped, total = int(suite.get("skipped", 0)), int(suite.get("tests", 0))
    seconds = float(suite.get("time", 0))
    return f"tests/gpu: {total - bad - skipped} passed, {bad} failed, {skipped} skipped, {seconds:.0f} s"


def checkpoints(found: dict[str, Any]) -> Iterator[str]:
    saves = found["saves"]
    yield "| saver | loop blocked, s | time lost, s | bytes a parameter |"
    yield "|---|---|---|---|"
    for name, one in saves.items():
        each = one["bytes"] / found["parameters"]
        yield f"| {name} | {one['blocked_s']:.3f} | {one['lost_s']:.3f} | {each:.3f} |"


def tuning(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Of posttraining.py: the speed of ours over a peer's is one over the share of its seconds."""
    if found:
        yield "| part | contestant | tokens/s | ms a step | peak, GiB | llmtrain over it | largest loss difference |"
        yield "|---|---|---|---|---|---|---|"
    for part, one in found.items():
        for name, row in one["contestants"].items():
            peer = not name.startswith("llmtrain")
            ratio, apart = (f"{1 / row['ours_over_it']:.2f}", f"{row['loss_difference']:.1e}") if peer else ("", "")
            yield (
                f"| {part} | {name} | {row['tokens_per_s']:,.0f} | {row['ms_per_step']:.1f} | {row['peak_gib']:.1f} | "
                f"{ratio} | {apart} |"
            )


def packing(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Of posttraining.py on rows of skewed lengths: seconds are compared for the same tokens."""
    if found:
        yield "| part | contestant | tokens that count/s | peak, GiB | llmtrain over it | loss apart by | held out |"
        yield "|---|---|---|---|---|---|---|"
    for part, one in found.items():
        for name, row in one["contestants"].items():
            peer = not name.startswith("llmtrain")
            ratio, apart = (f"{1 / row['ours_over_it']:.2f}", f"{row['loss_difference']:.1e}") if peer else ("", "")
            held = f"{row['held_out']:.5f}" if "held_out" in row else ""
            speed = f"{row['counted_per_s']:,.0f}"
            yield f"| {part} | {name} | {speed} | {row['peak_gib']:.1f} | {ratio} | {apart} | {held} |"


def context(part: str, found: dict[str, Any]) -> Iterator[str]:
    for name, one in found.items():
        took = f"{one['step_s']:.0f} s, {one['peak_gib']:.1f} GiB" if "step_s" in one else "did not fit"
        yield f"{part}, {name}, {one['tokens']:,} tokens: {took}"


def table(folder: Path) -> str:
    """All figures that are there; what is missing is named."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    machine: dict[str, str] = next((one["machine"] for one in found.values() if "machine" in one), {})
    lines = [", ".join(f"{key} {value}" for key, value in machine.items())] if machine else []
    if (folder / "tests.xml").is_file():
        lines.append(tests(folder / "tests.xml"))
    lines += ["", *speeds({part: found[part] for part in SPEEDS if part in found})]
    if "checkpoints" in found:
        lines += ["", *checkpoints(found["checkpoints"])]
    if "parity" in found:
        lines += ["", f"parity on the GPU: PASS for {', '.join(found['parity']['passed']) or 'none'}"]
    for part in ("context-1b", "context-8b"):
        if part in found:
            lines += list(context(part, found[part]))
    tuned = ("sft-1b", "lora-1b")
    lines += ["", *tuning({part: found[part] for part in tuned if part in found})]
    packed = ("packing", "packing-dpo")
    lines += ["", *packing({part: found[part] for part in packed if part in found})]
    parts = (*SPEEDS, "checkpoints", "parity", "context-1b", "context-8b", *tuned, *packed)
    missing = [part for part in parts if part not in found] + ["tests"] * (not (folder / "tests.xml").is_file())
    if missing:
        lines += ["", f"not measured: {', '.join(missing)}"]
    return "\n".join(lines).strip()


if __name__ == "__main__":
    print(table(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/gpu-check")))
