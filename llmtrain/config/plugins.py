"""A user's own code: `--plugin FILE.py`, a module, or an installed entry point of the group `llmtrain.plugins`.

A plugin defines subclasses of the bases that `llmtrain` exports; its import makes their names known to the run's YAML.
No configuration names code: only the command line and Python do.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from llmtrain.base.choice import Entry
from llmtrain.base.errors import TrainingStopped

FLAG = "--plugin"
CHANGED = "--plugin-changed"
CARRIED = "LLMTRAIN_PLUGINS"
"""Environment variable by which `launch` gives ranks the files of `--plugin`: JSON, word -> packed bytes."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    given: str
    """The word on the command line."""
    path: Path
    """The plugin's file; of a package, its folder's __init__.py."""
    sha256: str
    """Hash of the file, or of all .py files in the package."""
    module: ModuleType
    source: bytes | None
    """The file as it was imported; None: a module or an entry point, which each host has of its own."""

    @property
    def name(self) -> str:
        return self.path.parent.name if self.path.stem == "__init__" else self.path.stem


class PluginError(TrainingStopped):
    """An exception in a plugin's code during a run."""


modules: set[str] = set()
"""Names of all modules that were imported as plugins in this process."""
current: list[Plugin] = []
"""The plugins of the run that was parsed last in this process."""
changed_ok = False
"""Accept checkpoints that were made with other versions of the plugins (`--plugin-changed ok`)."""


def entries(section: str) -> list[str]:
    return [name for name, cls in Entry.SECTIONS.get(section, {}).items() if within(cls, modules)]


def within(cls: type, modules: set[str]) -> bool:
    return any(cls.__module__ == module or cls.__module__.startswith(f"{module}.") for module in modules)


def is_of_plugin(entry: object) -> bool:
    return within(type(entry), modules)


def place_of(error: BaseException) -> str:
    """Return `FILE line N: ` of the plugin that raised an exception; "" if no plugin did."""
    for plugin in current:
        if line := line_of(error, plugin.path):
            return f"{plugin.given} {line}"
    return ""


def words() -> list[str]:
    """Return values of `--plugin` with which another process of this host imports the same plugins."""
    return [plugin.given if plugin.source is None or CARRIED in os.environ else str(plugin.path) for plugin in current]


def hashes() -> dict[str, str]:
    return {plugin.name: plugin.sha256 for plugin in current}


def line_of(error: BaseException, path: Path) -> str:
    """Return `line N: ` of the plugin's file that raised the error; "" if it did not."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"line {error.lineno}: "
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"line {lines[-1]}: " if lines else ""


def difference(saved: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the first difference between two results of `hashes` as a clause; "" if they are equal."""
    for name in sorted({*saved, *now}):
        if name not in now:
            return f"the run used the plugin {name}, and this command has none of that name"
        if name not in saved:
            return f"the run had no plugin {name} so far"
        if saved[name] != now[name]:
            return f"plugin {name} has changed since: its SHA-256 was {saved[name][:12]} and is {now[name][:12]}"
    return ""
