"""Numbers and tables as people read them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

GIB = 1024**3


def count(n: float) -> str:
    """1_234_567 -> '1.23M'. Decimal thousands, three figures."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= limit:
            return f"{n / limit:.3g}{suffix}"
    return f"{n:.3g}" if isinstance(n, float) else str(n)


def counted(number: int, noun: str) -> str:
    """'1 rank', '2 ranks'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size(n_bytes: float) -> str:
    """Return bytes in binary units: 1536 -> '1.5 KiB'."""
    value = float(n_bytes)
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {suffix}"
        value /= 1024
    return f"{value:.4g} TiB"


def duration(seconds: float) -> str:
    """Return seconds as '1h02m', '3m05s' or '4.2s'."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def spans(numbers: Iterable[int], most: int = sys.maxsize) -> str:
    """Return ascending numbers as '0-3, 7'; after `most` spans, the count of the remaining numbers."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges[:most])
    more = sum(high - low + 1 for low, high in ranges[most:])
    return f"{text} and {more} more" if more else text


def some(numbers: Sequence[int]) -> str:
    """Return '1, 2, 3'; for more than eight numbers the first eight and the count."""
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, ... ({len(numbers)} in all)"


def divisors(number: int, least: int = 1) -> str:
    """Return the divisors of `number` from `least` on: '1, 2, 4'."""
    return ", ".join(str(degree) for degree in range(least, number + 1) if number % degree == 0)


def lines_of(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns, two blanks apart."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
