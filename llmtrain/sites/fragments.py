"""Streaming: fragments of the model that synchronise one after another, and a round that travels during training.

A. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from llmtrain.cluster.watch.heartbeat import heart

_LAYER = re.compile(r"\.(\d+)\.")
T = TypeVar("T")


def fragment_of(shapes: Mapping[str, tuple[int, ...]], fragments: int) -> dict[str, int]:
    """Name -> fragment, the same for all sites.

    Layer i is in fragment i modulo their number; what belongs to no layer, the largest first, in the smallest one.

    Args:
        shapes: of all parameters, by Hugging Face name.
        fragments: at least 1.
    """
    found: dict[str, int] = {}
    sizes = [0] * fragments
    for name in sorted(shapes):
        if layer := _LAYER.search(name):
            found[name] = int(layer[1]) % fragments
            sizes[found[name]] += math.prod(shapes[name])
    rest = sorted(shapes.keys() - found.keys(), key=lambda name: (-math.prod(shapes[name]), name))
    for name in rest:
        found[name] = sizes.index(min(sizes))
        sizes[found[name]] += math.prod(shapes[name])
    return found


class Background(Generic[T]):
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._result: T
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), name="sites-round", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether `result` is there at once."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """Wait for it; what it returned or raised."""
        while self._thread.is_alive():
            self._thread.join(0.5)
            heart.beat()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._result = call()
        except BaseException as error:
            self._error = error
