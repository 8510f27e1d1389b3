"""Files from a repository on the Hub and to one. One process of a host fetches them into the cache, and verifies them.

Which files there are and what their checksums are is asked once and noted beside the cached files, so that what a cache
has needs no network again. The other ranks of a launch find the note of the first. For an upload, the token comes from
HF_TOKEN or `hf auth login`, and is never shown.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llmtrain.base import log, units, untrusted
from llmtrain.base.errors import ModelError, UserError
from llmtrain.base.files import lock_folder, replace_file
from llmtrain.base.redact import redact_text
from llmtrain.storage import folders
from llmtrain.storage.hub.names import COMMIT, INDEX, SINGLE, Repository, endpoint, is_remote
from llmtrain.storage.object_store import is_url

_NETWORK = ("TransportError", "ConnectionError", "TimeoutError")


class Diagnosis(str):
    """A clause that names the rule, and the remedy."""

    unreachable = False
    """The Hub did not answer; that it has what is asked for may be."""


def explain(error: BaseException | None, repository: Repository, revision: str | None) -> Diagnosis:
    """Diagnosis of an unusable repository. `error`: huggingface_hub's; None: HF_HUB_OFFLINE forbids to ask."""
    asked = f"revision {revision or 'main'}"
    where = f"on the Hub ({endpoint()})"
    if repository.kind == "model":  # it may be the path of a folder, misspelt
        where = f"no such folder is here (looked from {Path.cwd()}), and as a name {where}"
    if error is None:
        return Diagnosis(
            f"{where} it is not in the cache at {asked} ({repository.folder}), while HF_HUB_OFFLINE is set. Correct "
            "the path, fetch it where there is a network, or unset HF_HUB_OFFLINE"
        )
    chain = _chain(error)
    classes = {cls.__name__ for each in chain for cls in type(each).__mro__}
    full = next((each for each in chain if isinstance(each, OSError) and each.errno in _DISK), None)
    status = _status(chain)
    if full is not None:
        return Diagnosis(
            f"the cache {repository.folder} on {socket.gethostname()} cannot be written: "
            f"{os.strerror(full.errno or 0)}. Make room or give it back its rights, or set HF_HOME to another folder"
        )
    if "GatedRepoError" in classes:
        return Diagnosis(
            f"the repository is gated: {_who()} has no access to it. Ask for it at {endpoint()}/{_path(repository)}"
            f"{'' if _token() else ', and set HF_TOKEN to a token of the account that was given it'}"
        )
    if "RevisionNotFoundError" in classes:
        return Diagnosis(f"the repository has no {asked}. Name one of its branches, tags or commits, or none for main")
    if "RepositoryNotFoundError" in classes:
        return Diagnosis(
            f"{where} it does not exist, or is private and {_who()} may not see it. Correct the path or the name"
            f"{', or set HF_TOKEN to a token that may' if not _token() else ''}"
        )
    if status == 401:
        return Diagnosis(f"the Hub ({endpoint()}) does not take the token that is set. Renew HF_TOKEN, or unset it")
    if status == 403:
        return Diagnosis(
            f"the Hub ({endpoint()}) refuses {_who()}: the token's rights do not go so far. Use another one"
        )
    if "EntryNotFoundError" in classes and status == 404:
        return Diagnosis(f"the Hub ({endpoint()}) has not all files that belong together. Name another revision")
    if status is not None:
        return _unreachable(f"the Hub ({endpoint()}) answers with status {status}. Try again later")
    message = (str(chain[-1]).strip().splitlines() or [type(chain[-1]).__name__])[0].rstrip(".")
    if classes.isdisjoint(_NETWORK) and not classes & {"LocalEntryNotFoundError"}:
        return Diagnosis(redact_text(f"{type(error).__name__}: {message}"))
    return _unreachable(
        redact_text(
            f"{where} it cannot be reached from {socket.gethostname()}: {message}. Correct the path, or see to the "
            "network (HTTPS_PROXY, HF_ENDPOINT); what is in the cache needs none"
        )
    )


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def _unreachable(text: str) -> Diagnosis:
    message = Diagnosis(text)
    message.unreachable = True
    return message


