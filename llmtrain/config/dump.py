"""A typed run back to YAML that `load` reads to the same run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import yaml

from llmtrain.config.run import RunConfig
from llmtrain.config.strict_yaml import plain_scalar


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # the reader refuses anchors


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # PyYAML leaves `1e-3` unquoted, as YAML 1.1 has it for a string; our reader would make a number of it.
    # A character that YAML takes for a line break (U+0085) survives in double quotes only.
    style = None if value.isprintable() and isinstance(plain_scalar(value), str) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_list(list(value)))


def dump(run: RunConfig) -> str:
    """The run as YAML, every field written, in the order of the schema."""
    return yaml.dump(asdict(run), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
