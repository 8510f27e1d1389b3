"""What a foreign pickle would build, found out before and after torch builds it: names, size, depth.

A few hundred bytes can stand for 2^40 values (a tuple of twice the same tuple, forty times) or for tuples that lie
200,000 deep: to print, hash or compare them would take for ever, fill the memory or overflow the stack of C.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 64
"""Of values within values. DeepSpeed's own files have 8."""
MAX_VALUES = 50_000_000
"""That a file may stand for, one that appears twice counted twice. 100,000 parameters with Adam's state: 3 million."""
_MAX_TUPLE = 1_000_000  # values in one tuple, which might be hashed or printed at once
_MAKES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ", "BINPERSID"}
_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET = {"GET", "BINGET", "LONG_BINGET"}

_Size = tuple[int, int]
_ONE: _Size = (1, 1)


class Record:
    """Stands for DeepSpeed's small classes: what the pickle puts into the object are its attributes, nothing runs."""


class TooMuch(ValueError):
    """A pickle stands for more, or for something deeper, than any checkpoint."""


def names(data: bytes) -> Iterator[tuple[str, str]]:
    """(instruction, the name that it asks for or an empty text) of each instruction of a pickle; nothing is built.

    Tuples are measured on the way: torch may hash one before the whole can be looked at. Lists and dictionaries
    count as one value here, for they cannot be hashed; `measure` looks into them once they are built.

    Raises:
        TooMuch: by MAX_DEPTH, MAX_VALUES, or a million values in one tuple.
        ValueError, IndexError: it is no pickle.
    """
    stack: list[_Size | None] = []  # depth and values of each; None is a mark
    memo: dict[Any, _Size | None] = {}
    total = 0
    for code, argument, _ in pickletools.genops(data):
        yield code.name, str(argument).replace(" ", ".") if code.name == "GLOBAL" else ""
        if code.name in _PUT:
            memo[argument] = stack[-1]
            continue
        if code.name in _GET:
            stack.append(memo.get(argument, _ONE))
            continue
        taken = _take(stack, code.stack_before)
        made = _ONE
        if code.name in _MAKES:
            made = (1 + max((depth for depth, _ in taken), default=0), 1 + sum(size for _, size in taken))
        total += 1 + sum(size for _, size in taken)
        if made[0] > MAX_DEPTH or made[1] > _MAX_TUPLE or total > MAX_VALUES:
            raise TooMuch(_too_much(made[0], total))
        stack.extend(None if kind is pickletools.markobject else made for kind in code.stack_after)


def _take(stack: list[_Size | None], before: list[Any]) -> list[_Size]:
    """Pop what an instruction takes: so many values, or those down to a mark and what it names below that."""
    taken: list[_Size] = []
    below = len(before)
    if pickletools.markobject in before:
        below = before.index(pickletools.markobject)
        while (value := stack.pop()) is not None:
            taken.append(value)
    return taken + [stack.pop() or _ONE for _ in range(below)]


def measure(tree: Any) -> None:
    """Refuse a tree that is too deep or stands for too many values, or that contains itself. Does not recurse.

    Raises:
        TooMuch
    """
    sizes: dict[int, _Size] = {}
    open_: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(tree, False)]
    while waiting:
        value, seen = waiting.pop()
        if id(value) in sizes:
            continue
        parts = _parts(value)
        if seen:
            inner = [sizes.get(id(part), _ONE) for part in parts]  # what has no parts is not in it
            depth, size = 1 + max(d for d, _ in inner), 1 + sum(s for _, s in inner)
            if depth > MAX_DEPTH or size > MAX_VALUES:
                raise TooMuch(_too_much(depth, size))
            sizes[id(value)] = depth, size
            open_.discard(id(value))
        elif parts:
            if id(value) in open_:
                raise TooMuch("its pickle holds a value that contains itself")
            open_.add(id(value))
            waiting.append((value, True))
            waiting += [(part, False) for part in parts if id(part) not in sizes and _has_parts(part)]


def _has_parts(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple, set, Record))


def _parts(value: Any) -> list[Any]:
    """The values in a value, as far as plain data has any."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set)):
        return list(value)
    return list(vars(value).values()) if isinstance(value, Record) else []


def _too_much(depth: int, values: int) -> str:
    return (
        f"its pickle stands for values {depth} deep (at most {MAX_DEPTH}), or for {values} of them (at most "
        f"{MAX_VALUES}): no training writes that, and it was not built"
    )


def shown(value: Any) -> str:
    """A foreign value for a message: a number or a short text as it is, anything else by its type."""
    if isinstance(value, (bool, int, float)) or value is None:
        return repr(value)[:80]
    if isinstance(value, str):
        return repr(value[:50])
    return f"a {type(value).__name__}"
