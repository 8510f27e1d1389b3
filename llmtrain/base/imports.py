"""Prepares the import of torch, DeepSpeed and transformers: sets environment variables about devices, hides packages,
and caches what each process would compute again."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.errors import ConfigError
from llmtrain.base.files import cache_folder, content_of, replace_file

_ACCELERATORS = (
    "/dev/nvidia*",
    "/dev/kfd",
    "/dev/dxg",
    "/dev/dri",
    "/dev/davinci*",
    "/dev/accel*",
    "/dev/hl*",
    "/dev/hpu*",
)
"""Device files of NVIDIA, AMD, WSL, Intel and others."""
_KNOWN = ("cpu", "cuda", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")  # by DeepSpeed 0.19.8


def name_cpu() -> None:
    """Name the CPU as DeepSpeed's accelerator on a host without accelerators; DeepSpeed would guess it, with a warning.
    Raises ConfigError if DS_ACCELERATOR has an unknown name.

    With an empty CUDA_VISIBLE_DEVICES, DeepSpeed's launcher would show all GPUs to the ranks again.
    """
    if (name := os.environ.get("DS_ACCELERATOR", "cpu")) not in _KNOWN:
        remedy = f"Remove the variable, or set it to one of {', '.join(_KNOWN)}"
        raise ConfigError(f"DS_ACCELERATOR = {name}: DeepSpeed knows no such accelerator. {remedy}")
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(glob.glob(node) for node in _ACCELERATORS):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def let_segments_grow() -> None:
    """Let torch's allocator on NVIDIA GPUs extend its segments, unless the user has set its options.

    Training, evaluation and sequences differ in length, and would leave gaps between fixed segments.
    """
    if glob.glob("/dev/nvidia[0-9]*") and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@contextmanager
def without(package: str) -> Iterator[None]:
    """A context in which Python does not find a package, unless it is already imported.

    DeepSpeed's autotuner imports mlflow if it is installed, which costs one CPU-second in each process.
    """
    if hidden := package not in sys.modules:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[package]


class _Around:
    """A finder that calls `execute(load, module)` in place of executing the module `name`; `load()` executes it."""

    def __init__(self, name: str, execute: Callable[[Callable[[], None], Any], None]) -> None:
        self._name, self._execute = name, execute

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == self._name else None
        if spec is None or spec.loader is None:
            return None
        sys.meta_path.remove(self)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: self._execute(partial(load, module), module)  # type: ignore[method-assign]
        return spec


@cache
def hide_torchao() -> None:
    """Keep transformers, if not yet imported, from importing torchao for its quantizers: no run trains a quantized
    model, and our fp8 imports torchao itself. Saves 0.5 CPU-s a process."""

    def execute(load: Callable[[], None], module: Any) -> None:
        utils: Any = sys.modules["transformers.utils"]
        if (original := vars(utils).get("is_torchao_available")) is None:  # another version: no name to replace
            load()
            return
        utils.is_torchao_available = lambda *_: False
        try:
            load()
        finally:
            utils.is_torchao_available = original

    if "transformers" not in sys.modules:
        sys.meta_path.insert(0, _Around("transformers.quantizers.quantizer_torchao", execute))


@cache
def keep_listing() -> None:
    """Let transformers, if not yet imported, take the list of its models from the cache folder. Else it reads 3,287
    files to make the list, 0.5 CPU-s a process."""

    def execute(load: Callable[[], None], module: Any) -> None:
        load()
        with suppress(AttributeError):  # another version: it makes its listing itself
            models = Path(module.__file__).parents[1] / "models"
            module.define_import_structure = partial(_structure, module.define_import_structure, models)

    if "transformers" not in sys.modules:
        sys.meta_path.insert(0, _Around("transformers.utils.import_utils", execute))


def _structure(define: Callable[..., Any], models: Path, module_path: Any, prefix: str | None = None) -> Any:
    """Return what `define` returns, packages that names need -> module -> names, from the cache if possible."""
    if Path(module_path) not in (models, models / "__init__.py"):
        return define(module_path, prefix)
    try:
        file = _listing_of(models)
    except (OSError, RuntimeError, PackageNotFoundError):  # no home folder, or transformers is not installed
        return define(module_path, prefix)
    structure = _listed(file)
    if structure is None:
        structure = define(models)
        by_needs = ((sorted(needs), modules) for needs, modules in structure.items())
        rows = [[needs, {module: sorted(names) for module, names in modules.items()}] for needs, modules in by_needs]
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps(rows).encode())
    before = f"{prefix}." if prefix else ""
    return {
        needs: {before + module: set(names) for module, names in modules.items()}
        for needs, modules in structure.items()
    }


def _listing_of(models: Path) -> Path:
    """Return the cache's file for this installation. Raises OSError; RuntimeError without a home;
    PackageNotFoundError."""
    number = version("transformers")
    if "dev" in number:  # its files change without a change of the folder's time
        raise PackageNotFoundError(number)
    key = f"{number} {models} {models.stat().st_mtime_ns}"
    return cache_folder() / "transformers" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _listed(file: Path) -> dict[frozenset[str], dict[str, set[str]]] | None:
    """Return the list in a file; None if there is none, or if it is damaged."""
    try:
        rows = untrusted.loads(content_of(file))
        listing = {frozenset(needs): {module: {*names} for module, names in modules.items()} for needs, modules in rows}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return listing or None
