"""Rules of values. Types were checked before; here are ranges, exclusions, and things on disk."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, fields, is_dataclass
from glob import escape, glob
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.choice import Entry
from llmtrain.base.redact import redact_text
from llmtrain.base.units import GIB, size
from llmtrain.config.batch import Batch
from llmtrain.config.evaluation import check_choices, check_evaluation, check_set
from llmtrain.config.objective import (
    check_data,
    check_objective,
    check_revision,
    check_start,
    check_teacher_folder,
    check_url,
)
from llmtrain.config.problems import Places, Problems, stop
from llmtrain.config.run import AdapterConfig, EmaConfig, RunConfig, profiled_steps
from llmtrain.config.stages_rules import check_stages, stage_runs
from llmtrain.config.topology import Degrees
from llmtrain.storage.hub.names import is_remote
from llmtrain.storage.object_store import Store, StoreError, is_url, problem_of

MEASURED = "measured"
MOST = 2
"""Times `train.micro_batch` that a forward pass takes at most: what memory has to hold."""


def check_balance(run: RunConfig, batch: Batch, degrees: Degrees, path: str, problems: Problems) -> tuple[str, ...]:
    """Refuses train.balance where it cannot be. Returns notes. `path`: of the DeepSpeed JSON."""
    if run.train.balance != MEASURED:
        return ()
    asked = "train.balance measured: "
    if degrees.pipeline > 1:
        problems.add("pipeline.stages", degrees.pipeline, f"{asked}the stages of a pipeline send each other "
                     "micro-batches of one size", "set train.balance to equal, or use ZeRO in place of the pipeline",
                     path)  # fmt: skip
    if degrees.expert > 1:
        problems.add("expert_parallel.autoep_size", degrees.expert, f"{asked}ranks compute each other's tokens in "
                     "every layer, so other sequences would not change what a rank computes",
                     "set train.balance to equal, or remove expert_parallel", path)  # fmt: skip
    if run.model.compile_layers:
        problems.add(
            "model.compile_layers",
            True,
            f"{asked}layers are compiled for one shape of a micro-batch, and torch gives up after some others",
            "set it to false or null, or train.balance to equal",
        )
    if run.train.deterministic:
        problems.add("train.deterministic", True, f"{asked}who sums which sequences depends on the clock, and so do "
                     "the last digits", "set one of the two otherwise")  # fmt: skip
    if batch.data_parallel == 1:
        return ("train.balance measured changes nothing here: all ranks work on the same sequences",)
    if batch.micro_batch == 1:
        problems.add("train.micro_batch", 1, f"{asked}every micro-batch of every rank has a sequence, so a slow rank "
                     "would have none to give away", "set it to 4 or more (train.accumulation lower by as much), or "
                     "train.balance to equal")  # fmt: skip
    return ()


def check_adapter(run: RunConfig, problems: Problems) -> None:
    """Check `adapter`, model.freeze and model.train_only together: an adapter needs a rank and freezes the model."""
    if run.model.freeze and run.model.train_only:
        problems.add("model.train_only", run.model.train_only, "says the opposite of model.freeze, which is given, too",
                     "keep one of them")  # fmt: skip
    if run.adapter.r is None:
        if run.adapter != AdapterConfig():
            rule = "other keys of the section are given, and without a rank there is no adapter"
            remedy = "write a rank, 16 is common, or remove the section"
            problems.add("adapter.r", None, rule, remedy, problems.places.get("adapter"))
        return
    for key in ("freeze", "train_only"):
        if patterns := getattr(run.model, key):
            rule = "beside an adapter (adapter.r) all parameters of the model are frozen"
            problems.add(f"model.{key}", patterns, rule, "remove it")
    if run.adapter.quantize is not None:
        _check_quantize(run, problems)
    if not run.adapter.targets:
        problems.add("adapter.targets", [], "names no module", 'write ["all-linear"]')


def _check_quantize(run: RunConfig, problems: Problems) -> None:
    """Packed weights are those of whole maps that compute as the run says, and what it compares with has them too."""
    value = run.adapter.quantize
    if run.adapter.dora:
        rule = "the lengths that DoRA begins with are those of the folder's rows (adapter.dora), not of packed ones"
        problems.add("adapter.quantize", value, rule, "remove one of them")
    if run.model.compile_layers:
        rule = "bitsandbytes' maps are not compiled here (model.compile_layers)"
        problems.add("adapter.quantize", value, rule, "remove one of them")
    if run.objective.reference == "column":
        rule = "the log-probabilities of `llmtrain reference` are of weights that are not packed"
        problems.add("adapter.quantize", value, rule, "set objective.reference to online: the packed base")


def check_adapter_form(run: RunConfig, degrees: Degrees, zero_stage: int, path: str, problems: Problems) -> None:
    """The forms in which an adapter does not train."""
    if run.adapter.r is None:
        return
    if run.adapter.quantize is not None:
        forms = {"zero_optimization.stage": (zero_stage, zero_stage == 3),
                 "tensor_parallel.autotp_size": (degrees.tensor, degrees.tensor > 1),
                 "pipeline.stages": (degrees.pipeline, degrees.pipeline > 1)}  # fmt: skip
        for key, (degree, wrong) in forms.items():
            if wrong:
                rule = f"blocks of 4 bits are of whole maps that each rank has, not with {key} = {degree} ({path})"
                remedy = "remove one of them: sharded over the ranks, weights in bf16 may take as little"
                problems.add("adapter.quantize", run.adapter.quantize, rule, remedy)
    asked: dict[str, bool | float] = {"adapter.dora": run.adapter.dora, "adapter.dropout": run.adapter.dropout}
    for key, value in asked.items():
        if value and degrees.tensor > 1:
            rule = f"needs whole maps on each rank, not tensor_parallel.autotp_size = {degrees.tensor} ({path})"
            remedy = "remove one of them: ZeRO 3, sequence parallelism and pipelines keep maps whole"
            problems.add(key, value, rule, remedy)


_FP8_TOKENS = 16
"""Tokens that the products of fp8 want a multiple of: the gradient of a weight is summed over them."""


def check_length_in_fp8(run: RunConfig, degrees: Degrees, problems: Problems) -> None:
    """Each rank's share of a sequence goes into the products of model.fp8."""
    tokens, least = run.data.sequence_length, _FP8_TOKENS * degrees.sequence
    if run.model.fp8 is not None and tokens % least:
        shared = f" on each of the {degrees.sequence} ranks that share a sequence" * (degrees.sequence > 1)
        rule = f"model.fp8 {run.model.fp8}: its products take multiples of {_FP8_TOKENS} tokens{shared}"
        remedy = f"set it to {-(-tokens // least) * least}, or model.fp8 to null"
        problems.add("data.sequence_length", tokens, rule, remedy)


