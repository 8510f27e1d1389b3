"""What a cable does to frames: rate, delay, loss, and one direction at a time where it is half-duplex. No I/O here."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

# A queue holds this many seconds at the link's rate, or four of the largest frames where that is more.
QUEUE_S = 0.2
QUEUE_MIN_BYTES = 256 * 1024
# The token bucket's depth at the link's rate: what a sender that had to wait for a core may catch up.
BURST_S = 0.02
HEADERS = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps


@dataclass
class Wire:
    """The medium, with tokens for all after a moment (s). Two directions share one where the link is half-duplex."""

    free_at: float = 0.0


@dataclass
class Pipe:
    """One direction. rate: bytes/s; delay_s: one way; loss: share of frames."""

    wire: Wire
    rate: float = math.inf
    delay_s: float = 0.0
    loss: float = 0.0

    def admit(self, now: float, size: int) -> float | None:
        """When a frame of `size` bytes that comes at `now` is through; None if it is lost or the queue is full."""
        if self.loss and random.random() < self.loss:
            return None
        if self.rate == math.inf:
            return now + self.delay_s
        start = max(now - BURST_S, self.wire.free_at)
        if start - now > max(QUEUE_S, QUEUE_MIN_BYTES / self.rate):
            return None
        self.wire.free_at = start + size / self.rate
        return max(now, self.wire.free_at) + self.delay_s


class Link:
    """Two directions: `there` away from the host that it belongs to (its upload), `back` toward it."""

    def __init__(
        self,
        rate_mbit: float | None = None,
        delay_ms: float = 0.0,
        loss: float = 0.0,
        half_duplex: bool = False,
    ) -> None:
        rate = math.inf if rate_mbit is None else rate_mbit * 1e6 / 8
        wire = Wire()
        self.there = Pipe(wire, rate, delay_ms / 1e3, loss)
        self.back = Pipe(wire if half_duplex else Wire(), rate, delay_ms / 1e3, loss)
        self.lossy = loss > 0


def wire_size(frame: bytes) -> int:
    """Bytes on the wire of a frame with virtio-net header (10 bytes): each segment of a large one has its headers."""
    length = len(frame) - 10
    if frame[1] == 0:
        return length
    segment = int.from_bytes(frame[4:6], "little")
    return length + HEADERS * (math.ceil((length - HEADERS) / segment) - 1)
