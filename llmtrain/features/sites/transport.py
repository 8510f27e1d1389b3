"""Transport of parameters from a site's rank that owns them to another site's rank that needs them.

No rank ever holds a complete model; the sites may differ in their number of ranks and sharding. One request on a
connection:

    4 bytes, length of a JSON object: run, to, round, kind, take
    4 bytes, length of a JSON object: either error, or bytes
    the elements: fp32, little-endian; or bytes, of compressed blocks
    8 bytes, xxh3_64 of them

Nothing is encrypted or signed: sites listen on private addresses, such as a tunnel's.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.untrusted import loads, shown, to_end
from llmtrain.storage.region import Region, shared

Array = npt.NDArray[Any]
"""fp32, or uint8."""
Rectangle = tuple[int, int, int, int]
"""(first element, elements from one row to the next, rows, elements of a row) of a flat array."""
Pieces = Sequence[tuple[int, str, Region]]
"""(first element in the array, Hugging Face name, elements of the tensor) of everything that a rank owns."""

_HEADER_BYTES = 1 << 24
_REQUEST_BYTES = 1 << 22
"""Limit of a request's header, since 64 strangers may send one at a time; a rectangle takes about 30 bytes."""
_AT_ONCE = 1 << 20
"""Bytes sent or received at a time."""
_CONNECTIONS = 64
_LARGEST = 1 << 48
"""More elements than any tensor has."""
_RUNS = 1 << 10
"""More sections than any fused matrix has."""


class WireError(Exception):
    """A transfer failed; the message gives the reason, without the site's name."""


class Server:
    """Serves this rank's arrays to the ranks of other sites."""

    def __init__(self, host: str, *, run: str, member: str, pieces: Pieces, limit_s: float) -> None:
        """`run`: checksum of the settings that sites share; other requests are refused. `member`: this site's id, so
        that a later process at this address is not mistaken for it. `limit_s`: longest connection. Raises OSError."""
        self._run, self._member, self._limit_s = run, member, limit_s
        self._index = [[at, name, *_packed(region)] for at, name, region in pieces]
        self._arrays: dict[str, tuple[int, Array]] = {}
        self._sent = 0
        self._counting = threading.Lock()
        self._places = threading.BoundedSemaphore(_CONNECTIONS)
        self._silent: dict[int, tuple[socket.socket, str]] = {}
        """Connections without a request yet and their hosts, the oldest first, by the ids of their sockets."""
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, 0))
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        threading.Thread(target=self._accept, name="sites-listen", daemon=True).start()

    def publish(self, round_: int, arrays: Mapping[str, Array]) -> None:
        self._arrays = {kind: (round_, array) for kind, array in arrays.items()}

    def sent_bytes(self) -> int:
        """Return the bytes of elements sent since the last call."""
        with self._counting:
            sent, self._sent = self._sent, 0
        return sent

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        """Serve each connection in a thread of its own; close silent ones to make room for new ones."""
        while True:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # too many open files: others may hold them
                continue
            if not self._places.acquire(blocking=False) and not self._end_silent():
                connection.close()
                continue
            with self._lock:
                self._silent[id(connection)] = connection, host
            threading.Thread(target=self._serve, args=(connection,), name="sites-serve", daemon=True).start()

    def _end_silent(self) -> bool:
        """End the oldest silent connection of the host with most of them, as strangers could hold all places; True if
        one has ended."""
        with self._lock:
            if not self._silent:
                return False
            index = to_end([host for _, host in self._silent.values()])
            connection, _ = self._silent.pop(list(self._silent)[index])
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        return self._places.acquire(timeout=1.0)

    def _has_spoken(self, connection: socket.socket) -> None:
        with self._lock:
            self._silent.pop(id(connection), None)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, WireError), connection:
                line = _Line(connection, time.monotonic() + self._limit_s)
                try:
                    asked = line.receive_header(_REQUEST_BYTES)
                    self._has_spoken(connection)
                    answer = self._answer(asked)
                except OSError:
                    raise
                except Exception as error:  # a stranger's header may cause any error
                    line.send_header({"error": f"refused: {error}"})
                else:
                    self._send(line, *answer)
        finally:
            self._has_spoken(connection)
            self._places.release()

    def _answer(self, asked: Mapping[str, Any]) -> tuple[dict[str, Any], Iterable[Array]]:
        """Return (header, elements). Raises WireError, and others for a malformed request."""
        if asked["run"] != self._run:
            raise WireError("it belongs to another run")
        if asked["to"] != self._member:
            raise WireError(f"it is for {shown(asked['to'], 80)}, and this is {self._member}")
        if asked["kind"] == "index":
            return {"bytes": 0, "index": self._index}, []
        round_, array = self._arrays.get(str(asked["kind"]), (None, None))
        if array is None or round_ != asked["round"]:
            raise WireError(f"{shown(asked['kind'], 40)} of round {shown(asked['round'], 20)} is not here")
        take = asked["take"]
        size = sum(rows * length for _, _, rows, length in (_checked(array, rectangle) for rectangle in take))
        if size > array.size:
            raise WireError(f"it asks for {size} of {array.size} elements")
        return {"bytes": array.itemsize * size}, (_cut(array, rectangle) for rectangle in take)

    def _send(self, line: _Line, header: dict[str, Any], parts: Iterable[Array]) -> None:
        line.send_header(header)
        if not header["bytes"]:
            return
        hash_ = xxhash.xxh3_64()
        for part in parts:
            for row in _rows(part):
                data = row.data.cast("B")
                hash_.update(data)
                line.send(data)
        with self._counting:  # before the last bytes: a peer that has all of them is counted
            self._sent += header["bytes"]
        line.send(struct.pack("<Q", hash_.intdigest()))