def _check_fp8(run: RunConfig, problems: Problems) -> None:
    """The values that model.fp8 does not go with."""
    if (recipe := run.model.fp8) is None:
        return
    objective, tile = run.objective, run.model.mlp_tile_tokens
    if tile is not None and tile % _FP8_TOKENS:
        rule = f"model.fp8 {recipe}: its products take multiples of {_FP8_TOKENS} tokens"
        remedy = f"set it to {-(-tile // _FP8_TOKENS) * _FP8_TOKENS}, or model.fp8 to null"
        problems.add("model.mlp_tile_tokens", tile, rule, remedy)
    if run.adapter.quantize is not None:
        rule = "the maps beside the adapter are packed into 4 bits (adapter.quantize), and multiply in their own way"
        problems.add("model.fp8", recipe, rule, "remove one of them")
    if run.adapter.dora:
        rule = "DoRA takes the lengths of a map's exact rows (adapter.dora), and the map would compute with others"
        problems.add("model.fp8", recipe, rule, "remove one of them")
    if objective.data != "texts" or objective.top_k is not None or objective.teacher is not None:
        rule = f"objective.name {objective.name} compares models, and has not been tried in fp8"
        problems.add("model.fp8", recipe, rule, "set it to null, or objective.name to next_token")


_MASK_BYTES = 4 * GIB
"""Bytes of an attention mask: it is made in every forward pass; some kernels copy it in the precision of the scores."""


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value for every leaf field of nested dataclasses."""
    flat: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            flat |= flatten(value, f"{prefix}{item.name}.")
        elif isinstance(value, list) and value and all(map(is_dataclass, value)):
            for number, each in enumerate(value):
                flat |= flatten(each, f"{prefix}{item.name}[{number}].")
        elif item.name in Entry.SECTIONS:
            for name, entry in value.items():
                flat |= flatten(entry, f"{item.name}.{name}.")
        else:
            flat[f"{prefix}{item.name}"] = value
    return flat


def check_values(run: RunConfig, problems: Problems) -> None:
    """Ranges, exclusions and requirements that hold for any number of ranks."""
    flat = flatten(run)
    _check_one_of(flat, ("model.pretrained", "model.config"), "the model", problems)
    if run.data.mixture == {}:
        problems.add("data.mixture", {}, "names no folder", "write `FOLDER: WEIGHT` lines, or use data.path")
    _check_one_of(flat, ("data.path", "data.mixture"), "the data", problems)
    check_objective(run, problems)
    check_evaluation(run, problems)
    check_stages(run, problems)
    _check_end(run, problems)
    _check_model(run, problems)
    check_adapter(run, problems)
    _check_fp8(run, problems)
    if run.ema.decay is None and run.ema != EmaConfig():
        problems.add("ema.every", run.ema.every, "without ema.decay there is no average", "set ema.decay, 0.999 is "
                     "common, or remove the section")  # fmt: skip
    _check_going_on(run, problems)


def unused(run: RunConfig, given: Iterable[str]) -> list[str]:
    """Notes on the keys that are given, and that the run does not read for what others say."""
    train, evaluation = run.train, run.eval
    measures = train.eval or evaluation.sets or evaluation.choices or train.sample_prompts
    unread = {
        "sites.": not run.sites.name and "without sites.name the run trains alone",
        "train.eval_every": not measures and "train.eval is off, and nothing else is measured",
        "train.sample_tokens": not train.sample_prompts and "there are no train.sample_prompts",
        "checkpoint.when_busy": run.checkpoint.mode == "sync" and "no save is late in checkpoint.mode sync",
        "tracking.artifacts": run.tracking.wandb == "disabled" and "tracking.wandb is disabled",
    }
    found = {start: sorted(key for key in given if key.startswith(start)) for start, why in unread.items() if why}
    return [f"{', '.join(keys)}: no effect: {unread[start]}" for start, keys in found.items() if keys]


def _check_end(run: RunConfig, problems: Problems) -> None:
    """Something ends the run, and a schedule that needs its steps has them."""
    lengths = (run.train.max_steps, run.train.max_tokens, run.train.epochs)
    if all(length is None for length in (*lengths, run.train.max_minutes)):
        problems.add("train.max_steps", None, "nothing says when the run ends",
                     "set train.max_steps, train.max_tokens, train.epochs or train.max_minutes")  # fmt: skip
    elif run.schedule.needs_length and all(
        length is None for length in (*lengths, *(stage.schedule for stage in run.data.stages))
    ):
        problems.add("schedule.name", run.schedule.name, "this shape needs the number of steps in advance",
                     "set train.max_steps, train.max_tokens or train.epochs, or schedule.name: constant")  # fmt: skip


def _check_model(run: RunConfig, problems: Problems) -> None:
    """The model section, but for fp8."""
    if isinstance(run.model.config, dict):
        model_type, key = run.model.config.get("model_type"), "model.config.model_type"
        if not isinstance(model_type, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_\-]*", model_type):
            rule = "a Hugging Face model type is required, such as llama or qwen3"
            remedy = "write `model_type: llama` under model.config"
            problems.add(key, model_type, rule, remedy, problems.places.get(key, problems.places.get("model.config")))
    if run.model.vocabulary is not None and run.model.config is not None:
        problems.add("model.vocabulary", run.model.vocabulary, "is for the weights of a folder (model.pretrained)",
                     "write model.config.vocab_size")  # fmt: skip
    check_revision("model.revision", run.model.revision, "model.pretrained", run.model.pretrained, problems)
    if run.data.isolate_documents and run.model.attention.startswith("flash"):
        problems.add("data.isolate_documents", True, f"model.attention {run.model.attention} takes no mask",
                     "set model.attention to varlen or sdpa")  # fmt: skip
    if run.model.attention == "varlen" and not run.data.isolate_documents:
        problems.add("model.attention", "varlen", "keeps attention within documents",
                     "set data.isolate_documents to true, or model.attention to sdpa")  # fmt: skip
    if run.model.recompute.keep is not None and run.model.attention not in ("auto", "sdpa", "varlen"):
        problems.add(
            "model.recompute.keep",
            "attention",
            f"model.attention {run.model.attention} is no operator of "
            "torch's, so its output cannot be told from the rest",
            "set model.attention to sdpa, or remove it",
        )
    if run.model.recompute.layers == "auto" and run.adapter.quantize is not None:
        problems.add("model.recompute.layers", "auto", f"the bytes of adapter.quantize {run.adapter.quantize} cannot "
                     "be counted without its kernels", "write all or a number of layers")  # fmt: skip


def _check_going_on(run: RunConfig, problems: Problems) -> None:
    """Requirements of a run that goes on from another one's checkpoint."""
    if run.resume_data == "new":
        if run.resume in ("auto", "none"):
            problems.add("resume_data", "new", "goes on from one checkpoint with other data", "name it: resume: PATH")
        elif run.resume_weights_only:
            problems.add("resume_data", "new", "with resume_weights_only the data begins anew anyway",
                         "remove one of the two")  # fmt: skip
    if run.resume_model == "new" and run.resume in ("auto", "none"):
        problems.add("resume_model", "new", "gives another model the parameters of one checkpoint",
                     "name it: resume: PATH")  # fmt: skip
    if run.resume_weights_only and run.resume in ("auto", "none"):
        problems.add("resume_weights_only", True, "begins a new run from the parameters of one checkpoint",
                     "name it: resume: PATH")  # fmt: skip


