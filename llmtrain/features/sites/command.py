"""`llmtrain sites coordinator|status`: start and watch the sites of a run."""

from __future__ import annotations

import argparse
import signal
import threading

from llmtrain.base import log
from llmtrain.base.errors import UserError
from llmtrain.base.untrusted import shown
from llmtrain.commands import completion
from llmtrain.features.sites.membership import heard_at, start_coordinator

_BIND = "127.0.0.1:29510"


def _coordinator(args: argparse.Namespace) -> int:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    server = start_coordinator(args.bind, args.wait_s)
    log.info(f"the coordinator listens on {args.bind}; sites give it as --sites.coordinator HOST:PORT")
    ended.wait()
    server.shutdown()
    return 0


def _status(args: argparse.Namespace) -> int:
    try:
        sites = heard_at(args.coordinator)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--coordinator {args.coordinator}: no coordinator answers ({shown(error, 200)}). Start it there with "
            f"`llmtrain sites coordinator --bind {args.coordinator}`."
        ) from error
    for site in sites:
        state = "there" if site.there else "away"
        part = "took part in the last meeting" if site.met else "was not in the last meeting"
        alone = ", ALONE: no other site was in its last synchronisation" if site.met and site.together == 1 else ""
        step = f", step {site.step}" if site.met else ""
        print(f"{shown(site.site, 40)}  {state}, heard of {site.silent_s:.1f} s ago, {part}{step}{alone}")
    if not sites:
        print("no site has reported")
    return 0


def main(argv: list[str]) -> int:
    """Raises UserError."""
    parser = argparse.ArgumentParser(prog="llmtrain sites", description="Several sites that train one model.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    coordinator = commands.add_parser("coordinator", help="start the coordinator; it ends with Ctrl-C")
    coordinator.add_argument("--bind", default=_BIND, metavar="HOST:PORT", help=f"where it listens ({_BIND})")
    text = "how long a majority of the sites waits for one that is alive and late (30)"
    coordinator.add_argument("--wait-s", type=float, default=30.0, metavar="S", help=text)
    coordinator.set_defaults(run=_coordinator)
    status = commands.add_parser("status", help="show which sites are there")
    status.add_argument("--coordinator", default=_BIND, metavar="HOST:PORT", help=f"its address ({_BIND})")
    status.set_defaults(run=_status)
    completion.offer(parser)
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code
