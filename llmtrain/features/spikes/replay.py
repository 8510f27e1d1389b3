"""Train steps of a run again: to compare them with its record, or to make a new run without some rows or steps."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from llmtrain import features
from llmtrain.base import units, untrusted
from llmtrain.base.child import ending_with_parent
from llmtrain.base.errors import CheckpointError, ConfigError, DataError, TrainingStopped
from llmtrain.base.files import lock_folder, refuse_if_in_use
from llmtrain.checkpoint.format import complete_checkpoints, step_of
from llmtrain.checkpoint.retain import looks_good
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config import plugins, strict_yaml
from llmtrain.config.deepspeed.join import offloads, without_degrees
from llmtrain.config.deepspeed.read import read_json
from llmtrain.config.reader import read_saved
from llmtrain.config.run import RunConfig
from llmtrain.config.stages import DataConfig, data_of
from llmtrain.data.where import documents_of, spans
from llmtrain.engine.ranks.local_ranks import ending_on_sigterm
from llmtrain.features.spikes.page import worst_rows
from llmtrain.features.spikes.steps import LOOKS, REPLAYED, STEPS, StepRow, read_steps
from llmtrain.tracking.local import read_rows

MARK = ".replay"
"""File that marks the folder of a replay, so that the next replay may delete it."""
_STOPPED = 75
"""Exit code of a launch that was asked to stop."""
_QUIET = {
    "train.log_every": 1, "train.eval": "off", "train.eval_every": "null", "train.export": False,
    "train.max_minutes": "null", "train.stop_early.metric": "null",
    "checkpoint.every_steps": "null", "checkpoint.every_minutes": "null", "checkpoint.keep": 1000,
    "checkpoint.keep_best.metric": "null", "checkpoint.dir": "null",
    "fault.preempt_file": "null", "spikes.pinned": 0,
    "trackers": "{}", "eval.sets": "{}", "eval.choices": "{}",
}  # fmt: skip
"""Settings of a replay that do not change the numbers of a step."""
_WHOLE = {"resume_weights_only": False, "resume_data": "same", "resume_model": "same"}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asks for, checked against the run."""

    run: Path
    out: Path
    first: int
    last: int
    rows: int
    record: dict[int, StepRow]
    """The run's rows in steps.bin for these steps."""
    begins: Path | None
    """Checkpoint before the first step; None: the replay starts where the run began."""
    within: list[Path]
    """Checkpoints of the run within these steps."""
    devices: list[str]
    """Name of each rank's device."""
    changed: dict[str, Any] | None
    """Settings in which the new run of `--write` differs from the run; None: this is a replay."""
    one_rank: bool
    launch: str | None
    """Hostfile for the ranks; None: they run on this machine."""
    plugins: list[str]

    @property
    def replayed(self) -> Path:
        """The run folder of the replay."""
        return self.out / "run"

    @property
    def ranks(self) -> int:
        return 1 if self.one_rank else max(1, len(self.devices))

    @property
    def log(self) -> Path:
        """File with all output of the ranks."""
        return self.out / "replay.log"

    def __str__(self) -> str:
        begins = "its beginning" if self.begins is None else self.begins.name
        how = f"from {begins}, by {units.counted(self.ranks, 'rank')}; the ranks' output: {self.log}"
        return f"steps {self.first}:{self.last} of {self.run} are trained again {how}"


def checkpoints_of(run: Path) -> Path:
    """Return the folder of a run's checkpoints. Raises ConfigError: `run` is not the folder of a run."""
    if not (run / "config.yaml").is_file() or not (run / "deepspeed.json").is_file():
        raise ConfigError(
            f"{run}: has no config.yaml and deepspeed.json of a run; give the folder of a run, such as runs/NAME"
        )
    return run / "checkpoints"


