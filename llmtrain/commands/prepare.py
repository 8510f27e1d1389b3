"""`llmtrain prepare`: makes token shards from texts, conversations, preferences and multiple-choice questions."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain import features
from llmtrain.base import untrusted
from llmtrain.base.errors import DataError, UserError
from llmtrain.commands import completion
from llmtrain.commands.arguments import Parser
from llmtrain.config.help import source_entries
from llmtrain.config.plugin_import import use
from llmtrain.data.kinds import RowKind
from llmtrain.data.manifest import Manifest
from llmtrain.data.prepare import plugin_source, preparation
from llmtrain.data.prepare.settings import PrepareSettings
from llmtrain.engine.ranks.local_ranks import ending_on_sigterm


def prepare(
    source: Path | str | Sequence[Path | str],
    out: Path | str,
    *,
    plugin: Path | str | Sequence[Path | str] = (),
    validation_source: Path | str | Sequence[Path | str] = (),
    fields: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Manifest:
    """Prepare a folder as `llmtrain prepare` does: make it, finish it after a kill, or find it complete.

    Args:
        source: what `--source` takes, one or several.
        out: the prepared folder, or its URL in an object store.
        plugin: files that define sources, one or several.
        validation_source: what `--validation-source` takes.
        fields: values of the fields of a plugin's source: {"csv": {"column": "text"}}.
        options: the command's other options, with _ in place of -: format="chat", special_tokens=False.

    Returns the folder's manifest, with `tokens` and `documents` of each split. Raises UserError.
    """
    if "stop_token" in options:
        options["stop_tokens"] = _texts(options.pop("stop_token"))
    if others := options.keys() - PrepareSettings.__dataclass_fields__.keys():
        options |= _of_features({name: options.pop(name) for name in others})
    named = {"sources": source, "validation_sources": validation_source, "plugins": plugin}
    options |= {key: _texts(given) for key, given in named.items()}
    return preparation.prepare(PrepareSettings(out=str(out), fields=fields or {}, **options))


def _of_features(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the settings for options that features have added. Raises DataError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    features.options("prepare", parser.add_argument)
    found = dict[str, Any]()
    for name, value in given.items():
        values, unknown = parser.parse_known_args([f"--{name.replace('_', '-')}={value}"])
        if unknown:
            raise DataError(f"llmtrain.prepare: there is no option {name}; `llmtrain prepare --help` lists them")
        found |= {} if value is None else vars(values)
    return found


def _texts(given: Path | str | Sequence[Path | str]) -> tuple[str, ...]:
    return (str(given),) if isinstance(given, Path | str) else tuple(map(str, given))


def _options() -> argparse.ArgumentParser:
    """Return the parser, when the plugins have been imported."""
    parser = Parser(
        prog="llmtrain prepare",
        description="Tokenize a corpus into memory-mapped shards with a train and a validation split.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    kinds = RowKind.CHOICES
    # fmt: off
    add = parser.add_argument
    add("--source", nargs="+", required=True, metavar="SOURCE",
        help="files, folders or globs (text, code, jsonl, parquet; .gz and .zst too), a saved `datasets` folder, "
             "hf:ORG/NAME[@REVISION][/FILES] for a dataset on the Hub, the URL of any of these in an object store "
             "(s3://BUCKET/corpus/*.jsonl.zst, gs://, az://), or stdlib: the running Python's own standard library")
    add("--out", required=True, metavar="FOLDER", help="the prepared folder, or its URL in an object store")
    add("--tokenizer", metavar="FOLDER",
        help="Hugging Face folder with a tokenizer.json, or ORG/NAME[@REVISION] on the Hub")
    add("--vocab-size", type=int, metavar="N", help="train a byte-level BPE of N tokens on the source instead")
    add("--field", default="text",
        help="the field (jsonl) or column (parquet, csv, datasets) with the text, the question, or token ids "
             "(for these the default is input_ids)")
    add("--format", default="auto",
        choices=[name for format, kind in kinds.items() for name in (*kind.also, format)],
        help="; ".join(f"{format}: {kind.title}" for format, kind in kinds.items()))
    add("--validation-fraction", type=float, metavar="F",
        help="share of --source held out for validation (default: 0.05); 0: none, for runs with train.eval off")
    add("--validation-source", nargs="+", metavar="SOURCE",
        help="take validation from these instead (as --source); a file or document in both is only for validation")
    add("--exclude", metavar="LIST",
        help="a file of lines FILE:RECORD, as `data where` prints them: these documents are left out")
    add("--no-special-tokens", dest="special_tokens", action="store_false", default=argparse.SUPPRESS,
        help="leave out tokens that the tokenizer puts around each text, such as <bos>")
    add("--max-document-bytes", type=int, default=16 << 20, metavar="N", help="reject longer documents")
    add("--shard-bytes", type=int, metavar="N", help="input bytes per shard (default: a 64th, 1 to 256 MiB)")
    add("--max-rejected", type=int, default=0, metavar="N", help="stop when more than N records are bad")
    add("--plugin", action="append", metavar="FILE.py",
        help="a Python file or module with your own sources or formats (extend.md); may be repeated")
    add("--processes", type=int, metavar="N", help="worker processes (default: all cores)")
    features.options("prepare", add)
    # fmt: on
    _add_chat(parser)
    for entry in source_entries():
        values = parser.add_argument_group(f"source {entry.key.partition('.')[0]}:WORDS of a plugin")
        about = f"{entry.doc} ({entry.values}; default: {entry.default})".strip().replace("%", "%%")
        values.add_argument(f"--{entry.key}", dest=entry.key, metavar="VALUE", help=about)
    return parser


def _add_chat(parser: argparse.ArgumentParser) -> None:
    # fmt: off
    add = parser.add_argument_group(
        f"conversations (--format {', '.join(name for name, kind in RowKind.CHOICES.items() if kind.templated)})",
    ).add_argument
    add("--chat-template", metavar="FILE", help="a Jinja template instead of the tokenizer's own")
    add("--chat-template-kwargs", metavar="JSON",
        help="variables for the template, a JSON object; a record's own chat_template_kwargs override "
             "them")
    add("--count", default="assistant", choices=["assistant", "last", "all"],
        help="tokens that the loss counts: of all answers, of the last one, or all")
    add("--max-tokens", type=int, metavar="N",
        help="most tokens of a row, or of a record's rows that stay together (default: no limit; training needs "
             "data.sequence_length of at least the longest)")
    add("--too-long", default="reject", choices=["reject", "cut", "split"],
        help="with a row of more than --max-tokens: reject its record, keep its beginning, or split it into rows")
    add("--stop-token", nargs="+", metavar="TOKEN",
        help="tokens at which generation stops, besides the tokenizer's eos_token and the model's eos_token_id")
    # fmt: on


@ending_on_sigterm()
def main(argv: list[str]) -> int:
    """Return the exit code. A UserError is printed on standard error."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--plugin", action="append", default=[])
    try:
        use(early.parse_known_args(argv)[0].plugin)  # plugins add options
        parser = _options()
        completion.offer(parser)
        if argv and not argv[0].startswith("-"):
            words = " ".join(map(shlex.quote, argv))
            given = {word.split("=")[0] for word in argv}
            out = ("" if given & {"--tokenizer", "--vocab-size"} else " --vocab-size 8192") + (
                "" if "--out" in given else " --out FOLDER"
            )
            raise UserError(
                f"prepare {argv[0]}: write --source before the files to read: `llmtrain prepare --source {words}{out}`"
            )
        values = vars(parser.parse_args(argv))
        out, fields = values["out"], {name: dict[str, Any]() for name in plugin_source.classes()}
        for key in [key for key in values if "." in key]:
            name, _, field = key.partition(".")
            fields[name][field] = values.pop(key)
        prepare(**values, fields={name: given for name, given in fields.items() if given})
    except UserError as error:
        print(f"error: {untrusted.shown(error, lines=True)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"\ninterrupted; finished shards are kept in {out}: the same command continues", file=sys.stderr)
        return 130
    return 0
