"""Downloads from the Hub. One process of a host downloads files into the cache and verifies them.

The list of files and their checksums is asked for once and noted in the cache, so that cached files need no network
again.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llmtrain.base import log, untrusted
from llmtrain.base.errors import ModelError
from llmtrain.base.files import content_of, replace_file
from llmtrain.base.redact import redact_text
from llmtrain.storage import folders
from llmtrain.storage.addresses import COMMIT, INDEX, SINGLE, Repository, endpoint, is_remote, is_url
from llmtrain.storage.folders import Choose, Wrong

_NETWORK = ("TransportError", "ConnectionError", "TimeoutError", "LocalEntryNotFoundError")


class Diagnosis(str):
    """A clause with rule and remedy."""

    unreachable: bool
    """True if the Hub did not answer, so that it may have the files."""

    def __new__(cls, text: str, *, unreachable: bool = False) -> Diagnosis:
        message = super().__new__(cls, redact_text(text))
        message.unreachable = unreachable
        return message


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def explain(error: BaseException | None, repository: Repository, revision: str | None) -> Diagnosis:
    """Explain a failure. `error`: huggingface_hub's exception; None: HF_HUB_OFFLINE is set."""
    from huggingface_hub import get_token

    asked, hub, name = f"revision {revision or 'main'}", f"the Hub ({endpoint()})", repository.name
    where = f"on {hub}"
    if repository.kind == "model":  # it may be the path of a folder, misspelt
        where = f"no such folder is here (looked from {Path.cwd()}), and as a name {where}"
    if error is None:
        return Diagnosis(
            f"{where} it is not in the cache at {asked} ({repository.folder}), and HF_HUB_OFFLINE is set. Correct "
            "the path, fetch it where there is a network, or unset HF_HUB_OFFLINE"
        )
    chain, status = chain_of(error)
    classes = {cls.__name__ for cause in chain for cls in type(cause).__mro__}
    token = get_token() is not None
    who = "the account of this token" if token else "a user without a token"
    if full := [cause for cause in chain if isinstance(cause, OSError) and cause.errno in _DISK]:
        text = (
            f"the cache {repository.folder} on {socket.gethostname()} cannot be written: "
            f"{os.strerror(full[0].errno or 0)}. Make room, correct its permissions, or set HF_HOME to another folder"
        )
    elif "GatedRepoError" in classes:
        path = name if repository.kind == "model" else f"datasets/{name}"
        text = f"the repository is gated: {who} has no access to it. Ask for it at {endpoint()}/{path}"
        text += "" if token else ", and set HF_TOKEN to a token of the account with access"
    elif "RevisionNotFoundError" in classes:
        text = f"the repository has no {asked}. Name one of its branches, tags or commits, or none for main"
    elif "RepositoryNotFoundError" in classes:
        text = f"{where} it does not exist, or is private and {who} may not see it. Correct the path or the name"
        text += "" if token else ", or set HF_TOKEN to a token that may"
    elif status == 401:
        text = f"{hub} does not take the token that is set. Renew HF_TOKEN, or unset it"
    elif status == 403:
        text = f"{hub} refuses {who}: the token lacks the rights. Use another one"
    elif "EntryNotFoundError" in classes and status == 404:
        text = f"{hub} lacks some of the files. Name another revision"
    elif status is not None:
        return Diagnosis(f"{hub} answers with status {status}. Try again later", unreachable=True)
    else:
        text = (str(chain[-1]).strip().splitlines() or [type(chain[-1]).__name__])[0].rstrip(".")
        if classes.isdisjoint(_NETWORK):
            return Diagnosis(f"{type(error).__name__}: {text}")
        text = (
            f"{where} it cannot be reached from {socket.gethostname()}: {text}. Correct the path, or see to the "
            "network (HTTPS_PROXY, HF_ENDPOINT); cached files need none"
        )
        return Diagnosis(text, unreachable=True)
    return Diagnosis(text)