class Peer:
    """A rank of another site."""

    def __init__(self, address: str, *, run: str, member: str) -> None:
        self._address, self._run, self._member = address, run, member
        self._index: list[tuple[int, str, Region]] | None = None

    def covers(self, mine: Pieces, deadline_s: float) -> list[tuple[Rectangle, Rectangle]]:
        """Return (elements of the peer's array, the same ones in this rank's) that both own. Raises WireError."""
        if self._index is None:
            header = self._ask("index", 0, [], deadline_s, lambda _line, header: header)
            try:
                self._index = [(int(at), str(name), _unpacked(rest)) for at, name, *rest in header["index"]]
            except (KeyError, OverflowError, TypeError, ValueError) as error:
                raise WireError(f"its index makes no sense ({error})") from error
        by_name: dict[str, list[tuple[int, Region]]] = {}
        for at, name, region in self._index:
            by_name.setdefault(name, []).append((at, region))
        pairs = []
        left = sum(region.numel for _, _, region in mine)
        for at, name, region in mine:
            for other_at, other in by_name.get(name, ()):
                if time.monotonic() > deadline_s:
                    raise WireError("its index does not end")
                for overlap in shared(other, region):
                    if (left := left - overlap.rows * overlap.length) < 0:
                        raise WireError("its index makes no sense (it has elements twice)")
                    rows = overlap.rows, overlap.length
                    source = (other_at + overlap.at[0], overlap.step[0], *rows)
                    pairs.append((source, (at + overlap.at[1], overlap.step[1], *rows)))
        return pairs

    def fetch(
        self, kind: str, round_: int, pairs: Sequence[tuple[Rectangle, Rectangle]], into: Array, deadline_s: float
    ) -> int:
        """Fill the elements `pairs` (see `covers`) of `into`; return the received bytes. Raises WireError."""
        if not pairs:
            return 0
        places = [_cut(into, mine) for _, mine in pairs]

        def receive(line: _Line, header: Mapping[str, Any]) -> int:
            expected = into.itemsize * sum(place.size for place in places)
            if header.get("bytes") != expected:
                raise WireError(f"it announces {shown(header.get('bytes'), 20)} bytes instead of {expected}")
            hash_ = xxhash.xxh3_64()
            for place in places:
                for row in _rows(place):
                    data = row.data.cast("B")
                    line.receive_into(data)
                    hash_.update(data)
            sent = bytearray(8)
            line.receive_into(memoryview(sent))
            if struct.unpack("<Q", sent)[0] != hash_.intdigest():
                raise WireError("the checksum of what it sent is wrong")
            return expected

        return self._ask(kind, round_, [source for source, _ in pairs], deadline_s, receive)

    def _ask(
        self,
        kind: str,
        round_: int,
        take: list[Rectangle],
        deadline_s: float,
        read: Callable[[_Line, Mapping[str, Any]], Any],
    ) -> Any:
        host, _, port = self._address.rpartition(":")
        began_s = time.monotonic()
        try:
            address = (host, int(port))
            with socket.create_connection(address, timeout=max(deadline_s - began_s, 0.001)) as connection:
                line = _Line(connection, deadline_s, heart.beat)
                line.send_header({"run": self._run, "to": self._member, "round": round_, "kind": kind, "take": take})
                header = line.receive_header()
                if "error" in header:
                    raise WireError(shown(header["error"], 200))
                return read(line, header)
        except TimeoutError as error:
            waited = f"it has not sent all of it within {time.monotonic() - began_s:.1f} s"
            raise WireError(f"{self._address}: {waited}") from error
        except (OSError, OverflowError, WireError, ValueError) as error:
            raise WireError(f"{self._address}: {shown(error, 200)}") from error


