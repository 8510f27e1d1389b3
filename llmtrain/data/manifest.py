"""manifest.json of a prepared folder: its contents, and the fingerprints that resume and checks compare.

It is written last. A folder without it is not prepared, even if it holds other files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError
from llmtrain.base.files import replace_file

NAME = "manifest.json"
SAMPLE = "conversations.jsonl"
"""File with some of the conversations; an export must render them to the same ids (chat/encoder.py)."""
URL = ".url"
"""File with the store's URL in a copy of a store's folder (cache.py)."""
FORMAT = "llmtrain-data"
VERSION = 1

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")
NEW_COLUMN = "run `llmtrain reference RUN.yaml`, which writes it"
"""Remedy for a reference's or teacher's column that was made with another model or data."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of token ids: the documents of one unit, each followed by the separator."""

    file: str
    tokens: int
    documents: int
    xxh3: str
    """xxh3_64 of the file's bytes, in hexadecimal."""
    rows: str = ""
    """xxh3_64 of the shard's file of rows (their lengths and counted bits, token_stream.py); empty: it has none."""
    origins: str = ""
    """xxh3_64 of the shard's file of origins; empty: a version without origins made the shard."""
    begin: int = 0
    """Bytes before the first token if `file` is a link to a source that is used in place."""
    continues: str = ""
    """Source file of lines of which an earlier shard has the beginning (origins.py); empty: there is none."""
    records_before: int = 0
    """Lines of the file in `continues` before this shard."""
    bytes: int | None = None
    """Size of a source that is used in place and holds more than this shard; None: `file` holds the tokens alone."""


def origins_path(shard: Path) -> Path:
    return shard.with_suffix(".origins.parquet")


@dataclass(frozen=True, kw_only=True)
class ChatFigures:
    """Figures of prepared conversations. Their rows have no separator between them."""

    counted: dict[str, int] = field(default_factory=dict)
    """Counted tokens per split."""
    longest: int
    """Tokens of the longest row, or of the longest record whose rows stay together."""
    too_long: int = 0
    """Rows that were cut or split."""
    stop_tokens: list[str] = field(default_factory=list)
    """Tokens that end an answer."""
    marks: dict[str, bool] = field(default_factory=dict)
    """Flags by which versions before 0.1 recognise the format (`RowKind.marks`)."""
    moment: str | None = None
    """Time that the template's clock showed, if the template writes the date."""
    unread: list[str] = field(default_factory=list)
    """Fields of records with text that was not used."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template for all records."""

    def as_dict(self) -> dict[str, Any]:
        """Return the section for manifest.json; the last three fields are left out if they are empty."""
        values = asdict(self)
        first = {key: values.pop(key) for key in ("counted", "longest", "too_long", "stop_tokens")}
        return first | values.pop("marks") | {key: value for key, value in values.items() if value}

    def notes(self) -> list[str]:
        """Return notes on the template's date and variables, and on fields that were not used."""
        notes = []
        if self.moment is not None:
            notes.append(
                f"the template writes the date: {self.moment.replace('T', ' ')}, when the data was prepared, is in "
                "every prompt"
            )
        if self.chat_template_kwargs:
            notes.append(f"chat_template_kwargs {json.dumps(self.chat_template_kwargs)}")
        if self.unread:
            names = ", ".join(map(untrusted.shown, self.unread))
            rule = "put text that the model should see into messages or documents, and remove the other fields"
            notes.append(f"the fields {names} of the records are not used: {rule}")
        return notes


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a prepared folder. Token counts include the separators."""

    dtype: str
    """uint16 or uint32, little-endian."""
    vocab_size: int
    """Largest token id + 1, added tokens included."""
    separator_id: int
    """The token after every document (the tokenizer's eos_token)."""
    first_tokens: tuple[int, ...] = ()
    """Ids that the tokenizer puts before each text, such as <bos>."""
    tokens: dict[str, int]
    """Tokens per split."""
    documents: dict[str, int]
    """Documents per split."""
    rejected: int
    """Records listed in rejected.jsonl."""
    cut: int = 0
    """Documents that were cut in two, the end for validation and the rest for train; `documents` counts both parts."""
    tokenizer_fingerprint: str
    """Hash of tokenizer/tokenizer.json."""
    data_fingerprint: str
    """Hash of everything that training reads: dtype, vocabulary, separator, tokenizer, and every shard in order."""
    source: dict[str, Any]
    """Number of source files, their bytes, and `stat`: a hash of names, sizes and modification times."""
    settings: dict[str, Any]
    """Options of `llmtrain prepare`."""
    shards: dict[str, tuple[Shard, ...]]
    """Shards per split, in order."""
    chat: ChatFigures | None = None
    """Figures of conversations; None: the documents are texts."""

    @property
    def doubled(self) -> bool:
        """True if documents begin with the separator, too: then two of them are between documents."""
        return self.first_tokens[:1] == (self.separator_id,)


def data_fingerprint(
    dtype: str,
    vocab_size: int,
    separator_id: int,
    tokenizer: str,
    shards: dict[str, tuple[Shard, ...]],
    first_tokens: tuple[int, ...] = (),
) -> str:
    parts = [dtype, vocab_size, separator_id, tokenizer, *filter(None, [first_tokens])]
    listed = [
        [split, shard.tokens, shard.xxh3, *filter(None, [shard.rows])] for split in SPLITS for shard in shards[split]
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps([VERSION, parts, listed]).encode())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    values = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    if not manifest.first_tokens:
        del values["first_tokens"]  # most tokenizers put none there
    if manifest.chat is not None:
        values["chat"] = manifest.chat.as_dict()
    replace_file(folder / NAME, json.dumps(values, indent=1).encode() + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Read the folder's manifest.json. Raises DataError when the folder is not a complete prepared folder."""
    path = folder / NAME
    if not path.is_file():
        state = "is not there" if not folder.exists() else f"holds no {NAME}, so it is not (or not fully) prepared"
        raise DataError(f"{folder}: {state}; run `llmtrain prepare --source FILES --tokenizer FOLDER --out {folder}`")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); prepare the folder again") from error
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, name: str) -> Manifest:
    """Parse manifest.json. `name`: the file's name for messages. Raises DataError."""
    try:
        values = untrusted.loads(content)
        if values.pop("format") != FORMAT:
            raise ValueError("its format is unknown")
        if (version := values.pop("version")) != VERSION:
            raise ValueError(f"its version is {version}, this program reads {VERSION}")
        values.pop("source_fingerprint", None)  # no longer written
        listed = values.pop("shards")
        shards = {split: tuple(map(_shard, listed[split])) for split in SPLITS}
        first = tuple(values.pop("first_tokens", ()))
        chat = values.pop("chat", None)
        chat = None if chat is None else ChatFigures(**{key: chat[key] for key in chat if type(chat[key]) is not bool})
        manifest = Manifest(shards=shards, first_tokens=first, chat=chat, **values)  # type: ignore[arg-type]  # keys are checked by the constructor
        numbers = (manifest.vocab_size, manifest.separator_id, manifest.rejected, *first)
        if any(type(number) is not int for number in numbers):
            raise ValueError("a count in it is not a whole number")
        if not isinstance(manifest.source, dict) or not isinstance(manifest.settings, dict):
            raise ValueError("its source or its settings are not a map")
        if manifest.tokens != {split: sum(shard.tokens for shard in shards[split]) for split in SPLITS}:
            raise ValueError("its tokens do not fit its shards")
        if chat is not None and type(chat.longest) is not int:
            raise ValueError("its longest row is not a whole number")
        if any(bool(shard.rows) != (manifest.chat is not None) for split in SPLITS for shard in shards[split]):
            raise ValueError("some of its shards are of conversations, and some are not")
        tokenizer = manifest.tokenizer_fingerprint
        if manifest.data_fingerprint != data_fingerprint(
            manifest.dtype, manifest.vocab_size, manifest.separator_id, tokenizer, manifest.shards, first
        ):
            raise ValueError("its data_fingerprint does not match its shards, their order, dtype, tokens or tokenizer")
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{name}: is not a manifest of prepared data ({error}); prepare the folder again") from error


