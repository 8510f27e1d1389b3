"""Round trip and rate between sites over plain TCP: one side answers, the other measures. Standard library only."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llmtrain.base.errors import UserError
from llmtrain.base.files import replace_file
from llmtrain.cluster.doctor import tcp_rates

_TOKEN = "llmtrain sites measure"
_WINDOW_S, _LONGEST_WINDOW_S = 1.5, 6.0
_TRIPS = 30
"""Round trips in a window: its first third, which does not count, has ten, in which TCP's window opens."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    site: str
    """HOST:PORT of the other side."""
    trip_s: float
    """Shortest round trip."""
    up: float
    """bit/s to the other side, of one connection, alone."""
    down: float
    both_up: float
    """bit/s while both directions are used, like sites do."""
    both_down: float


class Answering(tcp_rates.Host):
    """The answering side, until it is closed."""

    def __init__(self, host: str, port: int, limit_s: float) -> None:
        """Raises OSError: it cannot listen there."""
        self._at = host, port
        super().__init__({"host": "", "limit_s": limit_s, "token": _TOKEN, "pair_limit_s": 0.0})

    def listen(self) -> socket.socket:
        return socket.create_server(self._at)

    def serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            super().serve()

    def wait(self) -> None:
        time.sleep(max(0.0, self.until - time.monotonic()))
        self.listener.shutdown(socket.SHUT_RDWR)  # a close alone waits for the thread in accept()
        self.listener.close()


class _Asking(tcp_rates.Host):
    def __init__(self, host: str, port: int) -> None:
        """The measuring side, which listens nowhere."""
        self.me = ""
        self.ask = {"token": _TOKEN, "ports": [port], "addresses": {"": host}}

    def measured(self, site: str) -> Measured:
        """Raises OSError, ValueError."""
        trip_s = self.ping("")
        window_s = min(_LONGEST_WINDOW_S, max(_WINDOW_S, _TRIPS * trip_s))
        found = self.rates("", window_s)
        del found["idle"]
        if not all(found.values()):
            raise OSError("nothing came within the time")
        return Measured(site=site, trip_s=trip_s, **found)


def measure(sites: Sequence[str]) -> list[Measured]:
    """Measure the line to each site (HOST:PORT of `llmtrain sites measure --listen`). Raises UserError."""
    found = []
    for site in sites:
        host, colon, port = site.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
            raise UserError(
                f"--sites {site}: must be HOST:PORT. Give what `llmtrain sites measure --listen` has there."
            )
        try:
            found.append(_Asking(host, int(port)).measured(site))
        except (OSError, ValueError) as error:
            raise UserError(
                f"--sites {site}: no measurement ({error}). Start `llmtrain sites measure --listen {site}` there, and "
                "let this host reach that port."
            ) from error
    return found


def examine(sites: Sequence[str], out: str | None, as_json: bool) -> int:
    """Measure, print, and write the file for `llmtrain sites plan --measured`. Raises UserError."""
    found = measure(sites)
    text = json.dumps({"lines": [asdict(each) for each in found]}, indent=1)
    if as_json:
        print(text)
    else:
        for each in found:
            rates = " ".join(f"{name} {rate / 1e6:.3g}" for name, rate in (("up", each.up), ("down", each.down)))
            both = f"both at once {each.both_up / 1e6:.3g} and {each.both_down / 1e6:.3g}"
            print(f"{each.site}: round trip {1e3 * each.trip_s:.3g} ms; Mbit/s of one connection: {rates}, {both}")
    if out is not None:
        try:
            replace_file(Path(out), text.encode() + b"\n")
        except OSError as error:
            raise UserError(f"--out {out}: {error.strerror}. Give a file in a folder that can be written.") from error
        if not as_json:
            print(f"wrote {out}: llmtrain sites plan RUN.yaml --measured {out} --sites {len(found) + 1}")
    return 0
