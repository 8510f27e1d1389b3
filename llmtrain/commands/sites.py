"""`llmtrain sites coordinator|status|plan`: where the sites of a run meet, who is there, and what it will cost."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from llmtrain.base import log
from llmtrain.base.errors import UserError
from llmtrain.base.untrusted import shown
from llmtrain.commands import completion
from llmtrain.config.sites_rules import private
from llmtrain.sites import advice, measure
from llmtrain.sites.forward import Forwarder, as_it_is, to_coordinator
from llmtrain.sites.keys import Keys, differs, make_keys
from llmtrain.sites.members import SILENT_S, heard_at

_BIND = "127.0.0.1:29510"


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
        _check_bind(bind)
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


def _coordinator(args: argparse.Namespace) -> int:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    server = started(args.bind, args.wait_s, Keys(Path(args.keys), "--keys") if args.keys else None)
    log.info(f"the coordinator listens on {args.bind}; sites give it as --sites.coordinator HOST:PORT")
    ended.wait()
    server.shutdown()
    return 0


def _check_bind(bind: str) -> None:
    """Raises UserError: it is no HOST:PORT, or an address that the world reaches."""
    host, colon, port = bind.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdecimal()):
        raise UserError(f"--bind {bind}: must be HOST:PORT. Give an address of this host in the sites' network.")
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, int(port))}
    except OSError as error:
        raise UserError(f"--bind {bind}: {error.strerror}. Give HOST:PORT, a private address of this host.") from error
    if public := sorted(address for address in found if not private(address)):
        raise UserError(
            f"--bind {bind}: {public[0]} is no private address, and what sites say is neither encrypted nor "
            "signed. Join the sites by a tunnel (WireGuard, ssh) and give its address."
        )


def _keys(args: argparse.Namespace) -> int:
    for folder in make_keys(Path(args.out), args.sites, args.days):
        print(f"{folder}: copy it to {folder.name}'s host")
    print(f"{Path(args.out) / 'authority'}: keep it; it makes more sites of the run, and belongs to nobody else")
    return 0


def _status(args: argparse.Namespace) -> int:
    keys = Keys(Path(args.keys), "--keys") if args.keys else None
    try:
        address = to_coordinator(args.coordinator, keys).address if keys else args.coordinator
        sites = heard_at(address)
    except (OSError, ValueError) as error:
        if why := differs(args.coordinator, keys):
            raise UserError(f"--coordinator {args.coordinator}: {why}.") from error
        raise UserError(
            f"--coordinator {args.coordinator}: no coordinator answers ({shown(error, 200)}). Start it there with "
            f"`llmtrain sites coordinator --bind {args.coordinator}`."
        ) from error
    for each in sites:
        state = "there" if each.there else "away"
        part = "took part in the last meeting" if each.met else "was not in the last meeting"
        alone = ", ALONE: no other site was in its last synchronisation" if each.met and each.together == 1 else ""
        step = f", step {each.step}" if each.met else ""
        print(f"{shown(each.site, 40)}  {state}, heard of {each.silent_s:.1f} s ago, {part}{step}{alone}")
    if not sites:
        print("no site is there")
    return 0


def _add_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", metavar="DIR", help="a folder that `llmtrain sites keys` has made")


def main(argv: list[str]) -> int:
    """The command line behind `llmtrain sites`; 0 on success. Raises UserError."""
    parser = argparse.ArgumentParser(prog="llmtrain sites", description="Several sites that train one model.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    coordinator = commands.add_parser("coordinator", help="start the coordinator; it ends with Ctrl-C")
    coordinator.add_argument("--bind", default=_BIND, metavar="HOST:PORT", help=f"where it listens ({_BIND})")
    coordinator.add_argument(
        "--wait-s", type=float, default=30.0, metavar="S",
        help="how long a majority of the sites waits for one that is alive and late (30)",
    )  # fmt: skip
    _add_keys(coordinator)
    coordinator.set_defaults(run=_coordinator)
    status = commands.add_parser("status", help="show which sites are there")
    status.add_argument("--coordinator", default=_BIND, metavar="HOST:PORT", help=f"its address ({_BIND})")
    _add_keys(status)
    status.set_defaults(run=_status)
    keys = commands.add_parser("keys", help="make a run's own certificates, a folder for each site")
    keys.add_argument("--out", required=True, metavar="DIR", help="where the folders are made")
    keys.add_argument("--sites", nargs="+", required=True, metavar="NAME", help="the sites' names")
    keys.add_argument("--days", type=int, default=365, help="how long the certificates are valid (365)")
    keys.set_defaults(run=_keys)
    advice.register(commands)
    measure.register(commands)
    completion.offer(parser)
    args, words = parser.parse_known_args(argv)
    if words and args.run is not advice.command:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    args.words = words
    code: int = args.run(args)
    return code
