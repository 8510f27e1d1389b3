"""One launch of a run on this rank, from the process group to the exported folder."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import operator
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from llmtrain import features
from llmtrain.base import log, units
from llmtrain.base.errors import CheckpointError, TrainingStopped
from llmtrain.base.rank import messages, watch
from llmtrain.base.rank.heartbeat import count_collectives, heart
from llmtrain.base.redact import redact_text
from llmtrain.base.threads import in_thread
from llmtrain.checkpoint.format import complete_checkpoints, step_folder
from llmtrain.checkpoint.rundir import CheckpointFolder, RunDirectory, open_checkpoints
from llmtrain.config.deepspeed.join import FP32_BY_AUTO
from llmtrain.config.plugins import hashes, place_of
from llmtrain.config.run import Run, RunConfig, same_command
from llmtrain.config.strict_yaml import dump
from llmtrain.data.stream.loader import check_validation
from llmtrain.data.stream.train_data import RunData, TrainData
from llmtrain.engine.deepspeed.build import join_process_group
from llmtrain.engine.process_memory import collected_by_hand
from llmtrain.engine.ranks.device import device_name, max_memory_gib, use_deterministic_kernels
from llmtrain.engine.ranks.ranks import AgreedError, Ranks
from llmtrain.engine.ranks.rendezvous import introduce, leave_all
from llmtrain.engine.ranks.stop_requests import StopAsked, StopRequests
from llmtrain.models.spec import ModelSpec
from llmtrain.models.transformers_private import VARLEN
from llmtrain.objectives.by_token import NextToken
from llmtrain.optim.optimizers import norm_of
from llmtrain.tracking.environment import describe_environment, unverified, versions, write_environment
from llmtrain.tracking.metrics import perplexity
from llmtrain.tracking.tracker import Status, Tracker
from llmtrain.training.guards import DataCheck, Limits, SkippedSteps
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.replica_check import ReplicaCheck
from llmtrain.training.reporting import Evaluation, Logging, StageBorders, throughput_of
from llmtrain.training.saving import Saving
from llmtrain.training.setup import Setup
from llmtrain.training.start import Start, resume_or_start
from llmtrain.training.step import Passes, Position, Request

_COLLECTED_EVERY = 20
"""Steps between two collections of Python's cycles by all ranks together: 0.2 ms each (3M parameters, two CPU ranks)"""


def run_rank(run: Run, spec: ModelSpec, data: RunData) -> int:
    """Run one launch on this rank. `run`, `spec`, `data`: what `examine` returned. Returns the exit code. Raises
    UserError; AgreedError on all ranks."""
    config = run.config
    # torch 2.13 renames collectives that DeepSpeed 0.19.8 calls; nobody here can act on it.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    count_collectives(torch)
    if config.train.deterministic:
        use_deterministic_kernels()
    heart.phase("rendezvous")
    ranks = join_process_group(
        config.fault.timeout_s,
        start_timeout_s=config.fault.start_timeout_s,
        settings={
            **asdict(config),
            "json": run.deepspeed,
            "bf16_optimizer_states": run.mix.bf16_moments,
            "plugin": hashes(),
            "configuration of the model": spec.config.to_dict(),  # each host reads its own file
        },
    )
    introduce(ranks)
    run = features.decided(run, ranks)
    config = run.config
    _describe(run, ranks)
    heart.phase("model")
    folder = RunDirectory(run.run_dir, config.checkpoint.dir)
    with contextlib.ExitStack() as stack:
        stack.push(_leave)
        try:
            requests = stack.enter_context(StopRequests(config.fault.preempt_file))
            with ranks.together():
                if ranks.rank == 0:
                    stack.enter_context(folder)
            checkpoints = stack.enter_context(open_checkpoints(folder, config, ranks))
            if config.train.eval:
                with ranks.together():
                    for stage_data in data.stages:
                        check_validation(stage_data)  # now, not after days of training
            _train(Setup(run, spec, data, ranks), folder, checkpoints, requests)
        except Exception as error:
            with contextlib.suppress(RuntimeError, MemoryError):  # the device or the host may no longer answer
                explanations = [feature.explain(error, run, ranks.device) for feature in features.features().values()]
                for words in filter(None, explanations):
                    print(f"rank {ranks.rank}: {words}", file=sys.stderr, flush=True)  # on any rank
            watch.failed(error)  # before closing anything, which may wait for other ranks
            raise
    return 0


