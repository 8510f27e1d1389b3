"""Uploads to the Hub. The token comes from HF_TOKEN or `hf auth login`, and is never shown."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from llmtrain.base.errors import UserError
from llmtrain.checkpoint.hf.folder_files import MARK
from llmtrain.storage.addresses import Repository, endpoint, is_url
from llmtrain.storage.hub import chain_of, explain

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)


class PushError(UserError):
    """A folder cannot be published."""


def check(args: argparse.Namespace) -> None:
    """Check the options and the token before there is a folder. Raises PushError."""
    from huggingface_hub import HfApi, constants, get_token

    name = args.push
    if name is None:
        raise PushError("--public: says how --push ORG/NAME makes a repository; add that.")
    if is_url(args.out):
        raise PushError(f"--push {name}: publishes a folder of this host; give one for OUT.")
    if not _NAME.fullmatch(name):
        raise PushError(
            f"--push {name}: is not a name on the Hub. Write ORG/NAME, with your user name or an organisation."
        )
    if constants.is_offline_mode():
        raise PushError(f"--push {name}: HF_HUB_OFFLINE is set. Unset it, or leave --push out.")
    if get_token() is None:
        raise PushError(f"--push {name}: no token. Set HF_TOKEN to one with write access, or run `hf auth login`.")
    try:
        HfApi().whoami()
    except Exception as error:  # classes of the HTTP library and huggingface_hub
        raise PushError(f"--push {name}: {_explain(error, name)}") from error


def push(args: argparse.Namespace, checkpoint: Path) -> None:
    """Upload the folder as one commit; a missing repository is created. Raises PushError."""
    from huggingface_hub import HfApi

    name, message = args.push, f"Upload {checkpoint.parent.parent.name}, {checkpoint.name}"
    try:
        api = HfApi()
        api.create_repo(name, private=not args.public, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=args.out, ignore_patterns=[MARK], commit_message=message)
    except Exception as error:  # classes of the HTTP library and huggingface_hub, RuntimeError of an upload
        raise PushError(
            f"--push {name}: {_explain(error, name)} {args.out} is complete; the same command pushes it."
        ) from error
    print(f"pushed      {done.commit_url or f'{endpoint()}/{name}'}")


def _explain(error: BaseException, name: str) -> str:
    status = chain_of(error)[1]
    if status == 401:
        return f"the Hub ({endpoint()}) does not take the token that is set. Renew HF_TOKEN."
    if status in (403, 404):
        return (
            f"the account of the token may not write {name} on the Hub ({endpoint()}). Correct the name, or "
            "set HF_TOKEN to a token with write access to it."
        )
    message = explain(error, Repository(kind="model", name=name), None).rstrip(".")
    return f"{message.replace('as a name on', 'on')}."
