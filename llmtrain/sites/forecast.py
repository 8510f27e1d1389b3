"""Forecast of a run over a slow network: bytes, waiting, share of computing and wall time.

The formulas follow the code: `exchange.py` fetches from all other sites at once, `transport.py` opens a connection for
each request, `quorum.py` meets twice a round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from llmtrain.base import untrusted
from llmtrain.config.problems import stop
from llmtrain.config.run import RunConfig
from llmtrain.optim.message_formats import BLOCK, FORMATS
from llmtrain.optim.outer_methods import Periodic, SitesConfig
from llmtrain.tracking.local import read_rows

HEADERS = 1 + 66 / 1448
"""Bytes on the wire for a payload byte: Ethernet, IPv4 and TCP headers of a full segment."""
FIRST_WINDOW = 10 * 1448
"""Bytes that a new connection sends before the first answer; Linux doubles them with each round trip."""
WINDOW = 4 << 20
"""Most bytes of one connection in transit: Linux's largest default send buffer (tcp_wmem)."""
ROUND_TRIPS = 2
"""Round trips of a request: the connection, and the question."""
MEETINGS = 2
"""Meetings of a round, each a round trip to the coordinator."""
GOAL = 0.95
"""Default goal: share of the time spent computing."""
LONGEST = 100
"""Steps between two synchronisations up to which a gentler compression is preferred."""
_MOST = 100_000
COMPRESS = ("none", *FORMATS)
"""Formats, the most exact first."""

# Seconds of one core for an element, measured on a virtual machine with two x86-64 cores at 2.5 GHz.
_KEEP_S = 5.2e-9
"""Two checksums and two copies of the common state."""
_MOVE_S = 3e-9
"""Live parameters into the array and back."""
_MEAN_S = 6.5e-9
"""Averaging, for each site beyond two."""
_ASK_S = 2.5e-3
"""Cost of one peer whatever the model's size: a request sent, one served, its status at two meetings."""
_RECEIVE_S = 0.6e-9
"""Receiving fp32 from one site."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Network line of each site, for both directions at once."""

    rate: float
    """Bytes a second, headers included."""
    rtt_s: float
    """Round trip between two sites."""
    window: float = WINDOW
    """Most bytes of one connection in transit."""

    def fetch_s(self, payload: float, answers: int = 1) -> float:
        """Return the seconds until all bytes have come over `answers` new connections, one after another."""
        if not payload:
            return 0.0
        return answers * ROUND_TRIPS * self.rtt_s + self.transfer_s(payload)

    def transfer_s(self, payload: float) -> float:
        """Return the seconds from the first byte's arrival to the last one's on an idle connection, whose window
        doubles with each round trip until it fills the line or reaches its limit."""
        size = payload * HEADERS
        rate = min(self.rate, self.window / self.rtt_s) if self.rtt_s else self.rate
        full = rate * self.rtt_s
        window, passed_s = float(FIRST_WINDOW), 0.0
        while window < full and size > window:
            size, passed_s, window = size - window, passed_s + self.rtt_s, 2 * window
        return passed_s + size / rate


def measured(path: str) -> Line:
    """Return the lowest rate and longest round trip in a file of `doctor --sites --out`. Raises ConfigError."""
    try:
        lines = untrusted.loads(Path(path).read_bytes())["lines"]
        rates = [float(line[key]) / 8 for line in lines for key in ("up", "down", "both_up", "both_down")]
        rtt_s = max(float(line["trip_s"]) for line in lines)
        if not (min(rates) > 0 and rtt_s >= 0):
            raise ValueError("a rate of 0")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise stop("--measured", path, f"is no file of measured lines ({error})",
                   "write one with `llmtrain doctor --sites HOST:PORT --out FILE`") from error  # fmt: skip
    return Line(rate=min(rates), rtt_s=rtt_s, window=math.inf)  # the measured rate is one connection's


def step_seconds(folder: str) -> float:
    """Return the median seconds of an optimizer step from a run's metrics.jsonl. Raises ConfigError."""
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


