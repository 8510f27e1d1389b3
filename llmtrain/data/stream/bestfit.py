"""Whole records into windows: best fit, longest first, the same on every machine.

Method: best-fit decreasing (D. S. Johnson et al., SIAM J. Comput. 3, 1974), done at once for all records of a length
and all windows with the same room: a million records take a fraction of a second, so every rank does it for itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(records in the order of the windows, int64 [records]; where each window begins in it, int64 [windows + 1]).

    Args:
        lengths: int [records], each from 1 to `capacity`.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    sizes, starts = np.unique(-lengths[order].astype(np.int64), return_index=True)
    window_of = np.empty(len(lengths), dtype=np.int64)
    rooms: list[int] = []  # ascending; what some window has left
    windows: dict[int, np.ndarray] = {}
    made = 0

    def put_back(some: np.ndarray, room: int) -> None:
        if room and len(some):
            if room not in windows:
                insort(rooms, room)
            windows[room] = np.concatenate([windows.get(room, some[:0]), some])

    for size, records in zip((-sizes).tolist(), np.split(order, starts)[1:], strict=True):
        while len(records):
            at = bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms.pop(at)
                free = windows.pop(room)
            else:
                room, new = capacity, -(-len(records) // (capacity // size))
                free = np.arange(made, made + new)
                made += new
            each = room // size
            taken = min(len(free), -(-len(records) // each))
            count = min(len(records), taken * each)
            window_of[records[:count]] = np.repeat(free[:taken], each)[:count]
            put_back(free[: taken - 1], room - each * size)
            put_back(free[taken - 1 : taken], room - (count - (taken - 1) * each) * size)
            put_back(free[taken:], room)
            records = records[count:]
    in_windows = np.argsort(window_of, kind="stable")
    return in_windows, np.searchsorted(window_of[in_windows], np.arange(made + 1))
