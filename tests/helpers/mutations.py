"""What happens to files: by disks, copies and people, or on purpose. Every change follows from its random generator."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEEP = "[" * 100_000
WEIRD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**62, 2**63, 10**30, 1e308, math.nan, math.inf, "", "x", "../x", "/etc/passwd", "a/b",
    "\0", "\ud800", "\x1b[2J", "x" * 5000, [], {}, [None], [-1], [2**62, 2**62], {"a": 1}, "F32", "BF16", "F8_E5M2",
]  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes, low: int = 0, high: int | None = None) -> bytes:
    """One change of the bytes [low, high)."""
    high = len(data) if high is None else high
    at = rng.randrange(low, high) if high > low else low
    count = rng.choice([1, 2, 8, 64, 500])
    changed = bytearray(data)
    match rng.randrange(8):
        case 0 if at < len(data):
            changed[at] ^= 1 << rng.randrange(8)
        case 1:
            changed[at : at + count] = rng.randbytes(count)
        case 2:
            changed[at:at] = rng.randbytes(count)
        case 3:
            del changed[at : at + count]
        case 4:
            del changed[at:]
        case 5:
            changed += rng.randbytes(count)
        case 6:
            changed[at : at + count] = bytes(count)
        case _:
            changed[at:at] = changed[at : at + count]
    return bytes(changed)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON tree."""
    yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def mutate_tree(rng: random.Random, tree: Any) -> Any:
    """One change of a JSON tree: a strange value, a key gone, another name, two values swapped."""
    paths = [path for path in places(tree) if path]
    if not paths:
        return rng.choice(WEIRD)
    path = rng.choice(paths)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    match rng.randrange(6):
        case 0:
            del parent[path[-1]]
        case 1 if isinstance(parent, dict):
            parent[rng.choice([w for w in WEIRD if isinstance(w, str)])] = parent.pop(path[-1])
        case 2:
            other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            parent[path[-1]], parent[other] = parent[other], parent[path[-1]]
        case 3 if type(parent[path[-1]]) is int:
            parent[path[-1]] += rng.choice([-4, -1, 1, 4, 2**32, 2**63])
        case _:
            parent[path[-1]] = rng.choice(WEIRD)
    return tree


def mutate_text(rng: random.Random, text: str) -> str:
    """One change of JSON as a text: a bracket that never ends, a key twice, a number of many digits."""
    match rng.randrange(4):
        case 0:
            return text.replace("[", DEEP, 1)
        case 1:
            key = rng.choice(text.split('"')[1::2] or ["a"])
            return text.replace("{", '{"' + key + '": 1, ', 1)
        case 2:
            digits = [i for i, letter in enumerate(text) if letter.isdigit()] or [0]
            at = rng.choice(digits)
            return text[:at] + "9" * rng.choice([30, 6000]) + text[at:]
        case _:
            return text[: rng.randrange(len(text))]


def mutate_header(rng: random.Random, data: bytes) -> bytes:
    """One change of a safetensors header; its length fits again, most of the time."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    a, b = rng.sample(names, 2)
    match rng.randrange(6):
        case 0:
            header[a]["data_offsets"], header[b]["data_offsets"] = header[b]["data_offsets"], header[a]["data_offsets"]
        case 1:
            header[a], header[b] = header[b], header[a]
        case 2:
            header[a]["dtype"] = rng.choice(["F32", "I32", "BF16", "F64", "F8_E4M3", "Q4"])
        case 3:
            header[a]["shape"] = rng.choice([[2**40], [2**31, 2**31], [-1], [0], [1.0], [], [1] * 500])
            if rng.random() < 0.5:
                header[a]["data_offsets"] = [0, 4 * 2**40]
        case _:
            header = mutate_tree(rng, header)
    text = json.dumps(header)
    text = mutate_text(rng, text) if rng.random() < 0.2 else text
    raw = text.encode("utf-8", "surrogatepass")
    length = len(raw) if rng.random() < 0.9 else rng.choice([0, 2**63, 2**64 - 1, 10**12, len(raw) - 1, 99_999_999])
    return struct.pack("<Q", length) + raw + body


def mutate_json(rng: random.Random, text: str) -> str:
    if rng.random() < 0.2:
        return mutate_text(rng, text)
    return json.dumps(mutate_tree(rng, json.loads(text)))


def mutate_folder(rng: random.Random, folder: Path, other: Path) -> None:
    """One change of the files themselves: swapped, gone, renamed, replaced by something that is no file."""
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    if not names:
        return
    path = folder / rng.choice(names)
    match rng.randrange(8):
        case 0:
            path.unlink()  # it may be a link by now
            if (other / path.name).exists():
                shutil.copy(other / path.name, path)
        case 1:
            second = folder / rng.choice(names)  # may be the same
            held = path.read_bytes()
            path.write_bytes(second.read_bytes())
            second.write_bytes(held)
        case 2:
            path.unlink()
        case 3:
            path.rename(folder / rng.choice(["rank-00007.safetensors", "x", "manifest.json.bak", "model.safetensors"]))
        case 4:
            path.unlink()
            path.symlink_to(rng.choice([other / path.name, Path("/dev/zero"), path, folder / "nowhere"]))
        case 5:
            path.unlink()
            os.mkfifo(path)
        case 6:
            path.unlink()
            path.mkdir()
        case _:
            path.write_bytes(b"")