@dataclass(frozen=True, kw_only=True)
class Job:
    fragments: tuple[int, ...]
    """Trained parameters of each part of a model that is synchronised in parts."""
    sites: int
    ranks: int
    """Ranks of each site."""
    step_s: float
    """Seconds of computing in an optimizer step, without other sites."""
    steps: int | None
    """Optimizer steps of the run; None: unknown, without a wall time."""

    @property
    def parameters(self) -> int:
        return sum(self.fragments)

    def messages(self, method: SitesConfig) -> Sequence[int]:
        return (self.parameters,) if method.parts == 1 else self.fragments


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Cost of a way of training for a site."""

    way: str
    compress: str
    sync_every: int
    """Optimizer steps between two synchronisations of an element; 1: every step."""
    bytes_per_step: float
    """Mean bytes that a site sends per step, headers included; it receives the same number."""
    wait_s: float
    """Mean seconds of a step beyond its computing, without the run's last synchronisation."""
    computing: float
    """Share of the time, 0 to 1."""
    round_s: float
    """Seconds of a complete synchronisation."""
    fetch_s: float
    """The part of `round_s` until parameters have come."""
    run_s: float | None
    """The run with its last synchronisation; without evaluation, saving and start."""


def ways(settings: SitesConfig) -> dict[str, SitesConfig]:
    """Return every method: the run's with its own fields, the others with their defaults."""
    return {**{name: method() for name, method in SitesConfig.CHOICES.items()}, settings.method: settings}


def data_parallel(job: Job, line: Line) -> Forecast:
    """Forecast one run over all sites' ranks: gloo's ring adds up all gradients, in bf16, after every step.

    A ring of P ranks passes 2 (P-1)/P of its 2 N bytes over each site's line, in 2 (P-1) turns of half a round trip
    where it crosses lines. A step has two more collectives of a few bytes.
    """
    ring = job.sites * job.ranks
    sent = 2 * (ring - 1) / ring * 2 * job.parameters
    turns = 2 * (ring - 1) * line.rtt_s / 2
    # The connections live as long as the run: their windows are open.
    wait_s = sent * HEADERS / min(line.rate, line.window / line.rtt_s if line.rtt_s else math.inf) + 3 * turns
    return Forecast(
        way="data parallel", compress="bf16", sync_every=1, bytes_per_step=sent * HEADERS, wait_s=wait_s,
        computing=job.step_s / (job.step_s + wait_s), round_s=wait_s, fetch_s=wait_s,
        run_s=None if job.steps is None else job.steps * (job.step_s + wait_s),
    )  # fmt: skip


def with_sites(job: Job, line: Line, method: SitesConfig, compress: str) -> Forecast:
    """Forecast one run per site with a `sites.method`."""
    parts = job.messages(method)
    rounds = [_round(job, line, method, compress, part) for part in parts]
    every = method.period / len(parts)
    blocked = [fetch_s + _meet_s(line) + own_s for fetch_s, own_s in rounds]
    stops = [method.waits_s(fetch_s + _meet_s(line), job.step_s) + own_s for fetch_s, own_s in rounds]
    sent = [(job.sites - 1) * _payload(part, compress) * HEADERS for part in parts]
    wait_s = sum(stops) / len(stops) / every
    total, run_s = sum(sent) / len(sent) / every, None
    if job.steps is not None:  # the last step's synchronisation is of all parts, and waited for
        before = math.ceil(job.steps / every) - 1
        total = sum(sent) * (before / len(parts) + 1) / job.steps
        wait_s = sum(stops) / len(stops) * before / job.steps
        run_s = job.steps * (job.step_s + wait_s) + sum(blocked)
    return Forecast(
        way=method.method, compress=compress, sync_every=method.period, bytes_per_step=total, wait_s=wait_s,
        computing=job.step_s / (job.step_s + wait_s), round_s=max(blocked),
        fetch_s=max(fetch_s for fetch_s, _ in rounds), run_s=run_s,
    )  # fmt: skip


