"""python -m tools.families: every causal language model of transformers through parity and training in every form.

Results are appended to a jsonl file; a job that is interrupted goes on where it was. --table writes the page.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Before anything imports torch; nothing else may import this file, for the variables would stay in its process.
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from tools.families.cell import FORMS, Ended, parity, train, write_run
from tools.families.configs import families, has_experts, tiny
from tools.families.table import read, write_page

REPO = Path(__file__).resolve().parents[2]
RESULTS, PAGE = REPO / "docs/developers/families.jsonl", REPO / "docs/developers/families.md"
COMMANDS = ("train", "parity")
PARITY_STEPS = 5
_OFFERED = re.compile(r"Set expert_parallel\.preset_model to (\w+)")


def main() -> None:
    args = _arguments()
    if args.table:
        write_page(args.results, PAGE)
        return
    chosen = args.families or families()
    done = set() if args.again else {(row["family"], row["form"], row["command"]) for row in read(args.results)}
    _preload()
    with tempfile.TemporaryDirectory(prefix="llmtrain-families-") as folder:
        data = _prepare(Path(folder))
        for family in chosen:
            _family(family, args, done, Path(folder), data)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.families", description=__doc__)
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--families", type=words, metavar="A,B", help="model types; default: all")
    parser.add_argument("--forms", type=words, metavar="A,B", default=list(FORMS), help=f"of {', '.join(FORMS)}")
    parser.add_argument("--commands", type=words, metavar="A,B", default=list(COMMANDS), help="train, parity")
    parser.add_argument("--results", type=Path, default=RESULTS, help="jsonl file")
    parser.add_argument("--again", action="store_true", help="cells that have a result, too; the last one counts")
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds for a command")
    parser.add_argument("--keep-logs", type=Path, help="a folder for the output of what did not pass")
    parser.add_argument(
        "--table", action="store_true", help="write docs/developers/families.md from the results, run nothing"
    )
    return parser.parse_args()


def _preload() -> None:
    """What the forked processes would import, without a thread or a process group."""
    import warnings

    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # engines import it, and torch.compile with it
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def _prepare(folder: Path) -> str:
    """Data of 512 words, from this project's pages."""
    (folder / "text").mkdir()
    for page in (REPO / "docs").rglob("*.md"):
        shutil.copy(page, folder / "text")
    command = [
        sys.executable,
        "-m",
        "llmtrain",
        "prepare",
        "--source",
        str(folder / "text"),
        "--out",
        str(folder / "data"),
    ]
    done = subprocess.run(
        [*command, "--vocab-size", "512", "--processes", "1", "--validation-fraction", "0.3"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(folder / "data")


def _family(family: str, args: argparse.Namespace, done: set[tuple[str, str, str]], folder: Path, data: str) -> None:
    try:
        model = tiny(family)
        _import(family)
    except Exception as error:  # transformers cannot make the default configuration, or lacks a package for the model
        model, failed = {}, f"{type(error).__name__}: {error}"
    before = [row["attention"] for row in read(args.results) if row["family"] == family]
    attention = before[-1] if before and before[-1] else "sdpa"
    for form in args.forms:
        if form == "ep2" and not has_experts(model):
            continue
        for command in args.commands:
            if (family, form, command) in done:
                continue
            if not model:
                _record(args.results, family, form, command, Ended("no tiny model", failed, 0, 0), "")
                continue
            ended, attention, preset = _cell(family, form, command, attention, model, args, folder, data)
            _record(args.results, family, form, command, ended, attention, preset)


def _cell(
    family: str,
    form: str,
    command: str,
    attention: str,
    model: dict[str, Any],
    args: argparse.Namespace,
    folder: Path,
    data: str,
) -> tuple[Ended, str, str]:
    """(how it ended, the attention and the preset of experts with which): a user who is told to use eager attention, no
    export, or a preset, does so."""
    export, preset = True, ""
    while True:
        with tempfile.TemporaryDirectory(prefix=f"{family}-{form}-", dir=folder) as place:
            recipe = write_run(Path(place), model, form, attention, data, export=export, preset=preset)
            ended = train(recipe, args.limit_s) if command == "train" else parity(recipe, PARITY_STEPS, args.limit_s)
            if args.keep_logs and ended.outcome != "passes":
                args.keep_logs.mkdir(parents=True, exist_ok=True)
                log = (Path(place) / f"{command}.log").read_text(errors="replace")
                (args.keep_logs / f"{family}-{form}-{command}-{attention}.log").write_text(log)
        if ended.outcome == "refused" and attention != "eager" and "model.attention to eager" in ended.reason:
            attention = "eager"
        elif ended.outcome == "refused" and export and "train.export to false" in ended.reason:
            export = False
        elif ended.outcome == "refused" and not preset and (offered := _OFFERED.search(ended.reason)):
            preset = offered[1]
        else:
            return ended, attention, preset


def _import(family: str) -> None:
    """The family's code, so that its processes need not."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    _ = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[family]]


def _record(path: Path, family: str, form: str, command: str, ended: Ended, attention: str, preset: str = "") -> None:
    row = {
        "family": family,
        "form": form,
        "command": command,
        "outcome": ended.outcome,
        "reason": ended.reason[:1500],
        "attention": attention,
        **({"preset": preset} if preset else {}),
        "seconds": round(ended.seconds, 1),
        "cpu_s": round(ended.cpu_s, 1),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "transformers")},
    }
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(
        f"{family} {form} {command}: {ended.outcome} ({row['seconds']} s, cpu {row['cpu_s']} s) {ended.reason[:200]!r}"
    )


if __name__ == "__main__":
    main()