def _settings(run: Path) -> dict[str, Any]:
    """Return the content of the run's config.yaml, with all fields. Raises ConfigError: it was not written by a run."""
    settings: Any = strict_yaml.parse((run / "config.yaml").read_text(encoding="utf-8"), "config.yaml").tree
    if not isinstance(settings, dict) or not {"deepspeed", "resume", "data", "train"} <= settings.keys():
        raise ConfigError(f"{run}/config.yaml: is not the file of a run, which has all sections; restore it")
    return settings


def asked_by(args: argparse.Namespace) -> Asked:
    """Check the command line against the run. Raises UserError; nothing is written."""
    steps = re.fullmatch(r"(\d{1,12}):(\d{1,12})", args.steps)
    if not steps or not 1 <= int(steps[1]) <= int(steps[2]):
        raise ConfigError(f"--steps {args.steps}: write FIRST:LAST, steps from 1 on, such as --steps 805:815")
    if args.rows < 1:
        raise ConfigError(f"--rows {args.rows}: must be at least 1; 32 is the default")
    first, last = int(steps[1]), int(steps[2])
    folder = checkpoints_of(args.run)
    try:
        record = {row.step: row for row in read_steps(args.run / STEPS)}
    except OSError as error:
        raise DataError(
            f"{args.run / STEPS}: cannot be read ({error.strerror}), and without it no step can be "
            "compared; give the folder of a run that has it"
        ) from None
    if first not in record or last not in record:
        begins = f" from {min(record)}" if record and first < min(record) else ""
        rule = f"the run has recorded steps{begins} up to {max(record, default=0)}"
        raise ConfigError(f"--steps {args.steps}: {rule}; give steps that it has done")
    settings, config = _settings(args.run), _of_features(args.run)
    for feature in features.asked(config):
        if reason := feature.unrepeatable(config):
            raise ConfigError(f"{args.run}: {reason} (section {feature.key}); replay a run without it")
    complete = [path for path in complete_checkpoints(folder) if looks_good(path)]
    before = [path for path in complete if (step_of(path) or 0) < first]
    if not before and complete and settings["resume"] == "auto" and min(record) > 1:
        raise CheckpointError(
            f"--steps {args.steps}: no checkpoint before step {first} is left; the first step that can be replayed is "
            f"{(step_of(complete[-1]) or 0) + 1}"
        )
    try:
        environment = untrusted.loads((args.run / "environment.json").read_bytes())
        devices = [rank["device"] for rank in environment["ranks"]]
    except (OSError, ValueError, LookupError, TypeError):
        environment, devices = {}, []
    after = [path for path in complete if (step_of(path) or 0) >= last]
    _refuse_other_plugins(args, TrainerState.read(after[-1]).plugins if after else environment.get("plugins") or {})
    out = args.out or args.run.resolve().with_name(f"{args.run.resolve().name}-replay-{first}-{last}")
    changed = _changed(args, settings, first, last) if args.write or args.without or args.skip else None
    if changed is not None:
        if args.one_rank:
            raise ConfigError("--one-rank: goes without --write, whose run has the ranks of the old one; remove it")
        out = out.with_name(f"{out.name}-replay")
    if out.is_relative_to(args.run.resolve()):
        raise ConfigError(
            f"--out {args.out}: is in the folder of the run, which is only read; give a folder outside of it"
        )
    start = before[0] if before else None
    within = [path for path in complete if first <= (step_of(path) or 0) <= last]
    bounds: dict[str, Any] = {"first": first, "last": last, "rows": args.rows, "record": record, "changed": changed}
    how: dict[str, Any] = {"one_rank": args.one_rank, "launch": args.launch, "plugins": args.plugin}
    return Asked(run=args.run, out=out, begins=start, within=within, devices=devices, **bounds, **how)


def _refuse_other_plugins(args: argparse.Namespace, saved: dict[str, Any]) -> None:
    """Raise ConfigError if the plugins differ from those of the steps. `saved`: hashes of the latter."""
    if args.plugin:
        from llmtrain.config.plugin_import import use

        use(args.plugin)
    if other := plugins.difference(saved, plugins.hashes() if args.plugin else {}):
        raise ConfigError(f"{args.run}: {other}; give the plugins as they were (--plugin FILE.py)")


