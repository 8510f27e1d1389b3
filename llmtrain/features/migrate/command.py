"""`llmtrain init --from FILE`: a run of another stack's configuration."""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmtrain.base import log
from llmtrain.base.errors import ConfigError, UserError
from llmtrain.base.trees import leaves, lookup
from llmtrain.commands import completion
from llmtrain.config import strict_yaml
from llmtrain.config.load import parse
from llmtrain.config.problems import Problems, closest, nearest_file, read_text, stop
from llmtrain.config.resolve import resolve
from llmtrain.config.schema import schema
from llmtrain.features.migrate import axolotl, llamafactory, megatron, run_clm, swift, torchtitan, trl
from llmtrain.features.migrate.arguments import Asked, Stack
from llmtrain.features.migrate.draft import Draft, Given, Remark
from llmtrain.features.migrate.rows import Row, rows_of, word

STACKS: dict[str, Stack] = {
    stack.name: stack
    for stack in (
        axolotl.STACK,
        llamafactory.STACK,
        *trl.STACKS,
        run_clm.STACK,
        swift.STACK,
        torchtitan.STACK,
        megatron.STACK,
    )
}


def main(argv: list[str]) -> int:
    """Returns 1 if an option without a place here would train another function. Raises UserError, before it writes."""
    parser = argparse.ArgumentParser(prog="llmtrain init", description="Make a run of another stack's configuration.")
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path(),
        metavar="DIR",
        help="for run.yaml, deepspeed.json and commands.sh (default: this folder)",
    )
    parser.add_argument(
        "--from", dest="file", type=Path, nargs="?", metavar="FILE", help="YAML, JSON or TOML; or -- and a command line"
    )
    parser.add_argument("--stack", choices=STACKS, help="whose it is, where its keys leave it open")
    parser.add_argument("--gpus", type=int, metavar="N", help="ranks of the run: writes the whole batch")
    completion.offer(parser)
    words = argv[argv.index("--") + 1 :] if "--" in argv else []
    asked = parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    if asked.file is None and not words:
        raise UserError("init --from: give a FILE, or -- and a command line of another stack.")
    values, by_words, file = _of_words(words)
    asked.file = asked.file or file
    if asked.file is not None:
        values = {**_read(asked.file), **values}
    asked.file = asked.file or Path("run.sh")
    values = {option: _with_map(option, value, asked.file) for option, value in values.items()}
    if asked.gpus is not None and asked.gpus < 1:
        raise stop("--gpus", asked.gpus, "must be at least 1", "give the number of the run's GPUs")
    gpus, counted_by = _launched(words)
    if asked.gpus is None:
        asked.gpus = gpus
    elif gpus not in (None, asked.gpus):
        rule = f"the command line starts {gpus} ranks ({counted_by})"
        raise stop("--gpus", asked.gpus, rule, f"leave --gpus out, or give --gpus {gpus}")
    else:
        counted_by = "--gpus"
    stack = _stack_of(values, asked.stack or by_words, asked.file)
    rows = rows_of(*stack.classes)
    _refuse_unknown(values, rows, stack, asked.file)
    context = Asked(
        stack=stack, folder=asked.file.parent, out=asked.folder, gpus=asked.gpus, counted_by=counted_by or "--gpus"
    )
    try:
        draft = _translated(values, rows, context)
    except _OF_VALUES as error:
        raise error if isinstance(error, UserError) else _no_value(values, rows, context, asked.file) from None
    files = _files(draft, asked.folder, asked.file, stack)
    _write(files)
    log.info(f"{asked.file} is of {stack.title}. Written: {', '.join(map(str, files))}")
    problems = [str(line) for line in draft.changes] + _check(asked.folder / "run.yaml", asked.gpus, draft.json)
    for line in problems:
        log.info(f"to decide: {line}")
    return 1 if problems else 0


