"""Reads files and texts from outside safely: none can crash its reader, name code to load, or control a terminal."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Largest nesting depth of objects and lists. Hugging Face's own files have 6; Python fails at about 1,000."""
_CODE = ("auto_map", "custom_pipelines", "custom_generate")
_KERNELS = ("attn_implementation", "experts_implementation")
_OWN = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")


def pointer(text: str | bytes) -> str:
    """Return an error if a file's first bytes are those of a git-lfs pointer, which git puts in place of the content;
    else an empty text."""
    is_pointer = text[:23] in ("version https://git-lfs", b"version https://git-lfs")
    return "it is a pointer of git-lfs; `git lfs pull` in its folder fetches the file itself" if is_pointer else ""


def loads(text: str | bytes, *, infinite: bool = False, pairs: Callable[[Any], Any] | None = None) -> Any:
    """json.loads that raises nothing but ValueError, whatever the text.

    Args:
        infinite: allow NaN and Infinity, which some model configurations hold (Mamba-2's time_step_limit), also in
            transformers 5's spelling.
        pairs: json's object_pairs_hook.

    Raises:
        ValueError: the text is no JSON, is nested deeper than MAX_DEPTH, or has a number that Python cannot hold
            (1e999, or one of more than 4,300 digits).
    """
    if fetch := pointer(text):
        raise ValueError(fetch)
    constant = float if infinite else _no_constant
    try:
        tagged = _tagged if infinite else None
        tree = json.loads(
            text, object_pairs_hook=pairs, object_hook=tagged, parse_float=_finite, parse_constant=constant
        )
    except RecursionError:
        raise _too_deep() from None
    level = [tree] if isinstance(tree, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [part for parts in inner for part in parts if isinstance(part, (dict, list))]
        if not level:
            return tree
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MAX_DEPTH} objects or lists")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _tagged(fields: dict[str, Any]) -> Any:
    """Return the number that transformers 5 writes as this object; any other object unchanged."""
    tag = fields.get("__float__")
    return float(tag) if len(fields) == 1 and tag in ("Infinity", "-Infinity", "NaN") else fields


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


def to_end(hosts: Sequence[str]) -> int:
    """Return the index of the connection to end if strangers hold too many: the oldest of the host with the most.
    `hosts`: the host of each connection, oldest first."""
    count = Counter(hosts)
    return hosts.index(max(hosts, key=lambda host: count[host]))


def natural(value: Any, limit: int = 2**63) -> int:
    """Return the value if it is a natural number below the limit. Raises ValueError."""
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r} is not a whole number from 0 to below {limit}")
    return value


def word(value: Any) -> str:
    """Return the value if it is a printable text, without control sequences and halves of surrogate pairs. Raises
    ValueError."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{value!r} is not a printable text")
    return value


def shown(text: object, most: int | None = None, *, lines: bool = False) -> str:
    """Return text from outside with control characters escaped, for a log, a terminal or a report.

    Control sequences, halves of surrogate pairs and marks that change the direction of writing become `\\x1b`,
    `\\ud800`, `\\u202e`.

    Args:
        most: largest number of characters; a longer text is cut and ends in `...`.
        lines: keep line breaks and tabs, with which foreign text could forge a line.
    """
    allowed = "\n\t" if lines else ""
    full = str(text)
    cut = full if most is None or len(full) <= most else full[:most] + "..."
    return cut if cut.isprintable() else "".join(c if c.isprintable() or c in allowed else ascii(c)[1:-1] for c in cut)


def first_line(error: BaseException, most: int | None = None) -> str:
    """Return the first line of an error, or its class if it has no text. `most`: see `shown`."""
    return shown((str(error).strip().splitlines() or [type(error).__name__])[0], most)


def names_code(fields: Any, where: str = "") -> str | None:
    """Return the key in a config.json or tokenizer_config.json through which transformers would load code, or None.

    `auto_map` names Python files. An attention or expert implementation of the form `owner/name` is a kernel that
    transformers downloads and imports, as it does for flash attention without its package. Nested sections are
    searched, too.
    """
    if isinstance(fields, list):
        return next((key_of_code for value in fields if (key_of_code := names_code(value, where))), None)
    if not isinstance(fields, dict):
        return None
    for key, value in fields.items():
        path = f"{where}{key}"
        fetched = key.lstrip("_").removesuffix("_internal") in _KERNELS and not _is_own(value)
        if (key in _CODE and value) or fetched:
            return path
        if key_of_code := names_code(value, f"{path}."):
            return key_of_code
    return None


def _is_own(value: Any) -> bool:
    """Return True for an implementation that is part of transformers, or a map with only such values."""
    return all(map(_is_own, value.values())) if isinstance(value, dict) else value in _OWN