def chain_of(error: BaseException) -> tuple[list[BaseException], int | None]:
    """Return (the error with its causes, the HTTP status of the Hub's answer or None)."""
    chain = [error]
    while (following := chain[-1].__cause__ or chain[-1].__context__) is not None and following not in chain:
        chain.append(following)
    answers = [response for cause in chain if (response := getattr(cause, "response", None)) is not None]
    return chain, answers[0].status_code if answers else None


_NOTES = "llmtrain"  # a folder next to huggingface_hub's, and deleted with them
_CHUNK = 8 << 20  # bytes
_WORKERS = 8

Files = dict[str, tuple[int | None, str | None]]
"""Name of a file -> (its bytes, its checksum: SHA-256 (64 digits) if large, else git's SHA-1 (40)). None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The files of a commit on this host."""

    folder: Path
    commit: str


def fetch(repository: Repository, revision: str | None, choices: Sequence[Choose], wrong: Wrong) -> Snapshot:
    """Download the files that `choices` choose from a branch, tag or commit (default: main); without network if all are
    here. Raises what `wrong` makes; a choice may raise, too."""
    with folders.alone(repository.lock):
        # Known without a question: it is a commit, or another rank of this launch has asked.
        commit = revision if revision is not None and COMMIT.fullmatch(revision) else None
        asked = {"launch": _launch(), "revision": revision}
        last = _read_note(repository, "launch")
        if "LOCAL_RANK" in os.environ and {**last, **asked} == last and COMMIT.fullmatch(str(last.get("commit"))):
            commit = last["commit"]
        files = {} if commit is None else _files_noted(repository, commit)
        if commit is None or not files:
            commit, files = _ask(repository, commit or revision, wrong)
        folder = repository.snapshot(commit)
        for choose in choices:
            chosen = {name: files.get(name, (None, None)) for name in choose(sorted(files), folder)}
            _complete(repository, commit, chosen, wrong)
        if revision != commit:
            with contextlib.suppress(OSError):  # a branch's commit, as huggingface_hub records it for offline use
                branch = repository.folder / "refs" / (revision or "main")
                branch.parent.mkdir(parents=True, exist_ok=True)
                if not branch.is_file() or branch.read_text() != commit:
                    replace_file(branch, commit.encode())
        _note(repository, "launch", {**asked, "commit": commit})
    return Snapshot(folder=folder, commit=commit)


def fetch_model(model: str, revision: str | None, choices: Sequence[Choose], wrong: Wrong) -> Snapshot:
    """As `fetch`, for ORG/NAME or a URL."""
    if is_url(model):
        folder, commit = folders.fetch(model, revision, choices, wrong)
        return Snapshot(folder=folder, commit=commit)
    return fetch(Repository(kind="model", name=model), revision, choices, wrong)


def known_files(repository: Repository, commit: str) -> list[str]:
    """Return the names of all known files of a commit that was downloaded before."""
    cached = _in_cache(repository, commit)
    return sorted(cached[1]) if cached else []


def _launch() -> str:
    """Return what identifies this launch on this host: the parent's process id and start time."""
    parent = os.getppid()
    with contextlib.suppress(psutil.Error):
        return f"{socket.gethostname()} {parent} {psutil.Process(parent).create_time()}"
    return f"{socket.gethostname()} {os.getpid()} alone"


