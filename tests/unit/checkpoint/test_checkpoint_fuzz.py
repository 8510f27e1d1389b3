"""1,000 mutated checkpoints and Hugging Face folders: refused with a message, or read with the values they had.

Every mutation follows from its number, so a failure is repeated by it. `damage` is what disks, copies and people do;
`malice` comes with sizes, hashes and signature that fit.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from llmtrain.base.errors import CheckpointError, ModelError, UserError
from llmtrain.checkpoint.arithmetic import diff
from llmtrain.checkpoint.format import MANIFEST, TRAINER, Manifest
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.listing import prune, rows, table
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.retain import looks_good
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.checkpoint.verify import verify
from llmtrain.config.run import ModelConfig
from llmtrain.models.skeleton import load_config
from llmtrain.models.source import SafetensorsSource
from llmtrain.storage.checksum import checksum
from llmtrain.storage.tensorfile import numel
from tests.helpers.checkpoints import LLAMA, SHAPES, WHOLE_LLAMA, resign, sign, tensors, write_checkpoint

pytestmark = pytest.mark.long


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


def mutations(few: int, all_: int) -> pytest.MarkDecorator:
    """So many of a kind, a fifth by default. The default's are the first of all, so that each has its number."""
    return pytest.mark.parametrize("count", [few, pytest.param(all_, marks=pytest.mark.slow)])


EACH = mutations(25, 125)
"""Of each of the eight kinds."""
KINDS = ["tensors", "header", "manifest", "trainer", "folder"]
"""Of damage to a checkpoint."""
LONGEST_S = 5.0
LARGEST_MIB = 300


def attempt(log: list[str], action: Callable[..., Any], *args: Any) -> Any:
    """What the action returns, or None when it refuses with a message. Anything else is a bug."""
    try:
        return action(*args)
    except UserError as error:
        assert len(str(error)) > 20
        log.append(str(error))
        return None


def look(folder: Path, intact: Path) -> tuple[list[str], dict[tuple[str, str], torch.Tensor], Manifest | None]:
    """Everything that reads a checkpoint: (what verify says, what can be read, the manifest)."""
    log: list[str] = []
    found = attempt(log, rows, folder.parent.parent)
    assert found and "\n".join(table(found)).encode()
    wrong = verify(folder)
    assert all(line and line.isprintable() for line in wrong), wrong
    looks_good(folder)
    attempt(log, TrainerState.read, folder)
    attempt(log, diff, intact, folder)
    attempt(log, prune, folder.parent.parent, 1, True)
    reader = attempt(log, CheckpointReader, folder)
    values: dict[tuple[str, str], torch.Tensor] = {}
    if reader is None:
        return wrong, values, None
    for file, entry in reader.manifest.files.items():
        if entry.pieces:
            attempt(log, reader.check, file)
    for kind, name in reader.tensors():
        count = numel(reader.shape(name))
        whole = attempt(log, reader.read_kind, kind, name, 0, count)
        if whole is not None:
            values[kind, name] = whole
            part = attempt(log, reader.read_kind, kind, name, count // 3, count)
            assert part is not None and torch.equal(part.view(torch.int32), whole[count // 3 :].view(torch.int32))
    reader.close()
    return wrong, values, reader.manifest


def differing(values: dict[tuple[str, str], torch.Tensor]) -> set[tuple[str, str]]:
    """What was read and is not what was saved, bit by bit."""
    saved = {key: value.float().reshape(-1).view(torch.int32) for key, value in tensors(1).items()}
    return {k for k, v in values.items() if k not in saved or not torch.equal(saved[k], v.view(torch.int32))}


class Overtime(BaseException):
    """A mutation made something wait."""


@pytest.fixture(autouse=True)
def bounded() -> Iterator[Callable[[], None]]:
    """Memory grows by less than LARGEST_MIB during a test; no single trial takes more than LONGEST_S."""

    def stop(*_: object) -> None:
        raise Overtime

    before = signal.signal(signal.SIGALRM, stop)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of earlier tests
    began_kib = _status_kib("VmRSS")
    yield lambda: signal.setitimer(signal.ITIMER_REAL, LONGEST_S) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert _status_kib("VmHWM") - began_kib < LARGEST_MIB * 1024


def _status_kib(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints and two Hugging Face folders."""
    place = tmp_path_factory.mktemp("originals")
    write_checkpoint(place / "a", 100, 1, strided=True)
    write_checkpoint(place / "b", 200, 2)
    for name, seed in (("hf_a", 1), ("hf_b", 2)):
        folder = place / name
        folder.mkdir()
        held = {name: value for (kind, name), value in tensors(seed).items() if kind == "param"}
        names = list(held)
        save_file({n: held[n] for n in names[:2]}, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
        save_file({n: held[n] for n in names[2:]}, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
        weight_map = {n: f"model-0000{1 + i // 2}-of-00002.safetensors" for i, n in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(
                {"metadata": {"total_size": sum(4 * v.numel() for v in held.values())}, "weight_map": weight_map}
            )
        )
        (folder / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    return place


@pytest.fixture
def copies(originals: Path, tmp_path: Path) -> Callable[[], Path]:
    """Fresh copies of the originals, again and again."""

    def fresh() -> Path:
        place = tmp_path / "trial"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(originals, place)
        return place

    return fresh


RANK_FILES = ["rank-00000.safetensors", "rank-00001.safetensors"]


def _damage(rng: random.Random, kind: str, folder: Path, other: Path) -> None:
    if kind == "folder":
        for _ in range(rng.randint(1, 3)):
            mutate_folder(rng, folder, other)
        return
    if kind == "tensors":
        path = folder / rng.choice(RANK_FILES)
        data = path.read_bytes()
        begins = 8 + struct.unpack("<Q", data[:8])[0]
        path.write_bytes(mutate_bytes(rng, data, begins))
    elif kind == "header":
        path = folder / rng.choice(RANK_FILES)
        path.write_bytes((mutate_header if rng.random() < 0.7 else mutate_bytes)(rng, path.read_bytes()))
    else:
        path = folder / (MANIFEST if kind == "manifest" else TRAINER)
        if rng.random() < 0.5:
            path.write_text(mutate_json(rng, path.read_text()))
        else:
            path.write_bytes(mutate_bytes(rng, path.read_bytes()))


@EACH
@pytest.mark.parametrize("kind", KINDS)
def test_damage(
    count: int, kind: str, copies: Callable[[], Path], originals: Path, bounded: Callable[[], None]
) -> None:
    """What verify calls intact is what was saved; what reads differently is caught by its checksum, too."""
    intact = originals / "a/checkpoints/step-00000100"
    unchanged = {name: data for name, data in _contents(intact).items() if name != MANIFEST}
    caught = 0
    for number in range(count):
        place = copies()
        folder, other = place / "a/checkpoints/step-00000100", place / "b/checkpoints/step-00000200"
        _damage(random.Random(f"{kind} {number}"), kind, folder, other)
        bounded()
        wrong, values, manifest = look(folder, intact)
        case = (kind, number, wrong)
        changed = differing(values)
        if not wrong:
            assert not changed and values.keys() == tensors(1).keys(), case
            assert manifest == Manifest.read(intact) and _contents(folder).items() >= unchanged.items(), case
        if manifest is not None and (kind != "folder" or manifest == Manifest.read(intact)):
            sums = manifest.checksums()
            assert manifest == Manifest.read(intact), case
            assert all(checksum(values[key]) != sums[key] for key in changed), case
        caught += bool(wrong)
    assert caught > count * 3 // 4


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and not file.is_symlink()}


@EACH
def test_malice(count: int, copies: Callable[[], Path], originals: Path, bounded: Callable[[], None]) -> None:
    """Signed by whoever changed it, a checkpoint may hold other values. It may not hurt."""
    refused = 0
    for number in range(count):
        rng = random.Random(f"malice {number}")
        folder = copies() / "a/checkpoints/step-00000100"
        for name in rng.sample([*RANK_FILES, TRAINER], rng.randint(0, 2)):
            path = folder / name
            if name == TRAINER:
                path.write_text(mutate_json(rng, path.read_text()))
            else:
                path.write_bytes(mutate_header(rng, path.read_bytes()))
        resign(folder)
        if rng.random() < 0.8:
            raw = json.loads((folder / MANIFEST).read_text())["manifest"]
            (folder / MANIFEST).write_text(sign(mutate_tree(rng, raw)))
        bounded()
        wrong, values, _ = look(folder, originals / "a/checkpoints/step-00000100")
        refused += bool(wrong) or len(values) < len(tensors(1))
    assert refused > count // 2


@mutations(10, 40)
def test_exports_of_a_signed_state(count: int, tmp_path: Path, bounded: Callable[[], None]) -> None:
    """The model's configuration in trainer.json may say anything, and say it with a signature."""
    folder = write_checkpoint(tmp_path / "run", 100, 1, shapes=WHOLE_LLAMA)
    trainer = (folder / TRAINER).read_text()
    refused = 0
    for number in range(count):
        rng = random.Random(f"state {number}")
        tree = json.loads(trainer)
        mutate_tree(rng, rng.choice([tree, tree["model_config"]]))
        (folder / TRAINER).write_text(json.dumps(tree))
        resign(folder)
        bounded()
        log: list[str] = []
        attempt(log, lambda: export_hf(folder, tmp_path / "export", check="none"))
        refused += bool(log)
        assert (tmp_path / "export").exists() != bool(log), (number, log)
        shutil.rmtree(tmp_path / "export", ignore_errors=True)
    assert count // 4 < refused < count


@EACH
@pytest.mark.parametrize("kind", ["shards", "index and config"])
def test_hugging_face_folders(count: int, kind: str, copies: Callable[[], Path], bounded: Callable[[], None]) -> None:
    """Whatever our reader takes, the safetensors library takes too, and both read the same values."""
    refused = 0
    for number in range(count):
        rng = random.Random(f"{kind} {number}")
        place = copies()
        folder, other = place / "hf_a", place / "hf_b"
        if kind == "shards":
            path = folder / f"model-0000{rng.randint(1, 2)}-of-00002.safetensors"
            match rng.randrange(3):
                case 0:
                    path.write_bytes(mutate_header(rng, path.read_bytes()))
                case 1:
                    path.write_bytes(mutate_bytes(rng, path.read_bytes()))
                case _:
                    mutate_folder(rng, folder, other)
        else:
            path = folder / rng.choice(["model.safetensors.index.json", "config.json"])
            path.write_text(mutate_json(rng, path.read_text()))
        bounded()
        log: list[str] = []
        attempt(log, load_config, ModelConfig(pretrained=str(folder)))
        source = attempt(log, SafetensorsSource, folder)
        refused += bool(log)
        if source is None:
            continue
        shards = {file.path for file in source.file_of.values()}
        assert all(path.resolve().parent == folder.resolve() for path in shards), (kind, number)
        try:
            theirs = {name: value for path in shards for name, value in load_file(path).items()}
        except SafetensorError as error:
            raise AssertionError((kind, number, "we take what safetensors refuses")) from error
        assert set(source.order()) == set(theirs)
        for name, value in theirs.items():
            assert source.shape(name) == tuple(value.shape)
            mine = attempt(log, source.read, name, 0, value.numel())
            if mine is not None:
                assert mine.dtype == value.dtype
                assert torch.equal(mine.view(torch.uint8), value.reshape(-1).view(torch.uint8)), (kind, number, name)
        source.close()
    assert refused > count // 3


def test_a_message_for_each(copies: Callable[[], Path], tmp_path: Path) -> None:
    """The trials would prove nothing if the originals were refused, or if these things were not what is meant."""
    place = copies()
    wrong, values, _ = look(place / "a/checkpoints/step-00000100", place / "a/checkpoints/step-00000100")
    assert not wrong and not differing(values) and len(values) == len(SHAPES) * 3 + 1
    assert SafetensorsSource(place / "hf_a").read("model.norm.weight", 0, 8).shape == (8,)
    with pytest.raises(ModelError):
        SafetensorsSource(place / "a")
    with pytest.raises(CheckpointError):
        CheckpointReader(place / "hf_a")
