"""`llmtrain data show|where DATA`: shows the contents of a prepared folder.

`show` prints rows of conversations with the counted tokens marked, or documents of texts. `where` prints the documents
that a step of a run has read, or the steps that have read a document.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError
from llmtrain.commands import completion
from llmtrain.commands.arguments import Parser
from llmtrain.config.plugin_import import use
from llmtrain.data.manifest import SPLITS, Split
from llmtrain.data.shards import PreparedSet
from llmtrain.data.show import Shown, shown_row, shown_text
from llmtrain.data.tokenize import Encoder
from llmtrain.data.where import Where

_STYLES = {(True, False): "bold green", (True, True): "bold magenta", (False, False): "dim", (False, True): "cyan"}
"""Terminal style of each (counted, special token)."""
_PREFIX = len("counted | ")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="llmtrain data", description="Look at prepared data.")
    actions: Any = parser.add_subparsers(dest="action", required=True)
    show: Any = actions.add_parser(
        "show",
        description="Print rows of prepared conversations with the counted tokens marked, or documents of texts.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    show.add_argument("data", metavar="DATA", help="the prepared folder, or its URL")
    show.add_argument("--split", choices=SPLITS, default="train", help="split of the rows")
    show.add_argument("--index", type=int, default=0, metavar="N", help="first row to print (0 is the first)")
    show.add_argument("--rows", type=int, default=1, metavar="N", help="number of rows")
    where: Any = actions.add_parser(
        "where",
        description="Say which documents a step of a run has read, or which steps have read a document.",
    )
    where.add_argument("data", metavar="DATA", help="the prepared folder, by its path or as the run names it")
    where.add_argument("--run", type=Path, required=True, metavar="RUN", help="folder of a run that has read it")
    for action in (show, where):
        action.add_argument("--plugin", action="append", default=[], metavar="FILE.py", help="defines the rows' format")
    asked = where.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", type=int, metavar="N", help="the documents that optimizer step N has read")
    asked.add_argument("--source", metavar="FILE:LINE", help="the steps that have read this line, row or document")
    where.add_argument("--rank", type=int, metavar="R", help="with --step: only what rank R has read")
    completion.offer(parser)
    args = parser.parse_args(argv)
    if args.action == "where" and args.rank is not None and args.step is None:
        parser.error("--rank needs --step")
    return args


def _where(args: argparse.Namespace) -> int:
    """Print the data of a step, or the steps that have read a record. Raises DataError."""
    known = Where(args.data, args.run)
    if args.step is not None:
        lines = known.at_step(args.step, args.rank)
    else:
        file, _, record = args.source.rpartition(":")
        if not record.isdecimal() or not file:
            raise DataError(f"--source {args.source}: write FILE:LINE, as `data where --step` prints it")
        lines = known.of_source(file, int(record))
    for line in lines:
        print(line)
    return 0


def main(argv: list[str]) -> int:
    """Raises DataError."""
    args = _arguments(argv)
    use(args.plugin)
    if args.action == "where":
        return _where(args)
    data = PreparedSet(args.data)
    chat = data.manifest.chat
    split = cast(Split, args.split)
    encoder = Encoder(data.tokenizer_dir)
    last = min(args.index + max(1, args.rows), data.manifest.documents[split])
    show = shown_row if data.kind.has_rows else shown_text
    rows = [show(data, encoder, split, index) for index in range(args.index, max(last, args.index + 1))]
    for line in [] if chat is None else chat.notes():
        print(untrusted.shown(line))
    for row in rows:
        _print(row, marks=chat is not None)
    return 0


def _print(row: Shown, *, marks: bool) -> None:
    """Print a row. `marks`: mark counted lines with text, too, for output without colours."""
    from rich.console import Console
    from rich.text import Text

    lines: list[Text] = []
    before = None
    for run in row.runs:
        if marks and run.counted is not before and lines and len(lines[-1]) == _PREFIX:  # after a line break
            lines.pop()
        for number, part in enumerate(untrusted.shown(run.text, lines=True).split("\n")):
            if number or run.counted is not before:
                lines.append(Text(("counted | " if run.counted else "        | ") if marks else "", style="dim"))
            before = run.counted
            lines[-1].append(part, style=_STYLES[run.counted, run.special])
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(row.heading, style="bold"))
    for line in lines:
        line.rstrip()
        console.print(line)
