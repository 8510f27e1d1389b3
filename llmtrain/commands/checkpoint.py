"""`llmtrain checkpoint COMMAND`: lists, verifies, converts and deletes checkpoints. No GPU, no torch.distributed."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain import features
from llmtrain.base import log
from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.listing import best_checkpoints, find_checkpoints, read_while_there, rows, step_folders, table
from llmtrain.commands import completion
from llmtrain.commands.arguments import Parser
from llmtrain.storage.addresses import is_url

if TYPE_CHECKING:
    from llmtrain.checkpoint.hf.proofs import Report

PATH: dict[str, Any] = {"help": "run folder, a checkpoint's folder, RUN/step-N, or a URL of one of them"}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def _ls(args: argparse.Namespace) -> int:
    if is_url(args.path):
        from llmtrain.checkpoint.remote import Remote

        remote = Remote(args.path)
        with remote.outline() as outline:
            found = [replace(row, path=f"{remote.url}/{Path(row.path).name}") for row in rows(outline)]
    else:
        found = rows(Path(args.path))
    if args.json:
        print(json.dumps([{**asdict(row), "path": str(row.path)} for row in found], indent=1))
    else:
        log.put("\n".join(table(found)))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.verify import verify, verify_frozen

    bad = False

    def tell(folder: Path, shown: str, wrong: list[str]) -> None:
        nonlocal bad
        changed = verify_frozen(folder)
        bad = bad or bool(wrong or changed)
        found = "DAMAGED" if wrong else "intact, without its frozen parameters" if changed else "intact"
        log.put("\n  ".join([f"{shown}  {found}", *wrong, *changed]))

    if is_url(args.path):
        from llmtrain.checkpoint.remote import Remote

        remote = Remote(args.path)
        with remote.outline() as outline:
            for folder in step_folders(outline) or find_checkpoints(outline):
                tell(folder, f"{remote.url}/{folder.name}", verify(folder, filled=remote.filled))
    else:
        path = Path(args.path)
        for folder in step_folders(path) or find_checkpoints(path):
            tell(folder, str(folder), verify(folder))
    return 1 if bad else 0


def _diff(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.arithmetic import diff
    from llmtrain.checkpoint.remote import checkpoints_at

    lines, equal = diff(checkpoints_at(args.a)[0], checkpoints_at(args.b)[0])
    log.put("\n".join(lines))
    return 0 if equal else 1


def _prune(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.listing import prune

    done = prune(args.run_folder, args.keep, args.dry_run)
    log.put("\n".join(done.lines))
    return 1 if done.failed else 0


def _average(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.arithmetic import average
    from llmtrain.checkpoint.remote import checkpoints_at

    found = [folder for path in args.sources for folder in checkpoints_at(path, args.last or 1)]
    if args.last is not None and len(found) != args.last * len(args.sources):
        raise CheckpointError(f"--last {args.last}: there are only {len(found)} checkpoints (checkpoint.keep).")
    log.put("\n".join(average(found, args.out)))
    return 0


def _to_hf(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.hf.exporting import export_hf
    from llmtrain.checkpoint.remote import checkpoints_at

    after = features.before_command("checkpoint to-hf", args)
    shard_bytes = None if args.max_shard_size is None else size_bytes(args.max_shard_size)

    def export(checkpoint: Path, out: Path) -> Report:
        return export_hf(
            checkpoint,
            out,
            args.dtype,
            max_shard_bytes=shard_bytes,
            check=args.check,
            merge=args.merge,
            weights=args.weights,
            trust_remote_code=args.trust_remote_code,
        )

    def to_its_place(checkpoint: Path) -> Report:
        if is_url(args.out):
            from llmtrain.checkpoint.hf.export_store import export_to_store

            return export_to_store(checkpoint, args.out, partial(export, checkpoint))
        return export(checkpoint, Path(args.out))

    find = best_checkpoints if args.best else find_checkpoints
    found, report = read_while_there(lambda: checkpoints_at(args.path, find=find)[0], to_its_place)
    log.put("\n".join(report.lines))
    for each in after:
        each(found)
    return 0


def _from_hf(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.hf.from_hf import import_hf
    from llmtrain.storage.addresses import folder_here
    from llmtrain.storage.hub import model_folder

    folder = folder_here(args.folder) or model_folder(args.folder, asked_by="from-hf")
    report = import_hf(folder, args.out, check=args.check, trust_remote_code=args.trust_remote_code)
    log.put("\n".join(report.lines))
    return 0


def size_bytes(text: str) -> int:
    """Return the bytes of '2GB' (2 * 10**9) or '512MiB' (512 * 2**20). Raises CheckpointError."""
    match = _SIZE.fullmatch(text.strip())
    power = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}[match[2].upper()] if match else 0
    value = int(float(match[1]) * (1024 if match[3] else 1000) ** power) if match else 0
    if value < 1:
        raise CheckpointError(f"--max-shard-size {text}: give a size such as 2GB, 500MB or 4GiB.")
    return value


def local(text: str) -> Path:
    """The type of an argument that must be a path on this host: refuses a URL."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL; give a folder on this host")
    return Path(text)


