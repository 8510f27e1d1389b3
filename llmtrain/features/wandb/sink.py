"""Weights & Biases, best effort: each step of all launches of a run is sent once.

W&B's `_step` is the training step. It can only grow: the server and `wandb sync` move a row whose step is taken to the
next free one. Online the server gives its last step. Offline no launch can ask, so RUN/wandb/sent.json has the last
sent step. A launch begins with the rows of metrics.jsonl after this step. The offline folder of a killed launch may end
within a record, where `wandb sync` stops: this folder counts as uploaded, and the next launch sends its rows again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from llmtrain.base import log, untrusted
from llmtrain.base.redact import redact_text
from llmtrain.features.wandb import TrackingConfig
from llmtrain.features.wandb.mode import QUIET, Mode, choose_mode
from llmtrain.tracking.local import read_rows, rows_after
from llmtrain.tracking.metrics import metrics
from llmtrain.tracking.sink import Sink

_INIT_TIMEOUT_S = 60.0
_HEADER_BYTES = 7
"""Size of a `.wandb` file without a record: W&B writes this header first."""


@dataclass
class _Sent:
    """RUN/wandb/sent.json: the rows in W&B, and the launches whose rows are only on this disk."""

    run_id: str
    step: int
    """Last sent step."""
    before: int
    """Last step that earlier launches have sent."""
    offline: list[str] = field(default_factory=list)
    """Folders of offline launches that no online launch has sent again."""
    open: str | None = None
    """Folder of the offline launch that has not ended."""


@dataclass(kw_only=True)
class WandB(Sink):
    """One W&B run that continues under the same id in every launch of the training run."""

    tracking: TrackingConfig
    MODULES = ("wandb",)
    title = "W&B"

    def __post_init__(self) -> None:
        for name, value in QUIET.items():  # W&B reads them when it is imported
            os.environ.setdefault(name, value)
        self._run: Any = None
        self._abandoned = False

    def open(self, run_dir: Path, run_id: str, config: dict[str, Any], start_step: int) -> None:
        """Begin or continue the W&B run, and send missing rows of earlier launches."""
        mode, why = choose_mode(self.tracking.wandb)
        if mode == "disabled":
            return
        self._run_dir, self._folder = run_dir, run_dir / "wandb"
        try:
            saved = _Sent(**untrusted.loads((self._folder / "sent.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            saved = None
        if saved is None or saved.run_id != run_id:  # `wandb clean` deletes uploaded folders, so W&B has the steps
            saved = _Sent(run_id=run_id, step=start_step or -1, before=start_step or -1)
        self._sent = saved
        for file in self._folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"):
            # A kill within `wandb.init`, or of the process that notes a fault: `wandb sync` would stop here.
            if file.stat().st_size <= _HEADER_BYTES and file.parent.name != self._sent.open:
                file.with_suffix(".wandb.synced").touch()
        if not self.late:  # a launch after a kill within `wandb.init` finds the last step that was sent
            self._folder.mkdir(parents=True, exist_ok=True)
            self._save_sent()
        if mode == "online":
            try:
                self._run = self._start_run("online", config)
                log.info(f"W&B: online, {self._run.url}")
            except Exception as error:
                if self._abandoned:
                    raise
                mode = "offline"
                why = redact_text(f"online failed, {type(error).__name__}: {error}".strip().splitlines()[0])
        if mode == "offline":
            self._run = self._start_run("offline", config)
            log.info(f"W&B: offline, {why}. To upload later: wandb sync {self._folder}/offline-run-*")
        sent, online = self._sent, mode == "online"
        sends_again = not online and sent.open is not None and self._skip_folder(sent.open)
        if sends_again:
            sent.offline = [name for name in sent.offline if name != sent.open]
            sent.step = sent.before
        if sends_again or not self.late:
            self._catch_up(online, sys.maxsize if self.late else start_step)

    def _save_sent(self) -> None:
        file = self._folder / "sent.json"
        temporary = file.with_suffix(".json.tmp")
        try:
            temporary.write_text(json.dumps(asdict(self._sent)))
            os.replace(temporary, file)  # no fsync: a killed process loses nothing
        except OSError as error:
            log.warn_once(f"{file} cannot be written ({error.strerror}): after a kill, W&B may get a row twice")

    def _catch_up(self, online: bool, start_step: int) -> None:
        sent = self._sent
        if online:
            sent.step = getattr(self._run, "starting_step", 0) - 1
        sent.before, sent.open = sent.step, None
        if not online:
            sent.open = Path(self._run.dir).parent.name
            sent.offline.append(sent.open)
        rows = [
            row for row in rows_after(self._run_dir / "metrics.jsonl", -1, sent.before) if row["step"] <= start_step
        ]
        sent.step = max([sent.before, *(row["step"] for row in rows)])
        self._save_sent()
        samples = {
            event["step"]: {"samples": list(zip(event["prompts"], event["texts"], strict=True))}
            for event in read_rows(self._run_dir / "events.jsonl")[0]
            if event.get("kind") == "samples" and {"step", "prompts", "texts"} <= event.keys()
        }
        for row in rows:
            # Left open: this launch may log the evaluation of the last step.
            self._send({**row, **samples.get(row["step"], {})}, more=True)
        if self.late:  # ends the last of these steps; the scores take the next one
            self._run.log({}, step=sent.step + 1, commit=False)
        if online:
            for name in sent.offline:
                self._skip_folder(name)
            sent.offline = []
            self._save_sent()

    def _skip_folder(self, name: str) -> bool:
        """Have `wandb sync` skip a folder whose rows a launch sends. False: W&B has some of them."""
        file = self._folder / name / f"run-{self._sent.run_id}.wandb"
        marks = [file.with_suffix(f".wandb.{kind}") for kind in ("synced", "syncstate")]
        if not file.exists():  # `wandb clean`
            return False
        uploaded = any(mark.exists() for mark in marks)
        marks[0].touch()
        return not uploaded

    def log(self, row: dict[str, Any], *, more: bool) -> None:
        """Send a row of a step that earlier launches have not sent. Texts of samples are a table."""
        if self._run is None:
            return
        if self.late:  # it takes the next free `_step`; the charts show it at its own `step`
            self._run.log(row)
        elif row["step"] > self._sent.before:
            self._send(row, more=more)
            self._save_sent()

    def _send(self, row: dict[str, Any], *, more: bool) -> None:
        if "samples" in row:
            import wandb

            pairs = [list(pair) for pair in row["samples"]]
            row = {**row, "samples": wandb.Table(columns=["prompt", "continuation"], data=pairs)}
        self._run.log(row, step=row["step"], commit=not more)
        self._sent.step = max(self._sent.step, row["step"])

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Send prompts as a table; all other events stay local."""
        if kind == "samples":
            pairs = list(zip(fields["prompts"], fields["texts"], strict=True))
            self.log({"step": fields["step"], "samples": pairs}, more=True)

    def alert(self, title: str, text: str) -> None:
        if self._run is not None:
            self._run.alert(title=title, text=text)

    def close(self, *, exit_code: int) -> None:
        if self._run is None:
            return
        import wandb

        self._run.finish(exit_code=exit_code)
        if self._sent.open == Path(self._run.dir).parent.name:
            self._sent.open = None
            self._save_sent()
        # Ends wandb-core and takes away W&B's exit hook, which could hold up the interpreter's end.
        wandb.teardown()

    def fault(self, run_dir: Path, run_id: str, event: dict[str, Any]) -> None:
        """Mark the run as failed, with the paragraph in its summary under `fault`."""
        mode, _ = choose_mode(self.tracking.wandb)
        if mode == "disabled":
            return
        os.environ.update(QUIET)
        import wandb

        run = wandb.init(
            id=run_id,
            resume="allow",
            mode=mode,
            dir=str(run_dir),
            project=self.tracking.project,
            entity=self.tracking.entity,
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True, save_code=False, silent=True),
        )
        run.summary.update({"fault": event["text"], "fault_cause": event["cause"], "fault_step": event["step"]})
        run.finish(exit_code=1)

    def abandon(self) -> None:
        """End wandb-core, then W&B's exit hook, which waits without limit for a stuck upload."""
        self._abandoned = True
        # SystemExit: `teardown` raises it where wandb-core was ended by a signal.
        with contextlib.suppress(Exception, SystemExit):
            cores = [child for child in psutil.Process().children() if child.name().startswith("wandb-core")]
            for core in cores:
                core.terminate()
            for core in psutil.wait_procs(cores, timeout=2)[1]:
                core.kill()
            importlib.import_module("wandb").teardown()

    def _start_run(self, mode: Mode, config: dict[str, Any]) -> Any:
        import wandb

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
            # A killed wandb-core loses its rows in memory: 15 s of rows by default.
            "x_transaction_log_flush_interval": 1.0,
        }
        # Settings with x_ come and go between W&B versions; one that is gone must not cost the dashboard.
        fields = wandb.Settings.model_fields
        run = wandb.init(
            id=self._sent.run_id,
            resume="allow",
            mode=mode,
            dir=str(self._run_dir),
            project=self.tracking.project,
            entity=self.tracking.entity,
            name=self.tracking.name or self._run_dir.resolve().name,
            tags=list(self.tracking.tags),
            group=self.tracking.group,
            job_type=self.tracking.job_type,
            config=config if self.late else {**config, "units": {k: m.unit for k, m in metrics().items()}},
            settings=wandb.Settings(**{name: value for name, value in wanted.items() if name in fields}),
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run