def _changed(args: argparse.Namespace, settings: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """Return the settings that leave out --without and --skip. Raises UserError."""
    rows, steps = _numbers("--without", args.without), _numbers("--skip", args.skip)
    if not (args.write and args.out and (rows or steps)):
        words = f"--steps {first}:{last} --without SEQUENCE --write --out NEWRUN"
        raise ConfigError(f"--without, --skip: go with --write and --out, the folder of the new run; write {words}")
    if args.out.exists():
        raise ConfigError(f"--out {args.out}: exists, and a new run needs a folder of its own; give another name")
    if wrong := [step for step in steps if not first <= step <= last]:
        raise ConfigError(f"--skip {wrong[0]}: is none of the steps {first}:{last}; give some of them")
    data = settings["data"]
    # A new run from the beginning has checkpoints when it continues.
    changed: dict[str, Any] = {"resume": "auto"} if settings["resume"] == "none" else {}
    if steps:
        changed["data.skip_steps"] = sorted({*(data.get("skip_steps") or ()), *steps})
    for row in rows:
        place = _place(args.run, data, row, first, last)
        of = data if place == 0 else data["stages"][place - 1]
        of["exclude"] = [*(of.get("exclude") or ()), row]
        changed["data.stages" if place else "data.exclude"] = data["stages"] if place else of["exclude"]
    return changed


def _numbers(option: str, text: str | None) -> list[int]:
    if text is not None and not re.fullmatch(r"\d{1,15}(,\d{1,15})*", text):
        raise ConfigError(f"{option} {text}: write numbers with commas between them, such as {option} 1352,1360")
    return sorted(set(map(int, text.split(",")))) if text else []


def _place(run: Path, data: dict[str, Any], row: int, first: int, last: int) -> int:
    """Return the number of the stage whose data has a sequence of these steps. Raises UserError: none has."""
    for span in spans(run):
        step = span.after + 1 + (row - span.next) // span.batch
        if not first <= step <= last or not span.after < step <= (span.until or last):
            continue
        opened, used = span.data(), read_saved(DataConfig, span.event["data"])
        if opened.place_of(row) in opened.excluded:
            raise ConfigError(f"--without {row}: the run leaves it out already; remove it")
        for place, stage in enumerate(data_of(read_saved(DataConfig, data))):
            if (stage.folders, stage.sequence_length) == (used.folders, used.sequence_length):
                return place
        names = ", ".join(used.folders)
        raise ConfigError(f"--without {row}: is of {names}, which {run}/config.yaml no longer names; name it again")
    command = f"`llmtrain replay {run} --steps {first}:{last}` names them"
    raise ConfigError(f"--without {row}: is no sequence of the steps {first}:{last}; {command}")


def finish(asked: Asked, out: Path) -> tuple[dict[str, Any], list[str]]:
    """Give the new run its final name, and return the answer and its lines.

    Raises TrainingStopped: the new run has not done the steps.
    """
    newest = next((step_of(path) for path in complete_checkpoints(asked.replayed / "checkpoints")), None)
    if newest != asked.last:
        raise TrainingStopped(
            f"the new run has ended at step {newest}, not {asked.last}, by its own settings; all output: {asked.log}"
        )
    settings = _settings(asked.replayed)
    settings["train"]["run_dir"] = str(out)
    (asked.replayed / "config.yaml").write_text(strict_yaml.dump(settings), encoding="utf-8")
    asked.log.rename(asked.replayed / "replay.log")
    asked.replayed.rename(out)
    shutil.rmtree(asked.out)
    steps = list(read_steps(out / STEPS, asked.first))
    launch = ["launch", "--hostfile", str(asked.launch or "HOSTS"), "--"]
    words = ["train"] if asked.ranks == 1 and asked.launch is None else launch
    command = ["llmtrain", *words, str(out / "config.yaml")]
    command += [word for plugin in asked.plugins for word in ("--plugin", plugin)]
    was = {step: f"{row.loss:.4f}" for step, row in asked.record.items()}
    cells = [(str(row.step), f"{row.loss:.4f}", f"{row.norm:.4g}", was.get(row.step, "")) for row in steps]
    lines = units.lines_of([("STEP", "LOSS", "NORM", "LOSS SO FAR"), *cells])
    lines.append(f"{out} is a run at step {asked.last}, which continues with: {shlex.join(command)}")
    answer = {"folder": str(out), "step": asked.last, "changed": asked.changed, "command": shlex.join(command)}
    return answer, lines


def prepare(asked: Asked) -> int:
    """Make the replay's folder and lock it; the folder of an earlier replay is deleted. Raises ConfigError."""
    if asked.out.exists():
        for folder in (asked.out, asked.replayed):  # a replay's own ranks may outlive it for a moment
            refuse_if_in_use(str(folder), "--out")
        if not (asked.out / MARK).is_file():
            raise ConfigError(f"--out {asked.out}: exists, and no replay has made it; give another folder")
        shutil.rmtree(asked.out)
    try:
        asked.out.mkdir(parents=True)
        lock = lock_folder(asked.out)
        (asked.out / MARK).touch()
    except OSError as error:
        raise ConfigError(f"--out {asked.out}: cannot be made ({error.strerror}); give another folder") from None
    return lock


def train(asked: Asked, lock: int) -> None:
    """Train up to the last step in ranks of their own; their output goes to replay.log. Raises UserError.

    `lock`: the open lock file of the folder, whose lock lasts as long as the child.
    """
    saves = [step for path in asked.within if (step := step_of(path)) is not None and step < asked.last]
    looks = {"rows": asked.rows, "saves": saves} if asked.changed is None else {"rows": 0, "saves": []}
    task = json.dumps({"first": asked.first, "last": asked.last, **looks}, separators=(",", ":"))
    settings = {
        "train.run_dir": asked.replayed,
        **({**_QUIET, **_unobserved()} if asked.changed is None else {**_without_places(asked.run), **asked.changed}),
        **({} if asked.begins is None else {"resume": asked.begins.resolve(), **_WHOLE}),
        **(_on_one_rank(asked) if asked.one_rank else {}),
    }
    words = [str(asked.run / "config.yaml")]
    for key, value in settings.items():
        words.append(f"--{key}={json.dumps(value) if isinstance(value, bool | list) else value}")
    # The plugins are those of the steps; the checkpoint before may be of other plugins.
    words += [*(word for plugin in asked.plugins for word in (plugins.FLAG, plugin)), plugins.CHANGED, "ok"]
    program = [sys.executable, "-m", "llmtrain"]
    if asked.launch is None and asked.ranks == 1:
        command = [*program, "train", *words]
    else:
        hosts = asked.out / "hosts"
        hosts.write_text(f"localhost slots={asked.ranks}\n")
        (asked.out / "env").write_text(f"{REPLAYED}='{task}'\n")
        options = ["--max-restarts", "0", "--env-file", str(asked.out / "env")]
        command = [*program, "launch", "--hostfile", str(asked.launch or hosts), *options, "--", *words]
    environment = {**os.environ, REPLAYED: task}
    with open(asked.log, "wb") as output, ending_on_sigterm():
        streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "pass_fds": [lock]}
        child = subprocess.Popen(command, env=environment, preexec_fn=ending_with_parent(signal.SIGTERM), **streams)
        try:
            code = child.wait()
        finally:
            child.terminate()  # after an interrupt: the launch then ends its ranks
            child.wait()
    made = asked.replayed / (LOOKS if asked.changed is None else STEPS)
    if code not in (0, _STOPPED) or not made.is_file():
        error = reason_of(asked.log.read_text(errors="replace"))
        if code == ConfigError.exit_code:  # a refusal, before the first step
            shutil.rmtree(asked.out)
            raise ConfigError(error)
        raise TrainingStopped(f"the replay has ended with exit code {code}: {error}\nall output: {asked.log}")
    if (reached := max((row.step for row in read_steps(asked.replayed / STEPS)), default=0)) != asked.last:
        raise TrainingStopped(f"the replay has ended at step {reached}, not {asked.last}; all output: {asked.log}")