def _ask(repository: Repository, revision: str | None, wrong: Wrong) -> tuple[str, Files]:
    """Return commit and files from the Hub; offline, or without an answer, from the cache."""
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode():
        if cached := _in_cache(repository, revision):
            return cached
        raise wrong(explain(None, repository, revision))
    try:
        info = HfApi().repo_info(
            repository.name, repo_type=repository.kind, revision=revision, files_metadata=True, timeout=30.0
        )
    except Exception as error:  # classes of the HTTP library and huggingface_hub
        message = explain(error, repository, revision)
        if message.unreachable and (cached := _in_cache(repository, revision)):
            log.warn(f"{repository.name}: the Hub does not answer; using commit {cached[0]} from the cache")
            return cached
        raise wrong(message) from error
    if info.sha is None or not COMMIT.fullmatch(info.sha):
        raise wrong(f"the Hub names no commit ({info.sha!a}). Is HF_ENDPOINT the address of a Hub?")
    files: Files = {
        sibling.rfilename: (sibling.lfs.size, sibling.lfs.sha256) if sibling.lfs else (sibling.size, sibling.blob_id)
        for sibling in getattr(info, "siblings", None) or ()
        if ".." not in sibling.rfilename.split("/") and not sibling.rfilename.startswith("/")
    }
    _note(repository, info.sha, {**_read_note(repository, info.sha), "files": files})
    return info.sha, files


def _files_noted(repository: Repository, commit: str) -> Files:
    files = _read_note(repository, commit).get("files") or {}
    return {name: (size, checksum) for name, (size, checksum) in files.items()}


def _in_cache(repository: Repository, revision: str | None) -> tuple[str, Files] | None:
    """Return commit and files in this host's cache, or None; a file's digest is the name of its blob."""
    commit = revision or "main"
    if not COMMIT.fullmatch(commit):
        with contextlib.suppress(OSError):
            commit = (repository.folder / "refs" / commit).read_text().strip()
    folder = repository.snapshot(commit)
    if not COMMIT.fullmatch(commit) or not folder.is_dir():
        return None
    files = _files_noted(repository, commit)
    for path in () if files else sorted(folder.rglob("*")):
        if path.is_file():
            digest = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
            is_digest = re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest)
            files[str(path.relative_to(folder))] = path.stat().st_size, digest if is_digest else None
    return commit, files


def _complete(repository: Repository, commit: str, chosen: Files, wrong: Wrong) -> None:
    """Download missing files, and verify files that are not yet verified."""
    folder = repository.snapshot(commit)
    note = _read_note(repository, commit)
    proved = note.get("proved") or {}
    todo = {name: file for name, file in chosen.items() if proved.get(name) != (_stat(folder / name) or 0)}
    if missing := [name for name in todo if not (folder / name).is_file()]:
        _download(repository, commit, {name: todo[name][0] or 0 for name in missing}, wrong)
    with ThreadPoolExecutor(_WORKERS) as pool:
        digests = pool.map(lambda name: _digest(folder / name, todo[name][1]), todo)
    for (name, (_, checksum)), digest in zip(todo.items(), digests, strict=True):
        if digest != checksum:
            path = folder / name
            while path.is_symlink():  # snapshot -> blob, or -> the blob of all repositories
                link = path
                path = path.parent / os.readlink(path)
                link.unlink()
            path.unlink()
            raise wrong(
                f"{name} of commit {commit} has the checksum {digest}, the Hub says {checksum}: the transfer or "
                f"the disk of {socket.gethostname()} has changed it. It was removed from the cache; start again"
            )
    if todo:
        now = {name: _stat(folder / name) for name in todo}
        _note(repository, commit, {**note, "proved": {**proved, **now}})


def _download(repository: Repository, commit: str, missing: Mapping[str, int], wrong: Wrong) -> None:
    """Download files that the cache lacks. `missing`: name -> bytes."""
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if constants.is_offline_mode():
        raise wrong(
            f"the cache {repository.folder} lacks {', '.join(sorted(missing)[:3])} of commit {commit}, and "
            "HF_HUB_OFFLINE is set. Fetch it where there is a network, or unset HF_HUB_OFFLINE"
        )
    nearest = next(path for path in (repository.folder, *repository.folder.parents) if path.exists())
    folders.announce(
        f"{repository.name}, commit {commit[:12]}", missing, nearest, "HF_HOME to a folder on a larger disk", wrong
    )
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        options: dict[str, Any] = {"max_workers": _WORKERS, "allow_patterns": list(map(glob.escape, missing))}
        snapshot_download(repository.name, repo_type=repository.kind, revision=commit, **options)
        # Without an answer of the Hub, snapshot_download may accept the local part of a snapshot.
        for name in missing:
            if not (repository.snapshot(commit) / name).is_file():
                hf_hub_download(repository.name, name, repo_type=repository.kind, revision=commit)
    except Exception as error:  # classes of the HTTP library, huggingface_hub and the disk
        raise wrong(explain(error, repository, commit)) from error