def _lookers(add: Callable[..., argparse.ArgumentParser]) -> None:
    ls = add("ls", _ls, "list step, tokens, size, layout, age and state of each checkpoint")
    ls.add_argument("path", **PATH)
    ls.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    verify = add("verify", _verify, "read every byte; name the file, the rank and the tensors that are damaged")
    verify.add_argument("path", **PATH)
    diff = add("diff", _diff, "compare configuration, layout and tensors; exit code 1 if anything differs")
    diff.add_argument("a", **PATH)
    diff.add_argument("b", **PATH)
    prune = add("prune", _prune, "delete all but the newest good checkpoints, and the leftovers of killed processes")
    prune.add_argument("run_folder", metavar="run", type=local, help="run folder")
    prune.add_argument("--keep", type=int, required=True, metavar="N", help="number of newest good checkpoints to keep")
    prune.add_argument("--dry-run", action="store_true", help="show what would be deleted, delete nothing")


def _converters(add: Callable[..., argparse.ArgumentParser]) -> None:
    average = add("average", _average, "average the parameters of several checkpoints of one model")
    average.add_argument("sources", nargs="+", **PATH)
    average.add_argument(
        "--last", type=int, metavar="K", help="take the newest K checkpoints of each run, not only the newest"
    )
    average.add_argument("out", type=local, help="new folder for OUT/checkpoints/step-N")
    to_hf = add("to-hf", _to_hf, "write a checkpoint as a Hugging Face folder")
    to_hf.add_argument("path", **PATH)
    to_hf.add_argument("out", help="folder to write, or a URL such as s3://bucket/model")
    to_hf.add_argument("--best", action="store_true", help="the best by checkpoint.keep_best, not the newest")
    to_hf.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default: as trained or imported")
    to_hf.add_argument("--max-shard-size", metavar="SIZE", help="largest weight file, such as 2GB; default 5GB")
    to_hf.add_argument(
        "--merge", action="store_true", help="with an adapter: write the complete model, not a PEFT folder"
    )
    to_hf.add_argument("--weights", metavar="NAME", help="write other values that the run has kept, such as ema")
    features.options("checkpoint to-hf", to_hf.add_argument)
    from_hf = add("from-hf", _from_hf, "make a checkpoint with only the parameters of a Hugging Face folder")
    from_hf.add_argument("folder", help="Hugging Face model folder, ORG/NAME on the Hub, or a URL of one")
    from_hf.add_argument("out", type=local, help="new folder for OUT/checkpoints/step-00000000")
    for command in (to_hf, from_hf):
        command.add_argument(
            "--check",
            choices=["auto", "logits", "none"],
            default="auto",
            help="compare logits with the source's (auto: if the models fit in memory); none: read nothing back",
        )
        command.add_argument("--trust-remote-code", action="store_true", help="run Python code in the model's folder")


def main(argv: list[str]) -> int:
    """Returns 1 if `verify` finds damage, `diff` a difference, or `prune` cannot delete. Raises CheckpointError."""
    parser = Parser(prog="llmtrain checkpoint", description="Look at checkpoints, convert them, delete them.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    _lookers(add)
    _converters(add)
    features.subcommands("checkpoint", add)
    completion.offer(parser)
    args = parser.parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        raise CheckpointError(f"{error.filename or 'the system refuses'}: {error.strerror or error}") from error
    return code
