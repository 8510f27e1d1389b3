"""What `llmtrain prepare` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.data import tokenize
from llmtrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """What to prepare, and how. Exactly one of `tokenizer` and `vocab_size` is given."""

    sources: tuple[str, ...]
    out: str
    tokenizer: str | None = None
    vocab_size: int | None = None
    field: str = "text"
    format: str = "auto"
    validation_sources: tuple[str, ...] = ()
    """What validation consists of; then nothing of `sources` is held out."""
    validation_fraction: float | None = None
    """Share of `sources` that is held out: 0.05, or 0 with `validation_sources`, if it is not given."""
    max_document_bytes: int = 16 << 20
    shard_bytes: int | None = None
    max_rejected: int = 0
    processes: int | None = None

    @property
    def fraction(self) -> float:
        """The share of `sources` that is held out."""
        if self.validation_fraction is not None:
            return self.validation_fraction
        return 0.0 if self.validation_sources else 0.05

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result; max_rejected and processes do not."""
        values: dict[str, Any] = {
            "source": list(self.sources),
            **({"validation_source": list(self.validation_sources)} if self.validation_sources else {}),
            "field": self.field,
            "format": self.format,
            "validation_fraction": self.fraction,
            "max_document_bytes": self.max_document_bytes,
            "shard_bytes": self.shard_bytes,
        }
        if self.tokenizer is not None:
            return {**values, "tokenizer": tokenize.fingerprint(Path(self.tokenizer))}
        return {**values, "vocab_size": self.vocab_size}

    def check(self) -> None:
        """Raises DataError for a value, or two together, that cannot be."""
        if (self.tokenizer is None) == (self.vocab_size is None):
            raise DataError(
                "give exactly one of --tokenizer FOLDER (a Hugging Face tokenizer) and --vocab-size N (train one here)"
            )
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
        if not 0 <= self.fraction < 1:
            raise DataError(f"--validation-fraction {self.validation_fraction}: must be at least 0 and below 1")
        for name in ("max_document_bytes", "shard_bytes", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.max_rejected < 0:
            raise DataError(f"--max-rejected {self.max_rejected}: must be at least 0")
