"""A run's side of upload.py: its process, and the fetch for a launch without checkpoints."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.base import log, units
from llmtrain.base.child import Child, of_module
from llmtrain.base.rank import processes
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.redact import redact_text
from llmtrain.checkpoint.format import complete_checkpoints
from llmtrain.checkpoint.retain import Best
from llmtrain.features.mirror import MirrorConfig
from llmtrain.features.mirror.upload import fetch_newest, refuse_other
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.step import Position

if TYPE_CHECKING:
    from llmtrain.checkpoint.rundir import CheckpointFolder
    from llmtrain.config.run import RunConfig
    from llmtrain.engine.ranks.ranks import Ranks
    from llmtrain.tracking.tracker import Tracker

_AT_THE_END_S, _WHEN_STOPPED_S = 1800.0, 20.0
"""Limits of the wait for the last checkpoint, at a complete run's end and at a stop, which has little time."""
_RESTART_S = 10.0
"""Least time between two starts of the process."""


def look(config: RunConfig, folder: CheckpointFolder, ranks: Ranks) -> None:
    """Fetch the mirror's newest checkpoint for a run with `resume: auto` and none on disk; else refuse a mirror with
    another run's checkpoints. All ranks call it together. Raises AgreedError."""
    url = str(config.section(MirrorConfig).url)

    def there() -> None:
        if not folder.leads:
            return
        if config.resume != "auto" or complete_checkpoints(folder.path):
            refuse_other(url, folder.path, continues=config.resume != "none")
        else:
            fetched = fetch_newest(url, folder.path, str(config.train.run_dir), heart.beat)
            what = "holds no checkpoint yet" if fetched is None else f"{fetched.name} is fetched from there"
            log.info(f"mirror.url {redact_text(url)}: {what}")

    with ranks.together():
        ranks.at_length(there)


class Mirror(Part):
    """Mirrors checkpoints by a process of each rank that leads a folder of checkpoints."""

    def __init__(self, launch: Launch) -> None:
        self._ranks, config = launch.setup.ranks, launch.setup.run.config
        self._idle_s = 0.5 * config.fault.longest_s  # the run goes on when the mirror's process ends
        self._process: Uploader | None = None
        if launch.checkpoints.leads:
            self._process = Uploader(config, launch.checkpoints.path, launch.tracker)

    def after_step(self, done: Done) -> None:
        if self._process is not None:
            self._process.listen()

    def last(self, position: Position, *, complete: bool) -> None:
        process, idle_s = self._process, self._idle_s
        self._ranks.at_length(
            (lambda: None) if process is None else partial(process.finish, complete=complete, idle_s=idle_s)
        )

    def close(self, error: BaseException | None) -> None:
        if self._process is not None:
            self._process.close()


class Uploader:
    """The process that mirrors a folder of checkpoints, and its messages."""

    def __init__(self, config: RunConfig, folder: Path, tracker: Tracker) -> None:
        url, settings = str(config.section(MirrorConfig).url), config.checkpoint
        best = Best.chosen(settings.keep_best)
        self._url, self._folder, self._tracker = redact_text(url), folder, tracker
        self._failing = False
        self._words = of_module(
            *("llmtrain.features.mirror.upload", str(folder), url, str(settings.keep)),
            json.dumps(best and asdict(best)),
        )
        self._start_process()

    def _start_process(self) -> None:
        self._process, self._began_s = Child(self._words), time.monotonic()

    def listen(self) -> None:
        """Forward messages to the tracker, and restart the process if it has ended; never waits."""
        self._pass_messages_on()
        if (code := self._process.code) is not None and time.monotonic() - self._began_s > _RESTART_S:
            log.warn(f"mirror.url {self._url}: its process has ended (code {code}), and is started again")
            self._tracker.event("mirror_restarted", code=code)
            self._process.close()
            self._start_process()

    def _pass_messages_on(self) -> None:
        for message in self._process.received():
            kind = message.pop("kind")
            self._tracker.event(kind, **message)
            failing = kind == "mirror_failed"
            if failing and not self._failing:
                log.warn(
                    f"mirror.url {self._url}: step {message['step']} cannot be mirrored ({message['error']}); "
                    "training continues, and the upload is tried again"
                )
            self._failing = failing

    def finish(self, *, complete: bool, idle_s: float) -> None:
        """Wait until the newest checkpoint is mirrored; only briefly if the run was asked to stop, or if the process
        does nothing for `idle_s`."""
        began_s = worked_s = time.monotonic()
        until, work = began_s + (_AT_THE_END_S if complete else _WHEN_STOPPED_S), None
        self.listen()
        self._process.send("finish")
        while self._process.code is None and time.monotonic() < min(until, worked_s + idle_s):
            stat, moved = processes.stat(self._process.pid), processes.bytes_moved(self._process.pid)
            before, work = work, (stat and stat.cpu_s, moved)
            if work != before:
                worked_s = time.monotonic()
                heart.beat()
            self._pass_messages_on()
            time.sleep(0.05)
        self._pass_messages_on()
        if (code := self._process.code) != 0:
            idle_now_s = time.monotonic() - worked_s
            how = f"has done nothing for {units.duration(idle_now_s)}" if idle_now_s >= idle_s else "is still at work"
            how = how if code is None else f"has ended with code {code}"
            log.warn(
                f"mirror.url {self._url}: the last checkpoint is not mirrored. After "
                f"{units.duration(time.monotonic() - began_s)} its process ({self._process.pid}) {how}. It is in "
                f"{self._folder}, and the run's next launch mirrors it"
            )

    def close(self) -> None:
        """Drop an upload that is not complete."""
        self._process.close()
