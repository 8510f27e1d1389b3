"""The comparison on each world size: local ranks train, plain PyTorch trains, and the results are compared.

A feature may compare the ranks with something else, by a class in place of `AgainstPlain`.
"""

from __future__ import annotations

import functools
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llmtrain.base import untrusted
from llmtrain.base.errors import UserError
from llmtrain.base.files import scratch_folder
from llmtrain.config import plugins
from llmtrain.config.problems import stop
from llmtrain.config.run import ModelConfig, Run
from llmtrain.engine.ranks.local_ranks import RankError, Ranks, ending_on_sigterm
from llmtrain.models.run.check import check_model
from llmtrain.models.skeleton import layer_configs, load_config
from llmtrain.objectives.by_token import ByToken, Distill
from llmtrain.objectives.preferences import Pairs
from llmtrain.parity.compare import CEILINGS, COUNT, KINDS, Difference, Trace, Verdict, compare, hint, tie
from llmtrain.parity.plain import nudged, orders, train_plainly
from llmtrain.parity.plain_objectives import PLAIN, with_small_teacher
from llmtrain.parity.small import attention_here, own_settings_here, patterns_here, small_model, targets_here
from llmtrain.parity.small_run import AUTOCAST, PLAN, degrees_text, resolve_in, small_run
from llmtrain.parity.untrained import compare_course, compare_folder

TIMEOUT_S = 900.0
SAME, PARTS, NO_ANSWER = 0, 1, 3
"""Exit codes."""


