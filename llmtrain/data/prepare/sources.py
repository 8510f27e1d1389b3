"""Find the files of a user's sources (files, folders, globs, `stdlib`, `hf:ORG/NAME`), and cut them into units.

A worker turns a unit into one pair of shards (train and validation). The units depend on the input alone, not on the
number of processes.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import re
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from llmtrain.base import log, untrusted
from llmtrain.base.errors import DataError
from llmtrain.base.redact import redact_text
from llmtrain.base.units import counted
from llmtrain.data.kinds import RowKind
from llmtrain.data.prepare import inputs, plugin_source, token_corpora
from llmtrain.storage.addresses import REVISION, Repository, is_name, is_url, leads_out
from llmtrain.storage.folders import Wrong
from llmtrain.storage.hub import fetch, fetch_model, known_files
from llmtrain.storage.hub import settings as tokenizer_files
from llmtrain.storage.object_store import Store, Stored, StoreError, problem_of

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
    """A file, a folder or a glob within the repository; None: all files of a known kind of data."""


def parts_of(source: str) -> OnHub | None:
    """Parse the name of a source on the Hub; None: it has another form, or a file has this name."""
    found = None if Path(source).exists() else _SOURCE.fullmatch(source)
    if found is None or not is_name(found[1]):
        return None
    return OnHub(repository=Repository(kind="dataset", name=found[1]), revision=found[2], files=found[3])


def chosen(names: Sequence[str], source: OnHub) -> list[str]:
    """Return the files of a dataset that a source names. Raises DataError: there are none, or of several splits."""
    what, files = f"{PREFIX}{source.repository.name}", source.files
    if files is not None:
        folder = f"{files.rstrip('/')}/"
        if found := [n for n in names if n == files or n.startswith(folder) or fnmatch.fnmatchcase(n, files)]:
            return found
        raise DataError(f"--source {what}: it has no file {files}, but {', '.join(names[:5]) or 'none at all'}")
    found = [n for n in names if n.lower().endswith(_DATA)]
    if not found:
        raise DataError(f"--source {what}: it has no parquet and no jsonl files; name its files: {what}/FILES")
    splits = {_split_of(n): n for n in reversed(found)}
    if len(splits) > 1:
        first = splits.get("train") or found[0]
        # 'data/train-00000-of-00002.parquet' -> 'data/train-*'
        pattern = f"{first[: split.end() + 1]}*" if (split := _SPLIT.search(first)) else first
        raise DataError(
            f"--source {what}: its files are of several splits ({', '.join(splits.values())}); name those to use: "
            f"'{what}/{pattern}'"
        )
    return found


def fetched(settings: PrepareSettings) -> PrepareSettings:
    """Download sources and tokenizer from the Hub, and return the settings with the tokenizer's folder and the commits.

    Raises: DataError.
    """
    return replace(
        settings,
        tokenizer=_tokenizer(settings.tokenizer),
        sources=tuple(_source(each, "--source") for each in settings.sources),
        validation_sources=tuple(_source(each, "--validation-source") for each in settings.validation_sources),
    )


def _tokenizer(given: str | None) -> str | None:
    """Fetch `--tokenizer ORG/NAME[@REVISION]` or a URL, and return its folder; any other value is returned as it is."""
    if given is not None and is_url(given):
        return str(fetch_model(given, None, [tokenizer_files], _wrong(f"--tokenizer {given}", None)).folder)
    name, _, revision = (given or "").partition("@")
    if given is None or Path(given).exists() or not is_name(name):
        return given
    wrong = _wrong(f"--tokenizer {given}", revision)
    return str(fetch(Repository(kind="model", name=name), revision or None, [tokenizer_files], wrong).folder)


def _source(given: str, option: str) -> str:
    """Download a source on the Hub, and return its name with the commit; any other source is returned as it is."""
    if (source := parts_of(given)) is None:
        return given
    wrong = _wrong(f"{option} {given}", source.revision)
    snapshot = fetch(source.repository, source.revision, [lambda names, _: chosen(names, source)], wrong)
    return f"{PREFIX}{source.repository.name}@{snapshot.commit}" + (f"/{source.files}" if source.files else "")


def _split_of(name: str) -> str | None:
    found = _SPLIT.search(name)
    return _SAME.get(found[1].lower(), found[1].lower()) if found else None


def _wrong(what: str, revision: str | None) -> Wrong:
    def wrong(text: str) -> DataError:
        return DataError(f"{what}: {text.rstrip('.')}.")

    if revision and not REVISION.fullmatch(revision):
        raise wrong(f"{revision!a} is neither a branch, a tag nor a commit. Write it as the Hub shows it")
    return wrong


Kind = Literal["text", "jsonl", "array", "csv", "parquet", "arrow", "tokens", "plugin"]

STDLIB = "stdlib"
# Folders of the standard library that are not library code. The name decides: `test` is the big one,
# `tests` folders lie next to the modules they test, and differ between distributions.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}

BOM = b"\xef\xbb\xbf"
"""The byte-order mark that some programs write before UTF-8; not part of the text."""

_RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".zst")
_IDS = (".npy", ".ds", ".idx")
_MIN_UNIT_BYTES = 1 << 20
_MAX_UNIT_BYTES = 256 << 20
_UNITS_WANTED = 64  # enough that cores finish together and a restart loses little; few enough shards to map


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """An input file. `label` is its path relative to the user's source, for fingerprints and messages."""

    path: str
    label: str
    kind: Kind
    bytes: int
    version: int | str
    """Modification time in ns, or for a URL the store's version: it changes with the content."""
    origin: str = ""
    """Name in `data where`, if different from `label`."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Range [start, stop) of one file, in bytes (text, jsonl, array, csv), row groups (parquet), record batches (arrow)
    or tokens. For records of a plugin the path is NAME:PART."""

    path: str
    label: str
    kind: Kind
    start: int
    stop: int
    bytes: int
    origin: str = ""
    """Name of the file in `data where`."""
    version: str = ""
    """Size and version in the store when the file was listed; empty: it is no URL."""
    excluded: tuple[int, ...] = ()
    """Numbers of the records of the file that --exclude leaves out."""
    before: int = 0
    """Lines of a jsonl file before the piece; only set with `excluded`."""

    @property
    def compressed(self) -> bool:
        return self.path.endswith((".gz", ".zst"))


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Input of one pair of shards, processed by one worker; `index` is in the shards' names."""

    index: int
    pieces: tuple[Piece, ...]
    validation: bool = False
    """True if all documents are for validation, because they are from --validation-source."""

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Unit:
        return Unit(**{**values, "pieces": tuple(Piece(**piece) for piece in values["pieces"])})


