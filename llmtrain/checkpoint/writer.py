"""The process that makes a rank's checkpoint durable while the rank continues training. No torch import.

It shares the image of the file with its rank, which fills it. Each JSON message is a job and gets one answer. The
process ends with its rank, also if the rank is killed.
"""

from __future__ import annotations

import mmap
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmtrain.base.child import Parent, ending_with_parent
from llmtrain.checkpoint.durable import DurableFile, remove_tree, sync, write_durably
from llmtrain.checkpoint.format import MANIFEST, TRAINER, FileEntry, FrozenSource, Manifest, Piece
from llmtrain.checkpoint.retain import Best, keep_newest, tidy
from llmtrain.storage.checksum import checksum_part_array

_BLOCK = 16 << 20  # bytes hashed, summed and written at a time


def write_image(image: memoryview, path: Path, pieces: list[tuple[int, str, list[Any]]]) -> dict[str, Any]:
    """Write the image to a file. `pieces`: (first byte in the image, dtype, `Piece.to_json`), in order. Returns
    {"bytes", "xxh3", "checksums"}. Raises OSError, and then leaves no file."""
    with DurableFile(path) as file:
        sums = []
        done = 0
        for offset, dtype, raw in pieces:
            region = Piece.from_json(raw).region
            total = 0
            for low in range(0, region.numel, _BLOCK // 4):
                count = min(_BLOCK // 4, region.numel - low)
                values = as_fp32(image, offset, low, count, dtype)
                total += checksum_part_array(values, region.part(low, low + count))
            sums.append(total % 2**64)
            end = offset + region.numel * (4 if dtype == "F32" else 2)
            while end - done >= _BLOCK:  # complete blocks are written from aligned memory
                file.write(image[done : done + _BLOCK], stays=True)
                done += _BLOCK
        file.write(image[done:], stays=True)
        size, xxh3 = file.close()
    return {"bytes": size, "xxh3": xxh3, "checksums": sums}


def as_fp32(image: memoryview, offset: int, first: int, count: int, dtype: str) -> npt.NDArray[np.float32]:
    """Return elements [first, first + count) of the piece at byte `offset`, as fp32."""
    if dtype == "F32":
        return np.frombuffer(image, dtype=np.float32, count=count, offset=offset + 4 * first)
    raw = np.frombuffer(image, dtype=np.uint16, count=count, offset=offset + 2 * first)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    assert dtype == "BF16", dtype
    return (raw.astype(np.uint32) << 16).view(np.float32)


def commit(partial: Path, final: Path, message: dict[str, Any], table: dict[str, Any]) -> None:
    """Write trainer.json and the manifest of a checkpoint whose other files are durable, give it its final name, and
    delete the checkpoints that `keep` (unless None) and `best` (fields of a `Best`) do not cover.

    Args:
        message: step, layout, trainer (the text of trainer.json), keep, best if there is one, and "written": file ->
            the answer of `write_image`.
        table: "tensors" (shapes), "frozen" (`FrozenSource.to_json` of parameters that no file holds), and "pieces":
            file -> `Piece.to_json` of each piece, without valid checksums.

    Raises OSError.
    """
    written, best = message["written"], message.get("best")
    files = {
        name: FileEntry(
            bytes=written[name]["bytes"],
            xxh3=written[name]["xxh3"],
            pieces=[
                replace(Piece.from_json(piece), checksum=total)
                for piece, total in zip(file_pieces, written[name]["checksums"], strict=True)
            ],
        )
        for name, file_pieces in table["pieces"].items()
    }
    size, xxh3 = write_durably(partial / TRAINER, message["trainer"])
    files[TRAINER] = FileEntry(bytes=size, xxh3=xxh3)
    manifest = Manifest(
        step=message["step"],
        tensors=table["tensors"],
        files=files,
        layout=message["layout"],
        frozen=FrozenSource.from_json(table["frozen"]),
    )
    write_durably(partial / MANIFEST, manifest.to_json())
    sync(partial)
    if final.exists():  # an earlier save of this step, such as before a rewind
        remove_tree(final)
    partial.rename(final)
    sync(final.parent)
    tidy(final.parent)  # files of a failed save may be left if the disk was read-only or away
    if message["keep"] is not None:
        keep_newest(final.parent, message["keep"], best=None if best is None else Best(**best))


def perform(message: dict[str, Any], table: dict[str, Any], image: memoryview | None) -> dict[str, Any]:
    """Do the job of a message. Returns its answer, or {"error"} for a fault of the disk.

    Args:
        table: "own": the pieces of this rank's image; on a leader also "pieces" of every file, "tensors" (shapes) and
            "frozen".
    """
    message = dict(message)
    what = message.pop("do")
    try:
        if what == "write":
            assert image is not None
            return write_image(image, Path(message["path"]), table["own"])
        if what == "commit":
            partial, final = Path(message.pop("partial")), Path(message.pop("final"))
            try:
                commit(partial, final, message, table)
            except OSError:
                remove_tree(partial)
                raise
        elif what == "keep":
            best = message.get("best")
            keep_newest(Path(message["checkpoints"]), message["keep"], best=None if best is None else Best(**best))
        else:
            assert what == "discard", what
            remove_tree(Path(message["folder"]))
        return {}
    except OSError as error:
        return {"error": f"{error.strerror} ({error.filename or what})"}


def main(memory: int, size: int, parent: int) -> int:
    """`memory`: file descriptor of the image. The first message is the table."""
    ending_with_parent()()
    if os.getppid() != parent:
        return 1  # the rank died before the signal for its end was set up
    image = memoryview(mmap.mmap(memory, size))
    os.close(memory)
    rank = Parent()
    rank.listen()
    table = rank.asked()
    while True:
        rank.tell(perform(rank.asked(), table, image))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
