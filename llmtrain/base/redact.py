"""Keeps keys, tokens and passwords out of files, trackers and error texts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

REDACTED = "[redacted]"

_SECRET_WORDS = frozenset(
    ("password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey", "bearer")
)
_SECRET_PAIRS = frozenset({("api", "key"), ("access", "key"), ("private", "key"), ("account", "key")})
# "token" has another meaning in this field: pad_token, eos_token and so on are text, not secrets.
_TEXT_TOKENS = frozenset(
    ("pad", "bos", "eos", "unk", "cls", "sep", "mask", "start", "end", "image", "audio", "video", "special")
)

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL_USERINFO = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_URL_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]+@")
_URL_QUERY = re.compile(r"(?<=[?&])([\w.-]+)=([^&\s\"'<>]+)")
_SIGNATURES = (["sig"], ["signature"])
"""Last words in the names of parameters that sign a URL, as S3, Google and Azure have them."""
_KNOWN_FORMS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|wandb_v\d_\w{20,}|dapi[0-9a-f]{32}|AKIA[0-9A-Z]{16})\b"
)


def is_secret(key: str) -> bool:
    """Return True if a value with this name (config key, environment variable, flag) must be hidden."""
    words = [word.lower() for word in _WORD.findall(key)]
    if not words:
        return False
    if _SECRET_WORDS.intersection(words) or _SECRET_PAIRS.intersection(pairwise(words)):
        return True
    return words[-1] == "token" and not _TEXT_TOKENS.intersection(words[-2:-1])


def redact_text(text: str) -> str:
    """Return `text` without credentials and signatures in URLs, keys of known forms, and the environment's secrets."""
    for name, value in os.environ.items():
        if len(value) >= 6 and value in text and is_secret(name):
            text = text.replace(value, REDACTED)
    text = _URL_QUERY.sub(_parameter, _URL_USERINFO.sub(REDACTED, text))
    return _KNOWN_FORMS.sub(REDACTED, text)


def holds_secret(text: str) -> bool:
    """Return True if the text has a URL with a password or secret parameter, or a key of a known form."""
    return bool(_URL_PASSWORD.search(text) or _KNOWN_FORMS.search(text) or _URL_QUERY.sub(_parameter, text) != text)


def _parameter(match: re.Match[str]) -> str:
    last = [word.lower() for word in _WORD.findall(match[1])[-1:]]
    return f"{match[1]}={REDACTED}" if is_secret(match[1]) or last in _SIGNATURES else match[0]


def redact(value: Any, key: str = "") -> Any:
    """Return a copy of nested dicts and lists in which secret values read `[redacted]`."""
    if isinstance(value, Mapping):
        return {str(name): redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, key) for item in value]
    if isinstance(value, str):
        return REDACTED if value and is_secret(key) else redact_text(value)
    return value


def redact_argv(argv: Iterable[str]) -> list[str]:
    """Return a command line without secrets: `--api_key=X` and `--api_key X` both lose X."""
    safe: list[str] = []
    hide_next = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            safe.append(REDACTED)
        elif equals and is_secret(flag):
            safe.append(f"{flag}={REDACTED}")
        else:
            safe.append(redact_text(word))
        hide_next = word.startswith("-") and not equals and is_secret(word)
    return safe
