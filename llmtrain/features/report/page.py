"""The report of runs from their local files: one HTML page, and plots as PNG."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from llmtrain.base import units, untrusted
from llmtrain.base.errors import UserError
from llmtrain.base.files import replace_file
from llmtrain.base.trees import leaves
from llmtrain.config import strict_yaml
from llmtrain.features import features
from llmtrain.objectives.objective import Chart, Objective, accuracies
from llmtrain.optim.optimizers import Optimizer, norm_of
from llmtrain.reports.charts import png
from llmtrain.reports.page import escaped, html_page, table
from llmtrain.tracking.local import read_rows
from llmtrain.tracking.metrics import loss_unit, metric_of, perplexity

_EVENTS_SHOWN = 200
_MARKED_BELOW = 10
"""Points of a curve that is too short for an average: each gets a mark."""


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    environment: dict[str, Any]
    settings: dict[str, str]
    """Values of config.yaml by dotted key, with the precision and the ZeRO stage of deepspeed.json; `norm`: the vector
    whose norm is `grad_norm`."""
    unreadable_lines: int

    def shown_settings(self) -> dict[str, str]:
        argv = self.environment.get("argv")
        words = {"command": shlex.join(map(str, argv))} if isinstance(argv, list) else {}
        return words | {key: value for key, value in self.settings.items() if key != "norm" and value != "null"}

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("kind") == kind]


def load(run_dir: Path) -> Run:
    """Read a run folder. Torn or foreign lines are counted and skipped. Raises UserError: there is nothing to show."""
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
        tree = untrusted.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _settings(run_dir: Path) -> dict[str, str]:
    try:
        tree = strict_yaml.parse((run_dir / "config.yaml").read_text(), "config.yaml").tree
    except (OSError, ValueError, RecursionError):
        tree = None
    fields = leaves(tree) if isinstance(tree, dict) else ()
    settings = {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in fields}
    ds = _json(run_dir / "deepspeed.json")
    zero = ds.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    names = {"bf16": "bf16", "fp16": "fp16", "torch_autocast": "fp32 with products in bf16"}
    on = [word for name, word in names.items() if isinstance(ds.get(name), dict) and ds[name].get("enabled")]
    if ds:
        settings |= {"precision": (on or ["fp32"])[0], "ZeRO stage": str(stage)}
    return settings | {"norm": norm_of(settings.get("optim.name"), zero=bool(stage))}


def _finite(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number with hundreds of digits
        return None
    return number if abs(number) <= _MOST else None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Finite values of one metric over steps, in order."""

    steps: Sequence[float] = ()
    values: Sequence[float] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A run's curves by metric name, its resume points (steps) and its baselines (name -> nats/token)."""

    by_name: dict[str, Curve]
    resumes: Sequence[float] = ()
    borders: dict[int, float] = field(default_factory=dict)
    """Stage -> number of earlier steps, for stages after the first."""
    baselines: dict[str, float] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        return loss_unit(self.by_name)

    def __getitem__(self, name: str) -> Curve:
        return self.by_name.get(name, Curve())


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over a centred window: a fiftieth of the curve, at least 5 points.

    Centred, because a running average lags a loss that falls fast. Within half a window of an end, the values are the
    straight line through the last complete window (as in Savitzky and Golay's filter).
    """
    reach = max(2, len(values) // 100)
    width = 2 * reach + 1
    if len(values) < width:
        return list(values)
    sums = [0.0, *accumulate(values)]
    means = [(sums[start + width] - sums[start]) / width for start in range(len(values) - width + 1)]
    squares = reach * (reach + 1) * width / 3  # of the distances from the middle

    def line(window: Sequence[float], mean: float, distances: range) -> list[float]:
        slope = sum((index - reach) * value for index, value in enumerate(window)) / squares
        return [mean + slope * distance for distance in distances]

    head = line(values[:width], means[0], range(-reach, 0))
    return [*head, *means, *line(values[-width:], means[-1], range(1, reach + 1))]


def curves_of(run: Run) -> Curves:
    """Return the finite values of each metric by step; of two rows with equal steps the later counts."""
    points_of: dict[str, dict[float, float]] = {}
    for row in run.rows:
        for name, value in row.items():
            if name != "step" and (number := _finite(value)) is not None:
                points_of.setdefault(name, {})[float(row["step"])] = number
    by_name = {}
    for name, points in points_of.items():
        steps = sorted(points)
        by_name[name] = Curve(steps=steps, values=[points[step] for step in steps])
    resumes = sorted({step for e in run.of_kind("resume") if (step := _finite(e.get("step"))) is not None})
    borders = {}
    for event in run.of_kind("stage"):
        stage, first = _finite(event.get("stage")), _finite(event.get("from_step"))
        if stage and first is not None:
            borders[int(stage)] = first
    baselines = {}
    for key, loss in (item for event in run.of_kind("baselines") for item in event.items()):
        if key.endswith("_loss") and (value := _finite(loss)) is not None:
            baselines[key.removesuffix("_loss")] = value
    return Curves(by_name=by_name, resumes=resumes, borders=borders, baselines=baselines)


def facts_of(run: Run, curves: Curves) -> list[tuple[str, str]]:
    facts = [("Steps", f"{max(float(row['step']) for row in run.rows):,.0f}")]
    if parameters := _finite(run.environment.get("parameters")):
        facts.append(("Parameters of the model", f"{parameters:,.0f}"))
    if tokens := curves["tokens"]:
        facts.append(("Training tokens", f"{tokens.values[-1]:,.0f}"))
    if epoch := curves["epoch"]:
        facts.append(("Epochs of the training data", f"{epoch.values[-1]:.3g}"))
    if train := curves["loss"]:
        facts.append(("Training loss, first to last", f"{train.values[0]:.4f} → {train.values[-1]:.4f} {curves.unit}"))
    if evaluation := curves["eval/loss"]:
        last, best = evaluation.values[-1], min(evaluation.values)
        for label, value in (("Validation loss, last", last), ("Validation loss, best", best)):
            more = f" (perplexity {perplexity(value):.2f})" if curves["eval/perplexity"] else ""
            facts.append((label, f"{value:.4f} {curves.unit}{more}"))
    for key, curve in curves.by_name.items():
        if name := set_of(key, "eval/loss"):
            bits = curves[f"eval/{name}/bits_per_byte"]
            more = f" ({bits.values[-1]:.4f} bits/byte)" if bits else ""
            facts.append((f"Loss of {name}, last", f"{curve.values[-1]:.4f} {curves.unit}{more}"))
    if right := next(filter(None, (curves[f"eval/{name}"] for name in accuracies())), None):
        facts.append(("Validation answers preferred rightly, last", f"{right.values[-1]:.1%}"))
    for name, curve in curves.by_name.items():
        kind, _, figure = name.partition("/")
        if figure.endswith("/accuracy_norm"):
            plain = curves[name.removesuffix("_norm")].values[-1]
            about = f"Multiple choice of {figure.split('/')[0]}, last: accuracy, normalised"
            facts.append((about, f"{plain:.1%}, {curve.values[-1]:.1%}"))
        elif kind == "tasks" and "_stderr" not in figure:
            facts.append((f"Task {figure}, at step {curve.steps[-1]:,.0f}", f"{curve.values[-1]:.4f}"))
    for name, value in curves.baselines.items():
        tokens_seen = _finite(run.of_kind("baselines")[-1].get("validation_tokens"))
        measured_on = "" if tokens_seen is None else f" (first {tokens_seen:,.0f} validation tokens)"
        facts.append((f"Loss of a {name} model", f"{value:.4f} nats/token{measured_on}"))
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
    of_features = [fact for feature in features().values() for fact in feature.facts(run.of_kind)]
    return facts + of_features + _history(run)


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
_CHARTS = (
    Chart(file="loss", title="Loss", unit="", curves=(("loss", "training"), ("eval/loss", "validation"))),
    Chart(
        file="bits_per_byte",
        title="Validation loss in bits per byte",
        unit="bits/byte",
        curves=(("eval/bits_per_byte", "validation"),),
    ),
    Chart(
        file="throughput",
        title="Throughput, all devices",
        unit="tokens/s",
        from_zero=True,
        curves=(("tokens_per_s", "tokens/s"),),
    ),
    Chart(
        file="utilization",
        title="Model FLOPs utilization",
        unit="share of the peak",
        from_zero=True,
        curves=(("mfu_causal", "causal"), ("mfu_noncausal", "non-causal")),
    ),
    Chart(
        file="memory", title="Peak memory of rank 0", unit="GiB", from_zero=True, curves=(("max_memory_gib", "memory"),)
    ),
    Chart(
        file="communication",
        title="Communication within a step",
        unit="share",
        from_zero=True,
        curves=(("comm_share", "rank 0"),),
    ),
    Chart(file="learning_rate", title="Learning rate", unit="1", from_zero=True, curves=(("lr", "learning rate"),)),
    Chart(file="gradient_norm", title="Gradient norm", unit="1", curves=(("grad_norm", "norm"),)),
    Chart(file="update_norm", title=_UPDATE_NORM, unit="1", curves=(("grad_norm", "norm"),)),
)
_CHOICES, _NAMED_SHOWN = "Multiple choice, accuracy", 24
_SMOOTHED = ("loss", "tokens_per_s", "grad_norm")
_POINTS_SHOWN = 1500
_MOST = 1e300  # a sum of such values is one, too


def charts_of(runs: list[Run]) -> list[dict[str, Any]]:
    all_curves = [curves_of(run) for run in runs]
    charts = []
    of_objectives = dict.fromkeys(chart for objective in Objective.CHOICES.values() for chart in objective.charts)
    for number, chart in enumerate((*_CHARTS, *of_objectives, *_by_name(all_curves))):
        title, unit, metrics = chart.title, chart.unit, list(chart.curves)
        for metric, _ in chart.curves:
            if metric.startswith("eval/"):  # named sets have the figures of the validation data, too
                named = dict.fromkeys(key for run in all_curves for key in run.by_name if set_of(key, metric))
                metrics += [(key, set_of(key, metric)) for key in named]
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
            names = dict.fromkeys(Optimizer.CHOICES[run.settings["optim.name"]].title for run in measured)
            title += f" ({', '.join(names)})"
        levels = _levels(all_curves) if number == 0 else {}
        marks = all_curves[0].resumes if len(runs) == 1 else []
        borders = all_curves[0].borders if len(runs) == 1 else {}
        lines = [{"name": name, "y": y} for name, y in levels.items()]
        about = {"id": f"chart{number}", "file": chart.file, "title": title, "unit": unit, "zero": chart.from_zero}
        charts.append({**about, "series": series, "levels": lines, "marks": list(marks), "borders": borders})
    return charts


def _by_name(of_runs: Sequence[Curves]) -> list[Chart]:
    """Draw the accuracy of multiple-choice sets and the figures of plugins, which runs name."""
    keys = dict.fromkeys(key for run in of_runs for key in run.by_name)
    groups: dict[str, dict[str, str]] = {}
    for key in keys:
        (first, _, rest), last = key.partition("/"), key.rpartition("/")[2]
        if last in ("accuracy", "accuracy_norm") and f"{key.removesuffix('_norm')}_norm" in keys:
            called = rest.replace("/accuracy_norm", ", normalised").removesuffix("/accuracy")
            groups.setdefault(_CHOICES, {})[key] = called
        elif metric_of(key) is None and (first == "eval" or not rest):
            groups.setdefault(last, {}).update({last: "training", f"eval/{last}": "validation"})
        elif metric_of(key) is None:
            groups.setdefault(first, {})[key] = rest
    charts = []
    for title, curves in list(groups.items())[:_NAMED_SHOWN]:
        file, unit = re.sub(r"\W+", "_", f"named_{title}"), "0 to 1" if title == _CHOICES else ""
        charts.append(Chart(file=file, title=title, unit=unit, curves=tuple(curves.items())[:_NAMED_SHOWN]))
    return charts


def set_of(key: str, metric: str) -> str:
    """Return the named set of a key with the figure `metric` (eval/FIGURE), or ""."""
    figure = metric.removeprefix("eval/")
    name = key.removeprefix("eval/").removesuffix(f"/{figure}")
    return name if key == f"eval/{name}/{figure}" and "/" not in name else ""


def _levels(all_curves: list[Curves]) -> dict[str, float]:
    """Return the baselines on which all runs agree: runs on several data sets share no line."""
    names = all_curves[0].baselines
    values = {name: {curves.baselines.get(name) for curves in all_curves} for name in names}
    return {f"{name} model": names[name] for name, losses in values.items() if len(losses) == 1}


def _series(metric: str, curve: Curve, name: str, color: int, *, dash: bool) -> list[dict[str, Any]]:
    """Return one curve; a noisy one as its average, and faintly itself."""
    if not curve:
        return []
    every = -(-len(curve.steps) // _POINTS_SHOWN)
    shown = sorted({*range(0, len(curve.steps), every), len(curve.steps) - 1})
    x = [curve.steps[index] for index in shown]
    about = {"color": color, "x": x, "dash": dash}
    few = len(x) < _MARKED_BELOW
    raw = {**about, "name": name, "y": [curve.values[i] for i in shown], "dots": few or metric.startswith("eval/")}
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
    events = [event for event in run.events if event.get("kind") != "samples"]
    shown = events[-_EVENTS_SHOWN:]
    rows = []
    for event in shown:
        rest = {key: value for key, value in event.items() if key not in ("time_unix_s", "kind", "step")}
        detail = ", ".join(
            f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in rest.items()
        )
        step = _finite(event.get("step"))
        at = "" if step is None else f"{step:,.0f}"
        text = detail if len(detail) <= 500 else detail[:500] + "…"
        rows.append((_clock(event.get("time_unix_s")), at, str(event.get("kind", "")), text))
    note = f" (the last {_EVENTS_SHOWN} of {len(events)})" if len(events) > len(shown) else ""
    return f"Events of {run.name}{note}", table(("Time (UTC)", "Step", "Event", "Details"), rows)


def _samples(run: Run) -> tuple[str, str]:
    rows = []
    for event in reversed(run.of_kind("samples")):
        prompts, texts = event.get("prompts"), event.get("texts")
        if isinstance(prompts, list) and isinstance(texts, list):
            step = _finite(event.get("step"))
            at = "" if step is None else f"{step:,.0f}"
            rows += [(at, str(prompt), str(text)) for prompt, text in zip(prompts, texts, strict=False)]
    return f"Samples of {run.name}", table(("Step", "Prompt", "Continuation"), rows[:_EVENTS_SHOWN])


def why_slow(run: Run, curves: Curves) -> str:
    """One paragraph: a step's measured parts against those of `llmtrain plan`, the largest difference first."""
    if not (speed := curves["tokens_per_s"]) or not (tokens := curves["tokens"]) or len(tokens.steps) < 2:
        return ""
    of_step = (tokens.values[-1] - tokens.values[0]) / (tokens.steps[-1] - tokens.steps[0])
    step_s = of_step / statistics.median(speed.values)
    waits, shares = curves["data_wait_share"], curves["comm_share"]
    measured = {"waiting for data": step_s * statistics.fmean(waits.values) if waits else 0.0}
    if shares:
        measured["messages between ranks"] = step_s * statistics.fmean(shares.values)
    measured["computing"] = step_s - sum(measured.values())
    planned_steps = [event.get("step_s") for event in run.of_kind("planned")]
    parts = planned_steps[-1] if planned_steps and isinstance(planned_steps[-1], dict) else {}
    parts = {
        part: number for part, value in parts.items() if part != "saves" and (number := _finite(value)) is not None
    }
    if not parts:
        longest = max(measured, key=lambda part: measured[part])
        text = f"A step takes {step_s:.3g} s, of which {measured[longest]:.3g} s are {longest}."
        return f"{text} `llmtrain plan RUN.yaml --device NAME` before a start says what they should be."
    sent = parts.pop("messages", 0.0) + parts.pop("bubble", 0.0)
    planned = {"waiting for data": 0.0, "messages between ranks": sent, "computing": sum(parts.values())}
    if not shares:  # a device computes and sends from one queue
        planned["computing"] += planned.pop("messages between ranks")
    more = sorted(planned, key=lambda part: planned[part] - measured[part])
    delays = [f"{part} {measured[part]:.3g} s (planned {planned[part]:.3g})" for part in more]
    text = f"A step takes {step_s:.3g} s; planned were {sum(planned.values()):.3g} s. Parts, the most delayed first: "
    return f"{text}{', '.join(delays)}. {_REMEDIES[more[0]]}"


_REMEDIES = {
    "waiting for data": "Is the data's disk or store slow? `llmtrain doctor` looks at each host's.",
    "messages between ranks": "They include waiting for slower ranks: `llmtrain doctor` measures hosts and network.",
    "computing": "`--profile.steps 20:23` names the operators. A device that others use, or a hot one, is slow.",
}


def _side_by_side(runs: list[Run], columns: list[dict[str, str]], *, mark: bool) -> str:
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, *(column.get(key, "") for column in columns)) for key in keys]
    return table(("", *(run.name for run in runs)) if len(runs) > 1 else (), rows, mark=mark)


