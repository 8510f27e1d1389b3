"""`llmtrain report RUN ...`: one self-contained HTML page, and plots as PNG, from the local files of runs."""

from __future__ import annotations

import json
import shlex
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtrain.base import units, untrusted
from llmtrain.base.errors import UserError
from llmtrain.base.files import replace_file
from llmtrain.config import strict_yaml
from llmtrain.optim.optimizers import OPTIMIZERS, norm_of
from llmtrain.tracking.local import read_rows
from llmtrain.tracking.metrics import perplexity
from llmtrain.tracking.page import page, table
from llmtrain.tracking.plots import MARKED_BELOW, Curve, Curves, draw, smooth
from llmtrain.tracking.timeline import launches, site_facts, timeline

_EVENTS_SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the files of a run folder say."""

    name: str
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    environment: dict[str, Any]
    settings: dict[str, str]
    """Of config.yaml by dotted key, with the precision and the ZeRO stage of deepspeed.json; `norm`: what `grad_norm`
    is the norm of."""
    unreadable_lines: int

    def shown_settings(self) -> dict[str, str]:
        """The command first, then the settings that are not null."""
        argv = self.environment.get("argv")
        said = {"command": shlex.join(map(str, argv))} if isinstance(argv, list) else {}
        return said | {key: value for key, value in self.settings.items() if key != "norm" and value != "null"}

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, in order."""
        return [event for event in self.events if event.get("kind") == kind]


