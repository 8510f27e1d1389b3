"""environment.json: software and hardware of the run. Versions come from package metadata, so that nothing heavy is
imported."""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import string
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from llmtrain import features
from llmtrain.base.files import replace_file
from llmtrain.base.rank.messages import LAUNCH
from llmtrain.base.redact import redact, redact_argv
from llmtrain.tracking.local import to_json

_PACKAGES = (
    "llmtrain",
    "torch",
    "deepspeed",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
)
# An allow-list: the rest of the environment, which has keys, is private.
_VARIABLES = (
    "CUDA_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "DS_",
    "TORCH_",
    "PYTORCH_",
    "TRITON_",
    "SLURM_JOB_ID",
    "WORLD_SIZE",
)


VERIFIED = {"torch": ("2.11", "2.15"), "deepspeed": ("0.19", "0.19"), "transformers": ("5.17", "5.23")}
"""The lowest and the highest series of each package that the tests have run with (make test-oldest, test-newest)."""
READ_DEEPSPEED = "0.19.8"
"""The DeepSpeed whose private code was verified (engine/deepspeed/patches.py); zero_step.py compares code itself."""


def unverified(installed: Mapping[str, str | None]) -> str | None:
    """Return a line about installed versions that no test has run with; None if all are tested."""
    odd = []
    for package, (low, high) in VERIFIED.items():
        version = installed.get(package)
        if version is not None and not _series(low) <= _series(version) <= _series(high):
            odd.append(f"{package} {version} (tested: {low if low == high else f'{low} to {high}'})")
    if not odd:
        return None
    return f"not tested with {', '.join(odd)}: `llmtrain parity` shows whether this run trains as it should"


def _series(version: str) -> tuple[int, ...]:
    """Return (2, 13) for 2.13.0+cu126."""
    return tuple(int(part) for part in version.split(".")[:2])


def new_run_id() -> str:
    """Return the id of a new run: the one in the environment, else its launch's mark, which restarts have as well, else
    8 random characters (from no seeded generator)."""
    if run_id := features.run_id() or os.environ.get(LAUNCH):
        return run_id
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*_PACKAGES, *features.packages()):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _git(*words: str) -> str | None:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=folder,
            # Without locks: reading must not block the user's git.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def git_state() -> dict[str, Any]:
    """Return the commit of the code, and whether tracked files differ from it; None outside a checkout of llmtrain."""
    # An installed copy may be inside a foreign repository, whose commit would be wrong.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return {"commit": None, "dirty": None}
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": _git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def describe_environment(
    *, ranks: Iterable[Mapping[str, Any]], plugins: Mapping[str, str], argv: Iterable[str] | None = None
) -> dict[str, Any]:
    """Return the contents of environment.json, secrets redacted.

    `ranks`: rank, host and device of each rank; `plugins`: name -> SHA-256.
    """
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    return {
        "versions": versions(),
        "git": git_state(),
        "plugins": dict(plugins),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "pid": os.getpid(),
        "cwd": redact(os.getcwd()),
        "argv": redact_argv(sys.argv if argv is None else argv),
        "ranks": [redact(dict(rank)) for rank in ranks],
        "variables": redact(variables),
    }


def write_environment(run_dir: Path | str, environment: Mapping[str, Any]) -> None:
    text = json.dumps(to_json(dict(environment)), indent=2, allow_nan=False)
    replace_file(Path(run_dir) / "environment.json", text.encode() + b"\n")
