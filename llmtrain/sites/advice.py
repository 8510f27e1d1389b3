"""`llmtrain sites plan RUN.yaml --rate 100mbit --rtt 50ms`: what each way of joining sites will cost this run."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from llmtrain.base import units, untrusted
from llmtrain.config.load import load, run_words
from llmtrain.config.objective import SCORED
from llmtrain.config.pinned import fetched
from llmtrain.config.problems import stop
from llmtrain.config.run import RunConfig
from llmtrain.sites import plan
from llmtrain.sites.fragments import fragment_of
from llmtrain.sites.plan import Forecast, Job, Line
from llmtrain.tracking.local import read_rows

if TYPE_CHECKING:
    from rich.table import Table

_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kmg])bit(?:/s|ps)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(us|ms|s)")
_MOST_SITES = 10_000


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Everything that the command says."""

    job: Job
    line: Line
    goal: float
    plain: Forecast
    rows: tuple[tuple[Forecast, int | None], ...]
    """Each way at the run's sites.sync_every, and the smallest one with which it reaches the goal."""
    best: Forecast | None


def rate_of(text: str) -> float:
    """Bytes a second of `100mbit`. Raises ConfigError."""
    found = _RATE.fullmatch(text.strip())
    rate = float(found[1]) * 1e3 ** ("kmg".index(found[2].lower()) + 1) / 8 if found else 0.0
    if not 0 < rate < math.inf:
        raise stop("--rate", text, "must be a number above 0 with its unit: kbit, mbit or gbit (a second)",
                   "write --rate 100mbit; a byte has 8 bits")  # fmt: skip
    return rate


def seconds_of(key: str, text: str) -> float:
    """Seconds of `50ms`. Raises ConfigError."""
    found = _TIME.fullmatch(text.strip())
    if not found or not float(found[1]) < 1e6:
        raise stop(key, text, "must be a number with its unit: us, ms or s", f"write {key} 50ms")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def measured(path: str) -> Line:
    """The slowest and the longest of what `llmtrain doctor --sites ... --out FILE` has measured. Raises ConfigError."""
    try:
        lines = untrusted.loads(Path(path).read_bytes())["lines"]
        rates = [float(line[key]) / 8 for line in lines for key in ("up", "down", "both_up", "both_down")]
        rtt_s = max(float(line["trip_s"]) for line in lines)
        if not (min(rates) > 0 and rtt_s >= 0):
            raise ValueError("a rate of 0")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise stop("--measured", path, f"is no file of measured lines ({error})",
                   "write one with `llmtrain doctor --sites HOST:PORT --out FILE`") from error  # fmt: skip
    return Line(rate=min(rates), rtt_s=rtt_s, window=math.inf)  # what one connection carries is what was measured


