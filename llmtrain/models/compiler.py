"""torch.compile on this machine: a trial, the number of its processes, and a context without it.

On CUDA it needs Triton, a C compiler and Python's header files, on a CPU a C++ compiler. Without them runs train
uncompiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator

import torch

from llmtrain.base.files import cache_folder
from llmtrain.base.log import warn_once
from llmtrain.config.topology import cores_of_a_rank
from llmtrain.models.transformers_private import fresh_compilation_cache, set_compile_threads

_REMEDY = "It needs gcc, g++ and Python's header files (Debian: apt-get install build-essential python3-dev)"
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_VARIABLES = ("TORCH_COMPILE", "TORCHDYNAMO", "TORCHINDUCTOR", "TRITON_")
_answers: dict[str, str | None] = {}


def trouble(device: torch.device) -> str | None:
    """Return why nothing can be compiled for this kind of device, or None if it can. This is tried once: success is
    recorded in the user's cache folder, a failure is logged as a warning."""
    if device.type not in _answers:
        _answers[device.type] = None
        works_mark = cache_folder() / "compiler" / _circumstances(device)
        if works_mark.exists():
            share_cores()
        elif (reason := _attempt(device.type)) is not None:
            do_without(device, f"{reason}. {_REMEDY}")
        else:
            with contextlib.suppress(OSError):  # then the next process tries again
                works_mark.parent.mkdir(parents=True, exist_ok=True)
                works_mark.touch()
    return _answers[device.type]


def _circumstances(device: torch.device) -> str:
    """Return a hash of everything on which the result of a trial depends."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    files = [shutil.which(os.environ.get(key) or usual) for key, usual in (("CC", "gcc"), ("CXX", "g++"))]
    files += [sysconfig.get_path("include") + "/Python.h", getattr(importlib.util.find_spec("triton"), "origin", None)]
    stamps = [(file, os.stat(file).st_mtime_ns) for file in files if file and os.path.exists(file)]
    variables = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
    text = repr((platform.node(), name, sys.version, torch.__version__, stamps, variables))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def do_without(device: torch.device, reason: str) -> None:
    _answers[device.type] = reason
    warn_once(f"torch.compile is not used on this device ({device.type}), so steps take longer: {reason}")


def _attempt(kind: str) -> str | None:
    """Return None if a small function compiles, else the reason."""
    try:
        share_cores()
        # Without the cache: its compiler may be gone, or be that of another host with the same home folder.
        with fresh_compilation_cache():
            try:
                # The function doubles its input only if it is compiled.
                twice = torch.compile(lambda x: x * 2 if torch.compiler.is_compiling() else x, dynamic=False)
                works = bool((twice(torch.ones(64, device=kind)) == 2).all())
            except Exception as error:  # torch, Triton and the compilers raise classes of their own
                return _line(error)
    except Exception as error:
        return _line(error)
    return None if works else "torch is told not to compile (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE)"


def _line(error: Exception) -> str:
    message, _, _ = str(error).partition("Set TORCHDYNAMO_VERBOSE")  # what follows is for torch's developers
    return " ".join(f"{type(error).__name__}: {message}".split())[:300]


def share_cores() -> None:
    """Let inductor compile with as many processes as this rank has cores; by default each rank starts one for every
    core, up to 32. A value of TORCHINDUCTOR_COMPILE_THREADS that the user has set stays."""
    if _THREADS in os.environ:
        return
    os.environ[_THREADS] = str(min(32, cores_of_a_rank()))  # the package reads it when it is imported
    set_compile_threads(int(os.environ[_THREADS]))  # in case it has been imported before


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """A context in which compiled functions run as plain PyTorch. It is for calls with a few tokens: torch would
    compile each new shape, and then take the changing shapes for dynamic ones."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled in this process, and the import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
