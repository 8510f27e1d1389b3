"""What keeps a rank from stopping where the others do not: garbage collection; and memory that lies in pieces."""

from __future__ import annotations

import gc
import glob
import os
import weakref

import pytest

from llmtrain.base.imports import let_segments_grow
from llmtrain.engine.process_memory import collected_by_hand, none_while_importing


class Node:
    """Two of them that name each other are a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


def cycle() -> weakref.ref[Node]:
    one, two = Node(), Node()
    one.other, two.other = two, one
    return weakref.ref(one)


def test_garbage_waits_for_whoever_collects():
    """As many objects as make Python collect by itself several times, and a cycle among them."""
    times: list[int] = []
    gc.callbacks.append(lambda phase, info: times.append(info["generation"]) if phase == "start" else None)
    try:
        with collected_by_hand():
            times.clear()
            lost = cycle()
            kept = [[] for _ in range(100_000)]
            assert not times and lost() is not None
            gc.collect()
            assert lost() is None and times == [2]
            assert gc.get_freeze_count() > 1000  # what was there before is looked at no more
        assert gc.isenabled() and gc.get_freeze_count() == 0 and len(kept) == 100_000
    finally:
        gc.callbacks.pop()


def test_imports_are_not_looked_through():
    times: list[int] = []
    gc.callbacks.append(lambda phase, info: times.append(info["generation"]))
    try:
        with none_while_importing():
            kept = [[] for _ in range(100_000)]
        assert not times and gc.isenabled() and gc.get_freeze_count() > len(kept)
    finally:
        gc.callbacks.pop()
        gc.unfreeze()


@pytest.mark.parametrize(
    ("devices", "given", "want"),
    [
        (["/dev/nvidia0"], {}, "expandable_segments:True"),
        ([], {}, None),
        (["/dev/nvidia0"], {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        (["/dev/nvidia0"], {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_segments_grow_on_nvidia_unless_the_user_has_chosen(monkeypatch, devices, given, want):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(glob, "glob", lambda pattern: devices if "nvidia" in pattern else [])
    let_segments_grow()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == want
