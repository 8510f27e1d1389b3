"""python -m llmtrain.cluster.launch.srun WORDS: srun with these words, and a SIGTERM that its ranks hear.

srun takes SIGTERM for an order to end its tasks with SIGKILL (Slurm's srun_job.c, _srun_signal_mgr), and nothing would
be saved. scancel sends them the SIGTERM itself.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time

_ANSWERS_S = 30.0
_TRIES, _PAUSE_S = 3, 2.0


def main(words: list[str]) -> int:
    """srun's exit code, as a shell has it. SIGINT is srun's: two of them within a second end its tasks."""
    name = f"llmtrain-{secrets.token_hex(4)}"
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    srun = subprocess.Popen(("srun", f"--job-name={name}", *words))
    signal.signal(signal.SIGINT, lambda number, _: srun.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def hand_on() -> None:
        while True:
            asked.wait()
            asked.clear()
            if (problem := ask_to_leave(name)) is not None and srun.poll() is None:
                print(f"warning: the ranks were not asked to save and leave: {problem}", file=sys.stderr, flush=True)

    threading.Thread(target=hand_on, name="hand-on", daemon=True).start()
    code = srun.wait()
    return code if code >= 0 else 128 - code


def ask_to_leave(name: str) -> str | None:
    """SIGTERM to the tasks of this job's step of that name; why not, when it could not be sent."""
    problem = ""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        try:
            jobs = f"--jobs={os.environ['SLURM_JOB_ID']}"
            steps = _slurm("squeue", "--noheader", "--steps", jobs, "--format=%i %j").splitlines()
            found = [step.removesuffix(f" {name}") for step in steps if step.endswith(f" {name}")]
            if _slurm("squeue", "--noheader", jobs, "--format=%t").strip() == "CG":
                return None  # cancelled, or out of time: Slurm has sent its own, and takes none from us
            if found:
                _slurm("scancel", "--signal=TERM", *found)
                return None
            problem = "Slurm does not know their step"
        except (KeyError, OSError, subprocess.SubprocessError) as error:
            problem = str(getattr(error, "stderr", None) or error).strip()
    return problem


def _slurm(*words: str) -> str:
    silent = subprocess.DEVNULL
    return subprocess.run(words, stdin=silent, capture_output=True, text=True, timeout=_ANSWERS_S, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
