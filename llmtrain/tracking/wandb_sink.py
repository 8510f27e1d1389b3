"""Weights & Biases, best effort: whatever it does, training neither waits for it nor ends because of it.

A daemon thread owns the W&B run: init, every log call and finish happen there. The training thread only puts
rows into a bounded queue; when that is full, rows are dropped and counted (metrics.jsonl has them all).

History: W&B's `_step` is the training step. It can only grow: the server and `wandb sync` move a row whose step is
taken to the next free one. So each step is sent once over all launches, and as offline there is no server to ask, the
files of the earlier launches tell which W&B has. A launch begins with the rows of metrics.jsonl that W&B lacks: a kill
took them, or the server could not be reached. A resume from an older checkpoint does not send the repeated steps a
second time. Scores of a checkpoint that come later (`llmtrain eval`) take the next free `_step`: the charts, whose x is
the row's own `step`, show them where they belong.
"""

from __future__ import annotations

import configparser
import importlib
import math
import netrc
import os
import queue
import socket
import struct
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from llmtrain.base import log, untrusted
from llmtrain.base.redact import redact, redact_text
from llmtrain.tracking.local import read_rows, rows_after
from llmtrain.tracking.metrics import metrics, mode_of
from llmtrain.tracking.sink import Sink, TrackingConfig

_BLOCK = 32768  # LevelDB's log format: chunks never cross a block
_HEADER = 7  # of the file, and of each chunk
_TAIL_BLOCKS = 64  # 2 MiB: many log points, and a moment to read
_LATE = "late"
"""Name of an empty file in the folder of offline rows that came late."""


def records(path: Path, first_block: int = 0) -> Iterator[tuple[bytes, int]]:
    """(protobuf record, offset of its end) of a .wandb file, from the first that begins in block `first_block` on.

    The file is a 7-byte header, then LevelDB's log format: blocks of 32 KiB, chunks of checksum, length and kind. A
    record that a kill tore is left out.
    """
    with open(path, "rb") as stream:
        stream.seek(first_block * _BLOCK)
        data = stream.read()
    at = 0 if first_block else _HEADER
    parts: list[bytes] | None = None
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        if kind == 0:  # the writer left the rest of the block empty
            at += left
            continue
        at += _HEADER
        if at + length > len(data):
            return
        if kind in (1, 2):  # a whole record, or the first chunk of one
            parts = []
        if parts is not None:
            parts.append(data[at : at + length])
        at += length
        if parts is not None and kind in (1, 4):
            yield b"".join(parts), first_block * _BLOCK + at
            parts = None


def _last_step(path: Path) -> tuple[int, int]:
    """(step of the last history row in a .wandb file, -1 when it has none; offset where its last whole record ends)."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # chosen when it is imported

    last = end = -1
    blocks = path.stat().st_size // _BLOCK
    for first_block in dict.fromkeys((max(0, blocks - _TAIL_BLOCKS), 0)):
        for payload, offset in records(path, first_block):
            end = offset
            try:
                record = Record.FromString(payload)
            except DecodeError:
                continue
            if record.WhichOneof("record_type") == "history":
                last = record.history.step.num
        if last >= 0:
            break
    return last, end


def earlier_launches(run_dir: Path, run_id: str) -> dict[Path, int]:
    """The .wandb file of each earlier launch of the W&B run, and the last step in it (-1: none); no unreadable ones.

    A record that a kill tore is cut off: `wandb sync` would stop there, and upload no later launch.
    """
    found = {}
    for path in sorted((run_dir / "wandb").glob(f"*run-*-{run_id}/run-{run_id}.wandb")):
        if (path.parent / _LATE).exists():  # `wandb sync` uploads it: no launch sends its row again
            continue
        try:
            found[path], end = _last_step(path)
            if end < 0:
                mark_uploaded(path)  # there is nothing in it
            elif end < path.stat().st_size:
                os.truncate(path, end)
        except (OSError, ImportError, AttributeError):  # W&B's private modules may move
            continue
    return found


def mark_uploaded(path: Path) -> None:
    """`wandb sync` leaves the file alone from now on: its rows have been sent another way, or it has none."""
    path.with_suffix(".wandb.synced").touch()


Mode = Literal["online", "offline", "disabled"]

_QUEUE_ROWS = 4096
_CONNECT_TIMEOUT_S = 3.0
_INIT_TIMEOUT_S = 60.0
_DEFAULT_URL = "https://api.wandb.ai"


_MODES: dict[str, Mode] = {
    "online": "online", "run": "online", "shared": "online", "offline": "offline", "dryrun": "offline",
    "disabled": "disabled",
}  # fmt: skip
"""W&B's own words for WANDB_MODE."""
_TRUE = ("1", "on", "yes", "true")
"""Values of WANDB_DISABLED that Hugging Face's Trainer takes for true."""


