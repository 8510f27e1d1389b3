"""The CPU time of each test with its child processes, and the table of files in docs/developers/proofs.md.

    python -m pytest -p tests.helpers.costs ...        # appends a line per test to runs/costs.jsonl
    python -m tests.helpers.costs                      # prints the table of runs/costs.jsonl

Ranks that stay in a pool between tests count for the test that uses them. The time of a process is lost if its
parent ends first.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

LINES = Path(os.environ.get("COSTS", "runs/costs.jsonl"))
DEAR_S = 20.0
"""CPU seconds; the docstring of a file that takes more has the reason."""


def cpu_s() -> float:
    """CPU seconds of this process and its descendants, those that have ended included."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write the test's line; the fixtures of a session count for the first test that asks for them."""
    cpu_before, before = cpu_s(), time.monotonic()
    yield
    line = {"test": item.nodeid, "cpu_s": round(cpu_s() - cpu_before, 2), "s": round(time.monotonic() - before, 2)}
    LINES.parent.mkdir(exist_ok=True)
    with LINES.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def table() -> Iterator[str]:
    """Lines of Markdown: the dear files, then the sum of each folder. The last line of a test counts."""
    tests = {row["test"]: row for row in map(json.loads, LINES.read_text().splitlines())}
    files: dict[str, list[float]] = defaultdict(list)
    for name, row in tests.items():
        files[name.partition("::")[0]].append(row["cpu_s"])
    yield "| file | tests | CPU s |\n|---|---|---|"
    for name, times in sorted(files.items(), key=lambda file: -sum(file[1])):
        if sum(times) > DEAR_S:
            yield f"| {name} | {len(times)} | {sum(times):.0f} |"
    folders: dict[str, list[list[float]]] = defaultdict(list)
    for name, times in files.items():
        folders["/".join(name.split("/")[:2])].append(times)
    yield "\n| folder | files | tests | CPU min |\n|---|---|---|---|"
    for name, each in sorted(folders.items()):
        yield f"| {name} | {len(each)} | {sum(map(len, each))} | {sum(map(sum, each)) / 60:.1f} |"
    yield f"| all | {len(files)} | {len(tests)} | {sum(map(sum, files.values())) / 60:.1f} |"


if __name__ == "__main__":
    print(*table(), sep="\n")
