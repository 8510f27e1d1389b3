"""`llmtrain checkpoint from-deepspeed FOLDER OUT` and `to-deepspeed-universal RUN OUT`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from llmtrain.base import log
from llmtrain.commands.checkpoint import PATH, local


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    importing = add("from-deepspeed", _import, "make a checkpoint from one of DeepSpeed's own")
    importing.add_argument("folder", type=local, help="what engine.save_checkpoint got, or a step's folder")
    importing.add_argument("out", type=local, help="new folder for OUT/checkpoints/step-N")
    importing.add_argument("--tag", help="the step's folder; default: what the file `latest` names")
    importing.add_argument("--model", type=local, help="Hugging Face folder or config.json; default: in the folder")
    importing.add_argument("--names", type=local, help="JSON {their parameter name: Hugging Face name}")
    importing.add_argument("--weights-only", action="store_true", help="take no optimizer state")
    exporting = add("to-deepspeed-universal", _export, "write DeepSpeed's universal checkpoint")
    exporting.add_argument("path", **PATH)
    exporting.add_argument("out", type=local, help="folder to write")


def _import(args: argparse.Namespace) -> int:
    from llmtrain.features.deepspeed_checkpoints.from_deepspeed import import_deepspeed

    lines = import_deepspeed(
        args.folder, args.out, model=args.model, tag=args.tag, names=args.names, weights_only=args.weights_only
    )
    log.put("\n".join(lines))
    return 0


def _export(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.remote import checkpoints_at
    from llmtrain.features.deepspeed_checkpoints.universal import export_universal

    log.put("\n".join(export_universal(checkpoints_at(args.path)[0], args.out)))
    return 0
