"""Diagnoses of failed reads from the Hub and writes to it, in words."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from llmtrain.base.redact import redact_text
from llmtrain.storage.hub.names import Repository, endpoint

_NETWORK = ("TransportError", "ConnectionError", "TimeoutError")


class Said(str):
    """A clause that names the rule, and the remedy."""

    unreachable = False
    """The Hub did not answer; that it has what is asked for may be."""


def explain(error: BaseException | None, repository: Repository, revision: str | None) -> Said:
    """Diagnosis of an unusable repository. `error`: huggingface_hub's; None: HF_HUB_OFFLINE forbids to ask."""
    asked = f"revision {revision or 'main'}"
    where = f"on the Hub ({endpoint()})"
    if repository.kind == "model":  # it may be the path of a folder, misspelt
        where = f"no such folder is here (looked from {Path.cwd()}), and as a name {where}"
    if error is None:
        return Said(
            f"{where} it is not in the cache at {asked} ({repository.folder}), while HF_HUB_OFFLINE is set. Correct "
            "the path, fetch it where there is a network, or unset HF_HUB_OFFLINE"
        )
    chain = _chain(error)
    classes = {cls.__name__ for each in chain for cls in type(each).__mro__}
    full = next((each for each in chain if isinstance(each, OSError) and each.errno in _DISK), None)
    status = _status(chain)
    if full is not None:
        return Said(
            f"the cache {repository.folder} on {socket.gethostname()} cannot be written: "
            f"{os.strerror(full.errno or 0)}. Make room or give it back its rights, or set HF_HOME to another folder"
        )
    if "GatedRepoError" in classes:
        return Said(
            f"the repository is gated: {_who()} has no access to it. Ask for it at {endpoint()}/{_path(repository)}"
            f"{'' if _token() else ', and set HF_TOKEN to a token of the account that was given it'}"
        )
    if "RevisionNotFoundError" in classes:
        return Said(f"the repository has no {asked}. Name one of its branches, tags or commits, or none for main")
    if "RepositoryNotFoundError" in classes:
        return Said(
            f"{where} it does not exist, or is private and {_who()} may not see it. Correct the path or the name"
            f"{', or set HF_TOKEN to a token that may' if not _token() else ''}"
        )
    if status == 401:
        return Said(f"the Hub ({endpoint()}) does not take the token that is set. Renew HF_TOKEN, or unset it")
    if status == 403:
        return Said(f"the Hub ({endpoint()}) refuses {_who()}: the token's rights do not go so far. Use another one")
    if "EntryNotFoundError" in classes and status == 404:
        return Said(f"the Hub ({endpoint()}) has not all files that belong together. Name another revision")
    if status is not None:
        return _unreachable(f"the Hub ({endpoint()}) answers with status {status}. Try again later")
    said = (str(chain[-1]).strip().splitlines() or [type(chain[-1]).__name__])[0].rstrip(".")
    if classes.isdisjoint(_NETWORK) and not classes & {"LocalEntryNotFoundError"}:
        return Said(redact_text(f"{type(error).__name__}: {said}"))
    return _unreachable(
        redact_text(
            f"{where} it cannot be reached from {socket.gethostname()}: {said}. Correct the path, or see to the "
            "network (HTTPS_PROXY, HF_ENDPOINT); what is in the cache needs none"
        )
    )


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def _unreachable(text: str) -> Said:
    said = Said(text)
    said.unreachable = True
    return said


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
    said = str(explain(error, repository, None)).rstrip(".")
    return f"{said.replace('as a name on', 'on')}."


def _status(chain: list[BaseException]) -> int | None:
    return next((each.response.status_code for each in chain if getattr(each, "response", None) is not None), None)  # type: ignore[attr-defined]
