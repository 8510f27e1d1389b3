"""`llmtrain checkpoint ls|verify|to-hf`. No GPU, no torch.distributed; torch only for to-hf."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmtrain import units
from llmtrain.checkpoint.format import Manifest, complete_checkpoints, problems, read_trainer, step_of
from llmtrain.errors import CheckpointError


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoints of a run folder (newest first), or the checkpoint itself. Raises CheckpointError."""
    found = [path] if step_of(path) is not None else complete_checkpoints(path / "checkpoints")
    if not found:
        raise CheckpointError(f"{path} holds no complete checkpoint. Give a run folder or a checkpoint's folder.")
    return found


def _list(args: argparse.Namespace) -> int:
    for folder in find_checkpoints(args.path):
        manifest, trainer = Manifest.read(folder), read_trainer(folder)
        total = sum(entry.bytes for entry in manifest.files.values())
        layout = manifest.layout
        print(
            f"{folder}  step {manifest.step}  {units.count(trainer['tokens'])} tokens  {units.size(total)}  "
            f"ZeRO {layout['zero_stage']} x {layout['world_size']} ranks  {layout['precision']}"
        )
    return 0


def _verify(args: argparse.Namespace) -> int:
    bad = False
    for folder in find_checkpoints(args.path):
        manifest = Manifest.read(folder)
        wrong = problems(folder, manifest, sorted(manifest.files))
        bad = bad or bool(wrong)
        print(f"{folder}  {'; '.join(wrong) if wrong else 'intact'}")
    return 1 if bad else 0


def _to_hf(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.hf import export_hf

    print(export_hf(find_checkpoints(args.path)[0], args.out, args.dtype))
    return 0


def main(argv: list[str]) -> int:
    """Returns the exit code: 1 when `verify` finds damage. Raises CheckpointError."""
    parser = argparse.ArgumentParser(prog="llmtrain checkpoint", description=__doc__.split(".")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("ls", _list, "step, tokens, size and layout of each checkpoint"),
        ("verify", _verify, "read every byte and compare it with the manifest"),
        ("to-hf", _to_hf, "write the newest checkpoint as a Hugging Face folder"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", type=Path, help="run folder, or one checkpoint's folder")
        command.set_defaults(run=run)
        if name == "to-hf":
            command.add_argument("out", type=Path, help="folder to write")
            command.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default: as it was trained")
    args = parser.parse_args(argv)
    return args.run(args)