def load(run_dir: Path) -> Run:
    """Read a run folder. Torn or foreign lines are counted and skipped; UserError if there is nothing to show."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run folder. Give a folder that training wrote, such as runs/NAME.")
    try:
        rows, bad_rows = read_rows(run_dir / "metrics.jsonl")
        events, bad_events = read_rows(run_dir / "events.jsonl")
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}). Check its permissions.") from None
    rows = [row for row in rows if _finite(row.get("step")) is not None]
    if not rows:
        raise UserError(
            f"{run_dir / 'metrics.jsonl'}: no metrics (missing, empty or not from llmtrain). "
            "Training writes the first row at its first log point (train.log_every): report after that."
        )
    return Run(
        name=run_dir.resolve().name,
        rows=rows,
        events=events,
        environment=_json(run_dir / "environment.json"),
        settings=_settings(run_dir),
        unreadable_lines=bad_rows + bad_events,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = untrusted.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _settings(run_dir: Path) -> dict[str, str]:
    try:
        tree = strict_yaml.parse((run_dir / "config.yaml").read_text(), "config.yaml").tree
    except (OSError, ValueError, RecursionError):
        tree = None
    settings = dict(_leaves(tree, "")) if isinstance(tree, dict) else {}
    given = _json(run_dir / "deepspeed.json")
    zero = given.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    on = [name for name in ("bf16", "fp16") if isinstance(given.get(name), dict) and given[name].get("enabled")]
    if given:
        settings |= {"precision": (on or ["fp32"])[0], "ZeRO stage": str(stage)}
    return settings | {"norm": norm_of(settings.get("optim.name"), zero=bool(stage))}


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


def _finite(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number with hundreds of digits
        return None
    return number if abs(number) <= _MOST else None


def curves_of(run: Run) -> Curves:
    """The finite values of each metric by step; where a step stands twice, the later row counts."""
    found: dict[str, dict[float, float]] = {}
    for row in run.rows:
        for name, value in row.items():
            if name != "step" and (number := _finite(value)) is not None:
                found.setdefault(name, {})[float(row["step"])] = number
    by_name = {}
    for name, points in found.items():
        steps = sorted(points)
        by_name[name] = Curve(steps=steps, values=[points[step] for step in steps])
    resumes = sorted({step for e in run.of_kind("resume") if (step := _finite(e.get("step"))) is not None})
    baselines = {}
    for event in run.of_kind("baselines"):
        for name in ("unigram", "bigram"):
            if (value := _finite(event.get(f"{name}_loss"))) is not None:
                baselines[name] = value
    return Curves(by_name=by_name, resumes=resumes, baselines=baselines)


def facts_of(run: Run, curves: Curves) -> list[tuple[str, str]]:
    """The run in figures: pairs of label and text."""
    facts = [("Steps", f"{max(float(row['step']) for row in run.rows):,.0f}")]
    if parameters := _finite(run.environment.get("parameters")):
        facts.append(("Parameters of the model", f"{parameters:,.0f}"))
    if tokens := curves["tokens"]:
        facts.append(("Training tokens", f"{tokens.values[-1]:,.0f}"))
    if train := curves["loss"]:
        facts.append(("Training loss, first to last", f"{train.values[0]:.4f} → {train.values[-1]:.4f} {curves.unit}"))
    if evaluation := curves["eval/loss"]:
        last, best = evaluation.values[-1], min(evaluation.values)
        for label, value in (("Validation loss, last", last), ("Validation loss, best", best)):
            more = f" (perplexity {perplexity(value):.2f})" if curves["eval/perplexity"] else ""
            facts.append((label, f"{value:.4f} {curves.unit}{more}"))
    if right := curves["eval/pairs/accuracy"] or curves["eval/unpaired/accuracy"]:
        facts.append(("Validation answers preferred rightly, last", f"{right.values[-1]:.1%}"))
    facts += [
        (f"Loss of a {name} model", f"{value:.4f} nats/token{_measured_on(run)}")
        for name, value in curves.baselines.items()
    ]
    if speed := curves["tokens_per_s"]:
        facts.append(("Tokens/s, median", f"{statistics.median(speed.values):,.0f}"))
    for kind, label in (("causal", "causal"), ("noncausal", "non-causal")):
        if flops := curves[f"model_tflops_per_s_{kind}"]:
            median = statistics.median(flops.values)
            text = f"{median:.4g} TFLOP/s" if median >= 0.1 else f"{1000 * median:.4g} GFLOP/s"
            if mfu := curves[f"mfu_{kind}"]:
                text += f", MFU {statistics.median(mfu.values):.1%}"
            facts.append((f"Model FLOP/s, median ({label})", text))
    if memory := curves["max_memory_gib"]:
        facts.append(("Peak memory of rank 0", f"{max(memory.values):.2f} GiB"))
    if waits := curves["data_wait_share"]:
        facts.append(("Waiting for data, mean", f"{statistics.fmean(waits.values):.2%}"))
    if share := curves["comm_share"]:
        facts.append(("Communication, share of a step, mean", f"{statistics.fmean(share.values):.1%}"))
    if stalls := curves["checkpoint_stall_s"]:
        facts.append(("Checkpoint stall, sum", units.duration(sum(stalls.values))))
    if skipped := curves["skipped_steps"]:
        facts.append(("Skipped steps", f"{skipped.values[-1]:.0f}"))
    return facts + site_facts(run.of_kind("synchronise"), run.of_kind("synchronise_failed")) + _history(run)


def _measured_on(run: Run) -> str:
    """Of the baselines: counted on the training tokens, measured on so many of the validation split."""
    tokens = _finite(run.of_kind("baselines")[-1].get("validation_tokens"))
    return "" if tokens is None else f" (first {tokens:,.0f} validation tokens)"


def _history(run: Run) -> list[tuple[str, str]]:
    facts = [
        (label, str(len(run.of_kind(kind)))) for kind, label in (("save", "Checkpoints saved"), ("resume", "Resumes"))
    ]
    versions = run.environment.get("versions")
    if isinstance(versions, dict):
        shown = [f"{name} {versions[name]}" for name in ("llmtrain", "torch", "deepspeed") if versions.get(name)]
        facts.append(("Versions", ", ".join(shown)))
    git = run.environment.get("git")
    if isinstance(git, dict) and git.get("commit"):
        facts.append(("Commit", f"{str(git['commit'])[:12]}{' with changes' if git.get('dirty') else ''}"))
    ranks = run.environment.get("ranks")
    if isinstance(ranks, list) and ranks:
        devices = {str(rank.get("device")) for rank in ranks if isinstance(rank, dict)}
        facts.append(("Ranks", f"{len(ranks)} ({', '.join(sorted(devices))})"))
    if run.unreadable_lines:
        facts.append(("Unreadable lines skipped", str(run.unreadable_lines)))
    return facts


_UPDATE_NORM = "Norm of the update"
"""Chart of `grad_norm` where it is the update's norm (some optimizers under ZeRO): no point is a gradient norm."""
# Of each chart: its title, its unit, whether its axis begins at 0, and (metric, what its curve is called).
_CHARTS = (
    ("Loss", "nats/token", False, (("loss", "training"), ("eval/loss", "validation"))),
    ("Throughput, all devices", "tokens/s", True, (("tokens_per_s", "tokens/s"),)),
    ("Model FLOPs utilization", "share of the peak", True, (("mfu_causal", "causal"), ("mfu_noncausal", "non-causal"))),
    ("Peak memory of rank 0", "GiB", True, (("max_memory_gib", "memory"),)),
    ("Communication within a step", "share", True, (("comm_share", "rank 0"),)),
    ("Learning rate", "1", True, (("lr", "learning rate"),)),
    ("Gradient norm", "1", False, (("grad_norm", "norm"),)),
    (_UPDATE_NORM, "1", False, (("grad_norm", "norm"),)),
    ("Pairs preferred rightly", "share", True, (("pairs/accuracy", "training"), ("eval/pairs/accuracy", "validation"))),
    ("Margin", "1", False, (("pairs/margin", "training"), ("eval/pairs/margin", "validation"))),
    (
        "Log-probability of answers",
        "nats/answer",
        False,
        (("pairs/chosen_log_prob", "chosen"), ("pairs/rejected_log_prob", "rejected")),
    ),
    ("Rewards", "1", False, (("pairs/chosen_reward", "chosen"), ("pairs/rejected_reward", "rejected"))),
    (
        "Judged answers on the right side",
        "share",
        True,
        (("unpaired/accuracy", "training"), ("eval/unpaired/accuracy", "validation")),
    ),
    ("Divergence from the reference", "nats/answer", True, (("unpaired/kl", "z"),)),
)
_SMOOTHED = ("loss", "tokens_per_s", "grad_norm")
_POINTS_SHOWN = 1500
_MOST = 1e300  # a sum of such values is one, too