def find_files(sources: Iterable[str], form: str = "auto", *, option: str = "--source") -> list[SourceFile]:
    """Return all input files of `sources`, each once, in an order that depends only on their names.

    `form`: the value of --format. Raises DataError, which names `option`, for a missing source.
    """
    found: dict[str, SourceFile] = {}
    for source in sources:
        for file in _expand(source, form, option):
            found.setdefault(place_of(file.path), file)
    if not found:
        raise DataError(f"{option} {' '.join(sources)}: no file in it; name files, folders, globs or {STDLIB!r}")
    return list(found.values())


def place_of(path: str) -> str:
    return path if is_url(path) else os.path.realpath(path)


def _expand(source: str, form: str, option: str) -> list[SourceFile]:
    if source == STDLIB and not os.path.exists(source):
        return _stdlib_files()
    if plugin_source.named_in(source) is not None:
        return [
            SourceFile(path=label, label=label, kind="plugin", bytes=size, version=changed)
            for label, size, changed in plugin_source.parts_of(source, option)
        ]
    if (found := parts_of(source)) is not None:
        return _hub_files(found, form)
    if is_url(source):
        return _store_files(source, form, option)
    if os.path.isdir(source):
        if (saved := _saved(source, os.path.isfile, option)) is not None:
            return _dataset_files(source, saved)
        paths, root = _below(source, option), source
    elif os.path.exists(source):
        paths, root = [source], os.path.dirname(source)
    else:
        paths = _matching(source, option)
        fixed = list(takewhile(lambda part: not glob.has_magic(part), Path(source).parts))
        root = str(Path(*fixed)) if fixed else ""
        if not paths and source.startswith(PREFIX):
            raise DataError(
                f"{option} {source}: a dataset on the Hub has a name of two parts, {PREFIX}ORG/NAME[@REVISION]"
                "[/FILES]; copy it from the dataset's page"
            )
        if not any(os.path.isfile(path) for path in paths):
            raise DataError(
                f"{option} {source}: there is no such file or folder, and as a glob it matches no file; "
                f"check the path (quote a glob so that the shell leaves it alone), or use {STDLIB!r}"
                + ("; for a source of your own give its file, --plugin FILE.py" if ":" in source else "")
            )
    paths = [path for path in paths if os.path.isfile(path)]
    if RowKind.named(form).of_ids and not os.path.isfile(source):
        paths = _with_ids(source, paths, option)
    labels = sorted((os.path.relpath(path, root or "."), path) for path in paths)
    return [_file(path, label, _kind(path, form, option)) for label, path in labels]


