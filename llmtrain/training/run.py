"""One launch of a run on this rank, from the process group to the exported folder. Reads as a recipe."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from llmtrain.base import log
from llmtrain.base.errors import TrainingStopped
from llmtrain.checkpoint.folder import open_checkpoints
from llmtrain.checkpoint.rundir import RunDirectory
from llmtrain.cluster import messages
from llmtrain.cluster.watch import rank_side
from llmtrain.cluster.watch.heartbeat import count_collectives, heart
from llmtrain.data.stream.columns import weights_hash
from llmtrain.engine.deepspeed.join import join_process_group
from llmtrain.engine.dist.control import AgreedError, StopRequests, together
from llmtrain.engine.dist.device import use_deterministic_kernels
from llmtrain.engine.dist.rendezvous import describe, introduce, leave_all
from llmtrain.engine.process_memory import collected_by_hand
from llmtrain.optim.optimizers import norm_of
from llmtrain.tracking.tracker import Status, Tracker
from llmtrain.training.begin import announce, write_run_files
from llmtrain.training.examine import Checked
from llmtrain.training.loop import Training
from llmtrain.training.saving import Saving
from llmtrain.training.setup import Setup

if TYPE_CHECKING:
    from llmtrain.sites.site import Site


def train(checked: Checked) -> int:
    """One launch of a run on this rank. Returns the exit code; raises UserError, AgreedError on all ranks."""
    resolved, run = checked.resolved, checked.resolved.run
    # torch 2.13 renames collectives that DeepSpeed 0.19.8 calls; nobody here can act on it.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    count_collectives(torch)
    if run.train.deterministic:
        use_deterministic_kernels()
    heart.phase("rendezvous")
    ranks = join_process_group(
        run.fault.timeout_s,
        start_timeout_s=run.fault.start_timeout_s,
        settings={**asdict(run), "json": resolved.deepspeed, "bf16_optimizer_states": resolved.mix.bf16_moments},
    )
    introduce(ranks)
    heart.phase("model")
    folder = RunDirectory(resolved.run_dir, run.checkpoint.dir)
    with contextlib.ExitStack() as stack:
        stack.push(_leave)
        try:
            requests = stack.enter_context(StopRequests(run.fault.preempt_file))
            with together(ranks):
                if ranks.rank == 0:
                    stack.enter_context(folder)
            checkpoints = stack.enter_context(open_checkpoints(folder, run, ranks))
            _train(Training(Setup(checked, ranks), folder, checkpoints, requests), stack)
        except Exception as error:
            rank_side.failed(error)  # before anything is closed: what is left of the job may hold that up
            raise
    return 0


def _train(training: Training, stack: contextlib.ExitStack) -> None:
    """All that the ranks do together. `stack`: what is to be closed at the end."""
    resolved, ranks, folder = training.resolved, training.ranks, training.folder
    heart.phase("resume")
    lines = training.resume_or_start()
    training.setup.prove()
    environment = write_run_files(folder, resolved.run, resolved.deepspeed, ranks, training.model_facts)
    experts = getattr(training.engine.module, "routing", None) is not None
    describe(resolved.run.tracking, resolved.mix, training.wandb_id, experts)
    tracker = _tracker(training, environment)
    status: Status = "failed"
    try:
        tracker.event("resume" if training.position.step else "start", step=training.position.step, lines=lines)
        site = stack.enter_context(_site(training, tracker)) if resolved.run.sites.name else None
        saving = stack.enter_context(_saving(training, tracker, site))
        lines = [*resolved.notes, *training.notes, *lines]
        announce(resolved.batch, resolved.mix, folder, training.model_facts, ranks.device, lines)
        try:
            with collected_by_hand():
                complete = training.loop(tracker, saving, site)
        except TrainingStopped:
            saving.settle()
            raise
        status, told = _conclude(training, tracker, saving, complete)
    except TrainingStopped as error:
        tracker.event("stop", step=training.position.step, complete=False, reason=str(error))
        raise AgreedError(str(error), error.exit_code) from error  # the ranks skip the same steps
    except Exception as error:
        rank_side.failed(error)  # now: closing W&B may take 20 s, and the other hosts' ranks wait for this one
        raise
    finally:
        tracker.close(status)
    log.info(told)  # the last words: closing W&B may have printed


def _saving(training: Training, tracker: Tracker, site: Site | None) -> Saving:
    return Saving(
        training.engine,
        training.checkpoints,
        training.run.checkpoint,
        training.resolved.mix,
        training.ranks,
        tracker,
        saved_step=training.saved_step,
        max_failed=training.run.fault.max_failed_saves,
        frozen=training.frozen_source,
        more=site.state if site else list,
    )


def _site(training: Training, tracker: Tracker) -> Site:
    """This launch among the sites that train the run's model. Raises AgreedError."""
    from llmtrain.sites.site import Site, telling
    from llmtrain.sites.step_rate import Share

    run, batch = training.run, training.resolved.batch
    common = {
        "data": training.data.fingerprint,
        "data.seed": run.data.seed,
        "data.sequence_length": run.data.sequence_length,
        "train.seed": run.train.seed,
        "adapter": asdict(run.adapter),
        "frozen parameters (model.pretrained)": weights_hash(training.frozen_source.checksums),
        "sites.method": run.sites.method,
        "sites.sync_every": 1 if run.sites.method == "every_step" else run.sites.sync_every,
        "sites.pace": run.sites.pace,
        "sites.max_alone_steps": run.sites.max_alone_steps,
        "sites.outer_lr": run.sites.outer[0],
        "sites.outer_momentum": run.sites.outer[1],
        "sites.compress": run.sites.compress,
        "sites.mean": run.sites.mean,
        "sites.meet_every": run.sites.meet_every,
        "sites.fragments": run.sites.fragments,
    }
    resumed = training.resumed
    site = Site(
        training.engine,
        training.ranks,
        run.sites,
        common,
        Share(batch=batch.global_batch, tokens=batch.tokens),
        telling(tracker.event, tracker.log),
        frozen=training.spec.frozen,
        last_step=training.resolved.max_steps,
    )
    if resumed is not None and (kept := resumed.trainer.get("outer")):
        site.restore(resumed.folder, kept)
    return site


