"""`llmtrain sites measure --listen HOST:PORT`: the side that answers while another site measures the line between."""

from __future__ import annotations

import argparse
import socket
from typing import Any

from llmtrain.base import log, units
from llmtrain.base.errors import UserError
from llmtrain.cluster.doctor.sites import Answering
from llmtrain.config.sites_rules import private

_LONGEST_S = 86_400.0


def register(commands: Any) -> None:
    """Add the command to `llmtrain sites`."""
    parser = commands.add_parser("measure", help="answer while another site measures the line: doctor --sites")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="a private address of this host")
    parser.add_argument("--for-s", type=float, default=300.0, metavar="S", help="seconds until it ends (300)")
    parser.set_defaults(run=command)


def command(args: argparse.Namespace) -> int:
    """Answer until the time is over, or Ctrl-C. Raises UserError."""
    if not 0 < args.for_s <= _LONGEST_S:
        raise UserError(f"--for-s {args.for_s:g}: must be above 0 and at most {_LONGEST_S:g}. Give some minutes.")
    host, port = _address(args.listen)
    try:
        answering = Answering(host, port, args.for_s)
    except OSError as error:
        raise UserError(
            f"--listen {args.listen}: {error.strerror}. Give an address of this host, a free port."
        ) from error
    log.info(
        f"for {units.duration(args.for_s)}, or until Ctrl-C; on the other site: llmtrain doctor --sites {args.listen} "
        "--out lines.json"
    )
    answering.wait()
    return 0


def _address(listen: str) -> tuple[str, int]:
    """Raises UserError: it is no HOST:PORT, or an address that the world reaches."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        raise UserError(f"--listen {listen}: must be HOST:PORT. Give an address of this host in the sites' network.")
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, int(port))}
    except OSError as error:
        raise UserError(f"--listen {listen}: {error.strerror}. Give a private address of this host.") from error
    if public := sorted(address for address in found if not private(address)):
        raise UserError(
            f"--listen {listen}: {public[0]} is no private address, and whoever reaches it may fill this line. Give "
            "the address in the network that joins the sites (a tunnel's)."
        )
    return host, int(port)
