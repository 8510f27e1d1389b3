"""`llmtrain report RUN`: plots as PNG and one self-contained HTML page from a run's local files."""

from __future__ import annotations

import argparse
import base64
import html
import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain import foreign, log, units
from llmtrain.errors import UserError
from llmtrain.tracking.local import read_rows, write_atomic
from llmtrain.tracking.metrics import perplexity
from llmtrain.tracking.plots import Curve, Curves, draw

_EVENTS_SHOWN = 200
_TITLES = {
    "loss": "Training and validation loss over optimizer steps",
    "throughput": "Throughput over optimizer steps",
    "memory": "Peak memory over optimizer steps",
    "learning_rate": "Learning rate and gradient norm over optimizer steps",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the files of a run folder say."""

    name: str
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    environment: dict[str, Any]
    unreadable_lines: int

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
        environment=_environment(run_dir / "environment.json"),
        unreadable_lines=bad_rows + bad_events,
    )


def _environment(path: Path) -> dict[str, Any]:
    try:
        found = foreign.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _finite(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


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
    if tokens := curves["tokens"]:
        facts.append(("Training tokens", f"{tokens.values[-1]:,.0f}"))
    if train := curves["loss"]:
        facts.append(("Training loss, first to last", f"{train.values[0]:.4f} → {train.values[-1]:.4f}"))
    if evaluation := curves["eval/loss"]:
        last, best = evaluation.values[-1], min(evaluation.values)
        facts.append(("Validation loss, last", f"{last:.4f} (perplexity {perplexity(last):.2f})"))
        facts.append(("Validation loss, best", f"{best:.4f} (perplexity {perplexity(best):.2f})"))
    facts += [(f"Loss of a {name} model", f"{value:.4f}") for name, value in curves.baselines.items()]
    if speed := curves["tokens_per_s"]:
        facts.append(("Tokens/s, median", f"{statistics.median(speed.values):,.0f}"))
    for kind, label in (("causal", "causal"), ("noncausal", "non-causal")):
        if flops := curves[f"model_tflops_per_s_{kind}"]:
            text = f"{statistics.median(flops.values):.4g} TFLOP/s"
            if mfu := curves[f"mfu_{kind}"]:
                text += f", MFU {statistics.median(mfu.values):.1%}"
            facts.append((f"Model FLOP/s, median ({label})", text))
    if memory := curves["max_memory_gib"]:
        facts.append(("Peak memory of rank 0", f"{max(memory.values):.2f} GiB"))
    if waits := curves["data_wait_share"]:
        facts.append(("Waiting for data, mean", f"{statistics.fmean(waits.values):.2%}"))
    if stalls := curves["checkpoint_stall_s"]:
        facts.append(("Checkpoint stall, sum", units.duration(sum(stalls.values))))
    if skipped := curves["skipped_steps"]:
        facts.append(("Skipped steps", f"{skipped.values[-1]:.0f}"))
    return facts + _history(run)


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


_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a202c; background: #f5f7fa; margin: 0; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; }
.sub { color: #4a5568; margin: .25rem 0 1.5rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr));
  background: #fff; border: 1px solid #e2e8f0; border-radius: 8px; overflow: hidden; margin: 0; }
.facts div { box-shadow: 0 0 0 .5px #e2e8f0; padding: .6rem .9rem; }
.facts dt { color: #4a5568; font-size: .8rem; }
.facts dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
img { display: block; width: 100%; background: #fff; border: 1px solid #e2e8f0; border-radius: 8px; margin-top: 1rem; }
table { border-collapse: collapse; width: 100%; background: #fff; font-size: .87rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .7rem; border-bottom: 1px solid #e2e8f0; }
td:nth-child(-n+2) { white-space: nowrap; font-variant-numeric: tabular-nums; }
td:last-child { overflow-wrap: anywhere; }
.wide { overflow-x: auto; border: 1px solid #e2e8f0; border-radius: 8px; }
"""


def page(run: Run, facts: list[tuple[str, str]], pictures: dict[str, bytes]) -> str:
    """The HTML page, everything embedded: it can be sent as one file."""
    escape = html.escape
    cells = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts)
    images = "".join(
        f'<img alt="{escape(_TITLES[name])}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        for name, png in pictures.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)} · llmtrain report</title><style>{_CSS}</style></head><body><main>"
        f'<h1>{escape(run.name)}</h1><p class="sub">{escape(_period(run))}</p>'
        f'<dl class="facts">{cells}</dl><h2>Curves</h2>{images}{_event_table(run)}</main></body></html>\n'
    )


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


def _event_table(run: Run) -> str:
    if not run.events:
        return ""
    shown = run.events[-_EVENTS_SHOWN:]
    lines = []
    for event in shown:
        rest = {key: value for key, value in event.items() if key not in ("time_unix_s", "kind", "step")}
        detail = ", ".join(
            f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in rest.items()
        )
        step = _finite(event.get("step"))
        columns = (
            _clock(event.get("time_unix_s")),
            "" if step is None else f"{step:,.0f}",
            str(event.get("kind", "")),
            detail if len(detail) <= 500 else detail[:500] + "…",
        )
        lines.append("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in columns) + "</tr>")
    note = f" (the last {_EVENTS_SHOWN} of {len(run.events)})" if len(run.events) > len(shown) else ""
    return (
        f'<h2>Events{note}</h2><div class="wide"><table><thead><tr><th>Time (UTC)</th><th>Step</th><th>Event</th>'
        f"<th>Details</th></tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def write_report(run_dir: Path, out: Path) -> list[Path]:
    """Draw the run's report into `out`; the page comes first in the list. UserError for what cannot be used."""
    run = load(run_dir)
    curves = curves_of(run)
    pictures = draw(curves)
    text = page(run, facts_of(run, curves), pictures)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "index.html", text.encode())
        for name, png in pictures.items():
            write_atomic(out / f"{name}.png", png)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}). Give another folder with --out.") from None
    return [out / "index.html", *(out / f"{name}.png" for name in pictures)]


def main(argv: list[str]) -> int:
    """The command `llmtrain report`; 0 on success. Raises UserError."""
    parser = argparse.ArgumentParser(prog="llmtrain report", description="Plots and one HTML page of a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, such as runs/NAME")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: RUN/report)")
    args = parser.parse_args(argv)
    for path in write_report(args.run, args.out or args.run / "report"):
        log.info(str(path))
    return 0