def _chain(error: BaseException) -> list[BaseException]:
    found = [error]
    while (following := found[-1].__cause__ or found[-1].__context__) is not None and following not in found:
        found.append(following)
    return found


def _path(repository: Repository) -> str:
    return repository.name if repository.kind == "model" else f"datasets/{repository.name}"


def _token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _who() -> str:
    return "the account of this token" if _token() else "whoever has no token"


def explain_push(error: BaseException, repository: Repository) -> str:
    """Diagnosis of a failed upload."""
    status = _status(_chain(error))
    if status == 401:
        return f"the Hub ({endpoint()}) does not take the token that is set. Renew HF_TOKEN."
    if status in (403, 404):
        return (
            f"the account of the token may not write {repository.name} on the Hub ({endpoint()}). Correct the name, or "
            "set HF_TOKEN to a token with write access to it."
        )
    message = str(explain(error, repository, None)).rstrip(".")
    return f"{message.replace('as a name on', 'on')}."


def _status(chain: list[BaseException]) -> int | None:
    return next((each.response.status_code for each in chain if getattr(each, "response", None) is not None), None)  # type: ignore[attr-defined]


Choose = Callable[[Sequence[str], Path], Sequence[str]]
"""Chooses the files to fetch, given the names of all and the folder with those that were fetched before."""
Wrong = Callable[[str], UserError]
"""Makes an error of a text, with key and value before it."""

_NOTES = "llmtrain"  # a folder beside huggingface_hub's own, and deleted with them
_CHUNK = 8 << 20  # bytes
_WORKERS = 8
_SPARE = 64 << 20  # bytes that a download leaves free


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Files of one commit, on this host."""

    folder: Path
    commit: str


@dataclass(frozen=True, kw_only=True)
class _File:
    """The Hub's record of a file."""

    size: int | None
    """Bytes."""
    checksum: str | None
    """SHA-256 (64 digits) of a large file, git's SHA-1 (40) of another. None: nobody says."""


_UNKNOWN = _File(size=None, checksum=None)
"""A cache that others have filled does not say what it lacks."""


def fetch(repository: Repository, revision: str | None, choices: Sequence[Choose], wrong: Wrong) -> Snapshot:
    """What `choices` take of a branch, tag or commit (default: main); nothing is asked of the network if it is here.

    Raises: what `wrong` makes; a `choice` may raise, too.
    """
    with _alone(repository.lock):
        commit = _commit_here(repository, revision)
        files = {} if commit is None else _noted(repository, commit)
        if commit is None or not files:
            commit, files = _ask(repository, commit or revision, wrong)
        folder = repository.snapshot(commit)
        for choose in choices:
            chosen = {name: files.get(name, _UNKNOWN) for name in choose(sorted(files), folder)}
            _complete(repository, commit, chosen, wrong)
        if revision is None or not COMMIT.fullmatch(revision):
            _refer(repository, revision or "main", commit)
        _note(repository, "launch", {"launch": _launch(), "revision": revision, "commit": commit})
    return Snapshot(folder=folder, commit=commit)


def fetch_model(given: str, revision: str | None, choices: Sequence[Choose], wrong: Wrong) -> Snapshot:
    """`fetch` for the model that ORG/NAME or a URL names."""
    if is_url(given):
        folder, commit = folders.fetch(given, revision, choices, wrong)
        return Snapshot(folder=folder, commit=commit)
    return fetch(Repository(kind="model", name=given), revision, choices, wrong)