def reason_of(output: str) -> str:
    """Return the findings of the doctor that have kept a launch from its start, else the last error."""
    output = re.sub(r"^[\w.-]+: (?=error: | {2})", "", output, flags=re.MULTILINE)  # pdsh names the host
    findings = re.findall(r"^red +(.*(?:\n {7}.*)*)", output, re.MULTILINE)
    errors = re.findall(r"^error: (.*(?:\n {2}.*)*)", output, re.MULTILINE)
    return "\n".join(findings) or (errors or output.splitlines() or ["no output"])[-1]


def _of_features(run: Path) -> RunConfig:
    """Return a run's sections of features, with defaults for the rest."""
    sections = {"deepspeed", *features.features()}
    return read_saved(RunConfig, {name: value for name, value in _settings(run).items() if name in sections})


def _without_places(run: Path) -> dict[str, Any]:
    """Settings that name no place of the run, which a new one would share."""
    return dict.fromkeys(("checkpoint.dir", "train.export_to", *features.stores(_of_features(run))), "null")


def _unobserved() -> dict[str, Any]:
    """Return the settings that turn off the features that only observe."""
    return {
        f"{name}.{field}": "null" if value is None else value
        for name, section in features.observing().items()
        for field, value in asdict(section).items()
    }


def _on_one_rank(asked: Asked) -> dict[str, Any]:
    """Return settings for equal steps of one rank, which takes all micro-batches. Raises ConfigError."""
    settings = _settings(asked.run)
    stages = [{**stage, "train": {**stage["train"], "accumulation": None}} for stage in settings["data"]["stages"]]
    path = asked.out / "one-rank.json"
    path.write_text(json.dumps(without_degrees(read_json(settings["deepspeed"]))))
    return {"deepspeed": path.resolve(), "train.accumulation": "null", "data.stages": stages}


