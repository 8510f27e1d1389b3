"""The host memory for asynchronous saves and the process that writes it to disk, got while training begins."""

from __future__ import annotations

import threading
from typing import Any

import torch

from llmtrain.base.units import size
from llmtrain.checkpoint.snapshot import HostImage, RankFile, WriterProcess


class HostCopy:
    """An image of a rank's file with its writer. Getting and page-locking 15 GB takes seconds: a thread does it.

    The thread stays until `close`: when the one that started the writer ends, the kernel takes the writer's parent for
    dead (PR_SET_PDEATHSIG) and kills it.
    """

    def __init__(self, plan: RankFile, table: dict[str, Any], device: torch.device) -> None:
        """`table`: what the writer must know (`writer.perform`)."""
        self._plan, self._table, self._device = plan, table, device
        self._image: HostImage | None = None
        self._writer: WriterProcess | None = None
        self._problem: str | None = None
        self._done, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._get, name="checkpoint-memory", daemon=True)
        self._thread.start()

    def _get(self) -> None:
        cuda = self._device.type == "cuda"
        try:
            if cuda:
                torch.cuda.set_device(self._device)
            self._image = HostImage(self._plan, cuda=cuda)
            self._writer = WriterProcess(self._image, self._table)
        except Exception as problem:  # whatever it is, the other ranks have to hear of it
            self._problem = f"a copy takes {size(self._plan.bytes)} of host memory and a process: {problem}"
        finally:
            self._done.set()
        self._closing.wait()

    def problem(self) -> str | None:
        """Wait until both are there; why they are not."""
        self._done.wait()
        return self._problem

    @property
    def image(self) -> HostImage:
        """After `problem` was None."""
        assert self._image is not None
        return self._image

    def writer(self) -> WriterProcess:
        """The process, or a new one after `drop_writer`. Raises OSError, WriterDied."""
        if self._writer is None:
            self._writer = WriterProcess(self.image, self._table)
        return self._writer

    def answer(self) -> dict[str, Any] | None:
        """The writer's next answer, or None as long as there is none. Raises WriterDied."""
        return None if self._writer is None else self._writer.answer()

    def drop_writer(self) -> None:
        """It cannot be used any more."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def close(self) -> None:
        """Give both back."""
        self._done.wait()
        self.drop_writer()
        self._closing.set()
        self._thread.join()
        if self._image is not None:
            self._image.close()
            self._image = None