def _check_one_of(flat: dict[str, Any], keys: tuple[str, str], what: str, problems: Problems) -> None:
    given = [key for key in keys if flat[key] is not None]
    if len(given) == 1:
        return
    rule = "is given twice" if given else "is missing"
    both = " and ".join(f"{key} = {flat[key]!r}" for key in given) or f"{keys[0]} and {keys[1]} are both null"
    where = ", ".join(problems.places[key] for key in given if key in problems.places) or None
    problems.add_text(keys[0], both, f"{what} {rule}", f"give exactly one of {keys[0]} and {keys[1]}", where)


def check_schedule(run: RunConfig, max_steps: int | None, tokens: int, problems: Problems) -> None:
    """The warm-up and the decay must fit into the run. `tokens`: of a step."""
    if max_steps is None:
        return
    warmup, decay, train = run.schedule.warmup_steps, run.schedule.decay(), run.train
    by_tokens = train.max_tokens is not None and -(-train.max_tokens // tokens) == max_steps != train.max_steps
    key, each = ("train.max_tokens", float(tokens)) if by_tokens else ("train.max_steps", 1.0)
    if train.epochs is not None and not by_tokens and train.max_steps != max_steps:
        key, each = "train.epochs", train.epochs / max_steps
    length = f"{key} = {getattr(train, key.removeprefix('train.'))}, {problems.places.get(key, 'the YAML')}"
    if warmup >= max_steps:
        problems.add("schedule.warmup_steps", warmup, f"must be less than the run's {max_steps} steps ({length})",
                     f"set schedule.warmup_steps to {max_steps - 1} or less (0: none), or {key} to more than "
                     f"{warmup * each:.15g}")  # fmt: skip
    elif warmup + decay > max_steps:
        problems.add("schedule.decay_steps", decay,
                     f"warm-up {warmup} + decay {decay} exceed the run's {max_steps} steps ({length})",
                     f"set schedule.decay_steps to {max_steps - warmup} or less, or shorten the warm-up")  # fmt: skip


def check_steps(run: RunConfig, max_steps: int | None, problems: Problems) -> None:
    """Steps at which something is to happen are steps that the run has."""
    if run.ema.decay is not None and max_steps is not None and run.ema.every > max_steps:
        problems.add("ema.every", run.ema.every, f"the run has {max_steps} steps, so the mean would stay as it begins",
                     f"set it to {max_steps} or less")  # fmt: skip
    asked = run.profile.steps
    if asked is None:
        return
    try:
        _, last = profiled_steps(asked)
    except ValueError:
        problems.add("profile.steps", asked, "must be FIRST:LAST, steps from 1 on, at most 20 of them",
                     "write it as 20:23")  # fmt: skip
        return
    if max_steps is not None and last > max_steps:
        problems.add("profile.steps", asked, f"the run has {max_steps} steps", f"let it end at {max_steps}")


def check_frozen(run: RunConfig, zero: dict[str, Any], path: str, problems: Problems) -> None:
    """ZeRO 3 keeps second copies of parameters that do not train, and never renews them (ZeRO++)."""
    model, copies = run.model, int(zero.get("zero_hpz_partition_size") or 0)
    if copies > 1 and (patterns := run.adapter.r or model.train_only or model.freeze):
        key = "adapter.r" if run.adapter.r else "model.train_only" if model.train_only else "model.freeze"
        rule = f"zero_optimization.zero_hpz_partition_size = {copies} ({path}) keeps copies of frozen parameters with "
        problems.add(key, patterns, f"{rule}other values", "remove zero_hpz_partition_size")


def check_mask(run: RunConfig, batch: Batch, degrees: Degrees, problems: Problems) -> None:
    """Isolated documents: a mask must fit into memory; without one the bounds of the documents reach one stage only."""
    if not run.data.isolate_documents:
        return
    shares = {"pipeline.stages": degrees.pipeline, "sequence_parallel_size": degrees.sequence}
    shared = next((f"{key} = {degree}" for key, degree in shares.items() if degree > 1), None)
    if run.model.attention == "varlen":
        if shared:
            problems.add("model.attention", "varlen", f"needs whole rows and all layers in each rank, not {shared}",
                         "set model.attention to sdpa, or use ZeRO or tensor parallelism instead")  # fmt: skip
        return
    if run.model.attention == "auto" and shared is None:
        return  # where it becomes sdpa, the start asks again (training/setup.py with_attention)
    largest = batch.micro_batch * (MOST if run.train.balance == "measured" else 1)
    mask_bytes = largest * batch.sequence_length**2
    if mask_bytes > _MASK_BYTES:
        remedy = "set model.attention to varlen, which needs none" if shared is None else "shorten it"
        problems.add("data.sequence_length", run.data.sequence_length,
                     f"with data.isolate_documents, model.attention {run.model.attention} makes a mask of "
                     f"{size(mask_bytes)} ({largest} sequences x length x length bytes) in each forward pass; at most "
                     f"{size(_MASK_BYTES)} are allowed", remedy)  # fmt: skip


def check_shared_rows(run: RunConfig, degrees: Degrees, path: str, problems: Problems) -> None:
    """Ranks that share a row have equally many of its columns, and in attention equally many heads."""
    degree, length = degrees.sequence, run.data.sequence_length
    if degree == 1:
        return
    if below := length % degree:
        problems.add(
            "data.sequence_length",
            length,
            f"must be a multiple of sequence_parallel_size = {degree} ({path}): the ranks share each sequence",
            f"set it to {length - below or degree} or {length - below + degree}, or change the degree",
        )
    model = _read_model_config(run, Problems()) or {}  # what is wrong with it is told by check_on_disk
    heads = model.get("num_attention_heads", model.get("n_head"))
    local = heads // degrees.tensor if isinstance(heads, int) and heads % degrees.tensor == 0 else None
    if local and local % degree:
        spread = f" on {degrees.tensor} tensor-parallel ranks" if degrees.tensor > 1 else ""
        legal = ", ".join(str(d) for d in range(1, local + 1) if local % d == 0)
        problems.add("sequence_parallel_size", degree,
                     f"within attention the ranks share the heads, equally many each; {heads} heads{spread}",
                     f"set it to one of {legal}", path)  # fmt: skip


def check_shared_heads(run: RunConfig, degrees: Degrees, path: str, problems: Problems) -> None:
    """Ranks that share each matrix have equally many heads. (models/parallel/tensor.py checks what else they share.)"""
    degree = degrees.tensor
    model = _read_model_config(run, Problems()) or {}  # what is wrong with it is told by check_on_disk
    given = {key: model.get(key) for key in ("num_attention_heads", "n_head", "num_key_value_heads")}
    heads = {key: count for key, count in given.items() if isinstance(count, int) and count > 0}
    common = math.gcd(*heads.values())
    if degree > 1 and heads and common % degree:
        key, count = next((key, count) for key, count in heads.items() if count % degree)
        legal = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
        problems.add("tensor_parallel.autotp_size", degree,
                     f"the ranks share the model's heads, equally many each, and {key} is {count}",
                     f"set it to one of {legal}; other ranks can work data-parallel, with ZeRO 3, or in a pipeline",
                     path)  # fmt: skip


def _check_packages(run: RunConfig, problems: Problems) -> None:
    """Trackers of packages that are not installed here."""
    for name, tracker in run.trackers.items():
        packages = {module.partition(".")[0] for module in tracker.MODULES}
        if missing := sorted(package for package in packages if importlib.util.find_spec(package) is None):
            ours = type(tracker).__module__.startswith("llmtrain.")
            what = f"'llmtrain[{name}]'" if ours else " ".join(missing)
            problems.add(f"trackers.{name}", asdict(tracker), f"needs {', '.join(missing)}, not installed here",
                         f"pip install {what} on all hosts")  # fmt: skip


def check_on_disk(run: RunConfig, problems: Problems) -> None:
    """Packages and paths exist; data folders are prepared; the tokenizer fits into the model's vocabulary."""
    _check_packages(run, problems)
    data_vocab: dict[str, int] = {}
    tokenizer = None
    for stage, within in stage_runs(run, problems):
        for path in stage.data.folders:
            key = "data.path" if stage.data.path else f"data.mixture.{path}"
            if key in within:
                continue
            manifest = _read_manifest(key, path, within)
            tokenizer = tokenizer or (manifest or {}).get("tokenizer_fingerprint")
            if isinstance(vocab := (manifest or {}).get("vocab_size"), int):
                data_vocab[path] = vocab
            _check_length(key, path, manifest or {}, stage, within)
            if manifest is not None:
                check_data(run, key, path, manifest, within)
    for key, path in ((f"eval.sets.{name}", path) for name, path in run.eval.sets.items()):
        if (manifest := _read_manifest(key, path, problems)) is not None:
            check_data(run, key, path, manifest, problems)
            check_set(key, path, manifest, run, tokenizer, problems)
    for key, path in ((f"eval.choices.{name}", path) for name, path in run.eval.choices.items()):
        if (manifest := _read_manifest(key, path, problems)) is not None:
            check_choices(key, path, manifest, run, tokenizer, problems)
    check_start(run, problems)
    check_teacher_folder(run, problems)
    model = _read_model_config(run, problems)
    if run.adapter.r is not None and run.model.pretrained is None:
        problems.add("adapter.r", run.adapter.r, "an adapter stands beside weights that stay as they are, and those of "
                     "model.config are random", "name a folder with weights: model.pretrained")  # fmt: skip
    if run.resume not in ("auto", "none") and not has_checkpoints(run):
        _check_resume(run.resume, problems)
    _check_run_dir(run, problems)
    model_vocab = run.model.vocabulary or (model or {}).get("vocab_size")
    room = "model.config.vocab_size" if run.model.config is not None else "model.vocabulary"
    for path, vocab in data_vocab.items():
        if isinstance(model_vocab, int) and model_vocab < vocab:
            problems.add(
                "model.config.vocab_size" if run.model.config is not None else "model.pretrained",
                model_vocab if run.model.config is not None else run.model.pretrained,
                f"the tokenizer of {path} has {vocab} tokens, the model room for {model_vocab}",
                f"set {room} to {vocab} or more, or prepare the data with the model's tokenizer",
                problems.places.get("model.config.vocab_size"),
            )


def refuse_if_preempted(run: RunConfig, places: Places) -> None:
    """Raises ConfigError when the run's preempt file is there before the run.

    Not asked of ranks that a launch starts: there the file may have come since, and they leave as they would later.
    """
    if (file := run.fault.preempt_file) and os.path.exists(file):
        key = "fault.preempt_file"
        rule = "is there already: the run would save and leave before its first step"
        raise stop(key, file, rule, "delete it, or name a file that is yet to appear", places.get(key))


def _check_length(key: str, path: str, manifest: dict[str, Any], run: RunConfig, problems: Problems) -> None:
    """Each split that the run reads fills a sequence: its tokens, and one more for the last label. One row of
    conversations does, whatever its length."""
    length, tokens, chat = run.data.sequence_length, manifest.get("tokens"), manifest.get("chat")
    if isinstance(chat, dict) and chat.get("choices"):  # `check_data` refuses it
        return
    least = 1 if isinstance(chat, dict) else length + 1
    remedies = {
        "train": "prepare more text",
        "validation": "prepare it with a larger --validation-fraction or with --validation-source FILE, or set "
        "train.eval to off to train without validation",
    }
    for split, remedy in remedies.items():
        found = tokens.get(split) if isinstance(tokens, dict) else None
        if isinstance(found, int) and found < least and (split == "train" or run.train.eval):
            remedy = f"lower data.sequence_length to {found - 1} or less, or {remedy}" if found > 2 else remedy
            rule = f"its {split} split ({found} tokens) does not fill one sequence of data.sequence_length {length}"
            problems.add(key, path, rule, remedy)


def starts_from_model(run: RunConfig) -> bool:
    """Return True if the parameters come from the model section, and not from a checkpoint."""
    return run.resume in ("auto", "none") and not has_checkpoints(run)


def reads_weights(run: RunConfig) -> bool:
    """Return True if the run reads model.pretrained's weights, as a resumed one does for its frozen parameters."""
    return starts_from_model(run) or bool(run.model.freeze or run.model.train_only) or run.adapter.r is not None


def has_checkpoints(run: RunConfig) -> bool:
    """The run goes on from its own checkpoints; what it began from may be gone by now."""
    return bool(glob(f"{escape(str(run.train.run_dir))}/checkpoints/step-*"))


def _check_resume(path: str, problems: Problems) -> None:
    """A checkpoint, a run with some, or RUN/step-N: as `llmtrain checkpoint` takes them. What a store has is looked at
    when it is fetched."""
    if is_url(path):
        if found := problem_of(path):
            problems.add("resume", redact_text(path), *found)
        return
    step = re.fullmatch(r"step-([0-9]{1,18})", Path(path).name)
    if step and not os.path.exists(path):
        full = f"step-{int(step[1]):08d}"
        if any(os.path.isdir(Path(path).parent / below / full) for below in ("", "checkpoints")):
            return
    if not _exists("resume", path, "write auto, none or the path of a checkpoint", problems):
        return
    inside = any(glob(f"{escape(path)}/{below}step-*") for below in ("", "checkpoints/"))
    if not (inside or Path(path).name.startswith("step-") or os.path.exists(f"{path}/manifest.json")):
        problems.add("resume", path, "holds no checkpoint", "give a run's folder, a checkpoint's folder, or RUN/step-N")


def _check_run_dir(run: RunConfig, problems: Problems) -> None:
    """The run's folder is one, or can be made. (Whether it can be written is known on rank 0's host alone.)"""
    sources = [*(run.data.mixture or {}), *([run.data.path] if run.data.path else [])]
    sources += [*run.eval.sets.values(), *run.eval.choices.values()]
    for key, path in (("train.run_dir", run.train.run_dir), ("checkpoint.dir", run.checkpoint.dir)):
        if path is None:
            continue
        nearest = next((p for p in (Path(path), *Path(path).parents) if os.path.exists(p)), Path("/"))
        rule = None
        if "\0" in path:
            rule = "has a null character, which no path can have"
        elif not os.path.isdir(nearest):
            rule = f"{nearest} is a file, so no folder can be there"
        elif os.path.realpath(nearest).split("/")[1] in ("proc", "sys"):
            rule = f"{os.path.realpath(nearest)} belongs to the kernel, and no folder can be made there"
        elif os.path.realpath(path) == "/":
            rule = "is the root of the file system, and a run writes files of its own there"
        elif source := next((s for s in sources if _within(path, s)), None):
            rule = f"lies in the data folder {source}, which a run only reads"
        elif other := _of_others(path, _RUN if key == "train.run_dir" else _CHECKPOINTS):
            kind = "a run" if key == "train.run_dir" else "checkpoints"
            rule = f"is no folder of {kind}: {other}; a run writes, replaces and deletes files in its own"
        if rule:
            problems.add(key, path, rule, "give the path of a folder, which may be new")
    for key, url in (("checkpoint.mirror", run.checkpoint.mirror), ("train.export_to", run.train.export_to)):
        if url is not None and (found := problem_of(url, writes=True)):
            problems.add(key, redact_text(url), *found)
    if run.train.export_to is not None and not run.train.export:
        problems.add("train.export_to", redact_text(run.train.export_to), "is where the export goes, and train.export "
                     "is off", "remove one of them")  # fmt: skip


_RUN = re.compile(r"checkpoints|events\.jsonl|environment\.json")
"""Files of a run's folder, of which the first is made before all others."""
_CHECKPOINTS = re.compile(r"step-[0-9].*")
_REPLACED = ("config.yaml", "deepspeed.json")
"""Files that a run writes anew at each start."""
_OF_A_LAUNCH = re.compile(r"\..*|.*\.(log|out|err|sh|ya?ml|json)|logs?|wandb|lost\+found")
"""Names that may stand in a run's folder before the run: hidden ones, logs and settings of its launch."""


def _of_others(path: str, own: re.Pattern[str]) -> str | None:
    """The sign that a folder belongs to something else; None: it is new, empty, cannot be read, or has something that
    tells what it is (`own`)."""
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return None
    shared = {os.path.realpath(os.path.expanduser("~")): "it is your home", os.path.realpath("/tmp"): "all use it"}
    if found := shared.get(os.path.realpath(path)):
        return found
    if any(map(own.fullmatch, names)):
        return None
    other = [name for name in names if name in _REPLACED or not _OF_A_LAUNCH.fullmatch(name)]
    return f"it holds {other[0]}" + (f" and {len(other) - 1} more" if other[1:] else "") if other else None


def _within(path: str, folder: str) -> bool:
    """Return True if a path is a folder, or lies in it."""
    inner, outer = os.path.realpath(path), os.path.realpath(folder)
    return inner == outer or inner.startswith(f"{outer.rstrip('/')}/")


def _exists(key: str, path: str, remedy: str, problems: Problems) -> bool:
    # os.path, because Path.exists raises for a name that is too long
    if os.path.exists(path):
        return True
    problems.add(key, path, f"no such file or folder (looked from {Path.cwd()})", remedy)
    return False


def _read_manifest(key: str, path: str, problems: Problems) -> dict[str, Any] | None:
    if is_url(path):
        return _read_in_store(key, path, problems)
    folder = Path(path)
    manifest = folder / "manifest.json"
    if not os.path.exists(path):
        rule = "a dataset on the Hub is prepared first" if path.startswith("hf:") else "no such folder"
        rule, remedy = f"{rule} (looked from {Path.cwd()})", _to_prepare(path, None)
    elif not os.path.isdir(path):
        rule, remedy = "is a file, and training reads a folder that was made of it", _to_prepare(path, path)
    elif not manifest.is_file() and (folder / "unfinished").is_dir():
        rule, remedy = "its preparation has not ended: it has no manifest.json", "run the same `llmtrain prepare` again"
    elif not manifest.is_file():
        rule, remedy = "not a prepared folder: it has no manifest.json", _to_prepare(path, path)
    else:
        return _read_json(key, manifest, problems)
    problems.add(key, path, rule, remedy)
    return None


def _read_in_store(key: str, url: str, problems: Problems) -> dict[str, Any] | None:
    """The manifest of a folder in an object store."""
    found = problem_of(url)
    if found is None:
        try:
            tree = untrusted.loads(Store(url).read("manifest.json"))
            if isinstance(tree, dict):
                return tree
            found = "its manifest.json must hold one JSON object", "upload the folder again"
        except FileNotFoundError:
            found = "no prepared folder: it has no manifest.json", "correct the URL, or upload the folder again"
        except StoreError as error:
            found = (
                f"cannot be read ({error})",
                "correct address or access; credentials are those of the store's driver",
            )
        except ValueError as error:
            found = f"its manifest.json cannot be read as JSON: {error}", "upload the folder again"
    problems.add(key, redact_text(url), *found)
    return None


def _to_prepare(path: str, source: str | None) -> str:
    """The command that makes a data folder: of `source`, which is there and is not written into; None: nothing is."""
    if source is None and not path.startswith("hf:"):
        return f"make it with `llmtrain prepare --source FILES --out {path}`, or correct the path"
    stem = Path(path.removeprefix("hf:")).name.partition(".")[0] or "mine"
    out = next(each for each in (f"data/{stem}", f"data/{stem}-tokens") if os.path.normpath(path) != each)
    source = source or path
    return f"make one: `llmtrain prepare --source {source} --out {out}`, and then write {out} here"


def _read_model_config(run: RunConfig, problems: Problems) -> dict[str, Any] | None:
    if isinstance(run.model.config, dict):
        return run.model.config
    key, path = ("model.config", run.model.config) if run.model.config else ("model.pretrained", run.model.pretrained)
    if not path:
        return None
    if key == "model.pretrained" and is_remote(path):
        check_url(key, path, run.model.revision, problems)
        return None  # what the Hub or a store has is looked at when it has been fetched: `with_base`
    remedy = "give a local Hugging Face folder"
    if not _exists(key, path, remedy if run.model.config else f"{remedy}, or ORG/NAME on the Hub", problems):
        return None
    if run.model.revision is not None:
        problems.add("model.revision", run.model.revision, f"goes with a name on the Hub, and {path} is a folder here",
                     "remove it, or write ORG/NAME of a repository")  # fmt: skip
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        rule = "the folder has no config.json"
        if (file.parent / "adapter_config.json").is_file():
            rule = "is the folder of an adapter, without its model"
            remedy = ("merge the two (llmtrain checkpoint to-hf RUN OUT --merge) and name that folder, or name the "
                      "model here and this folder in adapter.start")  # fmt: skip
        problems.add(key, path, rule, remedy)
        return None
    return _read_json(key, file, problems)


def _read_json(key: str, file: Path, problems: Problems) -> dict[str, Any] | None:
    try:
        tree = untrusted.loads(file.read_bytes(), infinite=True)
    except (OSError, ValueError) as error:
        problems.add(key, str(file), f"cannot be read as JSON: {error}", "make or copy the folder again")
        return None
    if not isinstance(tree, dict):
        problems.add(key, str(file), "must hold one JSON object", "make or copy the folder again")
        return None
    return tree
