"""The figures that tools/gpu_check.sh has left in a folder, as the tables of docs/developers/benchmarks.md.

python tools/gpu_table.py runs/gpu-check
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPEEDS = ("0.5b", "1.2b", "8b", "1.2b-fp8", "8b-fp8", "host")
"""Parts of train_speed.py."""
TUNED = ("lora-8b", "sft-1b", "lora-1b")
PACKED = ("packing", "packing-dpo")
CONTEXTS = ("context-1b", "context-8b")
PARTS = ("facts", *SPEEDS, "saves", "parity", *CONTEXTS, *TUNED, *PACKED, "moe")
GOALS = {
    "H100": {
        "0.5b": "92,000 to 105,000",
        "1.2b": "48,000 to 54,000",
        "lora-8b": "12,000 to 13,700",
        "moe": "60,000 to 110,000",
    },
    "H200": {
        "0.5b": "110,000",
        "1.2b": "58,000",
        "8b": "8,000 to 9,000",
        "lora-8b": "13,500 to 15,800",
        "moe": "70,000 to 120,000",
    },
}
"""By device and part: tokens/s of ours, counted from what a step computes and moves (docs/developers/benchmarks.md)."""
RATIOS = {("1.2b", "trainer"): "1.25 to 1.35", ("1.2b", "plain"): "1.3", ("0.5b", "trainer"): "1.5"}
"""Of ours over a peer."""


def goal(part: str, name: str, found: dict[str, Any]) -> str:
    device = found.get("machine", {}).get("device", "")
    of_device: dict[str, str] = next((of for kind, of in GOALS.items() if kind in device), {})
    of_ours = of_device.get(part, "")
    return of_ours if name.startswith("llmtrain") or not of_device else RATIOS.get((part, name), "")


def usage(one: dict[str, Any]) -> str:
    """Share of the data sheet's peak, attention counted causally and whole."""
    return f"{one['mfu_causal']:.1%}, {one['mfu_noncausal']:.1%}" if "mfu_causal" in one else ""


def way(one: dict[str, Any]) -> str:
    """Operators of attention, and whether layers were compiled."""
    return one.get("attention", "").strip("_") + (", compiled" if one.get("compiled") else "")


def rows_of_speed(part: str, found: dict[str, Any]) -> Iterator[str]:
    for name, one in found["contestants"].items():
        ratio = f"{found['speed_of_ours_over'][name]:.2f}" if name in found["speed_of_ours_over"] else ""
        rounds = len(found["losses"]) // (found["task"]["steps_per_round"] + 1)
        yield (
            f"| {part} ({rounds} rounds) | {name} | {one['tokens_per_s']:,.0f} | {usage(one)} | "
            f"{one['ms_per_step']:.1f} | {one['peak_gib']:.1f} | {ratio} | {goal(part, name, found)} | {way(one)} |"
        )
    if "clock_mhz" in found:
        yield f"| {part} | | | | | | | | {found['clock_mhz']:.0f} MHz, {found['power_w']:.0f} W |"