def step_seconds(folder: str) -> float:
    """Of an optimizer step, by a run's metrics.jsonl: the median of its log points. Raises ConfigError."""
    rows, _ = read_rows(Path(folder) / "metrics.jsonl")
    found = []
    for row in rows:
        try:
            step_s = float(row["tokens"]) / float(row["step"]) / float(row["tokens_per_s"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            continue
        if 0 < step_s < math.inf:
            found.append(step_s)
    if not found:
        raise stop("--step-s", "(not given)", f"is needed: {folder}/metrics.jsonl has no log point with tokens_per_s",
                   "give the seconds of an optimizer step of one site alone (--step-s 0.8), or the folder of a run on "
                   "one site's hardware (--run DIR), which a few steps of `llmtrain train` make")  # fmt: skip
    return median(found)


def sizes(run: RunConfig, fragments: int) -> tuple[int, ...]:
    """Parameters of the run's model that train, by fragment. Raises ModelError, ConfigError."""
    from llmtrain.models.spec import ModelSpec

    spec = ModelSpec.of(run.model, run.adapter, scores=run.objective.name in SCORED)
    found = [0] * fragments
    for name, fragment in fragment_of(spec.shapes, fragments).items():
        if name not in spec.frozen:
            found[fragment] += math.prod(spec.shapes[name])
    return tuple(found)


def advise(job: Job, line: Line, sync_every: int, goal: float) -> Advice:
    """All ways, at a run's sites.sync_every and at the smallest that reaches the goal."""
    rows = tuple(
        (plan.with_sites(job, line, way, compress, sync_every), plan.smallest(job, line, way, compress, goal))
        for way in plan.WAYS
        for compress in plan.COMPRESS
    )
    return Advice(
        job=job, line=line, goal=goal, plain=plan.data_parallel(job, line), rows=rows,
        best=plan.recommended(job, line, goal),
    )  # fmt: skip


def words(advice: Advice, timeout_s: float) -> list[str]:
    """The recommended keys, as words of the command line. `timeout_s`: the run's."""
    if (best := advice.best) is None:
        return []
    found = ["--sites.method", best.way, "--sites.compress", best.compress, "--sites.sync_every", str(best.sync_every)]
    needed = plan.timeout_s(best)
    return [*found, "--sites.timeout_s", str(needed)] if needed > timeout_s else found


def as_json(advice: Advice, timeout_s: float) -> dict[str, Any]:
    """Everything, with SI units in the keys."""
    line = {"rate_bit_per_s": 8 * advice.line.rate, "rtt_s": advice.line.rtt_s}
    job = {**asdict(advice.job), "parameters": advice.job.parameters}
    rows = [{**asdict(each), "sync_every_for_goal": least} for each, least in advice.rows]
    return {
        "line": line, "job": job, "computing_goal": advice.goal, "data_parallel": asdict(advice.plain), "sites": rows,
        "recommended": None if advice.best is None else {**asdict(advice.best), "words": words(advice, timeout_s)},
        "join_s": plan.join_s(advice.job, advice.line),
    }  # fmt: skip


def table(advice: Advice) -> Table:
    """For people."""
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
    """What follows the table."""
    best, plain, goal = advice.best, advice.plain, f"{advice.goal:.0%}"
    if plain.computing >= advice.goal:
        return [f"recommended: no sites: one run over all hosts computes for {plain.computing:.1%} of the time on this "
                "line, and synchronises every step"]  # fmt: skip
    if best is None:
        return [f"no sync_every keeps a site computing for {goal} of the time with {plan.GENTLE[-1]} or gentler: the "
                "line is too slow for this model"]  # fmt: skip
    rule = (
        f"the gentlest compression with which sites compute for {goal} of the time and synchronise at least every "
        f"{plan.LONGEST} steps, with the method that does so most often and its smallest sync_every"
    )
    if best.sync_every > plan.LONGEST:
        rule = f"nothing reaches {goal} within {plan.LONGEST} steps, so int4, and the smallest sync_every that does"
    shorter = ""
    if best.run_s is not None and plain.run_s is not None:
        shorter = f", the run {units.duration(best.run_s)} in place of {units.duration(plain.run_s)}"
    fewer = plain.bytes_per_step / best.bytes_per_step
    late_s = plan.join_s(advice.job, advice.line)
    return [
        "recommended: " + " ".join(words(advice, timeout_s)),
        f"  rule: {rule}",
        f"  then: {units.count(best.bytes_per_step)}B a step, 1/{fewer:.0f} of data parallel, computing "
        f"{best.computing:.1%} in place of {plain.computing:.1%}{shorter}",
        f"  a site that joins late takes the model from another in {units.duration(late_s)}",
    ]


def register(commands: Any) -> None:
    """Add the command to `llmtrain sites`."""
    parser = commands.add_parser(
        "plan", help="predict bytes, waiting and wall time of a run over a slow network", allow_abbrev=False,
        description=__doc__, epilog="Further words are keys of the run: --sites.fragments 8",
        usage="llmtrain sites plan RUN.yaml [--SECTION.FIELD VALUE ...] [options]",
    )  # fmt: skip
    parser.add_argument("--rate", metavar="100mbit", help="of a site's line, in each direction: kbit, mbit or gbit")
    parser.add_argument("--rtt", metavar="50ms", help="round trip between two sites")
    parser.add_argument("--measured", metavar="FILE", help="both, from `llmtrain doctor --sites HOST:PORT --out FILE`")
    parser.add_argument("--sites", type=int, default=2, metavar="N", help="how many (2)")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks of each site (1)")
    parser.add_argument("--step-s", type=float, metavar="S", help="seconds of an optimizer step of one site alone")
    parser.add_argument("--run", metavar="DIR", dest="folder", help="a run's folder that tells them (train.run_dir)")
    parser.add_argument("--computing", type=float, default=plan.GOAL, metavar="SHARE", help="to reach (0.95)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=command)


def command(args: argparse.Namespace) -> int:
    """`llmtrain sites plan`. Raises UserError."""
    line = _line(args)
    for key, value, low, high in (("--sites", args.sites, 2, _MOST_SITES), ("--world-size", args.world_size, 1, 2**20)):
        if not low <= value <= high:
            raise stop(key, value, f"must be from {low} to {high}", f"write {key} {low}")
    if not 0 < args.computing < 1:
        raise stop("--computing", args.computing, "must be a share between 0 and 1", "write --computing 0.95")
    if args.step_s is not None and not 0 < args.step_s < math.inf:
        raise stop("--step-s", args.step_s, "must be seconds above 0", "write --step-s 0.8")
    resolved = load(args.words, args.world_size, "--world-size")
    run, _ = fetched(resolved.run, resolved.places)
    step_s = args.step_s or step_seconds(args.folder or resolved.run_dir)
    job = Job(
        fragments=sizes(run, run.sites.fragments), sites=args.sites, ranks=args.world_size, step_s=step_s,
        steps=resolved.max_steps, overlap=run.sites.overlap_steps, meet_every=run.sites.meet_every,
    )  # fmt: skip
    advice = advise(job, line, run.sites.sync_every, args.computing)
    if args.json:
        print(json.dumps(as_json(advice, run.sites.timeout_s), indent=1))
    else:
        _show(run_words(args.words)[1], advice, run.sites.timeout_s)
    return 0


def _line(args: argparse.Namespace) -> Line:
    if args.measured is not None:
        if args.rate is not None or args.rtt is not None:
            raise stop("--measured", args.measured, "is given beside --rate or --rtt, and says both itself",
                       "remove --rate and --rtt")  # fmt: skip
        return measured(args.measured)
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
