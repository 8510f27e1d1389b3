"""The import of plugins (plugins.py), and the checks of their classes."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import zlib
from dataclasses import fields, is_dataclass
from importlib import metadata
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType

from llmtrain.base import log
from llmtrain.base.choice import Choice, Entry
from llmtrain.base.errors import ConfigError
from llmtrain.config import help, schema
from llmtrain.config.plugins import CARRIED, FLAG, Plugin, current, line_of, modules, within
from llmtrain.config.problems import closest, nearest_file

GROUP = "llmtrain.plugins"
_MOST_CARRIED = 96 << 10
"""Largest value of the variable `CARRIED` in bytes; Linux allows 128 KiB for one variable."""

_PREFIX = "llmtrain_plugin_"


def use(given: list[str]) -> None:
    """Import the run's plugins in the given order.

    Raises: ConfigError, with the line of the plugin that is wrong.
    """
    asked = [(word, spec := _found(word), _digest(spec)) for word in given]
    if [(word, digest) for word, _, digest in asked] == [(plugin.given, plugin.sha256) for plugin in current]:
        return
    _forget_all()
    try:
        for word, spec, digest in asked:
            if (name := spec.name) in [plugin.module.__name__ for plugin in current]:
                name = name.removeprefix(_PREFIX)
                raise ConfigError(f"{FLAG} {word}: another plugin is called {name}, too. Rename one")
            current.append(_import(word, spec, digest))
    except BaseException:  # the names that came before the mistake
        _forget_all()
        raise
    finally:
        for cached in (schema.sections, schema.subsections, schema.choices, schema.schema, help.entries):
            cached.cache_clear()


def _forget_all() -> None:
    """Remove the classes of earlier plugins from all sections, because each run has its own plugins."""
    current.clear()
    for names in [*(base.CHOICES for base in Choice.__subclasses__()), *Entry.SECTIONS.values()]:
        for name in [name for name, cls in names.items() if within(cls, modules)]:
            del names[name]


def _import(word: str, spec: ModuleSpec, digest: str) -> Plugin:
    path = Path(str(spec.origin)).resolve()
    module = importlib.util.module_from_spec(spec)
    modules.add(module.__name__)
    sys.modules[module.__name__] = module  # pickle finds its classes by this name
    try:
        assert spec.loader is not None
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        remedy = "Correct the file; `python FILE.py` shows the complete traceback"
        if isinstance(error, ModuleNotFoundError):
            package = str(error.name).partition(".")[0]
            remedy = f"Install it on all hosts (pip install {package}), or correct the import"
        what = f"{line_of(error, path)}{type(error).__name__}: {error}"
        raise ConfigError(f"{FLAG} {word}: {what}. {remedy}") from None
    if log.reopen():
        raise ConfigError(f"{FLAG} {word}: its import closes sys.stdout, where the run prints. Remove that")
    classes = [cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, (Choice, Entry))]
    own = [cls for cls in classes if within(cls, {module.__name__})]
    for cls in own:
        _check_fields(cls, word)
        check_methods(cls, f"{FLAG} {word}")
        if not _selectable(cls) and not any(cls in other.__mro__[1:] for other in own):
            base = next(each.__name__ for each in cls.__mro__ if not within(each, modules))
            name = cls.__name__.lower()
            raise ConfigError(
                f"{FLAG} {word}: class {cls.__name__} has no name, and no configuration can select it. "
                f'Write class {cls.__name__}({base}, {cls.KEYWORD}="{name}")'
            )
    selectable = [cls for cls in classes if not cls.__module__.startswith("llmtrain.") and _selectable(cls)]
    if not own and not selectable:  # a file may import its classes from a package
        raise ConfigError(
            f"{FLAG} {word}: defines no class of a plugin, and would change nothing. Derive a class from "
            "Part, Schedule, ByToken or another name that llmtrain exports; a TrainerCallback of "
            "transformers becomes a Part"
        )
    source = spec.loader.source if isinstance(spec.loader, _Source) else None
    return Plugin(given=word, path=path, sha256=digest, module=module, source=source)


class _Source(SourceLoader):
    """Imports a plugin from bytes that were read before: by this process, or by `launch` on its host."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.path, self.source = path, source

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_data(self, path: bytes | str) -> bytes:
        if str(path) != str(self.path):
            raise OSError("no file of compiled code is kept")
        return self.source


def carried() -> dict[str, str]:
    """Return the environment variable that carries this process's plugin files to the ranks on other hosts.

    Raises ConfigError for files that are too large.
    """
    sources = {plugin.given: plugin.source for plugin in current if plugin.source is not None}
    files = {word: base64.b64encode(zlib.compress(source, 9)).decode() for word, source in sources.items()}
    if not files:
        return {}
    if len(text := json.dumps(files)) > _MOST_CARRIED:
        largest = max(files, key=lambda word: len(files[word]))
        raise ConfigError(
            f"{FLAG} {largest}: the plugins have {len(text) >> 10} KiB, packed, and launch carries "
            f"{_MOST_CARRIED >> 10} to the hosts. Install the code as a package on all hosts, and give "
            "its name"
        )
    return {CARRIED: text}