def known_files(repository: Repository, commit: str) -> list[str]:
    """The names of all files of a commit that was fetched before, as far as this host knows them."""
    found = _in_cache(repository, commit)
    return sorted(found[1]) if found else []


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process of this host, or of all hosts that share the cache."""
    handle = None
    # A cache that cannot be written may still have everything. On a file system without locks huggingface_hub is safe
    # without, only slower.
    with contextlib.suppress(OSError):
        lock.mkdir(parents=True, exist_ok=True)
        handle = lock_folder(lock, wait=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


# --- which commit, and which files it has ---------------------------------------------------------


def _commit_here(repository: Repository, revision: str | None) -> str | None:
    """The commit, where it is known without a question: it is one, or another rank of this launch has asked."""
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    last = _read_note(repository, "launch")
    commit = last.get("commit")
    if "LOCAL_RANK" in os.environ and last.get("launch") == _launch() and last.get("revision") == revision:
        return commit if isinstance(commit, str) and COMMIT.fullmatch(commit) else None
    return None


def _launch() -> str:
    """Key that the ranks of a launch on this host share, and no other process has: their parent."""
    parent = os.getppid()
    with contextlib.suppress(psutil.Error):
        return f"{socket.gethostname()} {parent} {psutil.Process(parent).create_time()}"
    return f"{socket.gethostname()} {os.getpid()} alone"


def _ask(repository: Repository, revision: str | None, wrong: Wrong) -> tuple[str, dict[str, _File]]:
    """Commit and files by the Hub; offline, and where it does not answer, by the cache."""
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode():
        if found := _in_cache(repository, revision):
            return found
        raise wrong(explain(None, repository, revision))
    try:
        info = HfApi().repo_info(
            repository.name, repo_type=repository.kind, revision=revision, files_metadata=True, timeout=30.0
        )
    except Exception as error:  # the HTTP library's own classes, and those of huggingface_hub
        message = explain(error, repository, revision)
        if message.unreachable and (found := _in_cache(repository, revision)):
            log.warn(f"{repository.name}: the Hub does not answer, the cache's commit {found[0]} is taken")
            return found
        raise wrong(message) from error
    files = {
        each.rfilename: _File(
            size=each.lfs.size if each.lfs else each.size,
            checksum=each.lfs.sha256 if each.lfs else each.blob_id,
        )
        for each in getattr(info, "siblings", None) or ()
        if ".." not in each.rfilename.split("/") and not each.rfilename.startswith("/")
    }
    if info.sha is None or not COMMIT.fullmatch(info.sha):
        raise wrong(f"the Hub names no commit ({info.sha!a}). Is HF_ENDPOINT the address of a Hub?")
    noted = {name: [file.size, file.checksum] for name, file in files.items()}
    _note(repository, info.sha, {**_read_note(repository, info.sha), "files": noted})
    return info.sha, files


def _noted(repository: Repository, commit: str) -> dict[str, _File]:
    """The Hub's earlier answer about a commit, from the cache."""
    files = _read_note(repository, commit).get("files")
    return {name: _File(size=size, checksum=checksum) for name, (size, checksum) in (files or {}).items()}


def _in_cache(repository: Repository, revision: str | None) -> tuple[str, dict[str, _File]] | None:
    """Commit and files that this host's cache has, whoever fetched them: a file's digest is the name of its blob."""
    commit = revision if revision is not None and COMMIT.fullmatch(revision) else None
    if commit is None:
        with contextlib.suppress(OSError):
            commit = (repository.folder / "refs" / (revision or "main")).read_text().strip()
    if commit is None or not COMMIT.fullmatch(commit) or not repository.snapshot(commit).is_dir():
        return None
    folder, files = repository.snapshot(commit), _noted(repository, commit)
    for path in () if files else sorted(folder.rglob("*")):
        if path.is_file():
            digest = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
            known = len(digest) in (40, 64) and not set(digest) - set("0123456789abcdef")
            files[str(path.relative_to(folder))] = _File(size=path.stat().st_size, checksum=digest if known else None)
    return commit, files


# --- fetching -------------------------------------------------------------------------------------