def _with_ids(source: str, paths: list[str], option: str) -> list[str]:
    """Return the files that can hold token ids, without their indexes and other files."""
    paths = [path for path in paths if not token_corpora.is_index(path)]
    found = [path for path in paths if path.endswith(_RECORDS) or token_corpora.layout_of(path) is not None]
    notes = [path for path in paths if path not in set(found)]
    if notes:
        log.info(f"{option} {source}: {counted(len(notes), 'file')} without token ids left out, first {notes[0]}")
    return found


def _matching(pattern: str, option: str) -> list[str]:
    """Return the paths that a glob matches; below `**` each folder is visited once, as in `_folders`."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return glob.glob(pattern)
    head, tail = parts[: (at := parts.index("**"))], parts[at + 1 :] or ("*",)
    found: dict[str, None] = {}
    for root in filter(os.path.isdir, glob.glob(os.path.join(*head)) if head else ["."]):
        out: list[str] = []
        for folder in _folders(root, out):
            found |= dict.fromkeys(_matching(os.path.join(glob.escape(folder), *tail), option))
        _say_out(out, root, option)
    return list(found)


def _below(root: str, option: str) -> list[str]:
    """Return the visible files below a folder. Links out of it are not followed: a secret file could become data."""
    out: list[str] = []
    paths = [path for folder in _folders(root, out) for path in glob.glob(os.path.join(glob.escape(folder), "*"))]
    files = [path for path in paths if os.path.isfile(path)]
    out += [path for path in files if os.path.islink(path) and leads_out(Path(root), Path(path)) is not None]
    _say_out(out, root, option)
    return [path for path in files if path not in set(out)]


def _folders(root: str, out: list[str]) -> list[str]:
    """Return a folder and its visible subfolders, each once, even if links form a circle.

    Links out of the folder are added to `out`.
    """
    found: dict[tuple[int, int], str] = {}
    waiting = deque([root])
    while waiting:
        folder = waiting.popleft()
        stat = os.stat(folder)
        if found.setdefault((stat.st_dev, stat.st_ino), folder) != folder:
            continue
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*", "")), reverse=True):
            if not os.path.islink(path := path.rstrip("/")):
                waiting.appendleft(path)
            elif leads_out(Path(root), Path(path)) is None:
                waiting.append(path)  # names without a link come first
            else:
                out.append(path)
    return list(found.values())


def _say_out(out: list[str], root: str, option: str) -> None:
    if out:
        first = f"{untrusted.shown(min(out))} -> {untrusted.shown(os.path.realpath(min(out)))}"
        log.warn(
            f"{option} {root}: {counted(len(out), 'link')} out of the folder not followed, first {first}; to use a "
            f"link's target, name it as another {option}"
        )


def _hub_files(found: OnHub, form: str) -> list[SourceFile]:
    """Return the files of a commit on the Hub. Their modification time counts as 0, so that all hosts agree."""
    assert found.revision is not None
    root = found.repository.snapshot(found.revision)
    names = chosen(known_files(found.repository, found.revision), found)
    label = f"{PREFIX}{found.repository.name}@{found.revision}"
    kinds = {name: _kind(str(root / name), form) for name in names}
    return [replace(_file(str(root / name), f"{label}/{name}", kinds[name]), version=0) for name in names]


def _store_files(source: str, form: str, option: str) -> list[SourceFile]:
    """Return the files of an object store, in the order of a local copy; their labels are URLs."""
    shown = redact_text(source)
    if (problem := problem_of(source)) is not None:
        raise DataError(f"{option} {shown}: {problem[0]}; {problem[1]}")
    try:
        root, pattern = source.rstrip("/"), "**"
        found = Store(root).files()
        if not found:
            # The folder before the first wildcard is listed: 's3://a/b*/c' -> ('s3://a', 'b*/c').
            protocol, _, path = source.partition("://")
            parts = path.split("/")
            first = next((at for at, part in enumerate(parts) if glob.has_magic(part)), len(parts))
            root, pattern = f"{protocol}://{'/'.join(parts[:first])}", "/".join(parts[first:])
            found = Store(root).matching(pattern) if pattern else {}
        named = [name for name in found if name[-1:] != "/" and not _hidden(name, pattern)]
        urls = {f"{root}/{name}" if name else root: found[name] for name in named}
        saved = _saved(root, urls.__contains__, option)
        if saved is None and RowKind.named(form).of_ids and list(urls) != [root]:
            taken = _with_ids(source, list(urls), option)
            urls = {url: urls[url] for url in taken}
        if not urls:
            raise DataError(
                f"{option} {shown}: there is no such file or folder in the store, and as a glob it matches no file; "
                "check the URL (quote a glob so that the shell leaves it alone)"
            )

        def file(url: str) -> SourceFile:
            kind = "arrow" if saved is not None else _kind(url, form, option)
            version = _store_version(url, kind, urls[url])
            return SourceFile(path=url, label=url, kind=kind, bytes=urls[url].bytes, version=version)

        with ThreadPoolExecutor(inputs.AT_ONCE) as threads:
            return list(threads.map(file, sorted(urls) if saved is None else _in_store(root, urls, saved)))
    except (StoreError, FileNotFoundError) as error:
        raise DataError(
            f"{option} {shown}: cannot be read ({error}); check the URL, the store's credentials on this host and the "
            "network"
        ) from None


def _hidden(name: str, pattern: str) -> bool:
    """Return True for a name that `glob.glob` omits, because a wildcard matches no leading dot."""
    spelled = [part for part in pattern.split("/") if part.startswith(".")]
    points = [part for part in name.split("/") if part.startswith(".")]
    return not all(any(fnmatch.fnmatchcase(part, each) for each in spelled) for part in points)


def _store_version(url: str, kind: Kind, stored: Stored) -> str:
    """Return sizes and versions of a file and, for token ids, of its indexes, which `refuse_changed` compares."""
    beside = token_corpora.indexes(url) if kind == "tokens" else []
    return "+".join([f"{stored.bytes}:{stored.version}", *map(inputs.version, beside)])


def refuse_changed(pieces: Iterable[Piece]) -> None:
    """Raise DataError if a file in a store has changed since it was listed."""
    listed = {piece.path: piece for piece in pieces if piece.version}

    def check(piece: Piece) -> None:
        try:
            now = _store_version(piece.path, piece.kind, Store(piece.path).stat())
        except FileNotFoundError:
            now = "nothing"
        except StoreError as error:
            raise inputs.cannot_be_read(piece.path, error) from None
        if now != piece.version:
            raise DataError(
                f"{piece.path}: it has changed since the sources were listed (bytes:version {piece.version}, now "
                f"{now}); run the same command again, which begins again with the present files"
            )

    if listed:
        with ThreadPoolExecutor(inputs.AT_ONCE) as threads:
            list(threads.map(check, listed.values()))


def _file(path: str, label: str, kind: Kind) -> SourceFile:
    try:
        stat = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    beside = token_corpora.indexes(path) if kind == "tokens" else []
    changed = max([stat.st_mtime_ns, *(os.stat(each).st_mtime_ns for each in beside)])
    return SourceFile(path=os.path.abspath(path), label=label, kind=kind, bytes=stat.st_size, version=changed)


def _kind(path: str, form: str, option: str = "--source") -> Kind:
    """Return the kind of reader for a file. Raises DataError: it has token ids, and --format does not say so."""
    name = os.path.basename(path).lower()
    bare = name.removesuffix(".gz").removesuffix(".zst")
    kind = RowKind.named(form)
    if kind.of_ids and not bare.endswith(_RECORDS):
        return "tokens"
    if bare.endswith((".csv", ".tsv")) and form not in ("text", "jsonl", "parquet"):
        return "csv"
    if form == "auto" and (bare.endswith(_IDS) or token_corpora.layout_of(path) is not None):
        raise DataError(
            f"{option} {path}: by its name it holds token ids and not text; add --format tokens, or name other files"
        )
    if kind.reads_records:
        return "parquet" if name.endswith(".parquet") else "array" if _begins(path, b"[") else "jsonl"
    if form == "jsonl" and bare == name and _begins(path, b"["):
        return "array"
    if form != "auto":
        return form  # type: ignore[return-value]  # argparse has checked it
    if name.endswith(".parquet"):
        return "parquet"
    # Compressed .json is one object a line everywhere it is used for corpora (C4, Dolma); plain .json is one document,
    # unless it is a list of objects, which is a set of records and no prose.
    if bare.endswith((".jsonl", ".ndjson", ".json")) and bare == name and _begins(path, b"[", b"{"):
        return "array"
    if bare.endswith((".jsonl", ".ndjson")) or (bare != name and bare.endswith(".json")):
        return "jsonl"
    if bare.endswith(".json") and _is_lines(path):
        return "jsonl"
    return "text"


def _is_lines(path: str) -> bool:
    """Return True if the first two lines of a file are JSON objects."""
    try:
        first, _, rest = inputs.read(path, 0, 1 << 20).removeprefix(BOM).partition(b"\n")
        return rest.lstrip().startswith(b"{") and isinstance(json.loads(first), dict)
    except OSError as error:
        raise inputs.cannot_be_read(path, error) from error
    except (ValueError, RecursionError):
        return False


def _begins(path: str, *signs: bytes) -> bool:
    """Return True if an uncompressed file begins with one of `signs` after white space."""
    if path.endswith((".gz", ".zst")):
        return False
    try:
        head = inputs.read(path, 0, 4096).removeprefix(BOM).split()
    except OSError as error:
        raise inputs.cannot_be_read(path, error) from error
    return b"".join(head).startswith(b"".join(signs))


def _stdlib_files() -> list[SourceFile]:
    """Return the source files of the running Python's standard library, without tests and empty files."""
    root = sysconfig.get_paths()["stdlib"]
    files: list[SourceFile] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith(".py") and os.path.getsize(path) > 0:
                files.append(_file(path, os.path.join(STDLIB, os.path.relpath(path, root)), "text"))
    return sorted(files, key=lambda file: file.label)


