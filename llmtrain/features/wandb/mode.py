"""The mode of Weights & Biases, from the configuration, W&B's own settings and the network."""

from __future__ import annotations

import configparser
import netrc
import os
import socket
import urllib.request
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from llmtrain.base import log, untrusted

Mode = Literal["online", "offline", "disabled"]

QUIET = {"WANDB_DISABLE_CODE": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
"""Variables that keep W&B from sending source code and reports of its errors, and from printing."""

_CONNECT_TIMEOUT_S = 3.0
_FORMER_HOST = "api.wandb.ai"
"""Host of W&B's own server for logins of versions before 0.31, which still count."""


_MODES: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
"""W&B's own words for WANDB_MODE."""
_TRUE = ("1", "on", "yes", "true")
"""Values of WANDB_DISABLED that Hugging Face's Trainer takes for true."""


def _saved_settings() -> dict[str, str]:
    """Read W&B's settings files: the folder's, by `wandb offline`, overrides the user's."""
    user = os.environ.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb")
    settings: dict[str, str] = {}
    for folder in (user, Path(os.environ.get("WANDB_DIR") or ".") / "wandb"):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(Path(folder) / "settings")
            settings |= dict(parser["default"]) if parser.has_section("default") else {}
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
    return settings


def base_url() -> str:
    """The W&B server: WANDB_BASE_URL, else W&B's settings files, else the default of the installed W&B."""
    return os.environ.get("WANDB_BASE_URL") or _saved_settings().get("base_url") or _default_url()


def _default_url() -> str:
    import wandb

    return str(wandb.Settings.model_fields["base_url"].default)


def wandb_setting() -> tuple[Mode, str] | None:
    """The mode that W&B or Hugging Face's Trainer would obey, and its source; None: none is set.

    An unknown word causes a warning, and keeps the run offline.
    """
    if os.environ.get("WANDB_DISABLED", "").strip().lower() in _TRUE:
        return "disabled", "WANDB_DISABLED"
    saved = _saved_settings()
    word, said_by = os.environ.get("WANDB_MODE", "").strip(), "WANDB_MODE"
    if not word:
        word, said_by = saved.get("mode", "").strip(), "W&B's settings file, mode"
    if not word and saved.get("disabled", "").strip().lower() in _TRUE:
        return "disabled", "W&B's settings file, disabled"
    if not word:
        return None
    if (mode := _MODES.get(word.lower())) is None:
        log.warn(f"{said_by} is {untrusted.shown(word)}, which W&B does not know (one of {', '.join(_MODES)}): offline")
        os.environ["WANDB_MODE"] = mode = "offline"  # W&B would raise an error on the word
    return mode, said_by


def has_api_key(url: str) -> bool:
    """True if W&B finds credentials: an environment variable or netrc. The key is not kept."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    hosts = {urlsplit(url).hostname} | ({_FORMER_HOST} if url == _default_url() else set())
    for name in names:
        try:
            if not hosts.isdisjoint(netrc.netrc(os.path.expanduser(name)).hosts):
                return True
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
    return False


def reachable(url: str) -> bool:
    """True if a TCP connection to the server, or to its proxy, opens within 3 s."""
    scheme = urlsplit(url).scheme or "https"
    proxy = urllib.request.getproxies().get(scheme)
    host = urlsplit(url).hostname or ""
    via = urlsplit(proxy) if proxy and not urllib.request.proxy_bypass(host) else urlsplit(url)
    try:
        port = via.port or (80 if via.scheme == "http" else 443)
        with socket.create_connection((via.hostname or "", port), timeout=_CONNECT_TIMEOUT_S):
            return True
    except (OSError, ValueError):
        return False


def asked_mode(tracking_wandb: str) -> tuple[str, str]:
    """The value of `tracking.wandb`, and its source. W&B's settings, if any, decide for auto."""
    if tracking_wandb == "auto" and (setting := wandb_setting()) is not None:
        return setting[0], f"as {setting[1]} says"
    return tracking_wandb, "as configured"


def choose_mode(tracking_wandb: str) -> tuple[Mode, str]:
    """The W&B mode for `tracking.wandb`, and the reason.

    May take seconds (a connection is tried), so this runs in the sink's thread.
    """
    asked, why = asked_mode(tracking_wandb)
    if asked == "disabled":
        return "disabled", "switched off"
    if asked == "offline":
        return "offline", why
    url = base_url()
    # Without a key wandb.init would ask for one on the terminal and wait.
    if not has_api_key(url):
        return "offline", "no API key (set WANDB_API_KEY or run `wandb login`)"
    if asked == "auto" and not reachable(url):
        return "offline", f"{urlsplit(url).hostname} cannot be reached"
    return "online", why
