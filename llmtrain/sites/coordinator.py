"""The coordinator at which sites meet: torchft's lighthouse, on an address that only they reach."""

from __future__ import annotations

import os
import socket
from typing import Any

from llmtrain.base.errors import UserError
from llmtrain.config.sites_rules import private
from llmtrain.sites.membership import SILENT_S
from llmtrain.sites.tls import Forwarder, Keys, as_it_is


def started(bind: str, wait_s: float, keys: Keys | None) -> Any:
    """torchft's lighthouse, which listens on HOST:PORT; with keys behind a forwarder. Raises UserError."""
    os.environ.setdefault("RUST_LOG", "warn")  # it would tell of every meeting, with all that sites say there
    try:
        from torchft.coordination import LighthouseServer
    except ImportError as error:
        raise UserError(
            f"the coordinator is torchft's lighthouse, which cannot be imported ({error}). Run "
            "`pip install 'llmtrain[sites]'`."
        ) from error
    if keys is None:
        private_address(
            "--bind",
            bind,
            "what sites say is neither encrypted nor signed. Join the sites by a tunnel "
            "(WireGuard, ssh) and give its address",
        )
    try:
        server = LighthouseServer(
            bind=bind if keys is None else "127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=round(1000 * wait_s),
            quorum_tick_ms=100,
            heartbeat_timeout_ms=round(1000 * SILENT_S),
        )
        if keys is not None:
            host, _, port = bind.rpartition(":")
            inside = int(server.address().rpartition(":")[2])
            Forwarder((host.strip("[]"), int(port)), ("127.0.0.1", inside), accept=keys.accept, connect=as_it_is)
    except Exception as error:  # torchft has no class of its own
        raise UserError(f"--bind {bind}: {error}. Give an address of this host and a free port.") from error
    return server


def private_address(flag: str, address: str, public_rule: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT. Raises UserError: it is not one, or the host has a public address."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        raise UserError(f"{flag} {address}: must be HOST:PORT. Give an address of this host in the sites' network.")
    try:
        found = {str(each[0]) for *_, each in socket.getaddrinfo(host, int(port))}
    except OSError as error:
        raise UserError(
            f"{flag} {address}: {error.strerror}. Give HOST:PORT, a private address of this host."
        ) from error
    if public := sorted(each for each in found if not private(each)):
        raise UserError(f"{flag} {address}: {public[0]} is no private address, and {public_rule}.")
    return host, int(port)