# --- saved `datasets` folders: Arrow IPC streams next to a state.json that lists them -------------


def _saved(root: str, is_there: Callable[[str], bool], option: str) -> list[str] | None:
    """Return the Arrow files of a folder by `Dataset.save_to_disk`, in row order; None: it is no saved dataset.

    `root`: path or URL of the folder.
    """
    every, state, info = (os.path.join(root, name) for name in ("dataset_dict.json", "state.json", "dataset_info.json"))
    if is_there(every):
        named = " or ".join(os.path.join(root, str(split)) for split in _read_json(every).get("splits", []))
        raise DataError(f"{option} {root}: it holds several splits of a dataset; name the one to use: {named}")
    if not (is_there(state) and is_there(info)):
        return None
    return [str(entry["filename"]) for entry in _read_json(state).get("_data_files") or []]


def _dataset_files(folder: str, saved: list[str]) -> list[SourceFile]:
    for each in saved:
        if (target := leads_out(Path(folder), Path(folder, each))) is not None:
            raise DataError(
                f"{folder}/state.json names {untrusted.shown(each)}, which is {target}, outside of the folder"
            )
    name = os.path.basename(os.path.abspath(folder))
    return [_file(os.path.join(folder, each), os.path.join(name, each), "arrow") for each in saved]


