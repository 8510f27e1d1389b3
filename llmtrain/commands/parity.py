"""`llmtrain parity RUN.yaml`: trains a small copy of the run under its DeepSpeed JSON, and compares it with plain
PyTorch."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from llmtrain.commands import completion
from llmtrain.config.load import command_words, configs_in, parse, run_words
from llmtrain.config.pinned import fetched
from llmtrain.config.problems import COMMAND_LINE, stop
from llmtrain.parity.small_run import usual_ranks, wanted

if TYPE_CHECKING:
    from llmtrain.parity.worlds import Asked

DESCRIPTION = """\
Train a small copy of the run's model under the run's own DeepSpeed JSON, on a few ranks of this host, and compare
each step with plain PyTorch in one process. Needs no data, no weights and no GPU. Exit code 0: the trainings are equal;
1: they differ, and the output says where; 2: the run has a mistake, or its model or parallelism is not supported; 3: no
answer, because a rank died or a program failed."""

WORKER = "llmtrain.parity.trainer"


def main(argv: list[str], worker: str = WORKER) -> int:
    """Returns the exit code. `worker`: the module that each rank runs. Raises UserError."""
    _, title, asked, ranks = ask(make_parser(), argv, worker)
    from llmtrain.parity.worlds import compare_worlds  # --help needs no torch

    return compare_worlds(title, asked, ranks)


def make_parser(more: str = "") -> argparse.ArgumentParser:
    """Return the parser. `more`: usage of further arguments."""
    parser = argparse.ArgumentParser(
        prog="llmtrain parity",
        usage="llmtrain parity RUN.yaml [--SECTION.FIELD VALUE ...] [--ranks N,N] [--steps N] "
        f"[--device auto|cpu|cuda]{more}",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other --SECTION.FIELD VALUE pairs override the YAML, as in `llmtrain config check`.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ranks",
        type=_whole_numbers,
        metavar="N,N",
        help="world sizes to try (default: the smallest that the JSON's degrees allow, and twice that)",
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default 20)")
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: cuda if there is a GPU for each rank, else cpu",
    )
    return parser


def ask(
    parser: argparse.ArgumentParser, argv: list[str], worker: str
) -> tuple[argparse.Namespace, str, Asked, list[int]]:
    """Return (the command's own arguments, the names of the run's YAML files, the comparison, the world sizes). Raises
    UserError."""
    completion.offer_run(parser)
    args, words = command_words(parser, argv)
    words = run_words(words)
    if not 1 <= args.steps <= 1000:
        raise stop("--steps", args.steps, "must be from 1 to 1000", "write --steps 20", COMMAND_LINE)
    parsed = parse(words, check_paths=False)
    user = wanted(fetched(parsed.config)[0], parsed.places)
    ranks = args.ranks or usual_ranks(user.mix.degrees)
    cpu = _on_cpu(args.device, max(ranks))
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    from llmtrain.parity.worlds import Asked

    return args, ", ".join(configs_in(words)), Asked(run=user, steps=args.steps, cpu=cpu, worker=worker), ranks


def _whole_numbers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: write world sizes, such as 2,4")
    return [int(word) for word in words]


def _on_cpu(wish: str, ranks: int) -> bool:
    if wish == "cpu":
        return True
    import torch

    there = torch.cuda.device_count()
    if wish == "cuda" and there < ranks:
        rule = f"{ranks} ranks need a GPU each, and this host has {there}"
        raise stop("--device", wish, rule, "use --device cpu, or fewer --ranks", COMMAND_LINE)
    return there < ranks