def _describe(run: Run, ranks: Ranks) -> None:
    """Give the agent the facts about the run, before memory is taken."""
    mix, expected = run.mix, features.expected(run, on_gpu=ranks.device.type == "cuda")
    watch.describe(
        sections={key: asdict(getattr(run.config, key)) for key in features.defaults()},
        again=same_command(run.config).capitalize(),
        zero_stage=mix.zero_stage,
        alike=mix.degrees.pipeline == 1,
        memory={} if expected is None else dict(expected.memory),
    )


def _train(setup: Setup, folder: RunDirectory, checkpoints: CheckpointFolder, requests: StopRequests) -> None:
    """Do everything that needs all ranks."""
    ranks, began_s = setup.ranks, time.monotonic()
    heart.phase("resume")
    start = resume_or_start(setup, folder, checkpoints)
    setup.prove()
    environment = _write_files(setup, folder)
    experts = setup.engine.module.routing is not None
    watch.describe(run_id=start.run_id, experts=experts)
    tracker, session = _tracker(setup, start, folder, environment), setup.session(start.position.step)
    parts: list[Part] = []
    status: Status = "failed"
    try:
        with contextlib.ExitStack() as stack:
            stack.push(functools.partial(_close, parts))
            tracker.event("resume" if start.position.step else "start", step=start.position.step, lines=start.lines)
            loader = stack.enter_context(setup.loader(start.position.sample_index, step=start.position.step))
            launch = Launch(
                setup=setup,
                start=start,
                folder=folder,
                checkpoints=checkpoints,
                requests=requests,
                tracker=tracker,
                session=session,
                loader=loader,
                parts=parts,
                began_s=began_s,
                speed=throughput_of(setup, start.position.step),
            )
            for part in _parts(launch):
                parts.append(part)
                if start.folder is not None and (entry := start.kept.get(part.key)):
                    part.restore(entry, start.folder)
            _announce(launch)
            began = True
            try:
                with collected_by_hand():
                    position, ended = train_steps(launch)
            except StopAsked:  # before the first step: there is nothing new to save
                position, ended, began = start.position, False, False
            reason, asked = (None, False) if ended else _reason(launch)
            last_words = _conclude(launch, position, reason, began=began)
            if setup.run.config.parts:
                from llmtrain.training.plugin_parts import close_all

                close_all(parts, ranks, setup.run.config)
            if ranks.rank == 0:
                status_word = "complete" if ended else "stopped" if asked else "ended"
                messages.emit("end", status=status_word, code=0, reason=reason)
            watch.left(0)
        status = "finished" if ended else "stopped"
    except TrainingStopped as error:
        tracker.event("stop", step=session.step_number, complete=False, reason=str(error))
        raise AgreedError(str(error), error.exit_code) from error  # all ranks end here
    finally:
        tracker.close(status)
    log.info(last_words)  # the last words: closing a tracker may have printed


def _plugins(launch: Launch) -> Iterable[Part]:
    if not launch.setup.run.config.parts:
        return ()
    from llmtrain.training.plugin_parts import guarded

    return guarded(launch)


def _fetching(launch: Launch) -> Iterable[Part]:
    setup = launch.setup
    read = [*setup.course.data, *setup.data.sets.values()]
    questions = [choices.prepared for choices in setup.data.choices.values()]
    if not (any(data.in_store for data in read) or any(each.in_store for each in questions)):
        return ()
    from llmtrain.training.fetching import Fetching

    return (Fetching(launch),)


ORDER: tuple[Callable[[Launch], Part | Iterable[Part]] | str, ...] = (
    Limits,
    "spikes",
    SkippedSteps,
    "adapter_check",
    "sites",
    "balance",
    "ema",
    _plugins,
    "samples",
    Logging,
    Evaluation,
    StageBorders,
    _fetching,
    DataCheck,
    ReplicaCheck,
    "recheck",
    Saving,
    "mirror",
    "profile",
)
"""A run's parts in the order of their calls: classes of the core, functions for parts of few runs, names of
features."""


