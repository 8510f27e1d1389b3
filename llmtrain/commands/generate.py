"""`llmtrain generate RUN_OR_FOLDER --prompt ...`: continues a prompt with the trained model."""

from __future__ import annotations

import argparse

from llmtrain.checkpoint.hf.inference import Sampling, generate
from llmtrain.checkpoint.hf.usable import usable_folder
from llmtrain.commands import completion
from llmtrain.commands.arguments import Parser, add_options


def main(argv: list[str]) -> int:
    """Raises CheckpointError, ModelError."""
    parser = Parser(
        prog="llmtrain generate",
        description="Continue a prompt with a trained model; of a run the newest checkpoint or export is used.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser, Sampling())
    parser.add_argument(
        "--prompt", default=argparse.SUPPRESS, help="text to continue (default: none; the model begins a text)"
    )
    parser.add_argument("--best", action="store_true", help="the best by checkpoint.keep_best, not the newest")
    completion.offer(parser)
    args = vars(parser.parse_args(argv))
    path, prompt, best = args.pop("folder"), args.pop("prompt", ""), args.pop("best")
    with usable_folder(path, "generate", best=best) as folder:
        generate(folder, prompt, Sampling(**args), stream=True)
    return 0