def _complete(repository: Repository, commit: str, chosen: dict[str, _File], wrong: Wrong) -> None:
    """Fetch what is not there and prove what was not proved."""
    folder = repository.snapshot(commit)
    proved = _read_note(repository, commit).get("proved") or {}
    todo = {name: file for name, file in chosen.items() if proved.get(name) != (_stat(folder / name) or 0)}
    missing = {name: file for name, file in todo.items() if not (folder / name).is_file()}
    if missing:
        _download(repository, commit, missing, wrong)
    with ThreadPoolExecutor(_WORKERS) as pool:
        found = list(pool.map(lambda name: _digest(folder / name, todo[name]), todo))
    for (name, file), digest in zip(todo.items(), found, strict=True):
        if file.checksum is not None and digest != file.checksum:
            _drop(folder / name)
            raise wrong(
                f"{name} of commit {commit} has the checksum {digest}, the Hub says {file.checksum}: the transfer or "
                f"the disk of {socket.gethostname()} has changed it. It was removed from the cache; start again"
            )
    if todo:
        note = _read_note(repository, commit)
        now = {name: _stat(folder / name) for name in todo}
        _note(repository, commit, {**note, "proved": {**(note.get("proved") or {}), **now}})


def _download(repository: Repository, commit: str, missing: dict[str, _File], wrong: Wrong) -> None:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    names = ", ".join(sorted(missing)[:3])
    if constants.is_offline_mode():
        raise wrong(
            f"the cache {repository.folder} lacks {names} of commit {commit}, and HF_HUB_OFFLINE is set. Fetch it "
            f"where there is a network, or unset HF_HUB_OFFLINE"
        )
    total = sum(file.size or 0 for file in missing.values())
    nearest = next(path for path in (repository.folder, *repository.folder.parents) if path.exists())
    if (free := shutil.disk_usage(nearest).free) < total + _SPARE:
        raise wrong(
            f"{units.size(total)} are to be fetched, and {nearest} on {socket.gethostname()} has {units.size(free)} "
            "free. Make room, or set HF_HOME to a folder on a larger disk"
        )
    if not sys.stderr.isatty():
        disable_progress_bars()
    counted = units.counted(len(missing), "file")
    line = f"fetching {repository.name}, commit {commit[:12]}: {counted}, {units.size(total)}"
    print(untrusted.shown(line), file=sys.stderr, flush=True)  # on standard output `generate` has the model's words

    def one(name: str) -> None:
        hf_hub_download(repository.name, name, repo_type=repository.kind, revision=commit)

    try:
        with ThreadPoolExecutor(_WORKERS) as pool:
            list(pool.map(one, missing))
    except Exception as error:  # the HTTP library's own classes, those of huggingface_hub, and the disk's
        raise wrong(explain(error, repository, commit)) from error


def _digest(path: Path, file: _File) -> str | None:
    """As the Hub counts it: SHA-256 of a large file, of another what git calls its blob."""
    if file.checksum is None:
        return None
    digest = hashlib.sha256() if len(file.checksum) == 64 else hashlib.sha1(usedforsecurity=False)
    if len(file.checksum) != 64:
        digest.update(b"blob %d\0" % path.stat().st_size)
    with open(path, "rb") as stream:
        while part := stream.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest()


def _drop(pointer: Path) -> None:
    """A file, and every link that leads to it."""
    path = pointer
    while path.is_symlink():
        following = path.parent / os.readlink(path)
        path.unlink(missing_ok=True)
        path = following
    path.unlink(missing_ok=True)


# --- notes ----------------------------------------------------------------------------------------


def _stat(path: Path) -> list[int] | None:
    with contextlib.suppress(OSError):
        stat = path.stat()
        return [stat.st_size, stat.st_mtime_ns]
    return None


def _read_note(repository: Repository, name: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        note = untrusted.loads((repository.folder / _NOTES / f"{name}.json").read_bytes())
        return note if isinstance(note, dict) else {}
    return {}


def _note(repository: Repository, name: str, values: dict[str, Any]) -> None:
    """Beside the cached files. Where nothing can be written, the next start asks and reads again."""
    with contextlib.suppress(OSError):
        (repository.folder / _NOTES).mkdir(parents=True, exist_ok=True)
        replace_file(repository.folder / _NOTES / f"{name}.json", json.dumps(values).encode())


def _refer(repository: Repository, revision: str, commit: str) -> None:
    """Record the commit of a branch as huggingface_hub does, for the time without a network."""
    with contextlib.suppress(OSError):
        path = repository.folder / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != commit:
            replace_file(path, commit.encode())


_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)