_LAST_LINES = {
    SAME: "PASS",
    PARTS: "FAIL",
    NO_ANSWER: "NO ANSWER: a rank or the comparison itself failed, so it is not known whether the training is the same",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Settings of one `llmtrain parity` comparison."""

    run: Run
    """The user's run; for the ranks with the small copy's settings."""
    steps: int
    cpu: bool
    worker: str
    """The module that each rank runs."""

    def ranks(self, folder: Path, world_size: int, **others: Any) -> Ranks:
        return Ranks(folder, world_size, cpu=self.cpu, module=self.worker, timeout_s=TIMEOUT_S, **others)


class AgainstPlain:
    """Compares the ranks with plain PyTorch in one process. Each comparison prints its result, and yields or returns
    SAME, PARTS or NO_ANSWER."""

    def comparable(self, user: Run) -> Run:
        """Return the run that can be compared. Raises ConfigError for tensorwise fp8 if ranks and reference would scale
        different tokens together. (With scales that are powers of two this would not matter: all but the smallest
        numbers round equally.)"""
        config = user.config
        shares = {
            "sequence_parallel_size": user.mix.degrees.sequence > 1,
            "data.isolate_documents": config.data.isolate_documents,
            "model.mlp_tile_tokens": config.model.mlp_tile_tokens is not None,
        }
        if config.model.fp8 == "tensorwise" and any(shares.values()):
            key = next(key for key, cut in shares.items() if cut)
            rule = f"a scale depends on all tokens of a product, which with {key} are others in the reference"
            raise stop("model.fp8", config.model.fp8, rule, "compare with --model.fp8 rowwise")
        return user

    def before_ranks(self, user: Run) -> Iterator[int]:
        if (of_folder := compare_folder(user.config, user.mix.products)) is not None:
            print("\n".join(of_folder[0]), flush=True)
            yield SAME if of_folder[1] else PARTS

    def of_worlds(self, user: Run, worlds: list[int]) -> Iterator[int]:
        lines, same = compare_course(user, worlds)
        print("\n".join(lines), flush=True)
        yield SAME if same else PARTS

    def of_ranks(self, folder: Path, asked: Asked, plans: dict[str, Run]) -> int:
        """Start the ranks, compute the references meanwhile, and compare. Raises RankError. `plans`: precision -> small
        run."""
        user, steps, device = asked.run, asked.steps, torch.device("cpu" if asked.cpu else "cuda")
        (folder / PLAN).write_bytes(pickle.dumps((plugins.words(), pickle.dumps((plans, steps)))))
        world_size = next(iter(plans.values())).mix.degrees.world_size
        with asked.ranks(folder, world_size) as ranks:
            torch.set_num_threads(1)  # matrices are small, and the ranks need the cores
            references = {
                name: [train_plainly(run, steps, order, device) for order in orders(run.config.model, run.batch)]
                for name, run in plans.items()
            }
            ranks.wait()

        def more(name: str, until: int) -> list[Trace]:
            every = nudged(orders(plans[name].config.model, plans[name].batch), COUNT)
            return [train_plainly(plans[name], until, order, device) for order in every]

        codes = []
        for name, sharp, until in comparisons(list(plans), steps, fp8=user.config.model.fp8 is not None):
            got = Trace(**torch.load(folder / f"{name}.trace", weights_only=True)).until(until)
            want = [trace.until(until) for trace in references[name]]
            codes.append(_tell(user, plans[name], got, want, functools.partial(more, name), sharp=sharp))
        return worst_of(codes)


def compare_worlds(title: str, asked: Asked, worlds: list[int], comparison: AgainstPlain | None = None) -> int:
    """Compare on each number of ranks; print the results. Returns SAME, PARTS or NO_ANSWER. Raises UserError. `title`:
    the YAML's name."""
    codes = []
    with ending_on_sigterm():
        try:
            for code in _worlds(title, asked, worlds, comparison or AgainstPlain()):
                codes.append(code)
        except UserError:
            raise
        except Exception:  # a bug here or in a library, which proves nothing about the training
            traceback.print_exc()
            codes.append(NO_ANSWER)
    code = worst_of(codes)
    print(_LAST_LINES[code], flush=True)
    return code


def _worlds(title: str, asked: Asked, worlds: list[int], comparison: AgainstPlain) -> Iterator[int]:
    user, steps, cpu = comparison.comparable(asked.run), asked.steps, asked.cpu
    fields, shrunk_by = small_model(user.config.model, user.mix.degrees, scores=user.config.objective.scores)
    attention = attention_here(fields, user.config.model.attention, cpu=cpu)
    model = replace(user.config.model, attention=attention, **patterns_here(fields, user.config.model))
    adapter = targets_here(fields, user.config.adapter)
    optim = own_settings_here(fields, model, adapter, user.config.optim)
    user = replace(user, config=replace(user.config, model=model, adapter=adapter, optim=optim))
    print(f"{title} with {user.config.deepspeed}: {_words(fields)}, {steps} steps", flush=True)
    yield from comparison.before_ranks(user)
    with scratch_folder("parity") as made:
        if isinstance(user.config.objective, Distill):
            objective = with_small_teacher(user.config, fields, made / "teacher")
            user = replace(user, config=replace(user.config, objective=objective))
        asked = replace(asked, run=user)
        own: str = "bf16" if user.mix.precision == "fp16" and cpu else user.mix.precision
        own = AUTOCAST if user.mix.autocast else own
        in_bf16 = user.config.model.fp8 is not None and not cpu  # fp8 products are bf16
        precisions: list[str] = [own] if in_bf16 else list(dict.fromkeys(["fp32", own]))
        every = {}  # before any rank starts: a later refusal would hide an earlier failure
        for ranks in worlds:
            folder = made / f"{ranks}-ranks"
            folder.mkdir(exist_ok=True)
            run = small_run(user, fields, shrunk_by, ranks, steps, cpu=cpu)
            every[folder] = plans = {
                precision: resolve_in(folder, user, run, shrunk_by, ranks, precision) for precision in precisions
            }
            check_model(plans[precisions[0]])  # refuses models that training refuses
        yield from comparison.of_worlds(user, worlds)
        for folder, plans in every.items():
            degrees = plans[precisions[0]].mix.degrees
            print(f"{degrees.world_size} ranks on {'cpu' if cpu else 'cuda'} ({degrees_text(degrees)})", flush=True)
            try:
                yield comparison.of_ranks(folder, asked, plans)
            except RankError as error:
                print(f"  NO ANSWER  {untrusted.shown(error, lines=True)}", flush=True)
                yield NO_ANSWER


def comparisons(precisions: list[str], steps: int, *, fp8: bool) -> list[tuple[str, bool, int]]:
    """Return (precision, True for the sharp comparison, number of its steps) for each comparison. In fp8 the last digit
    decides between neighbouring numbers that are 1/8 apart: two orders of summation agree as in fp32 for one or two
    steps, and then differ as much as half precisions."""
    if not fp8:
        return [(name, name == "fp32", steps) for name in precisions]
    return [*((name, True, 1) for name in precisions if name == "fp32"), (precisions[-1], False, steps)]


def worst_of(codes: list[int]) -> int:
    """Return the worst exit code: a different training counts even if another comparison has no answer."""
    return next(code for code in (PARTS, NO_ANSWER, SAME) if code in codes)


def _tell(
    user: Run, plan: Run, got: Trace, want: list[Trace], more: Callable[[int], list[Trace]], *, sharp: bool
) -> int:
    """Print one comparison; return SAME, PARTS or NO_ANSWER. `more`: returns references of other roundings, up to a
    step."""
    split = plan.mix.degrees.tensor > 1 or plan.mix.degrees.sequence > 1
    name: str = plan.mix.products
    verdict = compare(got, want, fp32=sharp, split=split)
    instead = (
        f" instead of {user.mix.precision}, which DeepSpeed supports only on GPUs"
        if name not in (user.mix.products, "fp32")
        else ""
    )
    name += " under torch.autocast" * plan.mix.autocast
    title = f"{name} against plain PyTorch in {name}{instead}"
    if (recipe := user.config.model.fp8) is not None:
        title += f", both with fp8 {recipe}" + (", step 1" if sharp else "")
    found = tie(got, want, verdict, more, split=split) if sharp and not verdict.passed else None
    if found is not None and found.proves:
        print("\n".join([*report(title, found.verdict), f"        {found.line()}"]), flush=True)
        before, last = None, found.step - 1
        if last:
            before = compare(got.until(last), [trace.until(last) for trace in want], fp32=True, split=split)
        return SAME if before is None or before.blunt is None else _no_answer(before.blunt, recipe)
    if verdict.passed and verdict.blunt is not None:
        print("\n".join(report(title, verdict, passes="NO ANSWER")), flush=True)
        return _no_answer(verdict.blunt, recipe)
    likely = "" if verdict.passed else hint(got, want[0], verdict, plan.config.optim.clip_norm)
    if likely and isinstance(objective := user.config.objective, (ByToken, Pairs)):
        method, what = ("terms", "tokens") if isinstance(objective, ByToken) else ("losses", "pairs")
        shared = f"the {what} that share a micro-batch, such as by a mean over them"
        if method == "terms" or objective.name not in PLAIN:
            likely = f"{method} of objective.name {objective.name} depends on {shared}; or {likely}"
    if found is not None:
        likely = f"{found.line()}. So nothing is proved: choose other weights with --train.seed 1"
    print("\n".join([*report(title, verdict, likely), *bluntness(name, verdict, sharp=sharp)]), flush=True)
    return NO_ANSWER if found is not None else SAME if verdict.passed else PARTS


def _no_answer(blunt: Difference, fp8: str | None) -> int:
    """Report a comparison that proves nothing, as nearly every training would pass it. `fp8`: the run's `model.fp8`."""
    where = f"{blunt.kind} at step {blunt.step}" + (f", {blunt.name}" if blunt.name else "")
    print(
        f"        nothing is proved: trainings in one process that differ only in the order of their sums diverge so "
        f"far that {blunt.tolerated:.2g} would be tolerated ({where}; at most {CEILINGS[blunt.kind]:g} is a proof). "
        "Choose other weights with --train.seed 1, or fewer --steps"
        + ("; all but fp8 is compared with --model.fp8 null" if fp8 else ""),
        flush=True,
    )
    return NO_ANSWER


def bluntness(name: str, verdict: Verdict, *, sharp: bool) -> list[str]:
    """Return a line on faults that half precision cannot find; no line for the sharp comparison."""
    moved = verdict.worst.get("movement")
    sharper = "" if name == "fp32" else "; the fp32 comparison is the sharp one"
    if sharp or moved is None or moved.tolerated < 0.1:
        return []
    return [f"        blunt: in {name} a movement may be off by {moved.tolerated:.0%}{sharper}"]


def report(title: str, verdict: Verdict, likely: str = "", passes: str = "PASS") -> list[str]:
    """Return the lines of a verdict. `passes`: the word for a pass."""
    lines = [f"  {passes if verdict.passed else 'FAIL'}  {title}"]
    for kind, worst in verdict.worst.items():
        where = f"step {worst.step}" + (f", {worst.name}" if worst.name else "")
        lines.append(f"        {kind:<13}  {worst.got:.1e} of {worst.tolerated:.1e}  ({where})")
    if verdict.first:
        lines.append(f"        first parts at step {verdict.first[0].step}:")
        for kind in KINDS:
            failed = [one for one in verdict.first if one.kind == kind]
            for one in failed[:2]:
                what = f"{kind} {one.name}".strip() + (f": {one.note}" if one.note else "")
                lines.append(f"          {what}; differs by {one.got:.2e}, tolerated {one.tolerated:.1e}")
            if len(failed) > 2:
                lines.append(f"          {kind} of {len(failed) - 2} more")
        lines.append(f"        likely: {likely}")
    return lines


def _words(fields: dict[str, Any]) -> str:
    config = load_config(ModelConfig(config=fields)).get_text_config()
    parts = [fields["model_type"], f"{config.num_hidden_layers} layers", f"width {config.hidden_size}"]
    layer = layer_configs(config)[0]
    if heads := getattr(layer, "num_attention_heads", None):
        parts.append(f"{heads} / {getattr(layer, 'num_key_value_heads', None) or heads} heads")
    return ", ".join([*parts, "tied" if getattr(config, "tie_word_embeddings", False) else "untied"])
