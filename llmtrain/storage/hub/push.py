"""A folder to the Hub. The token comes from HF_TOKEN or `hf auth login`, and is never shown."""

from __future__ import annotations

import re
from pathlib import Path

from llmtrain.base.errors import UserError
from llmtrain.storage.hub.names import Repository, endpoint
from llmtrain.storage.hub.trouble import explain_push

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
