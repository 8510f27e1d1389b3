"""`llmtrain replay RUN --steps FIRST:LAST`: train steps of a run again, compare them with its record, name the rows."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from llmtrain.base import untrusted
from llmtrain.base.errors import CheckpointError
from llmtrain.commands.arguments import Parser
from llmtrain.features.spikes.page import lines_for, page_of
from llmtrain.features.spikes.pins import pins_of, write_pins
from llmtrain.features.spikes.replay import Asked, answer_of, asked_by, checkpoints_of, finish, prepare, train


def main(argv: list[str]) -> int:
    """Replay the steps. Returns 0 if they are equal to the record, else 1. Raises UserError."""
    args = _arguments(argv)
    if args.done:
        return _done(args.run)
    asked = asked_by(args)
    lock = prepare(asked)
    try:
        print(asked, file=sys.stderr if args.json else sys.stdout, flush=True)
        train(asked, lock)
        if asked.changed is None:
            return _report(asked, args)
        answer, lines = finish(asked, args.out)
        print(json.dumps(answer) if args.json else "\n".join(lines))
        return 0
    finally:
        os.close(lock)


def _report(asked: Asked, args: argparse.Namespace) -> int:
    answer = answer_of(asked)
    (asked.out / "answer.json").write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    (asked.out / "replay.html").write_text(page_of(answer), encoding="utf-8")
    lines = [*lines_for(answer), f"page {asked.out / 'replay.html'}"]
    for line in [json.dumps(answer)] if args.json else map(untrusted.shown, lines):
        print(line)
    return 0 if answer["equal"] else 1


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="llmtrain replay",
        description="Train steps of a run again from the nearest checkpoint, under the run's own form, in a folder of "
        "its own. Compare them with the run's record, and name the rows with the largest losses and gradients. The run "
        "itself is only read. Exit code 0: the steps are those of the record, 1: they are not.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--steps", metavar="FIRST:LAST", help="optimizer steps, both included")
    asked.add_argument("--done", action="store_true", help="let go of the checkpoints that spikes have kept")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--launch", metavar="HOSTS", help="a hostfile for `llmtrain launch` (default: this machine)")
    where.add_argument("--one-rank", action="store_true", help="train in one process, without any parallelism")
    add = parser.add_argument
    text = "(default: RUN-replay-FIRST-LAST next to the run)"
    add("--out", type=lambda folder: Path(folder).resolve(), metavar="FOLDER", help=text)
    add("--without", metavar="SEQUENCE,...", help="with --write: sequences of these steps that the new run leaves out")
    add("--skip", metavar="STEP,...", help="with --write: steps of these that the new run leaves out")
    add("--write", action="store_true", help="train the steps without them, and make --out a run that continues there")
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="rows with a gradient norm (default 32)")
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE", help="as in the run")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    return parser.parse_args(argv)


def _done(run: Path) -> int:
    folder = checkpoints_of(run)
    if pins := pins_of(folder):
        write_pins(folder, [])
    if pins_of(folder):  # the warning has the reason
        raise CheckpointError(f"{folder}: checkpoints before spikes are still kept; make the folder writable")
    steps = ", ".join(map(str, pins)) or "none was waiting"
    print(f"checkpoints before spikes are no longer kept (steps of the spikes: {steps})")
    return 0