def charts_of(runs: list[Run]) -> list[dict[str, Any]]:
    """What page.py draws: one chart for each metric that a run has, the curves of all runs in it."""
    all_curves = [curves_of(run) for run in runs]
    charts = []
    for number, (title, unit, zero, metrics) in enumerate(_CHARTS):
        series: list[dict[str, Any]] = []
        for index, (run, curves) in enumerate(zip(runs, all_curves, strict=True)):
            if metrics[0][0] == "grad_norm" and (run.settings.get("norm") == "update") != (title == _UPDATE_NORM):
                continue
            for order, (metric, called) in enumerate(metrics):
                color = index if len(runs) > 1 else order
                name = f"{run.name}: {called}" if len(runs) > 1 else called
                series += _series(metric, curves[metric], name, color, dash=order > 0 and len(runs) > 1)
        if not series:
            continue
        if metrics[0][0] == "loss":
            unit = " or ".join(dict.fromkeys(curves.unit for curves in all_curves))
        if title == _UPDATE_NORM:
            measured = [run for run in runs if run.settings.get("norm") == "update"]
            names = dict.fromkeys(OPTIMIZERS[run.settings["optim.name"]].title for run in measured)
            title += f" ({', '.join(names)})"
        levels = _levels(all_curves) if number == 0 else {}
        marks = all_curves[0].resumes if len(runs) == 1 else []
        lines = [{"name": name, "y": y} for name, y in levels.items()]
        about = {"id": f"chart{number}", "title": title, "unit": unit, "zero": zero}
        charts.append({**about, "series": series, "levels": lines, "marks": list(marks)})
    return charts


def _levels(all_curves: list[Curves]) -> dict[str, float]:
    """The baselines on which all runs agree: of runs on several data sets, no line is that of all curves."""
    names = all_curves[0].baselines
    values = {name: {curves.baselines.get(name) for curves in all_curves} for name in names}
    return {f"{name} model": names[name] for name, found in values.items() if len(found) == 1}


