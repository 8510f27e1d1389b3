"""Asks all hosts at once for their facts: probe.py through ssh, bounded in time and in hosts at a time. A hostfile with
this machine alone needs no ssh, like a launch."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtrain.base import disks
from llmtrain.base.child import read_marked
from llmtrain.base.rank import op_builds
from llmtrain.cluster import gpus
from llmtrain.cluster.hosts.hostfile import Host, is_alone, is_here
from llmtrain.cluster.hosts.ssh import FAN_OUT, Answer, on_hosts
from llmtrain.cluster.hosts.variables import PREFIXES
from llmtrain.features.doctor import probe
from llmtrain.features.doctor.checks import Needs, Survey

PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "triton", "safetensors", "tokenizers")
VARIABLES = (*PREFIXES, "LD_LIBRARY_PATH", "LD_PRELOAD")
PACKAGE = Path(__file__).resolve().parents[2]
NO_PYTHON = 127
_ANSWER_S = 25.0
"""Limit of a host's answer."""

# The interpreter of the launch, or any other that can report further faults there.
_START = (
    'if [ -x "$1" ]; then exec "$1" -; fi; for each in python3 python; do command -v $each >/dev/null && exec $each -; '
    f"done; exit {NO_PYTHON}"
)


def in_parallel(hosts: Sequence[str], work: Callable[[str], Any], fan_out: int = FAN_OUT) -> dict[str, Any]:
    """Return results of `work` for each host, at most `fan_out` at a time."""
    with ThreadPoolExecutor(max(1, min(fan_out, len(hosts))), "survey") as pool:
        try:
            return dict(zip(hosts, pool.map(work, hosts), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def program(module: Path, questions: Mapping[str, Any], *before: Path) -> str:
    """Return a program for `python -`: stdlib-only files, and a call of `module`'s main. `before`: files that it
    imports or calls."""
    # ssh starts it in the home folder, where a json.py or random.py would be imported instead of the library's.
    head = 'import sys\nif sys.path[:1] == [""]:\n    del sys.path[0]\n'
    future = "from __future__ import annotations\n"
    plain = (file.read_text().replace(future, "", 1) for file in (*before, module))
    text = head + "\n".join(re.sub(r"^from llmtrain\..*\n", "", source, flags=re.MULTILINE) for source in plain)
    return f"from __future__ import annotations\n{text}\nmain(json.loads({json.dumps(questions)!r}))\n"


def ask_python(host: str, text: str, survey: Survey, *, timeout_s: float) -> Answer:
    """Run a program with this process's interpreter on one host."""
    command = ("/bin/sh", "-c", _START, "sh", sys.executable)
    return on_hosts([host], command, input=text, timeout_s=timeout_s, port=survey.ssh_port, here=survey.alone)[host]


def look(hosts: Sequence[Host], run: Needs | None, port: int, ssh_port: int | None) -> Survey:
    """Ask each host all questions that it can answer alone. `port`: of the rendezvous, 0: unasked."""
    folder = os.getcwd()
    run_dir = folder if run is None else run.folder
    folders = () if run is None else run.folders
    names = [host.name for host in hosts]
    where = probe.nearest(run_dir)
    nonce = secrets.token_hex(16)
    nonce_path = os.path.join(where, f".llmtrain-nonce-{nonce[:8]}")
    written = {"temporary files": os.environ.get("TMPDIR", "/tmp"), "the run": run_dir}
    questions = {
        "packages": PACKAGES,
        "folder": folder,
        "package": str(PACKAGE),
        "files": [] if run is None else [os.path.abspath(file) for file in run.files],
        "variables": VARIABLES,
        "extensions": os.environ.get("TORCH_EXTENSIONS_DIR"),  # a launch passes it to its hosts
        "folders_read": {read.path: read.files for read in folders},
        "folders": {name: os.path.abspath(path) for name, path in written.items()},
        "disks": {} if run is None else dict(run.disks),
        "hosts": names,
        "first": names[0],
        "port": port,
        "nonce": nonce,
        "nonce_path": nonce_path,
        "nonce_writer": names[0] if len(names) > 1 else None,
    }
    survey = Survey(
        hosts=tuple(hosts),
        alone=is_alone(hosts),
        on_cpu=os.environ.get("DS_ACCELERATOR") == "cpu",
        python=sys.executable,
        folder=folder,
        run_dir=where,
        own_folders=run is not None and run.own_folders,
        port=port,
        ssh_port=ssh_port,
        folders=folders,
        ops=() if run is None else run.ops,
    )
    survey = _facts(survey, questions)
    if survey.facts.get(names[0], {}).get("nonce", {}).get("written"):
        # The hosts that see the first one's file share the folder; then the file is removed.
        first, *others = [name for name in names if name in survey.facts]
        answers = on_hosts(others, ("cat", nonce_path), timeout_s=_ANSWER_S, port=ssh_port)
        on_hosts([first], ("rm", "-f", nonce_path), timeout_s=_ANSWER_S, port=ssh_port)
        seen = {name: answer.stdout.strip() == nonce for name, answer in answers.items() if answer.code is not None}
        survey = replace(survey, nonce=seen)
    return survey


def _facts(survey: Survey, questions: Mapping[str, Any]) -> Survey:
    names = [host.name for host in survey.hosts]

    def one(name: str) -> tuple[Answer, float, float]:
        files = [Path(str(module.__file__)) for module in (gpus, op_builds, disks)]
        text = program(Path(probe.__file__), {**questions, "host": name}, *files)
        began = time.time()
        answer = ask_python(name, text, survey, timeout_s=_ANSWER_S)
        return answer, began, time.time()

    troubles, facts, failures, skew_s = {}, {}, {}, {}
    for name, (answer, began, ended) in in_parallel(names, one).items():
        if (trouble := answer.trouble) is not None:
            if is_here(name):
                why = "it is this machine, but with other hosts a launch starts its ranks through ssh, too"
                trouble = replace(trouble, text=f"{trouble.text} ({why})")
            troubles[name] = trouble
        if answer.code is None:
            continue
        report = read_marked(answer.stdout, probe.MARK)
        if report is not None:
            facts[name] = report
            # The host read its clock between our two readings of ours.
            skew_s[name] = (report["ended"] - ended, report["began"] - began)
        elif answer.code == NO_PYTHON:
            failures[name] = f"no Python at {survey.python}, and no python3 on PATH"
        else:
            last = [line for line in answer.stderr.splitlines() if line.strip()][-1:]
            failures[name] = f"{survey.python} ended with code {answer.code}: {''.join(last)[:200]}"
    return replace(survey, troubles=troubles, facts=facts, failures=failures, skew_s=skew_s)
