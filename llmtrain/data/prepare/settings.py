"""Settings of `llmtrain prepare`, their checks, and the split of documents into training and validation.

Which split a document goes to depends on its content (for a conversation on its training rows, since it may appear
under two ids), on the fraction and on the size of the complete input. It does not depend on the number of processes, a
kill or the contents of other documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as of_dataclass
from pathlib import Path
from typing import Any

import xxhash

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError
from llmtrain.config.plugins import hashes
from llmtrain.data import tokenize, tokenizer_folder
from llmtrain.data.chat.conversation import template_variables
from llmtrain.data.kinds import RowKind
from llmtrain.data.manifest import Split
from llmtrain.data.row import RefusedError


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """Settings of one preparation. Exactly one of `tokenizer` and `vocab_size` is given."""

    sources: tuple[str, ...]
    out: str
    tokenizer: str | None = None
    vocab_size: int | None = None
    field: str = "text"
    format: str = "auto"
    validation_sources: tuple[str, ...] = ()
    """Sources of the validation split; with them no document of `sources` is held out."""
    validation_fraction: float | None = None
    """Share of `sources` that is held out for validation; default: 0.05, or 0 with `validation_sources`."""
    exclude: str | None = None
    """File that lists documents to leave out (prepare/excluded.py)."""
    special_tokens: bool = True
    """Put the special tokens around a text that the tokenizer adds, such as <bos>."""
    max_document_bytes: int = 16 << 20
    shard_bytes: int | None = None
    max_rejected: int = 0
    processes: int | None = None
    places: Callable[[int | None], list[Any]] | None = None
    """Returns the places (prepare/pools.py) that do the work, for a value of `processes`; None: use this host."""
    chat_template: str | None = None
    """File with the chat template to use instead of the tokenizer's."""
    chat_template_kwargs: str | None = None
    """Variables of the template for all records, as JSON; those of a record override them."""
    count: str = "assistant"
    max_tokens: int | None = None
    too_long: str = "reject"
    stop_tokens: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    """Files or modules that define sources (prepare/plugin_source.py)."""
    fields: Mapping[str, Mapping[str, Any]] = of_dataclass(default_factory=dict)
    """Name of a plugin's source -> the values of its fields."""

    @property
    def kind(self) -> RowKind:
        """The kind of row with its options. Raises DataError: the tokenizer is unreadable."""
        cls = RowKind.named(self.format)
        options: dict[str, Any] = {} if self.field == "text" else {"field": self.field}
        if cls.templated:
            options |= {
                "stop_tokens": tokenizer_folder.stop_tokens(Path(str(self.tokenizer)), self.stop_tokens),
                "count": self.count,
                "max_tokens": self.max_tokens,
                "too_long": self.too_long,
                "variables": self._variables(),
            }
        return cls(**options)

    @property
    def is_text(self) -> bool:
        """True if the documents are texts, which get the tokenizer's special tokens."""
        return not RowKind.named(self.format).reads_records

    def _variables(self) -> dict[str, Any]:
        if self.chat_template_kwargs is None:
            return {}
        try:
            return template_variables(untrusted.loads(self.chat_template_kwargs), "it")
        except (ValueError, RefusedError) as error:
            raise DataError(
                f"--chat-template-kwargs {self.chat_template_kwargs[:80]}: {error}; write a JSON object, as in "
                """'{"enable_thinking": false}'"""
            ) from error

    @property
    def fraction(self) -> float:
        """Share of `sources` that is held out; 1 if no run can train on them."""
        if RowKind.named(self.format).measures:
            return 1.0
        if self.validation_fraction is not None:
            return self.validation_fraction
        return 0.0 if self.validation_sources else 0.05

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the result, so not max_rejected and processes."""
        values: dict[str, Any] = {
            "source": list(self.sources),
            **({"validation_source": list(self.validation_sources)} if self.validation_sources else {}),
            "field": self.field,
            "format": self.format,
            "validation_fraction": self.fraction,
            "max_document_bytes": self.max_document_bytes,
            "shard_bytes": self.shard_bytes,
            **({"plugins": hashes(), "fields": {k: dict(v) for k, v in self.fields.items()}} if self.plugins else {}),
        }
        if self.tokenizer is not None:
            values["tokenizer"] = tokenizer_folder.fingerprint(Path(self.tokenizer))
            if self.is_text and self.special_tokens and tokenizer_folder.surrounds(Path(self.tokenizer)):
                values["special_tokens"] = "those of the tokenizer's own encoding (--no-special-tokens: none)"
            if (kind := self.kind).templated:
                template = tokenizer_folder.chat_template(Path(self.tokenizer), self.chat_template)
                values |= kind.identity()
                values["chat_template"] = xxhash.xxh3_128_hexdigest(template.encode())
            return values
        return {**values, "vocab_size": self.vocab_size}

    def check(self) -> None:
        """Raise DataError for an invalid value or combination."""
        if (self.tokenizer is None) == (self.vocab_size is None):
            raise DataError(
                "give exactly one of --tokenizer FOLDER (a Hugging Face tokenizer) and --vocab-size N (train one here)"
            )
        kind = RowKind.named(self.format)
        if kind.tokenizer and self.tokenizer is None:
            raise DataError(f"--format {self.format} needs --tokenizer FOLDER: {kind.tokenizer}")
        if kind.measures and (self.validation_sources or self.validation_fraction is not None):
            option = "source" if self.validation_sources else "fraction"
            raise DataError(f"--validation-{option}: all {kind.title} are for evaluation; leave it out")
        given = [
            name
            for name in ("chat_template", "chat_template_kwargs", "max_tokens", "stop_tokens")
            if getattr(self, name)
        ]
        given += [name for name in ("count", "too_long") if getattr(self, name) != getattr(type(self), name)]
        if given and not kind.templated:
            option = {"stop_tokens": "stop-token"}.get(given[0], given[0].replace("_", "-"))
            raise DataError(f"--{option}: is for conversations; add --format chat")
        if kind.complete and (self.count != "assistant" or self.too_long != "reject"):
            option = f"--count {self.count}" if self.count != "assistant" else f"--too-long {self.too_long}"
            raise DataError(f"{option}: {kind.complete}; leave it out")
        if self.too_long != "reject" and self.max_tokens is None:
            raise DataError(f"--too-long {self.too_long}: say with --max-tokens N which row is too long")
        if self.vocab_size is not None and self.vocab_size < tokenize.LEAST_VOCABULARY:
            raise DataError(
                f"--vocab-size {self.vocab_size}: a byte-level BPE needs at least {tokenize.LEAST_VOCABULARY} (256 "
                "bytes and the separator)"
            )
        if self.validation_sources and self.validation_fraction:
            raise DataError(
                "give either --validation-source (its documents are for validation, all of --source for training) or "
                "--validation-fraction (a share of --source is for validation)"
            )
        if not 0 <= self.fraction < 1 and not kind.measures:
            raise DataError(f"--validation-fraction {self.validation_fraction}: must be at least 0 and below 1")
        limits = (
            ("max_document_bytes", 1, "leave it out for the default"),
            ("shard_bytes", 1, "leave it out for the default"),
            ("processes", 1, "leave it out for one a core"),
            ("max_tokens", 2, "a row has a token to read and one to predict; write data.sequence_length of the run"),
        )
        for name, least, remedy in limits:
            value = getattr(self, name)
            if value is not None and value < least:
                raise DataError(f"--{name.replace('_', '-')} {value}: must be at least {least}; {remedy}")
        if not self.special_tokens and not self.is_text:
            raise DataError(f"--no-special-tokens: --format {self.format} has tokens of its own; leave the flag out")
        if self.max_rejected < 0:
            raise DataError(f"--max-rejected {self.max_rejected}: must be at least 0")


_SMALLEST_CUT_BYTES = 4 << 10  # the end of anything shorter would be a meaningless fragment


def cut_above(fraction: float, total_bytes: int) -> int:
    """Return the bytes above which a document is cut in two, so that no split is empty or much too large by chance.

    This is a tenth of the smaller split's share: the probability that it gets none of the smaller documents is e^-10.
    """
    return max(_SMALLEST_CUT_BYTES, int(min(fraction, 1 - fraction) * total_bytes / 10))


def draw(data: bytes) -> float:
    """Return a number from 0 to 1 that depends on the bytes alone; a document below the fraction is for validation.

    So equal documents are always in the same split, and a larger fraction holds out a superset of a smaller one.
    """
    return xxhash.xxh3_64_intdigest(data) / 2.0**64


def parts(text: str, data: bytes, fraction: float, cut_bytes: int) -> list[tuple[Split, str]]:
    """Return the document's text by split: all in one split, or, above `cut_bytes`, the end of it for validation.

    Every character is in exactly one split, and neither part is blank.
    """
    if fraction and len(data) > cut_bytes and (at := _boundary(text, fraction)):
        return [("train", text[:at]), ("validation", text[at:])]
    return [("validation" if draw(data) < fraction else "train", text)]


def _boundary(text: str, share: float) -> int | None:
    """Return a position with about `share` of the characters after it: the end of a paragraph, else of a line or word.

    It is off the exact position by at most a tenth of the smaller part; without such an end in reach it is exact.
    """
    begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
    mark = end - round((end - begin) * share)
    reach = min(mark - begin, end - mark) // 10
    for ending in ("\n\n", "\n", " "):
        found = (text.rfind(ending, mark - reach, mark), text.find(ending, mark, mark + reach))
        ends = [at + len(ending) for at in found if at >= 0]
        if ends:
            return min(ends, key=lambda at: abs(at - mark))
    return mark if begin < mark < end else None