def _saved_settings() -> dict[str, str]:
    """Read W&B's settings files: the folder's, which `wandb offline` writes, overrides the user's."""
    user = os.environ.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb")
    found: dict[str, str] = {}
    for folder in (user, Path(os.environ.get("WANDB_DIR") or ".") / "wandb"):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(Path(folder) / "settings")
            found |= dict(parser["default"]) if parser.has_section("default") else {}
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
    return found


def base_url() -> str:
    """The W&B server: WANDB_BASE_URL, else W&B's settings files, else the public one."""
    return os.environ.get("WANDB_BASE_URL") or _saved_settings().get("base_url", _DEFAULT_URL)


def wandb_setting() -> tuple[Mode, str] | None:
    """The mode that W&B or Hugging Face's Trainer would obey, and who says so; None where nobody does.

    A word that W&B does not know is a warning, and keeps the run offline.
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
    """True if W&B finds credentials by itself: an environment variable or netrc. The key is not kept."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for name in names:
        try:
            if urlsplit(url).hostname in netrc.netrc(os.path.expanduser(name)).hosts:
                return True
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
    return False


def reachable(url: str) -> bool:
    """True if a TCP connection to the server, or to the proxy before it, opens within 3 s."""
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


def choose_mode(asked: str) -> tuple[Mode, str]:
    """The W&B mode for `tracking.wandb`, and why. What was said to W&B decides where the configuration says auto.

    May take seconds (a connection is tried), so this runs in the sink's thread.
    """
    why = "as configured"
    if asked == "auto" and (setting := wandb_setting()) is not None:
        asked, why = setting[0], f"as {setting[1]} says"
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