def smallest(job: Job, line: Line, method: SitesConfig, compress: str, goal: float = GOAL) -> int | None:
    """Return the smallest sites.sync_every that reaches the share of computing in an endless run; None: more than
    100,000 steps."""
    endless, parts = replace(job, steps=None), method.parts

    def reaches(units: int) -> bool:
        return with_sites(endless, line, method.synchronising(units * parts), compress).computing >= goal

    if not isinstance(method, Periodic):
        return 1 if reaches(1) else None
    low, high = -(-method.least_period // parts), _MOST // parts
    if not reaches(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    return low * parts


def recommended(job: Job, line: Line, methods: Mapping[str, SitesConfig], goal: float = GOAL) -> Forecast | None:
    """Return the gentlest compression with which a method reaches the goal within LONGEST steps, with the method that
    synchronises most often; else int4 with any number of steps."""
    for compress in COMPRESS:
        found = {way: smallest(job, line, each, compress, goal) for way, each in methods.items() if each.recommended}
        steps, way = min((each or math.inf, way) for way, each in found.items())
        if steps <= LONGEST or (compress == COMPRESS[-1] and steps < math.inf):
            return with_sites(job, line, methods[way].synchronising(int(steps)), compress)
    return None


def join_s(job: Job, line: Line) -> float:
    """Return the seconds until a late site has the common parameters and outer momentum, uncompressed."""
    return 2 * line.fetch_s(4 * job.parameters)


def needed_timeout_s(forecast: Forecast) -> int:
    """Return the smallest sites.timeout_s with 1.5 times a fetch's seconds in its half for fetching."""
    return 5 * math.ceil(2 * 1.5 * forecast.fetch_s / 5)


def _payload(part: int, compress: str) -> float:
    form = FORMATS.get(compress)
    return 4.0 * part if form is None else math.ceil(part / BLOCK) * form.record


def _round(job: Job, line: Line, method: SitesConfig, compress: str, part: int) -> tuple[float, float]:
    """Return (seconds of fetching, seconds of this site's own work) in a round over `part` parameters. The ranks of a
    site fetch at the same time over its line."""
    others = job.sites - 1
    payload = _payload(part, compress)
    # All ask all others at once: a site's line carries W - 1 of them, in each direction.
    fetch_s = replace(line, rate=line.rate / max(1, others)).fetch_s(payload) if others else 0.0
    form = FORMATS.get(compress)
    encode_s, decode_s = (form.encode_s, form.decode_s) if form else (0.0, _RECEIVE_S)
    whole_s = _KEEP_S * job.parameters
    part_s = part * (_MOVE_S + method.outer_s + _MEAN_S * max(0, others - 1) + encode_s + decode_s * others)
    return fetch_s, (whole_s + part_s) / job.ranks + _ASK_S * others


def _meet_s(line: Line) -> float:
    return MEETINGS * line.rtt_s


@dataclass(frozen=True, kw_only=True)
class Advice:
    job: Job
    line: Line
    goal: float
    plain: Forecast
    rows: tuple[tuple[Forecast, int | None], ...]
    """Each way at the run's sites.sync_every, with the smallest one that reaches the goal."""
    best: Forecast | None


def sizes(run: RunConfig) -> tuple[int, ...]:
    """Return the trained parameters of the run's model by fragment of streaming. Raises ModelError, ConfigError."""
    from llmtrain.models.spec import ModelSpec
    from llmtrain.sites.shard import fragment_of

    spec = ModelSpec.of(run.model, run.adapter, scores=run.objective.scores)
    fragments = max(method.parts for method in ways(run.sites).values())
    found = [0] * fragments
    for name, fragment in fragment_of(spec.shapes, fragments).items():
        if name not in spec.frozen:
            found[fragment] += math.prod(spec.shapes[name])
    return tuple(found)


def advise(job: Job, line: Line, settings: SitesConfig, goal: float) -> Advice:
    """Forecast all methods, and find the smallest sites.sync_every that reaches the goal."""
    methods = ways(settings)
    if isinstance(settings, Periodic):
        methods = {name: each.synchronising(settings.sync_every) for name, each in methods.items()}
    rows = tuple(
        (with_sites(job, line, method, compress), smallest(job, line, method, compress, goal))
        for method in methods.values()
        for compress in COMPRESS
    )
    return Advice(
        job=job, line=line, goal=goal, plain=data_parallel(job, line), rows=rows,
        best=recommended(job, line, methods, goal),
    )  # fmt: skip


def words(advice: Advice, timeout_s: float) -> list[str]:
    """Return the recommended keys, as words of the command line. `timeout_s`: the run's."""
    if (best := advice.best) is None:
        return []
    found = ["--sites.method", best.way, "--sites.compress", best.compress, "--sites.sync_every", str(best.sync_every)]
    needed = needed_timeout_s(best)
    return [*found, "--sites.timeout_s", str(needed)] if needed > timeout_s else found


def as_json(advice: Advice, timeout_s: float) -> dict[str, Any]:
    line = {"rate_bit_per_s": 8 * advice.line.rate, "rtt_s": advice.line.rtt_s}
    job = {**asdict(advice.job), "parameters": advice.job.parameters}
    rows = [{**asdict(each), "sync_every_for_goal": least} for each, least in advice.rows]
    return {
        "line": line, "job": job, "computing_goal": advice.goal, "data_parallel": asdict(advice.plain), "sites": rows,
        "recommended": None if advice.best is None else {**asdict(advice.best), "words": words(advice, timeout_s)},
        "join_s": join_s(advice.job, advice.line),
    }  # fmt: skip
