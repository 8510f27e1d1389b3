"""A worker that trains nothing and ends as a file in its folder says. No torch: it starts in a moment."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    how = json.loads((folder / "how.json").read_text())[rank]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if how == "killed":
        print("the last words of this rank", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "waits":
        time.sleep(600)
    elif how != "ends":
        after_rank, user, text = how
        while after_rank is not None and not (folder / f"error-{after_rank}.json").exists():
            time.sleep(0.01)
        told = {"time": time.time(), "rank": rank, "text": text, "user": text if user else None}
        (folder / f"error-{rank}.json").write_text(json.dumps(told))
        sys.exit(1)