def _tracker(training: Training, environment: dict[str, Any]) -> Tracker:
    return Tracker(
        training.folder.path,
        tracking=training.run.tracking,
        run_id=training.wandb_id,
        config={"run": asdict(training.run), "deepspeed": training.resolved.deepspeed, "environment": environment},
        total_steps=training.resolved.max_steps,
        enabled=training.ranks.rank == 0,
        start_step=training.position.step,
        norm=norm_of(training.resolved.optim.name, zero=training.resolved.zero_stage > 0),
        show=messages.show_progress(),
    )


def _conclude(training: Training, tracker: Tracker, saving: Saving, complete: bool) -> tuple[Status, str]:
    """What follows the last step: the last save, the validation loss, rank 0's export; returns rank 0's last words."""
    position, ranks, told = training.position, training.ranks, ""
    tracker.end_progress()
    with heart.during("save"):
        if training.began:
            saving.last(position.step, training.trainer_state, exports=complete and training.run.train.export)
    validation_loss = training.evaluate(tracker) if complete and training.run.train.eval else None
    if ranks.rank == 0:
        from llmtrain.training.finish import (  # an export and a sample take much that training does not need
            finish,
            stopped,
        )

        reason = None if complete else training.requests.stop_reason or "another rank was asked to stop"
        tracker.event("stop", step=position.step, complete=complete, reason=reason)
        if complete:
            heart.phase("export")
            told = finish(training.run, training.folder, training.data, tracker, validation_loss, ranks.device)
        else:
            told = stopped(training.checkpoints.path if training.began else None, position.step, reason)
        messages.emit("end", status="complete" if complete else "stopped", code=0, reason=reason)
    rank_side.left(0)
    return "finished" if complete else "stopped", told


def _leave(_kind: Any, error: BaseException | None, _trace: Any) -> None:
    heart.phase("end")
    leave_all(error)
