"""Tokenizers and datasets that `llmtrain prepare` is given by their names on the Hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.base.errors import DataError
from llmtrain.storage.hub.fetch import Wrong, fetch
from llmtrain.storage.hub.model import settings as tokenizer_files
from llmtrain.storage.hub.names import REVISION, Repository, is_name

if TYPE_CHECKING:
    from llmtrain.data.prepare.settings import PrepareSettings

PREFIX = "hf:"
_SOURCE = re.compile(r"hf:([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.+))?")
_DATA = (".parquet", ".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
_SPLIT = re.compile(r"(?:^|[/_.-])(train|test|validation|valid|val|dev|eval)(?:ing)?(?=[/_.-])", re.IGNORECASE)
_SAME = {"valid": "validation", "val": "validation", "dev": "validation"}


@dataclass(frozen=True, kw_only=True)
class OnHub:
    """`hf:ORG/NAME[@REVISION][/FILES]`."""

    repository: Repository
    revision: str | None
    files: str | None
    """A file, a folder or a glob within the repository; None: all that have a kind of data."""


def parts_of(source: str) -> OnHub | None:
    """Parses the name of a source on the Hub; None: it is no such name, or a file has it."""
    found = None if Path(source).exists() else _SOURCE.fullmatch(source)
    if found is None or not is_name(found[1]):
        return None
    return OnHub(repository=Repository(kind="dataset", name=found[1]), revision=found[2], files=found[3])


def chosen(names: Sequence[str], source: OnHub) -> list[str]:
    """Which files of a dataset a source means. Raises DataError: none, or those of several splits."""
    what, files = f"{PREFIX}{source.repository.name}", source.files
    if files is not None:
        folder = f"{files.rstrip('/')}/"
        if found := [n for n in names if n == files or n.startswith(folder) or fnmatchcase(n, files)]:
            return found
        raise DataError(f"--source {what}: it has no file {files}, but {', '.join(names[:5]) or 'none at all'}")
    found = [n for n in names if n.lower().endswith(_DATA)]
    if not found:
        raise DataError(f"--source {what}: it has no parquet and no jsonl files; name files of it: {what}/FILES")
    splits = {_split(n): n for n in reversed(found)}
    if len(splits) > 1:
        first = splits.get("train") or found[0]
        raise DataError(
            f"--source {what}: its files are of several splits ({', '.join(splits.values())}); name those to use: "
            f"'{what}/{_pattern(first)}'"
        )
    return found


def fetched(settings: PrepareSettings) -> PrepareSettings:
    """The settings with what is on the Hub on this host: a folder for the tokenizer, a commit in each source's name.

    Raises: DataError.
    """
    return replace(
        settings,
        tokenizer=_tokenizer(settings.tokenizer),
        sources=tuple(_source(each, "--source") for each in settings.sources),
        validation_sources=tuple(_source(each, "--validation-source") for each in settings.validation_sources),
    )


def _tokenizer(given: str | None) -> str | None:
    """The folder of `--tokenizer ORG/NAME[@REVISION]`; anything else as it is."""
    name, _, revision = (given or "").partition("@")
    if given is None or Path(given).exists() or not is_name(name):
        return given
    wrong = _wrong(f"--tokenizer {given}", revision)
    return str(fetch(Repository(kind="model", name=name), revision or None, [tokenizer_files], wrong).folder)


def _source(given: str, option: str) -> str:
    """A name on the Hub with the commit as its revision, its files on this host; anything else as it is."""
    if (source := parts_of(given)) is None:
        return given
    wrong = _wrong(f"{option} {given}", source.revision)
    snapshot = fetch(source.repository, source.revision, [lambda names, _: chosen(names, source)], wrong)
    return f"{PREFIX}{source.repository.name}@{snapshot.commit}" + (f"/{source.files}" if source.files else "")


def _split(name: str) -> str | None:
    found = _SPLIT.search(name)
    return _SAME.get(found[1].lower(), found[1].lower()) if found else None


def _pattern(name: str) -> str:
    """'data/train-00000-of-00002.parquet' -> 'data/train-*'."""
    found = _SPLIT.search(name)
    return f"{name[: found.end() + 1]}*" if found else name


def _wrong(what: str, revision: str | None) -> Wrong:
    def wrong(text: str) -> DataError:
        return DataError(f"{what}: {text.rstrip('.')}.")

    if revision and not REVISION.fullmatch(revision):
        raise wrong(f"{revision!a} is no name of a branch or tag, and no commit. Write it as the Hub shows it")
    return wrong
