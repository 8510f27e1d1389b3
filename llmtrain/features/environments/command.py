"""`llmtrain parity RUN.yaml --against VENV`: the small copy of a run here and in another environment."""

from __future__ import annotations

from llmtrain.commands.parity import ask, make_parser

WORKER = "llmtrain.features.environments.comparison"


def main(argv: list[str]) -> int:
    """Returns the exit code. Raises UserError."""
    parser = make_parser(" --against VENV")
    parser.add_argument("--against", metavar="VENV", help="another environment to compare with, instead of PyTorch")
    args, title, asked, ranks = ask(parser, argv, WORKER)
    from llmtrain.features.environments.comparison import AgainstEnvironment  # --help needs no torch
    from llmtrain.parity.worlds import compare_worlds

    return compare_worlds(title, asked, ranks, AgainstEnvironment(args.against))