def _parts(launch: Launch) -> Iterator[Part]:
    """Make the parts of the run. Raises AgreedError."""
    for entry in ORDER:
        if isinstance(entry, str):
            feature = features.features().get(entry)
            if (
                feature is not None
                and feature.asked(launch.setup.run.config)
                and (part := feature.part(launch)) is not None
            ):
                yield part
        else:
            made = entry(launch)
            yield from (made,) if isinstance(made, Part) else made


def train_steps(launch: Launch) -> tuple[Position, bool]:
    """Train until the run is complete, its time is up, or a rank is asked to stop. Closes the loader. Returns (counters
    of the run, False if a rank was asked to stop)."""
    session, loader, parts, position = launch.session, launch.loader, launch.parts, launch.start.position
    limit = launch.setup.run.max_steps

    def complete() -> bool:
        return (limit is not None and position.step >= limit) or any(part.ended for part in parts)

    def before_update() -> None:
        for part in parts:
            part.before_update()

    @contextlib.contextmanager
    def around(passes: Passes) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part in parts:
                if (context := part.around_passes(passes)) is not None:
                    stack.enter_context(context)
            yield

    for part in parts:
        position = part.begin(position) or position
    stopped, goes_on = False, not complete()
    with contextlib.closing(loader):
        while goes_on:
            session.step_number = position.step  # a part may have moved it
            loader.seek(position.sample_index, position.step)
            heart.begin_step()
            waited_s = loader.data_wait_s
            batch = next(loader)
            waited_s = loader.data_wait_s - waited_s
            request = functools.reduce(operator.or_, (part.request() for part in parts), Request())
            step = session.step(batch, request, before_update, around)
            position = position.after(step.update, loader.next_index, batch.tokens)
            if position.step % _COLLECTED_EVERY == 0:
                gc.collect()
            step_s, comm_s = heart.end_step(position.step)
            for part in parts:
                done = Done(
                    **vars(step),
                    position=position,
                    complete=complete(),
                    data_wait_s=waited_s,
                    step_s=step_s,
                    comm_s=comm_s,
                )
                position = part.after_step(done) or position
            stopped = step.agreed.stop and not complete()
            goes_on = not (complete() or step.agreed.stop)
    return position.settled(), not stopped


def _close(parts: list[Part], kind: Any, error: BaseException | None, trace: Any) -> None:
    """Close all parts, the last first, even if some raise."""
    if isinstance(error, Exception) and not isinstance(error, TrainingStopped):
        watch.failed(error)  # now: closing a tracker may take 20 s, and the other hosts' ranks wait for this one
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.callback(part.close, error)


def _tracker(setup: Setup, start: Start, folder: RunDirectory, environment: dict[str, Any]) -> Tracker:
    config, first = setup.run.config, setup.ranks.rank == 0
    named = {f"trackers.{name}": sink for name, sink in config.trackers.items()}
    return Tracker(
        folder.path,
        run_id=start.run_id,
        config={"run": asdict(config), "deepspeed": setup.run.deepspeed, "environment": environment}
        | {"parameters": setup.spec.facts.parameters},
        total_steps=setup.run.max_steps,
        enabled=first,
        start_step=start.position.step,
        trackers={**features.trackers(vars(config)), **named} if first else {},
        where=place_of,
        norm=norm_of(config.optim.name, zero=setup.run.mix.zero_stage > 0),
        show=messages.show_progress(),
    )


def _reason(launch: Launch) -> tuple[str, bool]:
    """Return (reason of the first rank that was asked to stop, True if from outside the run). All ranks call it."""
    ranks = launch.setup.ranks
    asks = next((text for part in launch.parts if (text := getattr(part, "asks", ""))), None)
    everywhere = ranks.gather((launch.requests.stop_reason, asks))
    outside = any(reason for reason, _ in everywhere)
    whys = [reason if outside else asks for reason, asks in everywhere]
    unnamed = ranks.seats[0], "a part of the run asked to stop, and gives no reason"
    seat, why = next(((seat, why) for seat, why in zip(ranks.seats, whys, strict=True) if why), unnamed)
    return (why if seat.rank == 0 else f"rank {seat.rank} on {seat.host}: {why}"), outside


