"""`llmtrain report RUN ...`: one self-contained HTML page, and plots as PNG, from the local files of runs."""

from __future__ import annotations

from pathlib import Path

from llmtrain.base import log
from llmtrain.commands import completion
from llmtrain.commands.arguments import Parser
from llmtrain.features.report.page import write_report


def main(argv: list[str]) -> int:
    """Raises UserError."""
    parser = Parser(prog="llmtrain report", description="Curves and figures of runs as one HTML page.")
    parser.add_argument(
        "run", type=Path, nargs="+", metavar="RUN", help="a run's folder, such as runs/NAME; several: side by side"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: report/ in the first RUN)")
    completion.offer(parser)
    args = parser.parse_args(argv)
    for path in write_report(args.run, args.out or args.run[0] / "report"):
        log.info(str(path))
    return 0