class _Line:
    """A connection with one deadline for all messages."""

    def __init__(self, connection: socket.socket, deadline_s: float, moved: Callable[[], None] = lambda: None) -> None:
        """`moved`: called while data moves."""
        self._connection, self._deadline_s, self._moved = connection, deadline_s, moved

    def send(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        for low in range(0, len(view), _AT_ONCE):
            self._set_timeout()
            self._connection.sendall(view[low : low + _AT_ONCE])

    def send_header(self, header: Mapping[str, Any]) -> None:
        text = json.dumps(header).encode()
        self.send(struct.pack("<I", len(text)) + text)

    def receive_into(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            self._set_timeout()
            count = self._connection.recv_into(data[done : done + _AT_ONCE])
            if not count:
                raise WireError(f"it has closed the connection after {done} of {len(data)} bytes")
            done += count

    def receive_header(self, limit: int = _HEADER_BYTES) -> dict[str, Any]:
        size = bytearray(4)
        self.receive_into(memoryview(size))
        (length,) = struct.unpack("<I", size)
        if length > limit:
            raise WireError(f"its header of {length} bytes is too long")
        text = bytearray(length)
        self.receive_into(memoryview(text))
        header = loads(bytes(text))
        if not isinstance(header, dict):
            raise WireError("its header is not a JSON object")
        return header

    def _set_timeout(self) -> None:
        self._moved()
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)


def _checked(array: Array, rectangle: Sequence[int]) -> Rectangle:
    """Raises ValueError: the rectangle is outside of the array."""
    at, step, rows, length = (int(number) for number in rectangle)
    inside = at >= 0 and rows > 0 and length > 0 and step >= 0 and at + (rows - 1) * step + length <= array.size
    if not inside or (rows > 1 and step < length):
        raise ValueError(f"{(at, step, rows, length)} is outside of {array.size} elements")
    return at, step, rows, length


def _cut(array: Array, rectangle: Sequence[int]) -> Array:
    """Return a view [rows, elements of a row]. Raises ValueError: it is outside of the array."""
    at, step, rows, length = _checked(array, rectangle)
    size = array.itemsize
    return np.lib.stride_tricks.as_strided(array[at:], (rows, length), (step * size, size))


def _rows(part: Array) -> Iterator[Array]:
    yield from part


def _packed(region: Region) -> list[Any]:
    return [region.start, region.numel, region.runs, region.stride, region.skip]


def _unpacked(rest: Sequence[Any]) -> Region:
    start, numel, runs, stride, skip = rest
    if len(runs) > _RUNS:
        raise ValueError(f"a region has {len(runs)} runs, more than {_RUNS}")
    pairs = tuple((int(offset), int(length)) for offset, length in runs)
    region = Region(int(start), int(numel), pairs, int(stride), int(skip))
    numbers = (region.start, region.numel, region.stride, region.skip, *(bound for pair in pairs for bound in pair))
    if any(not 0 <= number < _LARGEST for number in numbers):
        raise ValueError(f"a region has numbers from {min(numbers)} to {max(numbers)}, outside of 0 to {_LARGEST - 1}")
    ends = [offset + length for offset, length in pairs]
    begins = [*(offset for offset, _ in pairs[1:]), region.stride]
    elements = sum(length for _, length in pairs)
    if pairs and (any(end > begin for end, begin in zip(ends, begins, strict=True)) or region.skip >= elements):
        raise ValueError(f"runs that do not fit into {region.stride} elements")
    return region