def _digest(path: Path, checksum: str | None) -> str | None:
    """Return the file's digest as the Hub makes it: SHA-256 for a large file, else git's of its blob. None: no
    checksum."""
    if checksum is None:
        return None
    digest = hashlib.sha256() if len(checksum) == 64 else hashlib.sha1(usedforsecurity=False)
    if len(checksum) != 64:
        digest.update(b"blob %d\0" % path.stat().st_size)
    with open(path, "rb") as stream:
        while part := stream.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest()


def _stat(path: Path) -> list[int] | None:
    with contextlib.suppress(OSError):
        stat = path.stat()
        return [stat.st_size, stat.st_mtime_ns]
    return None


def _read_note(repository: Repository, name: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # a damaged one is made anew
        note = untrusted.loads(content_of(repository.folder / _NOTES / f"{name}.json"))
        [untrusted.natural(size or 0) for size, _ in (note.get("files") or {}).values()]
        return {**note, "proved": dict(note.get("proved") or {})}
    return {}


def _note(repository: Repository, name: str, values: dict[str, Any]) -> None:
    """Write a note next to the cached files. If that fails, the next start asks the Hub and verifies again."""
    with contextlib.suppress(OSError):
        (repository.folder / _NOTES).mkdir(parents=True, exist_ok=True)
        replace_file(repository.folder / _NOTES / f"{name}.json", json.dumps(values).encode())


_SETTINGS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_TEMPLATES = "additional_chat_templates/"
ADAPTER = "adapter_model.safetensors"
"""Weights in a PEFT folder."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def model_folder(model: str, revision: str | None = None, *, asked_by: str) -> Path:
    """Return the folder of a complete model: `model` itself, or the downloaded ORG/NAME on the Hub or URL.

    `asked_by`: named in messages. Raises ModelError.
    """
    if not is_remote(model):
        return Path(model)

    def wrong(text: str) -> ModelError:
        return ModelError(f"{asked_by}: {model}: {text.rstrip('.')}.")

    return fetch_model(model, revision, [settings, weights(wrong)], wrong).folder


def settings(names: Sequence[str], _: Path) -> list[str]:
    """Choose configuration, tokenizer, templates and licence: the files other than weights and code."""
    beside = [n for n in names if "/" not in n or (n.startswith(_TEMPLATES) and n.count("/") == 1)]
    return [n for n in beside if n.endswith(_SETTINGS) or n.startswith(("LICENSE", "NOTICE"))]


def weights(wrong: Wrong) -> Choose:
    """Return a `Choose` for the weight files that transformers would take; a repository may have other copies."""

    def choose(names: Sequence[str], folder: Path) -> list[str]:
        if INDEX not in names:
            if present := [name for name in (SINGLE, ADAPTER) if name in names]:
                return present[:1]
            pickles = [name for name in names if name.endswith(_PICKLES)]
            has = f"it has {', '.join(pickles[:3])}, and pickles are not read" if pickles else "it has no weights"
            raise wrong(
                f"the repository has no {SINGLE} and no {INDEX}: {has}. Name a repository, or a revision of this one, "
                "that has safetensors"
            )
        if SINGLE in names:
            raise wrong(f"the repository has both {SINGLE} and {INDEX}. One is stale: name a revision with one of them")
        try:
            present = sorted(set(untrusted.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise wrong(f"its {INDEX} is not a weight index: {error!r}") from error
        if odd := [n for n in present if not str(n).endswith(".safetensors") or Path(str(n)).name != n]:
            raise wrong(f"its {INDEX} names {odd[0]!a}, which is no safetensors file of the repository")
        return present

    return choose
