"""`llmtrain sites coordinator|status|keys|plan|measure`: start and watch the sites of a run, and forecast its cost."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.base import log, units
from llmtrain.base.errors import UserError
from llmtrain.base.untrusted import shown
from llmtrain.cluster.doctor.site_links import Answering
from llmtrain.commands import completion
from llmtrain.config.load import configs_in, load, run_words
from llmtrain.config.pinned import fetched
from llmtrain.config.problems import stop
from llmtrain.data.stream.epoch import sequences_of_epoch
from llmtrain.sites import forecast
from llmtrain.sites.forecast import Advice, Forecast, Line
from llmtrain.sites.membership import heard_at, private_address, start_coordinator
from llmtrain.sites.tls import Keys, differs, make_keys, to_coordinator

if TYPE_CHECKING:
    from rich.table import Table

_BIND = "127.0.0.1:29510"
_LONGEST_S = 86_400.0
_PLAN = "`llmtrain sites plan RUN.yaml --rate 100mbit --rtt 50ms`: what each way of joining sites will cost this run."
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kmg])bit(?:/s|ps)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(us|ms|s)")
_MOST_SITES = 10_000


def _coordinator(args: argparse.Namespace) -> int:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    server = start_coordinator(args.bind, args.wait_s, Keys(Path(args.keys), "--keys") if args.keys else None)
    log.info(f"the coordinator listens on {args.bind}; sites give it as --sites.coordinator HOST:PORT")
    ended.wait()
    server.shutdown()
    return 0


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


def _measure(args: argparse.Namespace) -> int:
    """Answer until the time is over, or Ctrl-C. Raises UserError."""
    if not 0 < args.for_s <= _LONGEST_S:
        raise UserError(f"--for-s {args.for_s:g}: must be above 0 and at most {_LONGEST_S:g}. Give some minutes.")
    host, port = private_address(
        "--listen", args.listen, "anyone who reaches it may fill this line. Give the address in the network that joins "
        "the sites (a tunnel's)",
    )  # fmt: skip
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


def rate_of(text: str) -> float:
    """Return bytes a second for `100mbit`. Raises ConfigError."""
    found = _RATE.fullmatch(text.strip())
    rate = float(found[1]) * 1e3 ** ("kmg".index(found[2].lower()) + 1) / 8 if found else 0.0
    if not 0 < rate < math.inf:
        raise stop("--rate", text, "must be a number above 0 with its unit: kbit, mbit or gbit (a second)",
                   "write --rate 100mbit; a byte has 8 bits")  # fmt: skip
    return rate


def seconds_of(key: str, text: str) -> float:
    """Return the seconds of `50ms`. Raises ConfigError."""
    found = _TIME.fullmatch(text.strip())
    if not found or not float(found[1]) < 1e6:
        raise stop(key, text, "must be a number with its unit: us, ms or s", f"write {key} 50ms")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def table(advice: Advice) -> Table:
    from rich.table import Table as RichTable

    made = RichTable(box=None, padding=(0, 1), header_style="bold")
    made.add_column("way")
    made.add_column("compress")
    for name in ("sync\nevery", "a site sends\na step", "of data\nparallel", "a round\nlasts", "waiting\na step",
                 "computing", "the run\nlasts", f"sync_every\nfor {advice.goal:.0%}"):  # fmt: skip
        made.add_column(name, justify="right")
    for each, least in ((advice.plain, None), *advice.rows):
        good = each.computing >= advice.goal
        made.add_row(*_cells(each, advice.plain), _least(each, least), style="green" if good else None)
    return made


def _cells(each: Forecast, plain: Forecast) -> list[str]:
    fewer = plain.bytes_per_step / each.bytes_per_step
    return [
        each.way, each.compress, str(each.sync_every), units.count(each.bytes_per_step) + "B",
        "1" if each is plain else f"1/{fewer:.0f}" if fewer >= 10 else f"1/{fewer:.2g}",
        f"{each.round_s:.2f} s", f"{each.wait_s:.3f} s", f"{each.computing:.1%}",
        "-" if each.run_s is None else units.duration(each.run_s),
    ]  # fmt: skip


def _least(each: Forecast, least: int | None) -> str:
    return "" if each.sync_every == 1 and each.way == "data parallel" else "never" if least is None else f"{least:,}"


def said(advice: Advice, timeout_s: float) -> list[str]:
    """Return the lines after the table: the recommended keys, and why."""
    best, plain, goal = advice.best, advice.plain, f"{advice.goal:.0%}"
    if plain.computing >= advice.goal:
        return [f"recommended: no sites: one run over all hosts computes for {plain.computing:.1%} of the time on this "
                "line, and synchronises every step"]  # fmt: skip
    if best is None:
        return [f"no sync_every keeps a site computing for {goal} of the time with {forecast.COMPRESS[-1]} or gentler: "
                "the line is too slow for this model"]  # fmt: skip
    rule = (
        f"the gentlest compression with which sites compute for {goal} of the time and synchronise at least every "
        f"{forecast.LONGEST} steps, with the method that does so most often and its smallest sync_every"
    )
    if best.sync_every > forecast.LONGEST:
        rule = f"nothing reaches {goal} within {forecast.LONGEST} steps, so int4, and the smallest sync_every that does"
    shorter = ""
    if best.run_s is not None and plain.run_s is not None:
        shorter = f", the run {units.duration(best.run_s)} instead of {units.duration(plain.run_s)}"
    fewer = plain.bytes_per_step / best.bytes_per_step
    late_s = forecast.join_s(advice.job, advice.line)
    return [
        "recommended: " + " ".join(forecast.words(advice, timeout_s)),
        f"  rule: {rule}",
        f"  then: {units.count(best.bytes_per_step)}B a step, 1/{fewer:.0f} of data parallel, computing "
        f"{best.computing:.1%} instead of {plain.computing:.1%}{shorter}",
        f"  a site that joins late takes the model from another in {units.duration(late_s)}",
    ]


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="predict bytes, waiting and wall time of a run over a slow network", allow_abbrev=False,
        description=_PLAN, epilog="Further words are keys of the run: --sites.sync_every 50",
        usage="llmtrain sites plan RUN.yaml [--SECTION.FIELD VALUE ...] [options]",
    )  # fmt: skip
    parser.add_argument("--rate", metavar="100mbit", help="of a site's line, in each direction: kbit, mbit or gbit")
    parser.add_argument("--rtt", metavar="50ms", help="round trip between two sites")
    parser.add_argument("--measured", metavar="FILE", help="both, from `llmtrain doctor --sites HOST:PORT --out FILE`")
    parser.add_argument("--sites", type=int, default=2, metavar="N", help="how many (2)")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks of each site (1)")
    parser.add_argument("--step-s", type=float, metavar="S", help="seconds of an optimizer step of one site alone")
    parser.add_argument(
        "--run", metavar="DIR", dest="folder", help="a run's folder with its step times (train.run_dir)"
    )
    parser.add_argument("--computing", type=float, default=forecast.GOAL, metavar="SHARE", help="to reach (0.95)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    """Forecast every method and compression. Raises UserError."""
    line = _line(args)
    for key, value, low, high in (("--sites", args.sites, 2, _MOST_SITES), ("--world-size", args.world_size, 1, 2**20)):
        if not low <= value <= high:
            raise stop(key, value, f"must be from {low} to {high}", f"write {key} {low}")
    if not 0 < args.computing < 1:
        raise stop("--computing", args.computing, "must be a share between 0 and 1", "write --computing 0.95")
    if args.step_s is not None and not 0 < args.step_s < math.inf:
        raise stop("--step-s", args.step_s, "must be seconds above 0", "write --step-s 0.8")
    resolved = load(args.words, args.world_size, "--world-size", epoch=sequences_of_epoch)
    run, _ = fetched(resolved.run, resolved.places)
    step_s = args.step_s or forecast.step_seconds(args.folder or resolved.run_dir)
    job = forecast.Job(
        fragments=forecast.sizes(run), sites=args.sites, ranks=args.world_size, step_s=step_s, steps=resolved.max_steps
    )
    advice = forecast.advise(job, line, run.sites, args.computing)
    if args.json:
        print(json.dumps(forecast.as_json(advice, run.sites.timeout_s), indent=1))
    else:
        _show(", ".join(configs_in(run_words(args.words))), advice, run.sites.timeout_s)
    return 0


def _line(args: argparse.Namespace) -> Line:
    if args.measured is not None:
        if args.rate is not None or args.rtt is not None:
            raise stop("--measured", args.measured, "is given with --rate or --rtt, and says both itself",
                       "remove --rate and --rtt")  # fmt: skip
        return forecast.measured(args.measured)
    for key, value in (("--rate", args.rate), ("--rtt", args.rtt)):
        if value is None:
            raise stop(key, "(not given)", "is needed", "write --rate 100mbit --rtt 50ms, or measure them with "
                       "`llmtrain doctor --sites HOST:PORT --out FILE` and give --measured FILE")  # fmt: skip
    return Line(rate=rate_of(args.rate), rtt_s=seconds_of("--rtt", args.rtt))


def _show(recipe: str, advice: Advice, timeout_s: float) -> None:
    from rich.console import Console

    job, line = advice.job, advice.line
    steps = "" if job.steps is None else f", {job.steps:,} steps"
    console = Console(width=None if os.isatty(1) else 160, highlight=False)
    print(
        f"{recipe}: {units.count(job.parameters)} parameters that train; {units.counted(job.sites, 'site')} of "
        f"{units.counted(job.ranks, 'rank')}; {8 * line.rate / 1e6:,.3g} Mbit/s, {1e3 * line.rtt_s:.3g} ms; a step of "
        f"{job.step_s:.3g} s{steps}\n"
    )
    console.print(table(advice))
    print("\n" + "\n".join(said(advice, timeout_s)))


def _add_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", metavar="DIR", help="a folder that `llmtrain sites keys` has made")


def main(argv: list[str]) -> int:
    """Raises UserError."""
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
    _add_plan(commands)
    measure = commands.add_parser("measure", help="answer while another site measures the line: doctor --sites")
    measure.add_argument("--listen", required=True, metavar="HOST:PORT", help="a private address of this host")
    measure.add_argument("--for-s", type=float, default=300.0, metavar="S", help="seconds until it ends (300)")
    measure.set_defaults(run=_measure)
    completion.offer(parser)
    args, words = parser.parse_known_args(argv)
    if words and args.run is not _plan:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    args.words = words
    code: int = args.run(args)
    return code
