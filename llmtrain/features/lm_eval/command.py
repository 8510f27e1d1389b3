"""`llmtrain eval RUN_OR_FOLDER --tasks NAMES`: the command line, and the table that it prints."""

from __future__ import annotations

import argparse
import sys

from llmtrain.base import log, units
from llmtrain.commands import completion
from llmtrain.commands.arguments import Parser
from llmtrain.features.lm_eval.scoring import need_lm_eval, record, score, target_of


def table(scores: dict[str, dict[str, float]]) -> list[str]:
    lines = [("TASK", "METRIC", "VALUE", "STANDARD ERROR")]
    for task, metrics in scores.items():
        for metric, value in metrics.items():
            if "_stderr" in metric:
                continue
            error = metrics.get(f"{metric}_stderr")
            lines.append((task, metric, f"{value:.4f}", "" if error is None else f"{error:.4f}"))
    return units.lines_of(lines)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="llmtrain eval",
        description="Score a model on tasks of lm-eval's harness (pip install 'llmtrain[eval]'). The scores of a run's "
        "checkpoint are written to the run's metrics at its step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    # fmt: off
    add = parser.add_argument
    add("folder", metavar="RUN_OR_FOLDER",
        help="run folder, checkpoint, Hugging Face or PEFT folder, or ORG/NAME on the Hub")
    add("--tasks", required=True, metavar="NAME,...", help="tasks and groups, such as hellaswag")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=int, metavar="STEP", help="of a run (default: its newest)")
    which.add_argument("--best", action="store_true", default=False, help="of a run: the best by checkpoint.keep_best")
    add("--include-path", action="append", metavar="FOLDER",
        help="a folder with YAML files of tasks, and of what they name: data, and functions in Python, which are run")
    add("--batch-size", type=_count, default=8, metavar="N", help="texts computed together")
    add("--num-fewshot", type=int, metavar="N", help="examples in a prompt (default: the task's)")
    add("--limit", type=_count, metavar="N", help="the first N records of each task alone, for a try")
    # fmt: on
    completion.offer(parser)
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def main(argv: list[str]) -> int:
    """Raises CheckpointError, ModelError, ConfigError, UserError."""
    args = _arguments(argv)
    options = vars(args)
    asked = {"num_fewshot": options.get("num_fewshot"), "limit": options.get("limit")}
    version = need_lm_eval()
    target = target_of(args.folder, options.get("checkpoint"), best=args.best)
    names = [name for name in args.tasks.split(",") if name]
    scores = score(target, names, options.get("include_path", []), batch_size=args.batch_size, **asked)
    log.put("\n".join(table(scores)))
    if target.run is not None:
        about = {"tasks": names, **asked, "lm_eval": version}
        print(f"written to {record(target, scores, about)}", file=sys.stderr)
    return 0
