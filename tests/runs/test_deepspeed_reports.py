"""The scripts of docs/developers/deepspeed.md print what the page shows: a fixed bug of DeepSpeed is seen here."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.helpers.launching import REPO, environment, free_port

PAGE = (REPO / "docs/developers/deepspeed.md").read_text()
REPORTS = re.findall(r"^### (\d+\. .*?)$.*?^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, flags=re.M | re.S)

# One process imports DeepSpeed; each report is a fork of it, with a port of its own.
RUN = """
import os, sys
import deepspeed, torch
for number, path in enumerate(sys.argv[2:]):
    sys.stdout.flush()
    if not (pid := os.fork()):
        os.environ["MASTER_PORT"] = sys.argv[1]
        os.dup2(os.open(path + ".out", os.O_WRONLY | os.O_CREAT), 1)
        exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reports")
    paths = []
    for title, script, _ in REPORTS:
        paths.append(folder / f"{title.partition('.')[0]}.py")
        paths[-1].write_text(script)
    seat = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    seat["ONEDNN_MAX_CPU_ISA"] = "AVX2"  # a device without fp16, on any processor
    command = [sys.executable, "-c", RUN, str(free_port()), *map(str, paths)]
    done = subprocess.run(command, env=environment(**seat), cwd=folder, capture_output=True, text=True, timeout=600)
    outputs = {title: path.with_suffix(".py.out").read_text() for (title, *_), path in zip(REPORTS, paths, strict=True)}
    return {**outputs, "stderr": done.stderr}


@pytest.mark.parametrize("title, _, shown", REPORTS, ids=[title[:40] for title, *_ in REPORTS])
def test_a_report_prints_what_the_page_shows(printed: dict[str, str], title: str, _: str, shown: str) -> None:
    assert printed[title].endswith(shown), (printed[title], printed["stderr"][-3000:])