def other_begin(first: Manifest, second: Manifest, names: tuple[str, str]) -> str:
    """Return reason and remedy if the texts of two folders begin differently, so that no run can mix them; else "".

    `names`: of the folders, for the message.
    """
    if first.chat is not None or second.chat is not None or first.first_tokens == second.first_tokens:
        return ""
    more, bare = names if first.first_tokens else names[::-1]
    return (
        f"the texts of {more} begin with the tokens that the tokenizer puts there, those of {bare} do not; prepare "
        f"{bare} again, or {more} with --no-special-tokens"
    )


def _shard(entry: dict[str, Any]) -> Shard:
    """Parse a shard's entry. Raises ValueError: it names a file outside the folder, or its counts are no numbers."""
    shard = Shard(**entry)
    name = shard.file
    if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or not name.isprintable():
        raise ValueError(f"{shard.file!r} cannot be the name of a file in this folder")
    counts = (shard.tokens, shard.documents, shard.begin, shard.records_before, shard.bytes or 0)
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        raise ValueError(f"the counts of {shard.file} are not whole numbers")
    return shard


def check_vocabulary(manifest: Manifest, model_vocab_size: int) -> None:
    """Raise DataError if the tokenizer has ids without an embedding in the model."""
    if manifest.vocab_size > model_vocab_size:
        raise DataError(
            f"model vocab_size {model_vocab_size} is smaller than the tokenizer's {manifest.vocab_size}: ids from "
            f"{model_vocab_size} on would index past the embedding; set the model's vocab_size (with "
            f"model.pretrained: model.vocabulary) to at least {manifest.vocab_size}, or prepare the data with the "
            "model's own tokenizer (--tokenizer FOLDER)"
        )
