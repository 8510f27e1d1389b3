"""Writes down a fault, a pause or a straggler: a line more in events.jsonl. Reads one JSON object from standard input.

For scripts that use the watch alone (script.py); a run's own program tells W&B, too.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from llmtrain.base.redact import redact


def main() -> int:
    """Entry point of the process."""
    asked = json.load(sys.stdin)
    line = json.dumps({"time_unix_s": time.time(), "kind": asked["kind"], **redact(asked["event"])})
    with open(Path(asked["run_dir"]) / "events.jsonl", "a") as file:
        file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