def _in_store(root: str, urls: Collection[str], saved: list[str]) -> list[str]:
    found = [f"{root}/{each}" for each in saved]
    for url in found:
        if url not in urls:
            raise DataError(f"{root}/state.json names {untrusted.shown(url)}, which is not there; save it again")
    return found


def _read_json(path: str) -> dict[str, Any]:
    try:
        values = untrusted.loads(inputs.read(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is not a readable JSON file ({error}); save the dataset again") from error
    return values if isinstance(values, dict) else {}


# --- cutting into units ---------------------------------------------------------------------------


def unit_bytes_for(total_bytes: int) -> int:
    """Return the input bytes of a unit: a 64th of the input, between 1 MiB and 256 MiB."""
    return min(_MAX_UNIT_BYTES, max(_MIN_UNIT_BYTES, total_bytes // _UNITS_WANTED))


def plan_units(
    files: list[SourceFile], unit_bytes: int, *, first_index: int = 0, validation: bool = False
) -> list[Unit]:
    """Cut `files` into units of about `unit_bytes` input bytes; a compressed file is never cut."""
    units: list[Unit] = []
    pieces: list[Piece] = []
    filled = 0

    def close() -> None:
        nonlocal pieces, filled
        if pieces:
            units.append(Unit(index=first_index + len(units), pieces=tuple(pieces), validation=validation))
        pieces, filled = [], 0

    with ThreadPoolExecutor(8) as threads:  # row groups are requested; Arrow files are read, 16 MiB each at a time
        cut = threads.map(lambda file: list(_split(file, unit_bytes)), files)
    for of_file in cut:
        for piece in of_file:
            alone = piece.kind == "tokens" and piece.bytes >= _MIN_UNIT_BYTES  # a shard in place is of one file
            if alone:
                close()
            pieces.append(piece)
            filled += piece.bytes
            if filled >= unit_bytes or alone:
                close()
    close()
    return units


def _split(file: SourceFile, unit_bytes: int) -> Iterator[Piece]:
    if file.kind == "jsonl" and not file.path.endswith((".gz", ".zst")):
        for start in range(0, max(file.bytes, 1), unit_bytes):
            stop = min(start + unit_bytes, file.bytes)
            yield _piece(file, start, stop, stop - start)
    elif file.kind in ("parquet", "arrow"):
        sizes = _sizes(file)
        if not sizes:  # unreadable: the worker meets the same error and lists the file as rejected
            yield _piece(file, 0, 0, file.bytes)
        start = total = 0
        for index, size in enumerate(sizes):
            total += size
            if total >= unit_bytes or index == len(sizes) - 1:
                yield _piece(file, start, index + 1, total)
                start, total = index + 1, 0
    elif file.kind == "tokens":
        tokens = len(token_corpora.read(file.path).ids)
        each = max(1, -(-unit_bytes * tokens // max(file.bytes, 1)))
        for start in range(0, tokens, each):
            stop = min(start + each, tokens)
            yield _piece(file, start, stop, (stop - start) * file.bytes // tokens)
    else:
        yield _piece(file, 0, file.bytes, file.bytes)


def _piece(file: SourceFile, start: int, stop: int, size: int) -> Piece:
    return Piece(
        path=file.path,
        label=file.label,
        kind=file.kind,
        start=start,
        stop=stop,
        bytes=size,
        origin=file.origin or file.label,
        version=str(file.version) if is_url(file.path) else "",
    )


def _sizes(file: SourceFile) -> list[int]:
    """Return the bytes of each row group of a parquet file or batch of an Arrow file; empty if the file is damaged."""
    import pyarrow
    import pyarrow.parquet

    try:
        with inputs.arrow_file(file.path, seeking=file.kind == "parquet") as raw:
            if file.kind == "arrow":
                return [batch.nbytes for batch in pyarrow.ipc.open_stream(raw)]
            metadata = pyarrow.parquet.read_metadata(raw)
        return [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]
    except (OSError, pyarrow.ArrowException) as error:
        if inputs.of_the_machine(error):
            raise inputs.cannot_be_read(file.path, error) from error
        return []


def stat_fingerprint(files: list[SourceFile]) -> str:
    """Return a hash of names, sizes and versions, which shows a changed input without reading it."""
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(json.dumps([file.label, file.kind, file.bytes, file.version]).encode())
    return digest.hexdigest()
