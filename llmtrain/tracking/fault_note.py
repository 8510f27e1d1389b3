"""Records a fault that ended a run, a pause or a straggler: events.jsonl first, then W&B. A separate process.

Started by the watch of a host (features/watch/agent.py), which ends it after a few seconds: the ranks, and their W&B
process, may hang or be dead. Reads one JSON object from standard input.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from llmtrain.base.redact import redact
from llmtrain.tracking.local import write_event


def tell_wandb(run_dir: Path, run_id: str, tracking: dict[str, Any], event: dict[str, Any]) -> None:
    """Mark the run as failed, with the paragraph in its summary under `fault`. May raise or hang."""
    from llmtrain.tracking.wandb_mode import QUIET, choose_mode

    mode, _ = choose_mode(tracking["wandb"])
    if mode == "disabled":
        return
    os.environ.update(QUIET)
    import wandb

    run = wandb.init(
        id=run_id,
        resume="allow",
        mode=mode,
        dir=str(run_dir),
        project=tracking["project"],
        entity=tracking["entity"],
        settings=wandb.Settings(console="off", disable_code=True, disable_git=True, save_code=False, silent=True),
    )
    run.summary.update({"fault": redact(event)["text"], "fault_cause": event["cause"], "fault_step": event["step"]})
    run.finish(exit_code=1)


def main() -> int:
    asked = json.load(sys.stdin)
    run_dir, event, run = Path(asked["run_dir"]), asked["event"], asked["run"]
    write_event(run_dir, asked["kind"], event)
    if run.get("run_id") and run.get("tracking"):
        tell_wandb(run_dir, run["run_id"], run["tracking"], event)
    return 0


if __name__ == "__main__":
    sys.exit(main())