class PushError(UserError):
    """A folder cannot be published."""


def check_push(name: str) -> None:
    """What can be known before there is a folder. Raises PushError."""
    from huggingface_hub import HfApi, constants, get_token

    if not _NAME.fullmatch(name):
        raise PushError(
            f"--push {name}: is no name on the Hub. Write ORG/NAME, with your user name or an organisation."
        )
    if constants.is_offline_mode():
        raise PushError(f"--push {name}: HF_HUB_OFFLINE is set. Unset it, or leave --push out.")
    if get_token() is None:
        raise PushError(f"--push {name}: no token. Set HF_TOKEN to one with write access, or run `hf auth login`.")
    try:
        HfApi().whoami()
    except Exception as error:  # the HTTP library's own classes, and those of huggingface_hub
        raise PushError(f"--push {name}: {explain_push(error, _repository(name))}") from error


def push(folder: Path, name: str, *, public: bool = False, leave_out: tuple[str, ...] = (), message: str) -> str:
    """Upload a model's folder as one commit; a repository that is not there is made, private unless `public`.

    Args:
        leave_out: names of files that stay here.

    Returns: the commit's address. Raises PushError.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(name, private=not public, exist_ok=True)
        done = api.upload_folder(
            repo_id=name, folder_path=folder, ignore_patterns=list(leave_out), commit_message=message
        )
    except Exception as error:  # the HTTP library's own classes, those of huggingface_hub, RuntimeError of an upload
        raise PushError(
            f"--push {name}: {explain_push(error, _repository(name))} {folder} is complete; the same command pushes it."
        ) from error
    return str(done.commit_url) if done.commit_url else f"{endpoint()}/{name}"


def _repository(name: str) -> Repository:
    return Repository(kind="model", name=name)


_SETTINGS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_TEMPLATES = "additional_chat_templates/"
ADAPTER = "adapter_model.safetensors"
"""Weights of a PEFT folder."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def model_folder(given: str, revision: str | None = None, *, asked_by: str) -> Path:
    """The folder of a whole model: `given`, or what ORG/NAME on the Hub or a URL names, once it is here.

    `asked_by`: for messages. Raises: ModelError.
    """
    if not is_remote(given):
        return Path(given)

    def wrong(text: str) -> ModelError:
        return ModelError(f"{asked_by}: {given}: {text.rstrip('.')}.")

    return fetch_model(given, revision, [settings, weights(wrong)], wrong).folder


def settings(names: Sequence[str], _: Path) -> list[str]:
    """Configuration, tokenizer, templates, licence: what lies beside the weights and is no code."""
    beside = [n for n in names if "/" not in n or (n.startswith(_TEMPLATES) and n.count("/") == 1)]
    return [n for n in beside if n.endswith(_SETTINGS) or n.startswith(("LICENSE", "NOTICE"))]


def weights(wrong: Wrong) -> Choose:
    """The weight files that transformers would take, of which a repository may have other copies."""

    def choose(names: Sequence[str], folder: Path) -> list[str]:
        if INDEX not in names:
            if found := [name for name in (SINGLE, ADAPTER) if name in names]:
                return found[:1]
            pickles = [name for name in names if name.endswith(_PICKLES)]
            has = f"it has {', '.join(pickles[:3])}, and pickles are not read" if pickles else "it has no weights"
            raise wrong(
                f"the repository has no {SINGLE} and no {INDEX}: {has}. Name a repository, or a revision of this one, "
                "that has safetensors"
            )
        if SINGLE in names:
            raise wrong(f"the repository has both {SINGLE} and {INDEX}. One is stale: name a revision with one of them")
        try:
            found = sorted(set(untrusted.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise wrong(f"its {INDEX} is not a weight index: {error!r}") from error
        if odd := [n for n in found if not str(n).endswith(".safetensors") or Path(str(n)).name != n]:
            raise wrong(f"its {INDEX} names {odd[0]!a}, which is no safetensors file of the repository")
        return found

    return choose