def _series(metric: str, curve: Curve, name: str, color: int, *, dash: bool) -> list[dict[str, Any]]:
    """One curve; where it is noisy, its average and faintly itself."""
    if not curve:
        return []
    every = -(-len(curve.steps) // _POINTS_SHOWN)
    shown = sorted({*range(0, len(curve.steps), every), len(curve.steps) - 1})
    x = [curve.steps[index] for index in shown]
    about = {"color": color, "x": x, "dash": dash}
    few = len(x) < MARKED_BELOW
    raw = {**about, "name": name, "y": [curve.values[i] for i in shown], "dots": few or metric == "eval/loss"}
    if few or metric not in _SMOOTHED:
        return [raw]
    average = smooth(curve.values)
    return [{**about, "name": f"{name}, smoothed", "y": [average[i] for i in shown]}, {**raw, "faint": True}]


def _clock(unix_s: Any) -> str:
    number = _finite(unix_s)
    try:
        return "" if number is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(number))
    except (OverflowError, ValueError, OSError):
        return ""


def _period(run: Run) -> str:
    times = [t for row in (*run.rows, *run.events) if (t := _finite(row.get("time_unix_s"))) is not None]
    if not times:
        return "Training run"
    return f"Training run, {_clock(min(times))} to {_clock(max(times))} UTC"


def _events(run: Run) -> tuple[str, str]:
    """Heading and table of what happened."""
    shown = run.events[-_EVENTS_SHOWN:]
    rows = []
    for event in shown:
        rest = {key: value for key, value in event.items() if key not in ("time_unix_s", "kind", "step")}
        detail = ", ".join(
            f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in rest.items()
        )
        step = _finite(event.get("step"))
        at = "" if step is None else f"{step:,.0f}"
        said = detail if len(detail) <= 500 else detail[:500] + "…"
        rows.append((_clock(event.get("time_unix_s")), at, str(event.get("kind", "")), said))
    note = f" (the last {_EVENTS_SHOWN} of {len(run.events)})" if len(run.events) > len(shown) else ""
    return f"Events of {run.name}{note}", table(("Time (UTC)", "Step", "Event", "Details"), rows)


def _side_by_side(runs: list[Run], columns: list[dict[str, str]], *, mark: bool) -> str:
    """A row for each key that a column has, in the order in which they come."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, *(column.get(key, "") for column in columns)) for key in keys]
    return table(("", *(run.name for run in runs)) if len(runs) > 1 else (), rows, mark=mark)


def page_of(runs: list[Run]) -> str:
    """The page of one run, or of several side by side."""
    facts = [dict(facts_of(run, curves_of(run))) for run in runs]
    settings = _side_by_side(runs, [run.shown_settings() for run in runs], mark=True)
    tables = [("Figures", _side_by_side(runs, facts, mark=False)), ("Settings", settings)]
    if sites := timeline([launches(run.settings.get("sites.name"), run.rows, run.events) for run in runs]):
        tables.append(("Sites", sites))
    tables += [_events(run) for run in runs if run.events]
    names = ", ".join(run.name for run in runs)
    return page(names, "; ".join(dict.fromkeys(_period(run) for run in runs)), tables, charts_of(runs))


def write_report(run_dirs: list[Path], out: Path) -> list[Path]:
    """Write the report into `out`: the page, and for a single run its plots as PNG. Returns the files, the page first.

    UserError for what cannot be used.
    """
    runs = [load(run_dir) for run_dir in run_dirs]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(run_dir)) for run, run_dir in zip(runs, run_dirs, strict=True)]
    norm = "update" if runs[0].settings.get("norm") == "update" else "gradient"
    pictures = draw(curves_of(runs[0]), norm=norm) if len(runs) == 1 else {}
    text = page_of(runs)
    try:
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / "index.html", text.encode(errors="replace"))
        for name, png in pictures.items():
            replace_file(out / f"{name}.png", png)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}). Give another folder with --out.") from None
    return [out / "index.html", *(out / f"{name}.png" for name in pictures)]
