"""Addresses of folders: URLs in object stores and names on the Hugging Face Hub; their places in the cache. No
network."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmtrain.base.files import cache_folder

Kind = Literal["model", "dataset"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Index of the weight files, if there are several."""

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_PART}/{_PART}")
COMMIT = re.compile(r"[0-9a-f]{40}")
REVISION = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9_][A-Za-z0-9._/-]*")
"""Form of a branch, a tag or a commit, which becomes part of a path."""


def is_url(text: str) -> bool:
    return _URL.match(text) is not None


def place_of(url: str) -> Path:
    """Return the cache folder for a URL, which has a folder for each revision."""
    return cache_folder() / "stores" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]


def is_name(text: str) -> bool:
    """Return True if the text has a repository's form ORG/NAME, and no path on this host has that name."""
    formed = bool(_NAME.fullmatch(text)) and "--" not in text and ".." not in text
    return formed and not text.startswith("runs/") and not os.path.lexists(text)


def folder_here(text: str) -> Path | None:
    """Return a command's word as a path if its parent is a folder on this host, else None."""
    return Path(text) if Path(text).parent.is_dir() else None


def is_remote(text: str) -> bool:
    return is_url(text) or is_name(text)


@dataclass(frozen=True, kw_only=True)
class Repository:
    kind: Kind
    name: str
    """ORG/NAME."""

    @property
    def folder(self) -> Path:
        """The repository's folder in this host's cache, in huggingface_hub's layout."""
        return _cache() / "--".join([f"{self.kind}s", *self.name.split("/")])

    @property
    def lock(self) -> Path:
        return _cache() / ".locks" / self.folder.name

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit


def _cache() -> Path:
    from huggingface_hub import constants  # reads HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME

    return Path(constants.HF_HUB_CACHE).absolute()


def endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def local_folder(model: str, commit: str | None) -> Path:
    """Return the folder of a model that is named by a path, or by ORG/NAME or a URL with a commit."""
    if commit is not None and COMMIT.fullmatch(commit) and is_url(model):
        return place_of(model) / commit
    if commit is not None and COMMIT.fullmatch(commit) and is_name(model):
        return Repository(kind="model", name=model).snapshot(commit)
    return Path(model)


def leads_out(folder: Path, path: Path) -> Path | None:
    """Return a file's real path if links lead out of the folder.

    Allowed are links within the folder, and those of the Hugging Face cache (snapshots/REVISION/NAME -> blobs/DIGEST,
    which may be one to the store of all repositories).
    """
    real, home = path.resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs"
    shared = home.parents[2] / "blobs" if len(home.parents) > 2 else blobs  # blobs/2 DIGITS/DIGEST
    cached = home.parent.name == "snapshots" and (blobs in real.parents or real.parent.parent == shared)
    return None if cached or real.is_relative_to(home) else real


def commit_of(folder: Path) -> tuple[Repository, str] | None:
    """Return (repository, commit) of a folder in a host's cache, .../models--ORG--NAME/snapshots/COMMIT; None: it is
    none."""
    kind, *parts = folder.parent.parent.name.split("--")
    name = "/".join(parts)
    if folder.parent.name != "snapshots" or not COMMIT.fullmatch(folder.name) or kind not in ("models", "datasets"):
        return None
    return (Repository(kind="model" if kind == "models" else "dataset", name=name), folder.name) if parts else None


def here(folder: Path) -> Path:
    """Return the folder, or if it is a snapshot that is gone, the same snapshot in this host's cache."""
    if not folder.exists() and (parsed := commit_of(folder)) and (snapshot := parsed[0].snapshot(parsed[1])).is_dir():
        return snapshot
    return folder