def _conclude(launch: Launch, position: Position, reason: str | None, *, began: bool) -> str:
    """Save for the last time, evaluate, export. `reason`: why the run stops; None: it is complete. `began`: False if
    the launch was stopped before its first step. Returns rank 0's last lines."""
    setup, folder, tracker = launch.setup, launch.folder, launch.tracker
    evaluation, complete, last_words = launch.part(Evaluation), reason is None, ""
    tracker.end_progress()
    if complete:
        launch.part(SkippedSteps).refuse_untrained(position)
    if complete and evaluation.decides:
        evaluation.evaluate(position)
    with heart.during("save"):
        if began:
            for part in launch.parts:
                part.last(position, complete=complete)
            if complete and setup.run.config.train.export and launch.checkpoints.split:  # rank 0 needs all files
                from llmtrain.checkpoint.host_files import fetch_all

                fetch_all(step_folder(launch.checkpoints.path, position.step), launch.checkpoints, setup.ranks)
    validation_loss = evaluation.evaluate(position).get("eval/loss") if complete else None
    failure = None
    if setup.run.config.parts:
        from llmtrain.training.plugin_parts import first_failure

        failure = first_failure(launch.parts, setup.ranks)
    if setup.ranks.rank == 0:
        tracker.event("stop", step=position.step, complete=complete, reason=failure or reason)
        if complete:
            heart.phase("export")
            device = setup.ranks.device
            if planned := features.expected(setup.run, on_gpu=device.type == "cuda"):
                measured, whose = units.size(max_memory_gib(device) * units.GIB), "tensors"
                whose = whose if device.type == "cuda" else "the process with its code"
                log.info(f"memory: planned {units.size(planned.tensors)} of tensors, measured {measured} of {whose}")
            data = setup.course.done(position.step).data
            last_words = finish(setup.run.config, folder, data, tracker, validation_loss, setup.ranks.device)
        else:
            last_words = stopped(setup.run.config, launch.checkpoints.path if began else None, position.step, reason)
    return last_words


def _write_files(setup: Setup, folder: RunDirectory) -> dict[str, Any]:
    """Write config.yaml, deepspeed.json and environment.json. Returns the environment on rank 0, else an empty dict."""
    environment: dict[str, Any] = {}
    ranks, spec = setup.ranks, setup.spec
    with ranks.together():
        if ranks.rank == 0:
            environment = describe_environment(ranks=[asdict(seat) for seat in ranks.seats], plugins=hashes())
            environment["parameters"] = spec.facts.parameters
            environment["attention"] = spec.model.attention
            if spec.model.attention == VARLEN:
                from llmtrain.models import varlen

                environment["attention"] = f"varlen, {varlen.kernel}"
            try:
                (folder.path / "config.yaml").write_text(dump(setup.run.config))
                (folder.path / "deepspeed.json").write_text(json.dumps(setup.run.deepspeed, indent=2) + "\n")
                write_environment(folder.path, environment)
            except OSError as error:
                why = f"cannot be written: {error.strerror}. Make room, or give another folder."
                raise CheckpointError(f"train.run_dir: {folder.path} {why}") from error
    return environment


def _announce(launch: Launch) -> None:
    setup, start, run = launch.setup, launch.start, launch.setup.run
    config, batch, mix, sizes = run.config, run.batch, run.mix, setup.spec.facts
    lines = [*run.notes, *setup.engine.module.notes, *start.lines]
    named = {"parts": config.parts, "metrics": config.metrics, "trackers": config.trackers}
    lines += [f"{section}: {', '.join(names)}" for section, names in named.items() if names]
    if run.max_steps is not None and start.position.step >= run.max_steps:
        lines.append(f"max_steps {run.max_steps} is reached, nothing to do: raise it to train on")
    frozen = f" ({units.count(sizes.trained)} trained)" if sizes.trained < sizes.parameters else ""
    by_auto = ' (by the JSON\'s "auto")' if any(FP32_BY_AUTO in line for line in lines) else ""
    log.info(
        f"{units.count(sizes.parameters)} parameters{frozen}, {mix.arithmetic}{by_auto}, ZeRO {mix.zero_stage}, "
        f"{units.counted(mix.degrees.world_size, 'rank')} on {device_name(setup.ranks.device)}; "
        f"{units.count(batch.tokens)} tokens a step ({batch.global_batch} sequences of {batch.sequence_length}: "
        f"micro-batch {batch.micro_batch} x accumulation {batch.accumulation} x {batch.data_parallel} data-parallel "
        f"ranks); run folder {launch.folder.path}"
    )
    for line in (*filter(None, [unverified(versions())]), *lines):
        log.info(line)


