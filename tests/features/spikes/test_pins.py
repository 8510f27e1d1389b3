"""Checkpoints before spikes stay until their steps have been replayed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from llmtrain.checkpoint.retain import outdated
from llmtrain.features.spikes.pins import pin, pinned, pins_of
from tests.helpers.checkpoints import at


def test_the_checkpoint_before_a_spike_stays(run: Path) -> None:
    folder = run / "checkpoints"
    assert pin(folder, 150, 2) == 100 and pinned(folder) == [at(run, 100)]
    assert outdated(folder, 1) == [at(run, 200)]
    assert pin(folder, 250, 2) == 200 and outdated(folder, 1) == []
    assert pin(folder, 260, 2) == 200  # the first of three is no longer waited for
    assert pins_of(folder) == [250, 260] and outdated(folder, 1) == [at(run, 100)]
    assert pin(folder, 270, 0) is None and outdated(folder, 1) == [at(run, 200), at(run, 100)]
    assert pin(folder, 100, 2) is None  # none is older
    (folder / "step-00000310.0123abcd.tmp").mkdir()
    assert pin(folder, 315, 2) == 310 and pin(folder, 310, 2) == 300  # it will be the newest before 315
    (folder / "spikes.json").write_text("[1, {]")
    assert pins_of(folder) == []
    (folder / "spikes.json").write_text(json.dumps([*range(120, 200_000), 150]))  # each save reads it
    began_s = time.process_time()
    assert sorted(pinned(folder)) == [at(run, 100), at(run, 200), at(run, 300)] and time.process_time() - began_s < 1.5
    (folder / "spikes.json").unlink()
    os.mkfifo(folder / "spikes.json")
    assert pinned(folder) == []