class WandbSink(Sink):
    """One W&B run that continues under the same id in every launch of the training run.

    Construct it on the rank that tracks, before this launch writes metrics.jsonl; then `log` and `close`. None of them
    raises. `start_step` is the step of the checkpoint that training goes on from.
    """

    def __init__(
        self, run_dir: Path, *, tracking: TrackingConfig, run_id: str, config: dict[str, Any], start_step: int = 0,
        late: bool = False,
    ) -> None:  # fmt: skip
        """`late`: the rows are of steps that W&B has already."""
        self._run_dir = run_dir
        self._metrics = run_dir / "metrics.jsonl"
        self._earlier_bytes = self._metrics.stat().st_size if self._metrics.is_file() else 0
        self._start_step, self._late = start_step, late
        self._sent_step = -1  # the last step that W&B has
        self._tracking = tracking
        self._run_id = run_id
        self._config: dict[str, Any] = redact(config)
        self._summary: dict[str, float] = {}
        """Baselines, and the best value so far of each figure of evaluations."""
        self._rows: queue.Queue[tuple[dict[str, Any], bool] | Path | int] = queue.Queue()
        """Rows, checkpoints, and at last the exit code."""
        self._dropped = 0
        self._failed = False
        self._abandoned = False
        self._thread: threading.Thread | None = None
        self._wandb: Any = None
        self._sent_again: list[Path] = []  # offline files whose rows this launch sends to the server
        if tracking.wandb == "disabled":
            return
        # No source code, and no error reports of W&B's own telemetry, leave the machine unasked.
        os.environ.setdefault("WANDB_DISABLE_CODE", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # Its banners would break into the progress line; what matters of them we say ourselves.
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            # Here and not in the thread: two threads that import large packages at once can deadlock on
            # module locks, which Python resolves by handing out half-initialised modules.
            self._wandb = importlib.import_module("wandb")
            remove_temporary_folders()
        except Exception as error:
            self._give_up("cannot be imported", error)
            return
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, row: dict[str, Any], *, more: bool = False) -> None:
        """Hand a row over; never waits. `more`: another row of the same step follows, and W&B shows both as one."""
        if self._thread is None or self._failed:
            return
        if self._rows.qsize() >= _QUEUE_ROWS:
            self._dropped += 1
            return
        self._rows.put_nowait((dict(row), more))

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Prompts become a table, a checkpoint an artifact, baselines go to the summary; all else stays local."""
        wanted = kind == "save" and self._tracking.artifacts == "reference"
        if wanted and self._thread is not None and not self._failed:
            self._rows.put_nowait(Path(fields["path"]))
        if kind == "baselines":
            self._summary |= {f"baselines/{key}": value for key, value in fields.items()}
        if kind == "samples":
            pairs = list(zip(fields["prompts"], fields["texts"], strict=True))
            self.log({"step": fields["step"], "samples": pairs}, more=True)

    def end_steps(self) -> None:
        """Rows may follow, of the last evaluation."""

    def close(self, *, exit_code: int, timeout_s: float = 20.0) -> None:
        """Upload what is left and end the run; after `timeout_s` leave the rest to `wandb sync`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._rows.put_nowait(exit_code)
        thread.join(timeout_s)
        if thread.is_alive():
            log.warn(
                f"W&B did not finish within {timeout_s:.0f} s; metrics.jsonl holds everything. "
                "The run's next launch sends what W&B lacks."
            )
        if thread.is_alive() or self._failed:
            self._abandon()
        if self._dropped:
            log.warn(f"W&B was too slow: {self._dropped} rows are only in {self._run_dir / 'metrics.jsonl'}.")

    def _give_up(self, what: str, error: Exception) -> None:
        self._failed = True
        if self._abandoned:
            return  # `close` has said so, and ended what the thread was talking to
        reason = redact_text(f"{type(error).__name__}: {error}".strip().splitlines()[0])
        log.warn_once(f"W&B {what} ({reason}); training goes on, metrics.jsonl holds everything.")

    def _work(self) -> None:
        try:
            run = self._start()
        except Exception as error:
            self._give_up("could not start", error)
            return
        if run is None:
            self._failed = True
            return
        exit_code = 1
        try:
            # Left open (commit=False): this launch may log the last of these steps once more, its evaluation.
            for row in () if self._late else rows_after(self._metrics, self._earlier_bytes, self._sent_step):
                run.log(row, step=row["step"], commit=False)
            for path in () if self._late else self._sent_again:
                mark_uploaded(path)
            for row in () if self._late else read_rows(self._metrics, self._earlier_bytes)[0]:
                self._count(row)
            while not isinstance(item := self._rows.get(), int):
                if isinstance(item, Path):
                    self._refer(run, item)
                    continue
                row, more = item
                self._count(row)
                if self._late:
                    run.log(row)
                elif row["step"] > self._sent_step:
                    self._send(run, row, more)
            exit_code = item
            if self._summary:
                run.summary.update(self._summary)
        except Exception as error:
            self._give_up("stopped taking metrics", error)
        try:
            run.finish(exit_code=exit_code)
            # Ends wandb-core and takes away W&B's exit hook, which could hold up the interpreter's end.
            self._wandb.teardown()
        except Exception as error:
            self._give_up("could not finish", error)

    def _count(self, row: dict[str, Any]) -> None:
        """Keep the best of the row's figures of evaluations."""
        for key, value in row.items():
            mode = mode_of(key) if key.startswith("eval/") else None
            if mode is not None and isinstance(value, int | float) and math.isfinite(value):
                known = self._summary.get(f"best/{key}", value)
                self._summary[f"best/{key}"] = max(known, value) if mode == "max" else min(known, value)

    def _send(self, run: Any, row: dict[str, Any], more: bool) -> None:
        """Log a row; W&B writes a table into its folder for media first."""
        if (pairs := row.get("samples")) is None:
            run.log(row, step=row["step"], commit=not more)
            return
        media: Any = getattr(sys.modules.get(_MEDIA[0]), _MEDIA[1][0], None)
        if media is None:
            return
        os.makedirs(media.name, exist_ok=True)
        try:
            table = self._wandb.Table(columns=["prompt", "continuation"], data=[list(pair) for pair in pairs])
            run.log({**row, "samples": table}, step=row["step"], commit=not more)
        finally:
            media.cleanup()

    def _refer(self, run: Any, checkpoint: Path) -> None:
        """Log a checkpoint as an artifact: a reference to each file, and none of their content. The rows go on without
        it."""
        try:
            artifact = self._wandb.Artifact(f"checkpoint-{self._run_id}", type="checkpoint")
            artifact.metadata = {"path": str(checkpoint.resolve())}
            artifact.add_reference(checkpoint.resolve().as_uri(), checksum=False)
            run.log_artifact(artifact, aliases=["latest", checkpoint.name])
        except Exception as error:  # it was pruned meanwhile; or the server, which is asked here, refuses the key
            reason = redact_text(f"{type(error).__name__}: {error}".strip().splitlines()[0])
            log.warn_once(f"W&B has no artifact of {checkpoint} ({reason}); metrics go on")

    def _start(self) -> Any:
        mode, why = choose_mode(self._tracking.wandb)
        if mode == "disabled":
            return None
        earlier = earlier_launches(self._run_dir, self._run_id)
        if mode == "online":
            try:
                run = self._init("online")
                self._sent_step = getattr(run, "starting_step", 0) - 1
                self._sent_again = [
                    path for path, step in earlier.items() if step >= 0 and "offline-" in path.parent.name
                ]
                log.info(f"W&B: online, {getattr(run, 'url', self._run_id)}")
                return run
            except Exception as error:
                if self._abandoned:
                    raise
                why = redact_text(f"online failed, {type(error).__name__}: {error}".strip().splitlines()[0])
        run = self._init("offline")
        if self._late:
            (Path(run.settings.sync_dir) / _LATE).touch()
        # No file that tells: `wandb clean` deletes those that were uploaded, so W&B has the steps before this launch.
        self._sent_step = max(earlier.values(), default=self._start_step or -1)
        log.info(f"W&B: offline, {why}. To upload later: wandb sync {self._run_dir}/wandb/offline-run-*")
        return run

    def _init(self, mode: Mode) -> Any:
        run = self._wandb.init(
            id=self._run_id,
            resume="allow",
            mode=mode,
            dir=str(self._run_dir),
            project=self._tracking.project,
            entity=self._tracking.entity,
            name=self._tracking.name or self._run_dir.resolve().name,
            tags=list(self._tracking.tags),
            group=self._tracking.group,
            job_type=self._tracking.job_type,
            config=self._config if self._late else {**self._config, "units": {k: m.unit for k, m in metrics().items()}},
            settings=self._settings(),
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run

    def _settings(self) -> Any:
        wanted: dict[str, Any] = {
            "allow_val_change": True,  # a resumed run may have another learning rate
            "console": "off",
            "disable_code": True,
            "disable_git": True,
            "save_code": False,
            "silent": True,
            "symlink": False,
            "init_timeout": _INIT_TIMEOUT_S,
            # W&B's own metadata file holds the raw command line; our redacted environment is in the config.
            "x_disable_meta": True,
            "x_save_requirements": False,
            # wandb-core does not write out what it holds when we are killed: 15 s of rows by default.
            "x_transaction_log_flush_interval": 1.0,
        }
        # Settings with x_ come and go between W&B versions; one that is gone must not cost the dashboard.
        known = self._wandb.Settings.model_fields
        return self._wandb.Settings(**{name: value for name, value in wanted.items() if name in known})

    def _abandon(self) -> None:
        """End wandb-core and W&B's exit hook, which waits without limit for an upload that does not move."""
        import psutil

        self._abandoned = True
        try:
            setup = sys.modules.get("wandb.sdk.wandb_setup")
            connection = getattr(getattr(setup, "_singleton", None), "_connection", None)
            if connection is not None:
                connection._cleanup()
        except Exception as error:
            log.warn(f"W&B's exit hook stays ({type(error).__name__}: {error}); the process may end late.")
        for child in psutil.Process().children():
            try:
                if child.name().startswith("wandb-core"):
                    child.terminate()  # it removes its socket in /tmp, which a plain kill would leave
                    try:
                        child.wait(timeout=2)
                    except psutil.TimeoutExpired:
                        child.kill()
                        child.wait(timeout=2)
            except psutil.Error:
                continue


_MEDIA = ("wandb.sdk.data_types._private", ("MEDIA_TMP",))


def remove_temporary_folders() -> None:
    """Delete the two folders that W&B makes in /tmp on import for media and artifacts: a killed run would leave them
    behind. That for media is made again while a table is logged. They have no public name; where they are elsewhere,
    they stay."""
    for module, path in (_MEDIA, ("wandb.sdk.artifacts.artifact", ("Artifact", "_TMP_DIR"))):
        found: Any = sys.modules.get(module)
        for name in path:
            found = getattr(found, name, None)
        if found is not None:
            found.cleanup()