def speeds(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    if found:
        yield "| part | contestant | tokens/s | MFU causal, whole | ms a step | peak, GiB | llmtrain over it | goal | |"
        yield "|---|---|---|---|---|---|---|---|---|"
    for part, one in found.items():
        yield from rows_of_speed(part, one)


def facts(found: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{key} {value:,.4g}" for key, value in found.items() if isinstance(value, (float, bool)))


def tests(folder: Path) -> str | None:
    """Of the report that pytest writes at its end; of a run that was cut off, of the log. None: neither is there."""
    report, log = folder / "tests.xml", folder / "gpu-check.log"
    if report.is_file():
        suite = next(xml.parse(report).getroot().iter("testsuite"))
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped, total = int(suite.get("skipped", 0)), int(suite.get("tests", 0))
        seconds = float(suite.get("time", 0))
        return f"tests/gpu: {total - bad - skipped} passed, {bad} failed, {skipped} skipped, {seconds:.0f} s"
    text = log.read_text(errors="replace") if log.is_file() else ""
    ends = Counter(re.findall(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) tests/gpu", text, re.MULTILINE))
    ends.update(re.findall(r"^tests/gpu\S+ (PASSED|FAILED|ERROR|SKIPPED)", text, re.MULTILINE))
    if not ends:
        return None
    bad = ends["FAILED"] + ends["ERROR"]
    return f"tests/gpu: {ends['PASSED']} passed, {bad} failed, {ends['SKIPPED']} skipped, cut off"


def saves(found: dict[str, Any]) -> Iterator[str]:
    yield "| saver | loop blocked, s (goal 0.05) | time lost, s (goal 0.1) | bytes a parameter |"
    yield "|---|---|---|---|"
    for name, one in found.get("saves", {}).items():  # none before the first one
        each = one["bytes"] / found["parameters"]
        yield f"| {name} | {one['blocked_s']:.3f} | {one['lost_s']:.3f} | {each:.3f} |"


def ratio_of(name: str, row: dict[str, Any]) -> tuple[str, str]:
    """Of posttraining.py, for a peer: the speed of ours over it, one over the share of its seconds; losses apart by."""
    if name.startswith("llmtrain"):
        return "", ""
    return f"{1 / row['ours_over_it']:.2f}", f"{row['loss_difference']:.1e}"


def tuning(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    if found:
        yield (
            "| part | contestant | tokens/s | MFU causal, whole | ms a step | peak, GiB | llmtrain over it | "
            "largest loss difference | goal | |"
        )
        yield "|---|---|---|---|---|---|---|---|---|---|"
    for part, one in found.items():
        for name, row in one["contestants"].items():
            ratio, apart = ratio_of(name, row)
            yield (
                f"| {part} | {name} | {row['tokens_per_s']:,.0f} | {usage(row)} | {row['ms_per_step']:.1f} | "
                f"{row['peak_gib']:.1f} | {ratio} | {apart} | {goal(part, name, one)} | {way(row)} |"
            )


def packing(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Of posttraining.py on rows of skewed lengths: seconds are compared for the same tokens."""
    if found:
        yield "| part | contestant | tokens that count/s | peak, GiB | llmtrain over it | loss apart by | held out |"
        yield "|---|---|---|---|---|---|---|"
    for part, one in found.items():
        for name, row in one["contestants"].items():
            ratio, apart = ratio_of(name, row)
            held = f"{row['held_out']:.5f}" if "held_out" in row else ""
            speed = f"{row['counted_per_s']:,.0f}"
            yield f"| {part} | {name} | {speed} | {row['peak_gib']:.1f} | {ratio} | {apart} | {held} |"


def context(part: str, found: dict[str, Any]) -> Iterator[str]:
    for name, one in found.items():
        took = f"{one['step_s']:.0f} s, {one['peak_gib']:.1f} GiB" if "step_s" in one else "did not fit"
        yield f"{part}, {name}, {one['tokens']:,} tokens: {', '.join(filter(None, (took, usage(one))))}"


def experts(found: dict[str, Any]) -> Iterator[str]:
    """Of experts.py."""
    yield "| ZeRO | experts | side | tokens/s | MFU causal, whole | ms a step | peak, GiB | grouped over it | goal |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in found["tables"]:
        for name, row in one["contestants"].items():
            ratio = f"{one['speed_of_ours_over'][name]:.2f}" if name in one["speed_of_ours_over"] else ""
            yield (
                f"| {one['zero']} | {one['experts']} | {name} | {row['tokens_per_s']:,.0f} | {usage(row)} | "
                f"{row['ms_per_step']:.1f} | {row['peak_gib']:.1f} | {ratio} | {goal('moe', name, found)} |"
            )


def table(folder: Path) -> str:
    """All figures that are there; what is missing is named."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    machine: dict[str, str] = next((one["machine"] for one in found.values() if "machine" in one), {})
    lines = [", ".join(f"{key} {value}" for key, value in machine.items())] if machine else []
    tested = tests(folder)
    lines += [tested] if tested else []
    if "facts" in found:
        lines += ["", *facts(found["facts"])]
    lines += ["", *speeds({part: found[part] for part in SPEEDS if part in found})]
    lines += ["", *tuning({part: found[part] for part in TUNED if part in found})]
    if "saves" in found:
        lines += ["", *saves(found["saves"])]
    if "moe" in found:
        lines += ["", *experts(found["moe"])]
    if "parity" in found:
        lines += ["", f"parity on the GPU: PASS for {', '.join(found['parity']['passed']) or 'none'}"]
    for part in CONTEXTS:
        if part in found:
            lines += list(context(part, found[part]))
    lines += ["", *packing({part: found[part] for part in PACKED if part in found})]
    missing = [part for part in PARTS if part not in found] + ["tests"] * (tested is None)
    if missing:
        lines += ["", f"not measured: {', '.join(missing)}"]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


if __name__ == "__main__":
    print(table(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/gpu-check")))