def _found(word: str) -> ModuleSpec:
    """Return the import spec of a plugin file, module or entry point. Raises ConfigError: there is none."""
    if word.endswith(".py") or "/" in word:
        path = Path(word).expanduser().resolve()
        packed = json.loads(os.environ.get(CARRIED, "{}")).get(word)
        if packed is None and not path.is_file():
            near = nearest_file(Path(word).expanduser(), "*.py")
            remedy = f"Did you mean {near}?" if near else "Give the path of a Python file, the same on all hosts"
            raise ConfigError(f"{FLAG} {word}: no such file (looked from {Path.cwd()}). {remedy}")
        if not path.stem.isidentifier():
            raise ConfigError(f"{FLAG} {word}: a file's name becomes a module's name: use letters, digits and _ only")
        if path.suffix != ".py":
            raise ConfigError(f"{FLAG} {word}: is no Python file: its name must end with .py")
        source = path.read_bytes() if packed is None else zlib.decompress(base64.b64decode(packed))
        made = ModuleSpec(f"{_PREFIX}{path.stem}", _Source(path, source), origin=str(path))
        made.has_location = True  # __file__
        return made
    entry = next((each for each in metadata.entry_points(group=GROUP) if each.name == word), None)
    try:
        spec = importlib.util.find_spec(entry.module if entry is not None else word)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise ConfigError(
            f"{FLAG} {word}: neither a file, nor a module that Python finds, nor an installed entry "
            f"point of the group {GROUP}. Give FILE.py, or install the package on all hosts"
        )
    return spec


def _digest(spec: ModuleSpec) -> str:
    if isinstance(spec.loader, _Source):
        return hashlib.sha256(spec.loader.source).hexdigest()
    path = Path(str(spec.origin)).resolve()
    files = sorted(path.parent.rglob("*.py")) if path.stem == "__init__" else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _check_fields(cls: type, word: str) -> None:
    """Raise ConfigError for a class with annotated fields that is no dataclass: its fields would be ignored."""
    own = [name for name in vars(cls).get("__annotations__", {}) if not name.isupper()]
    if own and "__dataclass_fields__" not in vars(cls):
        frozen = "frozen=True, " if issubclass(cls, Choice) else ""
        raise ConfigError(
            f"{FLAG} {word}: class {cls.__name__} has the field {own[0]} and is no dataclass. Write "
            f"@dataclass({frozen}kw_only=True) above it"
        )
    if is_dataclass(cls) and (bare := [item.name for item in fields(cls) if item.init and schema.is_required(item)]):
        raise ConfigError(
            f"{FLAG} {word}: class {cls.__name__}: the field {bare[0]} has no default. Give it one; None "
            "may mean that the user must set it"
        )


def check_methods(cls: type, given: str) -> None:
    """Check the methods of a plugin's class. `given`: the plugin's word on the command line.

    Raises ConfigError: a public method is none of the base class's, has other arguments, or a needed one is missing.
    """
    ours = next(base for base in cls.__mro__ if base.__module__.startswith("llmtrain.") and not within(base, modules))
    theirs = cls.__mro__[: cls.__mro__.index(ours)]
    uncalled = getattr(ours, "own_methods", ())
    callable_methods = inspect.getmembers(ours, inspect.isfunction)
    known = {name: method for name, method in callable_methods if not name.startswith("_") and name not in uncalled}
    members = [member for base in reversed(theirs) for member in vars(base).items()]
    own = {name: each for name, each in members if isinstance(each, FunctionType) and not name.startswith("_")}
    for name, method in own.items():
        if name not in known:
            near = closest(name, known)
            hint = f"Did you mean {near}? {ours.__name__}" if near else f"{ours.__name__}"
            raise ConfigError(
                f"{given}: class {cls.__name__}: nothing calls its method {name}. {hint} has "
                f"{', '.join(known)}; the name of a method of your own begins with _"
            )
        wanted = list(inspect.signature(known[name]).parameters.values())
        by_name = {each.name: None for each in wanted if each.kind is each.KEYWORD_ONLY}
        try:
            inspect.signature(method).bind(*[None] * (len(wanted) - len(by_name)), **by_name)
        except TypeError as error:
            raise ConfigError(
                f"{given}: class {cls.__name__}: llmtrain calls {_call(known[name])}, and this method of the class "
                f"does not take these arguments ({error})"
            ) from None
    for name, method in known.items() if _selectable(cls) else ():
        if getattr(getattr(cls, name), "__isabstractmethod__", False):
            raise ConfigError(f"{given}: class {cls.__name__} has no method {_call(method)}: {ours.__name__} needs it")


def _selectable(cls: type) -> bool:
    return "NAME" in vars(cls) or (issubclass(cls, Choice) and cls in cls.CHOICES.values())


def _call(method: FunctionType) -> str:
    """Return the call of a method for a message: `name(argument, *, argument)`."""
    given = [each.replace(annotation=each.empty) for each in inspect.signature(method).parameters.values()]
    return f"{method.__name__}{inspect.Signature(given[1:])}"
