"""`llmtrain init DIR`: recipes, DeepSpeed files, launch scripts and pages of this version, to start from."""

from __future__ import annotations

import argparse
import filecmp
import re
import shutil
from pathlib import Path

from llmtrain.base import log
from llmtrain.base.errors import UserError
from llmtrain.commands import completion

_SHIPPED = Path(__file__).parent / "shipped"
"""Folder that `init` copies. A wheel has its files, a clone links to folders at its top."""
_LEFT_OUT = (".png", ".jsonl")
"""Suffixes of figures and raw results, which a clone has and a wheel does not."""
_NEXT = """\
launch/recipes/   a YAML for each run: copy one and change it
ds_configs/       DeepSpeed JSON; its README.md says which to take
launch/           train.py (for `deepspeed` by hand), examples of hostfile and environment; Slurm, Kubernetes, SkyPilot
examples/         objectives, callbacks, trackers of your own (docs/extend.md)
docs/             the pages: README.md lists them, quickstart.md comes first, configuration.md has every key
to begin:         cd {folder}
                  llmtrain prepare --source stdlib --vocab-size 1024 --out data/stdlib
                  llmtrain launch -- launch/recipes/quickstart.yaml"""


def main(argv: list[str]) -> int:
    """Raises UserError, before anything is written; also for an error of the disk."""
    parser = argparse.ArgumentParser(prog="llmtrain init", description="Write recipes and DeepSpeed files to a folder.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="made if it is not there; no file of it is changed")
    completion.offer(parser)
    folder: Path = parser.parse_args(argv).folder
    pairs = [(file, folder / file.relative_to(_SHIPPED)) for file in _files(_SHIPPED)]
    try:
        for parent in {parent for _, new in pairs for parent in new.parents}:
            if parent.exists() and not parent.is_dir():
                raise UserError(f"{parent} is a file, but init needs a folder of that name. Give an empty folder.")
        if other := [new for old, new in pairs if new.exists() and not filecmp.cmp(old, new, shallow=False)]:
            raise UserError(f"{other[0]} exists with other contents, and init replaces no file. Give an empty folder.")
        for old, new in pairs:
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(old, new)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}. Give a folder that can be written to.") from None
    then = _NEXT.format(folder=folder)
    if folder.resolve() == Path.cwd():
        then = re.sub(r"cd .*\n +", "", then)
    log.info(f"{len(pairs)} files in {folder}\n{then}")
    return 0


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            found += _files(path)
        elif path.is_file() and path.suffix not in _LEFT_OUT:
            found.append(path)
    return found
