"""`llmtrain doctor --hostfile hosts [RUN.yaml]`: is this cluster in order, and if not, what is to be done?"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError, ModelError
from llmtrain.cluster.doctor import build_ops, fabric, site_links
from llmtrain.cluster.doctor.checks import Finding, Folder, Level, Survey
from llmtrain.cluster.doctor.preflight import (
    MASTER_PORT,
    WITHOUT_TERMINAL,
    Needs,
    Report,
    in_order,
    preflight,
    print_report,
)
from llmtrain.cluster.hosts.environment import deepspeed_env_problems
from llmtrain.cluster.hosts.hostfile import read_hostfile, select
from llmtrain.cluster.launch.plan import NO_PDSH
from llmtrain.commands import completion
from llmtrain.config.load import command_words, load, run_words
from llmtrain.config.objective import wants_column
from llmtrain.config.rules import has_checkpoints, reads_weights
from llmtrain.config.run import ResolvedRun, RunConfig
from llmtrain.config.topology import Mix, ring_bytes
from llmtrain.data.manifest import SPLITS, read_manifest
from llmtrain.optim.optimizers import Optimizer
from llmtrain.storage.hub.model import weights
from llmtrain.storage.hub.names import INDEX, is_name

_ALL_REDUCE = "llmtrain.engine.dist.all_reduce"
"""The program with torch that is started on each host to try the collectives."""


def needs(config: str, run: RunConfig, mix: Mix, run_dir: str) -> Needs:
    """Requirements of a run on its hosts. `config`: its YAML."""
    return Needs(
        files=(config, run.deepspeed),
        folders=tuple(_read_by(run)),
        folder=run.checkpoint.dir or run_dir,
        own_folders=run.checkpoint.dir is not None,
        ops=Optimizer.CHOICES[mix.optimizer].host_ops if mix.offload_optimizer else (),
    )


def _read_by(run: RunConfig) -> Iterator[Folder]:
    """The folders that each host's ranks read, and which files in them."""
    data = [("data.path", run.data.path)] if run.data.path else []
    for key, path in (*data, *(("data.mixture", each) for each in run.data.mixture or {})):
        yield Folder(key=key, path=os.path.abspath(path), files=_of_data(run, Path(path)))
    models = [
        ("model.pretrained", run.model.pretrained, reads_weights(run)),
        ("model.config", run.model.config, False),
        ("objective.teacher", run.objective.teacher, True),
    ]
    for key, given, weights_too in models:
        if isinstance(given, str) and is_name(given):
            yield Folder(key=key, path=os.path.abspath(given), on_hub=True)
        elif isinstance(given, str):
            file = Path(given) if os.path.isfile(given) else Path(given) / "config.json"
            names = [file.name, *(_weights(file.parent) if weights_too else ())]
            yield Folder(key=key, path=os.path.abspath(file.parent), files=tuple(names))
    if run.adapter.start:
        names = ["adapter_config.json", "adapter_model.safetensors"]
        yield Folder(key="adapter.start", path=os.path.abspath(run.adapter.start), files=tuple(names))
    if run.sites.keys:
        names = ["ca.pem", "cert.pem", "key.pem"]
        yield Folder(key="sites.keys", path=os.path.abspath(run.sites.keys), files=tuple(names))
    if run.resume not in ("auto", "none") and not has_checkpoints(run):
        yield Folder(key="resume", path=os.path.abspath(run.resume))  # with files of its own on each host, or the same


def _of_data(run: RunConfig, folder: Path) -> tuple[str, ...]:
    """The files of a prepared folder that the run opens; of one with a broken manifest that alone."""
    try:
        shards = read_manifest(folder).shards
    except DataError:
        return ("manifest.json",)
    read = [shard for split in SPLITS for shard in shards[split]]
    rows = [Path(shard.file).with_suffix(".rows").name for shard in read if shard.rows]
    columns = []
    if wants_column(run.objective):
        columns = ["reference.json", *(f"reference-{split}.f32" for split in SPLITS)]
    if run.objective.top_k is not None:
        columns += ["teacher.json", *(f"teacher-{split}.{kind}" for split in SPLITS for kind in ("f32", "words"))]
    return ("manifest.json", "tokenizer/tokenizer.json", *(shard.file for shard in read), *rows, *columns)


def _weights(folder: Path) -> list[str]:
    """The files with the weights of a model's folder; none where that cannot be told: the run will say why."""
    with contextlib.suppress(ModelError, OSError):
        names = os.listdir(folder)
        return [name for name in (INDEX,) if name in names] + list(weights(ModelError)(names, folder))
    return []


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def sent_bytes(resolved: ResolvedRun) -> float | None:
    """About what each host sends in an optimizer step of a data-parallel run; None: not known without its model."""
    run, degrees = resolved.run, resolved.degrees
    parameters = _parameters(run)
    if parameters is None or degrees.data != degrees.world_size or degrees.expert > 1:
        return None
    return ring_bytes(
        parameters, degrees.data, zero_stage=resolved.zero_stage, micro_batches=resolved.batch.accumulation,
        wide=4 if resolved.precision == "fp32" else 2,
    )  # fmt: skip