def answer_of(asked: Asked) -> dict[str, Any]:
    """Compare the replayed steps with the recorded ones, and return the answer with the rows. Raises UserError."""
    now = {row.step: row for row in read_steps(asked.replayed / STEPS)}
    metrics = {row["step"]: row for row in read_rows(asked.replayed / "metrics.jsonl")[0] if "loss" in row}
    looked = {row["step"]: row for row in read_rows(asked.replayed / LOOKS)[0]}
    exact, why = _exact(asked)
    bound = 0.0 if exact else _bound(now, looked)
    steps = []
    for step in range(asked.first, asked.last + 1):
        record, after, row = asked.record.get(step), now.get(step), metrics.get(step, {})
        if after is None:
            continue
        apart = math.nan if record is None else max(_apart(record.loss, after.loss), _apart(record.norm, after.norm))
        same = record is not None and (_bits(record) == _bits(after) if exact else apart <= bound)
        compared: dict[str, Any] = {"step": step, "loss": after.loss, "norm": after.norm, "lr": row.get("lr")}
        compared |= {"skipped": after.skipped, "record": None if record is None else record.loss}
        compared |= {"equal": same, "apart": apart}
        compared |= {key: value for key, value in row.items() if key.startswith(("moe/", "data/stage"))}
        steps.append(compared)
    checkpoints = [_compare(asked, path, exact=exact) for path in asked.within]
    rows = [{"step": step, **row} for step, look in looked.items() for row in look["rows"]]
    rows.sort(key=lambda row: (-(_number(row.get("norm"), -1.0)), -_number(row["loss"], math.inf)))
    worst = worst_rows([row for row in rows if row.get("norm") is not None] or rows, asked.rows)
    with contextlib.suppress(ConfigError, DataError):  # the data is gone, changed, of other fields, or without origins
        read = spans(asked.run)
        for row in worst:
            span = next(span for span in read if span.after < row["step"] <= (span.until or row["step"]))
            row["documents"] = documents_of(span, row["sequence"])
    answer = {"run": str(asked.run), "folder": str(asked.out), "first": asked.first, "last": asked.last}
    answer |= {"from": None if asked.begins is None else str(asked.begins), "exact": exact, "why": why, "bound": bound}
    answer |= {"equal": all(row["equal"] for row in (*steps, *checkpoints)), "steps": steps, "checkpoints": checkpoints}
    return answer | {"modules": modules_of(looked), "rows": worst}


