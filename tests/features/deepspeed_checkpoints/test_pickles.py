"""Foreign .pt files: what is read, and that nothing in them is run or believed."""

from __future__ import annotations

import collections
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.base.errors import CheckpointError
from llmtrain.features.deepspeed_checkpoints.pickles import PickleFile

VALUES = torch.arange(6.0).reshape(2, 3)


class Gadget:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


class Claim:
    """Pickles as a tensor of `numel` elements from `start` in a storage that claims `stored`."""

    def __init__(self, numel: int, stored: int, start: int = 0) -> None:
        self.numel, self.stored, self.start = numel, stored, start

    def __reduce__(self) -> Any:
        storage = ("storage", torch.FloatStorage, "0", "cpu", self.stored)
        hooks: collections.OrderedDict[str, Any] = collections.OrderedDict()
        place = (self.start, (self.numel,), (1,))  # first element, shape, strides
        return torch._utils._rebuild_tensor_v2, (_Persistent(storage), *place, False, hooks)


class _Persistent:
    def __init__(self, key: Any) -> None:
        self.key = key


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.key if isinstance(obj, _Persistent) else None


def pickled(tree: Any, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol).dump(tree)
    return buffer.getvalue()


def archive(path: Path, pickle_bytes: bytes, data: bytes = b"", *, compression: int = zipfile.ZIP_STORED) -> Path:
    """The archive that torch.save would make around a pickle."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in {"data.pkl": pickle_bytes, "version": b"3\n", "data/0": data}.items():
            file.writestr(f"archive/{name}", content)
    return path


def test_reads_what_torch_saves(tmp_path):
    half = torch.randn(5, dtype=torch.bfloat16)
    torch.save({"a": VALUES, "row": VALUES[1], "half": [half], "step": torch.tensor(7.0), "n": 3}, tmp_path / "a.pt")
    file = PickleFile(tmp_path / "a.pt")
    file.verify()
    tree = file.tree
    assert torch.equal(file.read(file.tensor(tree["a"]), 1, 5), VALUES.reshape(-1)[1:5])
    assert torch.equal(file.read(file.tensor(tree["row"]), 0, 3), VALUES[1])
    assert torch.equal(file.read(file.tensor(tree["half"][0]), 0, 5), half)
    assert (file.number(tree["step"]), file.number(tree["n"])) == (7, 3)


def test_reads_beside_state_that_scripts_add(tmp_path):
    state = {"rng": np.random.RandomState(0).get_state(), "loss": np.float64(1.5), "a": VALUES}
    torch.save(state, tmp_path / "a.pt")
    file = PickleFile(tmp_path / "a.pt")
    assert torch.equal(file.read(file.tensor(file.tree["a"]), 0, 6), VALUES.reshape(-1))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda canary: Gadget(os.system, f"touch {canary}"),
        lambda canary: Gadget(eval, f"open({str(canary)!r}, 'w').close()"),
        lambda canary: Gadget(exec, f"open({str(canary)!r}, 'w').close()"),
        lambda canary: Gadget(os.mkdir, str(canary)),
        lambda canary: Gadget(torch.hub.load_state_dict_from_url, f"file://{canary}"),
        lambda canary: Gadget(torch.load, str(canary)),
        lambda canary: Gadget(np.fromfile, str(canary)),
        lambda canary: Gadget(getattr, "", "__class__"),
        lambda canary: Gadget(bytearray, 1 << 40),
    ],
    ids=["system", "eval", "exec", "mkdir", "hub", "load", "fromfile", "getattr", "bytearray"],
)
def test_nothing_that_a_pickle_asks_for_is_run(tmp_path, make, protocol):
    canary = tmp_path / "canary"
    bad = archive(tmp_path / "bad.pt", pickled({"module": make(canary), "global_steps": 1}, protocol))
    with pytest.raises(CheckpointError, match=r"bad\.pt"):
        PickleFile(bad)
    assert not canary.exists()


def test_the_gadgets_do_run_elsewhere(tmp_path):
    """The canary is real: Python's own pickle runs it."""
    pickle.loads(pickled(Gadget(os.mkdir, str(tmp_path / "canary"))))
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "claim",
    [Claim(1 << 40, 1 << 40), Claim(1 << 40, 4), Claim(4, 4, 1), Claim(2, 3)],
    ids=["terabytes", "beyond its storage", "shifted", "smaller storage"],
)
def test_no_claim_of_a_tensor_is_believed(tmp_path, claim):
    file = PickleFile(archive(tmp_path / "bad.pt", pickled({"a": claim}), b"\0" * 16))
    with pytest.raises(CheckpointError, match="fit the record"):
        file.tensor(file.tree["a"])


def test_every_flipped_bit_and_every_cut_is_found(tmp_path):
    torch.save({"a": VALUES, "b": torch.randn(300), "steps": [1, 2, 3]}, tmp_path / "a.pt")
    good = (tmp_path / "a.pt").read_bytes()

    def contents(path: Path) -> Any:
        file = PickleFile(path)
        file.verify()
        tensors = [file.tensor(file.tree[key]) for key in ("a", "b")]
        return [file.read(tensor, 0, tensor.numel()).tolist() for tensor in tensors] + file.tree["steps"]

    want = contents(tmp_path / "a.pt")
    bad = tmp_path / "bad.pt"
    found = 0
    for at in range(0, len(good), 7):
        bad.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
        try:
            assert contents(bad) == want, at  # a bit between the records, or one that means nothing
        except CheckpointError:
            found += 1
    assert found > len(good) // 7 // 3  # the rest is padding
    for end in range(0, len(good), 101):
        bad.write_bytes(good[:end])
        with pytest.raises(CheckpointError):
            contents(bad)


def test_no_compressed_record_and_no_pickle_without_an_archive(tmp_path):
    bad = archive(tmp_path / "bad.pt", pickled({"a": 1}), b"\0" * 4096, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        PickleFile(bad)
    (tmp_path / "bad.pt").write_bytes(pickled(Gadget(os.mkdir, str(tmp_path / "canary"))))
    with pytest.raises(CheckpointError, match=r"no \.pt file"):
        PickleFile(tmp_path / "bad.pt")
    assert not (tmp_path / "canary").exists()


def test_no_link_and_no_pipe(tmp_path):
    torch.save({"a": VALUES}, tmp_path / "a.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "a.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    for name in ("link.pt", "pipe.pt", "missing.pt"):
        with pytest.raises(CheckpointError, match=f"{name} cannot be opened"):
            PickleFile(tmp_path / name)


def nested(depth: int) -> bytes:
    """A pickle of so many tuples, one in the other."""
    return b"\x80\x02)" + b"\x85" * depth + b"."


def doubled(times: int) -> bytes:
    """A pickle of a tuple of twice a tuple of twice ..., 2^times values in a few bytes."""
    step = b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(times))
    return b"\x80\x02K\x01" + step + b"."


def doubled_lists(times: int) -> bytes:
    """The same of lists, which are filled after they were made, as {"a": ...}."""
    steps = (b"]q" + bytes([n]) + (b"h" + bytes([n - 1]) + b"a") * 2 for n in range(1, times))
    return b"\x80\x02]q\x00" + b"".join(steps) + b"}X\x01\0\0\0ah" + bytes([times - 1]) + b"s."


def in_dict(value: bytes, *, key: bool) -> bytes:
    """A pickle of {"a": value}, or of {value: 1}."""
    inner = value[2:-1]
    return b"\x80\x02}" + (inner + b"K\x01" if key else b"X\x01\0\0\0a" + inner) + b"s."


@pytest.mark.parametrize("key", [False, True], ids=["value", "key"])
@pytest.mark.parametrize("bomb", [nested(200_000), doubled(40)], ids=["deep", "doubled"])
def test_a_small_pickle_that_stands_for_endless_tuples_is_refused(tmp_path, bomb, key):
    """As a key they would be hashed, as a value printed: neither ends, or the stack of C overflows."""
    with pytest.raises(CheckpointError, match="pickle"):
        PickleFile(archive(tmp_path / "bad.pt", in_dict(bomb, key=key)))


def test_lists_that_stand_for_endless_values_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="pickle"):
        PickleFile(archive(tmp_path / "bad.pt", doubled_lists(40)))
    itself = b"\x80\x02}q\x00X\x01\0\0\0ah\x00s."
    with pytest.raises(CheckpointError, match="itself"):
        PickleFile(archive(tmp_path / "bad.pt", itself))


def test_what_is_no_tensor_in_one_piece_and_no_number_is_named(tmp_path):
    lies = torch.nn.Parameter(VALUES)
    lies.numel = 1 << 40  # type: ignore[method-assign, assignment]
    torch.save({"tuple": (1, 2), "turned": VALUES.t(), "lies": lies, "n": float("inf")}, tmp_path / "a.pt")
    file = PickleFile(tmp_path / "a.pt")
    for key, says in {"tuple": "tuple", "turned": "piece", "lies": "is where"}.items():
        with pytest.raises(CheckpointError, match=says):
            file.tensor(file.tree[key])
    with pytest.raises(CheckpointError, match=r"\binf\b"):
        file.number(file.tree["n"])


def records(path: Path, names: dict[str, bytes], before: bytes = b"", comment: bytes = b"") -> Path:
    """A zip archive of these records, behind some other bytes."""
    path.write_bytes(before)
    with zipfile.ZipFile(path, "a") as file:
        file.comment = comment
        for name, content in names.items():
            file.writestr(name, content)
    return path


GOOD, BAD = pickled({"a": 1}), pickled(Gadget(os.mkdir, "/nonexistent/canary"))
VERSION = {"archive/version": b"3\n"}


@pytest.mark.parametrize(
    ("names", "before", "comment"),
    [
        ({"archive/DATA.PKL": BAD, "archive/data.pkl": GOOD, **VERSION}, b"", b""),
        ({"archive/data.pkl": GOOD, "archive/DATA.PKL": BAD, **VERSION}, b"", b""),
        ({"archive/DATA.PKL": GOOD, **VERSION}, b"", b""),
        ({"archive/version": b"3\n", "other/data.pkl": GOOD}, b"", b""),
        ({"archive/data.pkl": GOOD, "archive/inner/data.pkl": BAD, **VERSION}, b"", b""),
        ({"archive/data.pkl": GOOD, **VERSION}, BAD, b""),
        ({"archive/data.pkl": GOOD, **VERSION}, b"", b"PK\5\6" + b"\0" * 18),
        ({"archive/data.pkl": GOOD, **VERSION, "archive/byteorder": b"big"}, b"", b""),
    ],
    ids=["upper first", "upper last", "upper only", "two folders", "inner", "pickle before", "comment", "big-endian"],
)
def test_the_pickle_that_is_looked_at_is_the_one_that_torch_reads(tmp_path, names, before, comment):
    with pytest.raises(CheckpointError, match=r"torch\.save|\.pt file|endian"):
        PickleFile(records(tmp_path / "bad.pt", names, before, comment))


def test_an_archive_with_two_lists_of_records_is_refused(tmp_path):
    """zipfile finds the list from the end of the file, torch goes by the place that the end names."""
    torch.save({"a": VALUES}, tmp_path / "a.pt")
    PickleFile(tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    at = data.rindex(b"PK\6\7")
    data[at + 8 : at + 16] = (64).to_bytes(8, "little")
    (tmp_path / "bad.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="ends"):
        PickleFile(tmp_path / "bad.pt")