def _parameters(run: RunConfig) -> float | None:
    """About how many train, by the usual fields of a config.json; None where one is missing, or a part is frozen."""
    given = run.model.config or run.model.pretrained
    if run.adapter.r is not None or run.model.freeze or run.model.train_only:
        return None
    try:
        if not isinstance(given, dict):
            path = Path(str(given))
            given = untrusted.loads((path if path.is_file() else path / "config.json").read_bytes())
        width, heads = given["hidden_size"], given["num_attention_heads"]
        size = given.get("head_dim") or width // heads
        attention = 2 * width * size * (heads + (given.get("num_key_value_heads") or heads))
        experts = next((given[key] for key in _EXPERTS if given.get(key)), 1)
        inner = (
            given.get("moe_intermediate_size", given["intermediate_size"])
            if experts > 1
            else given["intermediate_size"]
        )
        head = 1 if given.get("tie_word_embeddings") else 2
        layers = given["num_hidden_layers"] * (attention + 3 * width * inner * experts)
        return float(layers + head * given["vocab_size"] * width)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None


def with_fabric(report: Report, run: Needs | None = None, ssh_port: int | None = None) -> Report:
    """The report with what was measured between the hosts that answered, in seconds and bit/s, and between GPUs."""
    measured, findings = fabric.examine(report.survey, ssh_port)
    reduced = fabric.measure_all_reduce(report.survey, _ALL_REDUCE, ssh_port)
    if fabric.all_reduce_worked(reduced):
        findings = fabric.without_doubt(findings, reduced["hosts"])
    findings = [
        *findings,
        *fabric.too_slow(measured.pairs, *((run.sent_bytes, run.patience_s) if run else (None, 0.0))),
    ]
    return replace(
        report,
        findings=in_order([*report.findings, *findings, *fabric.judge_all_reduce(reduced)], report.survey.hosts),
        checked=report.checked | {"fabric"},
        fabric=asdict(replace(measured, all_reduce=reduced)),
        notes=(*report.notes, *fabric.summary(measured), *fabric.all_reduce_summary(reduced)),
    )


def _with_ops(report: Report, run: Needs | None, args: argparse.Namespace) -> Report:
    """Build what is missing, then look again."""
    lines, failed = build_ops.build(report.survey, args.ssh_port)
    if not lines and not failed:
        return replace(report, notes=(*report.notes, "ops: all that this run needs are built"))
    again = preflight(report.survey.hosts, run, port=args.master_port, ssh_port=args.ssh_port)
    findings = in_order([*again.findings, *failed], report.survey.hosts)
    return replace(again, findings=findings, notes=tuple(lines))


def _deepspeeds_own_file(survey: Survey) -> list[Finding]:
    """`.deepspeed_env` here: a launch by hand reads it for other hosts. `llmtrain launch` does not."""
    parts = (problem.rpartition(": ") for problem in (() if survey.alone else deepspeed_env_problems()))
    first = survey.hosts[0].name
    return [Finding(host=first, check="env", level="red", what=what, fix=fix) for what, _, fix in parts]


def _launcher(survey: Survey) -> list[Finding]:
    """Findings on the program by which `llmtrain launch` starts other hosts; in a Slurm job srun may do it."""
    if survey.alone or shutil.which("pdsh") is not None:
        return []
    what, fix = NO_PDSH
    if in_slurm := "SLURM_JOB_ID" in os.environ:
        fix = f"{fix}, or start with `llmtrain launch --launcher slurm`"
    level: Level = "yellow" if in_slurm else "red"
    return [Finding(host=survey.hosts[0].name, check="ssh", level=level, what=f"here: {what}", fix=fix)]


def main(argv: list[str]) -> int:
    """0: no red cell. 1: a red cell. Raises ConfigError for the hostfile, the configuration and the command line."""
    parser = _parser()
    completion.offer(parser)
    args, words = command_words(parser, argv)
    if args.sites:
        return site_links.examine(args.sites, args.out, args.json)
    if args.hostfile is None:
        parser.error("the following arguments are required: --hostfile")
    hosts = select(read_hostfile(args.hostfile), args.include, args.exclude)
    started = time.monotonic()
    run = None
    if words:
        words = run_words(words)
        resolved = load(words, sum(host.slots for host in hosts), "the hostfile")
        run = needs(words[1], resolved.run, resolved.mix, resolved.run_dir)
        run = replace(run, sent_bytes=sent_bytes(resolved), patience_s=resolved.run.fault.stall_timeout_s)
    report = preflight(hosts, run, port=args.master_port, ssh_port=args.ssh_port)
    if args.build_ops:
        report = _with_ops(report, run, args)
    here = [*_deepspeeds_own_file(report.survey), *_launcher(report.survey)]
    report = replace(report, findings=in_order([*report.findings, *here], hosts))
    if not args.quick and fabric.has_peers(report.survey):
        report = with_fabric(report, run, args.ssh_port)
    report = replace(report, elapsed_s=time.monotonic() - started)
    if args.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        print_report(report, Console(width=None if os.isatty(1) else WITHOUT_TERMINAL, highlight=False))
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmtrain doctor",
        usage="llmtrain doctor --hostfile HOSTS [options] [RUN.yaml [--SECTION.FIELD VALUE ...]]",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("--hostfile", help="a line `NAME slots=COUNT` for each host; or --sites")
    parser.add_argument("--include", help="hosts and devices to take, as deepspeed's")
    parser.add_argument("--exclude", help="hosts and devices to leave out, as deepspeed's")
    parser.add_argument("--master-port", type=int, default=MASTER_PORT, help="of the rendezvous (default 29500)")
    parser.add_argument("--ssh-port", type=int, help="of every sshd, where ~/.ssh/config does not say it")
    parser.add_argument("--quick", action="store_true", help="do not measure the network between the hosts")
    parser.add_argument("--build-ops", action="store_true", help="compile the DeepSpeed ops that the run needs, now")
    parser.add_argument(
        "--sites", nargs="+", metavar="HOST:PORT", help="measure the lines to other sites, which run `llmtrain sites "
        "measure --listen HOST:PORT`, and nothing else",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="of --sites: a file for `llmtrain sites plan --measured`")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser
