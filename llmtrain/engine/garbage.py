"""Python's search for cycles of objects, where all ranks do it together.

Left alone, each rank searches through all its objects when its own counter says so: 0.2 to 0.3 s (DeepSpeed issue 8451)
in another step on each rank, and in each of these steps all the others wait for one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def none_while_importing() -> Iterator[None]:
    """Within it nothing is collected, and what it leaves is not looked at again: torch, DeepSpeed and transformers are
    400,000 objects, through which Python would go six times while they come, and DeepSpeed again when it begins."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def collected_by_hand() -> Iterator[None]:
    """Within it nothing is collected but by `gc.collect`, which looks at what was made since."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