def page_of(runs: list[Run], charts: list[dict[str, Any]]) -> str:
    facts = [dict(facts_of(run, curves_of(run))) for run in runs]
    settings = _side_by_side(runs, [run.shown_settings() for run in runs], mark=True)
    tables = [("Figures", _side_by_side(runs, facts, mark=False)), ("Settings", settings)]
    slow = {run.name: why_slow(run, curves_of(run)) for run in runs}
    tables += [(f"Why is {name} slow?", f"<p>{escaped(text)}</p>") for name, text in slow.items() if text]
    tables += [_samples(run) for run in runs if run.of_kind("samples")]
    tables += [_events(run) for run in runs if run.events]
    names = ", ".join(run.name for run in runs)
    return html_page(names, "; ".join(dict.fromkeys(_period(run) for run in runs)), tables, charts)


def write_report(run_dirs: list[Path], out: Path) -> list[Path]:
    """Write the page, and for a single run its plots as PNG, into `out`. Returns the files, the page first. Raises
    UserError."""
    runs = [load(run_dir) for run_dir in run_dirs]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(run_dir)) for run, run_dir in zip(runs, run_dirs, strict=True)]
    charts = charts_of(runs)
    pictures = {chart["file"]: png(chart) for chart in charts} if len(runs) == 1 else {}
    text = page_of(runs, charts)
    try:
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / "index.html", text.encode(errors="replace"))
        for name, picture in pictures.items():
            replace_file(out / f"{name}.png", picture)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}). Give another folder with --out.") from None
    return [out / "index.html", *(out / f"{name}.png" for name in pictures)]