def _exact(asked: Asked) -> tuple[bool, str]:
    """Return whether equal bits are expected, and the reason if not."""
    if _form(asked.run) != _form(asked.replayed):
        return False, "the replay has other ranks than the run"
    then, now = ((folder / "deepspeed.json").read_text() for folder in (asked.run, asked.replayed))
    if then != now:
        return False, "the DeepSpeed JSON has changed since"
    if offloads(untrusted.loads(now.encode()), "optimizer"):
        return False, "rounding in DeepSpeed's CPU optimizer depends on the number of steps since its start"
    if set(asked.devices) == {"cpu"} or _settings(asked.run)["train"]["deterministic"]:
        return True, ""
    return False, "train.deterministic is off"


def _form(folder: Path) -> Any:
    reads = [row for row in read_rows(folder / "events.jsonl")[0] if row.get("kind") == "reads" and "degrees" in row]
    return reads[-1]["degrees"] if reads else None


def _bound(now: dict[int, StepRow], looked: dict[int, dict[str, Any]]) -> float:
    """Four times the largest difference between a step's norm and the one that its look has measured before, for each
    step since the checkpoint."""
    apart = [_apart(now[step].norm, _number(row["norm"], math.nan)) for step, row in looked.items() if step in now]
    return 4 * len(now) * max([1e-6, *(distance for distance in apart if math.isfinite(distance))])


def _bits(row: StepRow) -> tuple[str, ...]:
    return tuple(float(value).hex() for value in (row.loss, row.norm, *row.shares))


def _apart(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


def _number(value: Any, instead: float) -> float:
    """JSON has no NaN; tracking/local.py writes names."""
    number = float(value) if isinstance(value, int | float | str) else instead
    return instead if math.isnan(number) else number


def _compare(asked: Asked, original: Path, *, exact: bool) -> dict[str, Any]:
    """Compare the tensors of a checkpoint. Without `exact`, differences are shown and are no fault."""
    from llmtrain.checkpoint.arithmetic import diff

    saved = complete_checkpoints(asked.replayed / "checkpoints")
    replayed = next((path for path in saved if path.name == original.name), None)
    if replayed is None:
        return {"step": step_of(original), "equal": False, "lines": ["the replay has not saved it"]}
    lines, _ = diff(original, replayed)
    tensors = [line for line in lines if line.startswith("tensor ")]
    return {"step": step_of(original), "equal": not tensors or not exact, "lines": tensors[:5]}


def modules_of(looked: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first module that was not finite, and then up to ten modules, the largest factor first, whose largest
    output or gradient at a step is more than twice that of any other step."""
    entries, names = [], dict.fromkeys(name for row in looked.values() for name in row["largest"])
    for (kind, what), (order, name) in product(enumerate(("output", "gradient of the output")), enumerate(names)):
        values = {step: float(row["largest"].get(name, (0.0, 0.0))[kind]) for step, row in looked.items()}
        for step, value in values.items():
            others = [other for at, other in values.items() if at != step and math.isfinite(other)]
            usual = max(others, default=math.nan)
            if not math.isfinite(value) or value > 2 * usual:
                factor = value / usual if usual else math.inf
                entry = {"step": step, "module": name, "what": what, "value": value, "others": usual}
                entries.append({**entry, "factor": factor, "order": order})
    bad = [entry for entry in entries if not math.isfinite(entry["value"])]
    bad.sort(key=lambda entry: (entry["step"], entry["what"] != "output", entry["order"]))
    return bad[:1] + sorted((entry for entry in entries if entry not in bad), key=lambda entry: -entry["factor"])[:10]