def _leave(_kind: Any, error: BaseException | None, _trace: Any) -> None:
    heart.phase("end")
    leave_all(error)


_UPLOAD_S = 1800.0
"""Seconds that the end of a run waits for the upload of its export."""


def finish(
    config: RunConfig,
    folder: RunDirectory,
    data: TrainData,
    tracker: Tracker,
    validation_loss: float | None,
    device: torch.device,
) -> str:
    """Log the result; write the Hugging Face folder and the sample if the run asks for them. `data`: the last stage's
    data. `validation_loss`: None with train.eval off. Returns the last lines for the user."""
    newest = complete_checkpoints(folder.checkpoints)[0]
    lines = [("run folder", str(folder.path)), ("checkpoint", str(newest))]
    if config.train.export:
        from llmtrain.checkpoint.hf.exporting import export_hf  # much that training does not need

        export_hf(newest, folder.export)
        tracker.event("export", path=str(folder.export))
        lines.append(("Hugging Face", str(folder.export)))
        if config.train.export_to is not None:
            _upload(config.train.export_to, newest, folder, tracker)
    if validation_loss is None:
        log.info("no validation loss: train.eval is off")
    elif not isinstance(config.objective, NextToken):
        log.info(f"validation loss {validation_loss:.4f} {config.objective.unit}")
    else:
        log.info(f"validation loss {validation_loss:.4f} nats/token (perplexity {perplexity(validation_loss):.2f})")
    for feature in features.asked(config):
        lines += feature.at_end(data, tracker)
    if config.train.export and config.train.sample_prompt is not None:
        _sample(folder, config.train.sample_prompt, config.train.seed, tracker, device)
        lines.append(("more text", f'llmtrain generate {folder.path} --prompt "..."'))
    return "\n".join(f"{what:<13} {where}" for what, where in lines)


def _upload(url: str, checkpoint: Path, folder: RunDirectory, tracker: Tracker) -> None:
    """Upload the export; a failure is a warning, since the export is on this host's disk."""
    from llmtrain.checkpoint.hf.export_store import ExportStore  # most runs have none

    done = in_thread(lambda: ExportStore(url, checkpoint, "train.export_to").put(folder.export), "upload")
    until = time.monotonic() + _UPLOAD_S
    while not wait([done], 1.0).done and time.monotonic() < until:
        heart.beat()
    try:
        words = done.result(0)
    except (CheckpointError, FutureTimeout) as error:
        reason = str(error) or f"train.export_to {redact_text(url)}: not done after {units.duration(_UPLOAD_S)}."
        tracker.event("export_failed", error=reason)
        log.warn(f"{reason} Later: llmtrain checkpoint to-hf {folder.path} {redact_text(url)}")
        return
    tracker.event("uploaded", export=words)
    log.info(f"uploaded {words}")


def _sample(folder: RunDirectory, prompt: str, seed: int, tracker: Tracker, device: torch.device) -> None:
    """Generate text with the exported model and log it. If the device has no memory left for a second model beside the
    engine, warn and give the command for later."""
    from llmtrain.checkpoint.hf.inference import Sampling, generate

    try:
        text = generate(folder.export, prompt, Sampling(max_tokens=64, seed=seed), device={"": device})
    except RuntimeError as error:
        from llmtrain.base.rank.device_faults import OUT_OF_MEMORY, device_fault

        if device_fault(str(error)) is not OUT_OF_MEMORY:
            raise
        command = f'llmtrain generate {folder.path} --prompt "..."'
        log.warn(f"no sample: {device} has no room for the exported model next to the engine. Later: {command}")
        return
    tracker.event("sample", text=text)
    log.info(f"sample: {json.dumps(text, ensure_ascii=False)}")


def stopped(config: RunConfig, checkpoints: Path | None, step: int, reason: str | None) -> str:
    """Return the last line of a run that was asked to stop. `checkpoints`: None if this launch trained no step."""
    if checkpoints is None:
        return f"stopped ({reason}) at step {step}, before this launch trained any; the same command begins again"
    where = step_folder(checkpoints, step)
    return f"stopped ({reason}) at step {step}, saved in {where}; {same_command(config)} continues"
