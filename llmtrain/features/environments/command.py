"""`llmtrain parity RUN.yaml --against VENV`: the small copy of a run here and in another environment."""

from __future__ import annotations

from llmtrain.commands.parity import arguments, asked_run, make_parser
from llmtrain.config.load import configs_in

WORKER = "llmtrain.features.environments.trainer"


def main(argv: list[str]) -> int:
    """Returns the exit code. Raises UserError."""
    parser = make_parser(" --against VENV")
    parser.add_argument("--against", metavar="VENV", help="another environment to compare with, instead of PyTorch")
    args, words = arguments(parser, argv)
    user, ranks, cpu = asked_run(args, words)
    from llmtrain.features.environments.comparison import AgainstEnvironment  # --help needs no torch
    from llmtrain.parity.worlds import Asked, compare_worlds

    asked = Asked(run=user, steps=args.steps, cpu=cpu, worker=WORKER)
    return compare_worlds(", ".join(configs_in(words)), asked, ranks, AgainstEnvironment(args.against))