_OF_VALUES = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""What Python raises where a value has another type than is meant, such as a list in place of a number."""


def _translated(values: Mapping[str, Any], rows: Mapping[str, Row], asked: Asked) -> Draft:
    given, draft = Given(values, asked.stack.names), Draft()
    asked.stack.translate(given, draft, asked)
    for option, value in list(given.left.items()):
        _by_row(option, value, _row(rows, option), draft)
    _batch(draft, asked)
    draft.read = [Remark(option, values[option], "") for option in given.answered if not draft.mentions(option)]
    return draft


def _no_value(values: Mapping[str, Any], rows: Mapping[str, Row], asked: Asked, path: Path) -> ConfigError:
    """Return the error of the option without which the others are understood."""
    remedy = f"write numbers, words, lists and maps as {asked.stack.title} expects them"
    for option in values:
        try:
            _translated({key: value for key, value in values.items() if key != option}, rows, asked)
        except _OF_VALUES:
            continue
        return stop(option, values[option], f"is not a value that {asked.stack.title} allows there", remedy, str(path))
    return stop("--from", str(path), f"several values are not allowed by {asked.stack.title}", remedy)


def _batch(draft: Draft, asked: Asked) -> None:
    """Write the whole batch for a number of ranks, as a product of what a data-parallel rank has."""
    if draft.batch_of_rank is None:
        return
    batch, source = draft.batch_of_rank
    if asked.gpus is None:
        text = f"the batch is {source} = {batch} sequences for each data-parallel rank, as in {asked.stack.title}"
        draft.remark("", None, f"{text}: --gpus N writes train.global_batch for N")
        return
    degree = _product(draft.json, _DEGREES[:3])
    draft.yaml.pop("train.accumulation")
    ranks = asked.counted_by if degree == 1 else f"{asked.counted_by} / {degree}, which share a sequence"
    draft.set("train.global_batch", batch * max(1, asked.gpus // degree), f"{source} x {ranks}")


def _product(tree: dict[str, Any], keys: Iterable[str]) -> int:
    return math.prod(size for key in keys if isinstance(size := lookup(tree, key), int) and size > 0)


def _read(path: Path) -> dict[str, Any]:
    """The options of a file. Raises ConfigError."""

    def no_file() -> tuple[str, str]:
        near = nearest_file(path, "*.yaml", "*.yml", "*.json")
        return "no such file", f"did you mean {near}?" if near else "give the path of another stack's configuration"

    text = read_text("--from", str(path), "a configuration", no_file)
    if path.suffix == ".toml":
        try:
            return dict(leaves(tomllib.loads(text)))
        except tomllib.TOMLDecodeError as error:
            raise stop("--from", str(path), f"is no TOML: {error}", "mend the line") from None
    tree = strict_yaml.parse(text, str(path)).tree
    if not isinstance(tree, dict) or not tree:
        raise stop("--from", str(path), "has no options", "give the YAML or JSON of a run")
    return tree


_MAP = re.compile(r"""\{\s*["'}]""")
"""The beginning of a map in a text; a Jinja template begins otherwise."""


def _with_map(option: str, value: Any, path: Path) -> Any:
    """The value, or the map that its text is, which transformers reads out of it, too. Raises ConfigError."""
    if not isinstance(value, str) or not _MAP.match(value):
        return value
    try:
        return strict_yaml.parse(value, str(path)).tree
    except ConfigError:
        raise stop(option, value, "is no JSON", "close its brackets and quotes", str(path)) from None


_OF_LAUNCHERS = ("num_processes", "nproc_per_node", "num_gpus", "nnodes", "num_nodes", "hostfile")
"""Options of accelerate, torchrun and deepspeed, and variables of swift's, that say how many ranks start."""


def _launched(words: list[str]) -> tuple[int | None, str]:
    """Return (the ranks that a command line starts, the options that say so); None: it leaves that open."""
    given = {}
    for part, after in itertools.pairwise([*words, ""]):
        name, has_value, value = part.partition("=")
        name = name.lstrip("-").replace("-", "_").lower()
        if name in _OF_LAUNCHERS and (has_value or part.startswith("-")):
            given[name] = value or after
    if given.get("num_processes", "").isdecimal():
        return int(given["num_processes"]), "num_processes"
    of_host = next((name for name in ("nproc_per_node", "num_gpus") if name in given), None)
    hosts = next((name for name in ("nnodes", "num_nodes") if name in given), None)
    counts = [given[name] for name in (of_host, hosts) if name is not None]
    if of_host is None or (hosts is None and "hostfile" in given) or not all(count.isdecimal() for count in counts):
        return None, ""
    return math.prod(map(int, counts)), " x ".join(name for name in (of_host, hosts) if name is not None)


def _of_words(words: list[str]) -> tuple[dict[str, Any], str | None, Path | None]:
    """Return (options of a command line, its stack if a word of it names one, the file of options that it names)."""
    programs = [place for place, part in enumerate(words) if Path(part).name in _OF_PROGRAMS]
    scripts = [place for place, part in enumerate(words) if part.endswith(".py")]
    begin = next(iter(programs or scripts), 0)
    stack = _OF_PROGRAMS[Path(words[begin]).name] if programs else None
    if stack == "trl":  # its method is the next word
        stack = next((f"trl-{method}" for method in words[begin + 1 : begin + 2] if f"trl-{method}" in STACKS), None)
    values: dict[str, Any] = {}
    if stack == "swift":
        values |= _OF_SWIFT.get("".join(words[begin + 1 : begin + 2]), {})
    name = file = None
    for part in words[begin:]:
        if part.startswith("--"):
            name, _, value = part[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = strict_yaml.plain_scalar(value) if value else True
        elif name is not None:
            known, value = values[name], strict_yaml.plain_scalar(part)
            values[name] = value if known is True else [*(known if isinstance(known, list) else [known]), value]
        elif Path(part).suffix in (".yaml", ".yml", ".json", ".toml"):
            file = Path(part)
        elif part.partition("=")[0].isidentifier() and "=" in part:  # LLaMA-Factory's words over those of its file
            values[part.partition("=")[0]] = strict_yaml.plain_scalar(part.partition("=")[2])
    values = {option: value for option, value in values.items() if option not in _OF_LAUNCHERS}  # trl takes them, too
    if (stack or "").startswith("trl") and isinstance(values.get("config"), str):
        file = Path(values.pop("config"))
    return values, stack, file


_SIGNS = {
    "axolotl": {"base_model"},
    "llamafactory": {"finetuning_type", "template", "cutoff_len", "dataset_dir", "stage", "export_dir"},
    "trl-kto": {"desirable_weight", "undesirable_weight"},
    "trl-reward": {"center_rewards_coefficient"},
    "trl-dpo": {"loss_weights", "sync_ref_model", "f_divergence_type", "use_weighting", "ld_alpha"},
    "trl-sft": {"assistant_only_loss", "completion_only_loss", "dataset_text_field", "packing_strategy"}
    | {"eval_packing"},
    "run_clm": {"block_size", "validation_split_percentage", "config_overrides", "train_file"},
    "swift": {"tuner_type", "rlhf_type", "split_dataset_ratio", "loss_scale", "torch_dtype"},
    "torchtitan": {"training.seq_len", "training.local_batch_size", "job.dump_folder", "model.flavor"},
    "megatron": {"num_layers", "lr_decay_style", "tensor_model_parallel_size"},
}
"""Stack -> options that its files alone have."""
_OF_PROGRAMS = {
    "trl": "trl",
    "swift": "swift",
    "llamafactory-cli": "llamafactory",
    "axolotl": "axolotl",
    "axolotl.cli.train": "axolotl",
    "run_clm.py": "run_clm",
    "pretrain_gpt.py": "megatron",
}
"""Word of a command line -> its stack."""
_OF_SWIFT: dict[str, dict[str, Any]] = {
    "pt": {"use_chat_template": False, "loss_scale": "all"},
    "rlhf": {"rlhf_type": "dpo"},
}
"""Command of swift -> defaults of its own."""
_OF_TRL = {"dataset_name", "dataset_train_split", "use_peft", "lora_r", "dataset_test_split"}
"""Options of all of TRL's commands."""


def _stack_of(values: Mapping[str, Any], asked: str | None, path: Path) -> Stack:
    """Raises ConfigError."""
    fits = [name for name, signs in _SIGNS.items() if signs & values.keys()]
    if not any(name.startswith("trl") for name in fits) and _OF_TRL & values.keys() and "axolotl" not in fits:
        fits += [name for name in STACKS if name.startswith("trl")]
    if asked is not None:
        return STACKS[asked]
    choices = "give --stack " + " or ".join(fits or STACKS)
    if len(fits) > 1:
        raise stop("--from", str(path), f"may be of {', '.join(STACKS[name].title for name in fits)}", choices)
    if not fits:
        raise stop(
            "--from",
            str(path),
            f"its keys ({', '.join(sorted(values)[:6])}) do not tell which stack it is for",
            choices,
        )
    return STACKS[fits[0]]


def _row(rows: Mapping[str, Row], option: str) -> Row | None:
    """Return the option's row, or that of the section that it is in."""
    while option not in rows and "." in option:
        option = option.rpartition(".")[0]
    return rows.get(option)


def _refuse_unknown(values: Mapping[str, Any], rows: Mapping[str, Row], stack: Stack, path: Path) -> None:
    """Raises ConfigError."""
    problems = Problems()
    for option in (option for option in values if _row(rows, option) is None):
        near = closest(option, rows)
        remedy = f"did you mean {near}?" if near else "remove it if it changes nothing that is trained"
        problems.add(option, values[option], f"llmtrain knows no such option of {stack.title}", remedy, str(path))
    if problems:
        raise problems.error()


def _by_row(option: str, value: Any, row: Row | None, draft: Draft) -> None:
    """Answer an option by its row alone."""
    assert row is not None, option
    text = word(value)
    if row.values:
        if text in row.values:
            draft.set(row.to, row.values[text], option)
        elif value not in (False, None):
            draft.change(option, value, row.answer)
    elif row.unless is not None:
        if value is not False or True in row.unless:
            (draft.remark if value in row.unless else draft.change)(option, value, row.answer)
    elif row.to and (value is not False or schema().get(row.to) is bool):
        draft.set(row.to, value, option)
    elif row.json and value is not False:
        draft.set_json(row.json, value)
        draft.json_from.append(option)
    elif row.prepare and value is not False:
        draft.flag(row.prepare, *(value if isinstance(value, list) else [value]))
        draft.prepare_from.append(option)
    elif not row.to and value is not False:
        draft.remark(option, value, row.answer)


def _files(draft: Draft, folder: Path, origin: Path, stack: Stack) -> dict[Path, str]:
    heading = _heading(origin, stack) + " Behind each line: the option that it comes from."
    draft.set("data.path", f"data/{origin.stem}", "llmtrain prepare")
    texts = {
        "run.yaml": draft.yaml_text(heading, "deepspeed.json"),
        "deepspeed.json": draft.json_text(),
        "commands.sh": _commands(draft, origin, stack),
        **draft.files,
    }
    return {folder / name: text for name, text in texts.items()}


def _heading(origin: Path, stack: Stack) -> str:
    return f"From {origin.name} of {stack.title}, by `llmtrain init --from`."


def _commands(draft: Draft, origin: Path, stack: Stack) -> str:
    lines = [
        "#!/bin/sh",
        f"# {_heading(origin, stack)} Run it where run.yaml lies.",
        "set -e",
        f"# prepare: {', '.join(draft.prepare_from)}",
        shlex.join(["llmtrain", "prepare", *draft.prepare, "--out", f"data/{origin.stem}"]),
    ]
    if draft.refers_to_start() and "objective.reference" not in draft.yaml:
        lines.append("llmtrain reference run.yaml")
    lines += ["llmtrain config check run.yaml", "llmtrain launch -- run.yaml"]
    return "\n".join(lines) + "\n"


def _write(files: Mapping[Path, str]) -> None:
    """Raises UserError, and then nothing was written."""
    if there := [path for path in files if path.exists()]:
        raise UserError(f"{there[0]}: it is there already, and init replaces no file. Give an empty folder.")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:  # such as a full disk: half a run would look like one
        for path in files:
            path.unlink(missing_ok=True)
        raise UserError(f"{error.filename}: {error.strerror}. Give a folder that can be written to.") from None


_DEGREES = ("tensor_parallel.autotp_size", "pipeline.stages", "sequence_parallel_size", "expert_parallel.autoep_size")
"""Keys of the JSON whose product is the least number of ranks, at most."""


def _check(path: Path, gpus: int | None, tree: dict[str, Any]) -> list[str]:
    """What `llmtrain config check` would say of the run, but for its data, which are not there yet."""
    try:
        words = ["--config", str(path), "--deepspeed", str(path.with_name("deepspeed.json"))]
        parsed = parse(words, check_paths=False)
        ranks = gpus or _product(tree, _DEGREES)
        resolve(parsed.config, ranks, "--gpus", places=parsed.places, epoch=lambda data: 10**6)
    except ConfigError as error:
        return [str(error)]
    return []
