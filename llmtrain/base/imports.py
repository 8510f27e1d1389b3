"""Prepares the import of torch, DeepSpeed and transformers: sets environment variables about devices, hides packages,
caches what each process would compute again, and lets parts of torch load at their first use."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

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
def _with_names(names: dict[str, Any], others: dict[str, Any]) -> Iterator[None]:
    """Context with other names in a module, or other modules, until something else replaces them."""
    before = {name: names[name] for name in others if name in names}
    names.update(others)
    try:
        yield
    finally:
        for name in [name for name, other in others.items() if names.get(name) is other]:
            del names[name]
        names.update(before)


@contextmanager
def without(package: str) -> Iterator[None]:
    """A context in which Python does not find a package, unless it is already imported.

    DeepSpeed's autotuner imports mlflow if it is installed, which costs one CPU-second in each process.
    """
    with _with_names(sys.modules, {} if package in sys.modules else {package: None}):
        yield


_Execute: TypeAlias = Callable[[Callable[[], object], Any], object]


class _Around:
    """A finder that calls functions `execute(load, module)` in place of executing a module; `load()` executes it."""

    def __init__(self) -> None:
        self.executes: dict[str, list[_Execute]] = defaultdict(list)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in self.executes else None
        if spec is None or spec.loader is None:
            return None
        for execute in self.executes.pop(name):
            spec.loader.exec_module = partial(self._run, execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _run(self, execute: _Execute, load: Callable[[Any], None], module: Any) -> None:
        execute(partial(load, module), module)


_around = _Around()


@cache
def hide_torchao() -> None:
    """Keep transformers, if not yet imported, from importing torchao for its quantizers: no run trains a quantized
    model, and our fp8 imports torchao itself. Saves 0.5 CPU-s a process."""

    def execute(load: Callable[[], object], module: Any) -> None:
        utils = vars(sys.modules["transformers.utils"])
        others = {"is_torchao_available": lambda *_: False}
        with _with_names(utils, others if others.keys() <= utils.keys() else {}):  # another version: no such name
            load()

    if "transformers" not in sys.modules:
        _around.executes["transformers.quantizers.quantizer_torchao"].append(execute)


@cache
def keep_listing() -> None:
    """Let transformers, if not yet imported, take the list of its models from the cache folder. Else it reads 3,287
    files to make the list, 0.5 CPU-s a process."""

    def execute(load: Callable[[], object], module: Any) -> None:
        load()
        with suppress(AttributeError):  # another version: it makes its listing itself
            models = Path(module.__file__).parents[1] / "models"
            module.define_import_structure = partial(_structure, module.define_import_structure, models)

    if "transformers" not in sys.modules:
        _around.executes["transformers.utils.import_utils"].append(execute)


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


_READ: dict[str, str | tuple[str, ...]] = {"torch": "2.13.", "transformers": ("5.23.", "5.24.")}  # series
_DYNAMO, _MASKS = "torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op"
_SHARDED = [f"transformers.distributed.{name}" for name in ("checkpoint", "expert_parallel", "fsdp", "parallel_utils")]
_SHARDED += ["transformers.distributed.sharding_utils", "transformers.distributed.tensor_parallel"]
"""Import torch.distributed.tensor; others need their functions for a sharded model. parallel_utils: what these fill."""


@cache
def load_late() -> None:
    """Let torch and transformers, as far as they are not yet imported, load torch._dynamo, torch.distributed.tensor
    and sympy when a run uses them: 1 CPU-s a process. Versions that are not in _READ load as always."""
    late: dict[str, _Execute] = {
        "torch._compile": _call_without_dynamo,
        "torch.optim.optimizer": _step_without_dynamo,
        "transformers.distributed.parallel_utils": lambda load, _: (load(), *map(import_module, _SHARDED)),
        "transformers.distributed.utils": _compare_without_dtensor,
    }
    for name in ("activations", "core_model_loading", "generation.utils", "masking_utils", "modeling_utils"):
        late[f"transformers.{name}"] = _execute_without
    for name, execute in late.items():
        package = name.partition(".")[0]
        with suppress(PackageNotFoundError):
            if package not in sys.modules and version(package).startswith(_READ[package]):
                _around.executes[name].append(execute)


def once_loaded(name: str, do: Callable[[], object]) -> None:
    """Call a function as soon as a module is imported."""
    if name in sys.modules:
        do()
    else:
        _around.executes[name].append(lambda load, _: (load(), do()))


def _call_without_dynamo(load: Callable[[], object], module: Any) -> None:
    """torch's `_disable_dynamo` imports torch._dynamo at the first call; nothing compiles before others import it."""
    load()
    disable = module._disable_dynamo

    def disable_dynamo(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        disabled = disable(function, *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            if _DYNAMO not in sys.modules:
                return function(*args, **kwargs)
            vars(function).pop("__dynamo_disable", None)
            return disabled(*args, **kwargs)

        if function is not None:
            function.__dynamo_disable = call  # where torch keeps what the first call has made
        return disabled

    module._disable_dynamo = disable_dynamo


def _step_without_dynamo(load: Callable[[], object], module: Any) -> None:
    """torch's optimizers import torch._dynamo for marks around each step, which only its compiler reads."""
    load()
    mark = module._use_grad_for_differentiable

    def use_grad(function: Callable[..., Any]) -> Callable[..., Any]:
        marked = mark(function)

        @wraps(marked)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if _DYNAMO in sys.modules:
                return marked(optimizer, *args, **kwargs)
            with module.torch.set_grad_enabled(optimizer.defaults["differentiable"]):
                return function(optimizer, *args, **kwargs)

        return step

    module._use_grad_for_differentiable = use_grad


class _Late:
    """In the place of a module's name: imports the module at its first use."""

    def __init__(self, module: str, name: str) -> None:
        self._place = module, name

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(import_module(self._place[0]), self._place[1]), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)

    def __iter__(self) -> Any:  # also for `in`
        return self.__getattr__("__iter__")()


class _LateModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks
            raise AttributeError(name)
        return _Late(self.__name__, name)


def _execute_without(load: Callable[[], object], module: Any) -> None:
    """Execute a module of transformers while names of _SHARDED are `_Late`, and decorators of torch._dynamo wait."""
    torch: Any = import_module("torch")
    names = [*_SHARDED, *([_MASKS] if module.__name__ == "transformers.masking_utils" else [])]
    absent = {name: _LateModule(name) for name in names if name not in sys.modules}

    def decorate(name: str, function: Any) -> Any:
        once_loaded(_DYNAMO, lambda: getattr(sys.modules[_DYNAMO], name)(function))
        return function

    late: dict[str, Any] = {name: partial(decorate, name) for name in ("allow_in_graph", "assume_constant_result")}
    vars(dynamo := _LateModule(_DYNAMO)).update(late)
    late["disable"] = lambda function=None, recursive=True, **_: torch._disable_dynamo(function, recursive)
    late, package = (late, {"_dynamo": dynamo}) if "_dynamo" not in vars(torch) else ({}, {})
    in_torch, in_compiler = _with_names(vars(torch), package), _with_names(vars(torch.compiler), late)
    with _with_names(sys.modules, absent), in_torch, in_compiler:
        load()


def _compare_without_dtensor(load: Callable[[], object], module: Any) -> None:
    """transformers imports torch.distributed.tensor to ask whether a tensor is one of its own."""
    load()
    compare = module.is_dtensor
    module.is_dtensor = lambda tensor: "torch.distributed.tensor" in sys.modules and compare(tensor)
