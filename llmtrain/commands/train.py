"""`llmtrain train`: what every rank of a launch runs."""

from __future__ import annotations

import os

from llmtrain.base.files import refuse_if_in_use
from llmtrain.cluster import messages
from llmtrain.cluster.watch import rank_side
from llmtrain.commands import completion
from llmtrain.config.deepspeed import let_segments_grow
from llmtrain.config.load import load
from llmtrain.config.pinned import with_base
from llmtrain.config.run import FaultConfig
from llmtrain.engine.process_memory import none_while_importing


def main(argv: list[str]) -> int:
    """Train as the command line says. Returns the exit code; raises UserError."""
    completion.offer_run()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    source = "WORLD_SIZE, set by the launcher" if "WORLD_SIZE" in os.environ else "started without a launcher"
    with rank_side.outcome_reported():
        if messages.SECRETS in os.environ:
            from llmtrain.cluster.hosts.variables import load_secrets

            load_secrets()
        if "LOCAL_RANK" in os.environ and messages.SUPERVISED not in os.environ:  # `llmtrain launch` has read it
            from llmtrain.cluster.hosts.hostfile import refuse_missing_hostfile

            refuse_missing_hostfile()
        resolved = load(argv, world_size, source)
        refuse_if_in_use(resolved.run_dir)  # rank 0 takes the folder when all ranks have met: later
        with messages.waiting():  # before the watch begins: a large model takes longer than any stall
            resolved = with_base(resolved)
        rank_side.begin(
            stall_timeout_s=stall_timeout_s(resolved.run.fault),
            start_timeout_s=resolved.run.fault.start_timeout_s,
            run_dir=resolved.run_dir,
            notes="llmtrain.tracking.fault_note",
        )
        let_segments_grow()
        if resolved.run.train.deterministic:  # without it cuBLAS may add in any order, and torch refuses its products
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Only now torch and DeepSpeed: what can be known without them is answered in a fraction of a second.
        with none_while_importing():
            from llmtrain.training.examine import examine

            checked = examine(resolved)
            from llmtrain.training.run import train

        return train(checked)


def stall_timeout_s(fault: FaultConfig) -> float:
    """The watch acts before the collectives' own time limit: after it the ranks are dead and cannot be asked."""
    return min(fault.stall_timeout_s, 0.75 * fault.timeout_s)
