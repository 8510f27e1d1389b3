"""Records a fault that ended a run, a pause or a straggler: events.jsonl first, then the trackers of features.

A process of its own, started by the agent, which ends it after a few seconds: the ranks, and their trackers, may hang
or be dead. Reads one JSON object from standard input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llmtrain import features
from llmtrain.base.redact import redact
from llmtrain.tracking.local import write_event


def main() -> int:
    asked = json.load(sys.stdin)
    run_dir, event, run = Path(asked["run_dir"]), asked["event"], asked["run"]
    write_event(run_dir, asked["kind"], event)
    if run.get("run_id"):
        for sink in features.trackers(run.get("sections") or {}).values():
            sink.fault(run_dir, run["run_id"], redact(event))
    return 0


if __name__ == "__main__":
    sys.exit(main())
