"""`llmtrain plan --fit`: its first is the best of all, and nothing it proposes lacks room."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from llmtrain import cli
from llmtrain.base.errors import UserError
from llmtrain.config.run import Run
from llmtrain.features.plan import asked, fit
from llmtrain.features.plan.device import MIB, Machines
from llmtrain.features.plan.fit import Choice, Fitter, Form
from llmtrain.features.plan.rehearsal import Rehearsed
from llmtrain.features.plan.speed import Speeds, step_time
from llmtrain.features.plan.work import Message, Operator
from llmtrain.training.examine import Examined
from tests.features.plan.test_plan import RUN

SPEEDS = Speeds(products=1e12, attention=1e12, memory=1e12, inside=1e9, to_host=1e8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN.replace("num_hidden_layers: 2", "num_hidden_layers: 4"))
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1, "reduce_bucket_size": 40_000}}))
    return tmp_path


def facts(run: Run, **_: Any) -> Any:
    """Facts of the model, which is not built."""
    config: Any = run.config.model.config
    found = SimpleNamespace(layers=config["num_hidden_layers"], parameters=1000, trained=1000)
    return run, SimpleNamespace(facts=found), None


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "prepared", facts)
    monkeypatch.setattr(fit, "rehearse_each", by_formula)
    monkeypatch.setattr(Machines, "others", lambda *_: [])


def by_formula(jobs: Sequence[tuple[Examined, int]], *_: Any, **__: Any) -> Iterator[tuple[int, Rehearsed]]:
    """Rehearse nothing: states in their shares, activations of rows and layers, and their recomputation."""
    for number, ((run, spec, _), rank) in enumerate(jobs):
        layers = spec.facts.layers
        degrees, batch, again = run.mix.degrees, run.batch, run.config.model.recompute.layers
        again = layers if again == "all" else again or 0
        stage, shares = run.mix.zero_stage, degrees.data
        states = layers * MIB / degrees.tensor * (1 / (shares if stage == 3 else 1) + 6 / (shares if stage else 1))
        states -= layers * MIB * 6 / shares * run.mix.offload_optimizer
        kept = batch.micro_batch * MIB * ((layers - again) + 0.1 * again) / degrees.tensor
        kept *= 0.2 if run.config.model.mlp_tile_tokens else 1
        passes = batch.accumulation * (1 + batch.micro_batch) * 10**9 // degrees.tensor
        work: Counter[Operator | Message] = Counter(
            {
                Operator("forward", "mm", passes, 0): layers,
                Operator("recompute", "mm", passes // 3, 0): again,
                Message("forward", "allreduce", tuple(range(degrees.tensor)), 10**6): layers * batch.accumulation,
                Message("step", "allgather", tuple(range(shares)), 10**6): layers * max(1, stage),
            }
        )
        yield (
            number,
            Rehearsed(
                rank=rank,
                peak=int(states + kept),
                at="step",
                phases={"step": {}},
                ahead=0,
                kept=0,
                highest={},
                host=0,
                saved=layers * MIB // shares,
                curve=[],
                step=work,
                cpu_s=0.0,
            ),
        )


def resolved(form: Form, values: dict[str, Any], ranks: int = 4, batch: int = 32) -> Run:
    """The run of these tests with other values."""
    path = Path(f"{form}.json")
    path.write_text(json.dumps(form.json(json.loads(Path("ds.json").read_text()))))
    more = {"deepspeed": str(path), "train.global_batch": batch, **values}
    words = [f"--{key}={'null' if value is None else value}" for key, value in more.items()]
    return asked.resolved(["run.yaml", *words], ranks)


@pytest.mark.usefixtures("formula")
@pytest.mark.parametrize("memory", (3, 5, 9, 15, 25, 41))
def test_the_first_is_the_best_of_all(memory: int) -> None:
    machines = Machines(hosts=1, slots=4, device="x", on_gpu=False, memory=memory * MIB, host_memory=None)
    fitter = Fitter(resolved(Form(stage=1), {}), machines, SPEEDS, resolved)
    found = fitter.fit()
    assert all(each.peak <= memory * MIB and each.left >= 0 for each in found.best)
    times = [each.time.seconds for each in found.best]
    assert times == sorted(times) and found.rehearsed <= 12
    every = [
        each.time.seconds
        for form in fitter._legal_forms()
        for each in fitter._rehearse_complete(
            [
                Choice(form=form, micro_batch=rows, recomputed=layers)
                for rows, layers in product(fitter._rows(form), (None, 2, "all"))
            ]
        )
    ]
    assert times[0] <= 1.1 * min(every) and len(every) > 5


@pytest.mark.usefixtures("formula")
def test_the_search_goes_on_until_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates of what is faster are close to the limit, and above it."""
    machines = Machines(hosts=1, slots=4, device="x", on_gpu=False, memory=15 * MIB, host_memory=None)
    fitter = Fitter(resolved(Form(stage=1), {}), machines, SPEEDS, resolved)
    monkeypatch.setattr(fit, "_CLOSE", 0.1)
    monkeypatch.setattr(fit, "_TRIED", 1)
    found = fitter.fit()
    assert found.best and found.rehearsed > fit.BEST


@pytest.mark.usefixtures("formula")
def test_half_of_the_layers_is_half_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(hosts=2, slots=1, device="x", on_gpu=False, memory=43 * MIB, host_memory=None)
    few, halves, point = functools.partial(resolved, ranks=2, batch=4), set(), Fitter._estimate

    def noted(fitter: Fitter, choice: Choice) -> Any:
        if isinstance(choice.recomputed, int):
            halves.add((choice.form.pipeline, choice.recomputed))
        return point(fitter, choice)

    monkeypatch.setattr(Fitter, "_estimate", noted)
    monkeypatch.setattr(fit, "_EXPLORED", 1000)
    Fitter(few(Form(stage=1), {"train.micro_batch": 1}), machines, SPEEDS, few).fit()
    assert halves == {(1, 2), (2, 1)}  # of 4 layers


@pytest.mark.usefixtures("formula")
def test_the_margin_of_the_run_stays_free() -> None:
    machines = Machines(hosts=1, slots=4, device="x", on_gpu=False, memory=20 * MIB, host_memory=None)
    peaks = []
    for margin in (None, 0.25):
        run = resolved(Form(stage=1), {"plan.memory_margin": margin})
        peaks.append(max(each.peak for each in Fitter(run, machines, SPEEDS, resolved).fit().best))
    assert peaks[1] <= 15 * MIB < peaks[0] <= 20 * MIB


@pytest.mark.usefixtures("formula")
def test_long_rows_are_tried_with_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the MLPs of complete rows do not fit."""
    machines = Machines(hosts=1, slots=1, device="x", on_gpu=False, memory=4 * MIB + MIB // 5, host_memory=None)

    def alone(form: Form, values: dict[str, Any]) -> Run:
        return resolved(form, values, ranks=1)

    with pytest.raises(UserError, match=r"--memory 4.2 MiB.* --hosts"):
        Fitter(alone(Form(stage=0), {}), machines, SPEEDS, alone).fit()
    monkeypatch.setattr(fit, "_LONG", 64)
    first = Fitter(alone(Form(stage=0), {}), machines, SPEEDS, alone).fit().best[0]
    assert first.choice.values["model.mlp_tile_tokens"] == 4096 and first.choice.again == "all, tiles of 4096"


def test_messages_that_travel_while_a_rank_computes() -> None:
    """ZeRO's with overlap_comm; those of a layer are waited for, also where as many ranks share it."""
    zero = {"stage": 1, "reduce_bucket_size": 40_000, "overlap_comm": True}
    Path("ds.json").write_text(json.dumps({"zero_optimization": zero}))
    run = resolved(Form(stage=1, tensor=2), {"train.micro_batch": 1, "train.accumulation": None})
    machines = Machines(hosts=1, slots=4, device="x", on_gpu=False, memory=None, host_memory=None)
    computing = Operator("backward", "mm", 10**12, 0)
    [(_, rehearsed)] = by_formula([(facts(run), 0)])

    def waited(*group: int) -> float:
        work: Counter[Operator | Message] = Counter([computing, Message("backward", "allreduce", group, 10**8)])
        return step_time(run, machines, SPEEDS, {0: replace(rehearsed, step=work)}).parts.get("messages", 0.0)

    assert waited(0, 2) == 0 and waited(0, 1) == pytest.approx(0.1, rel=0.01)


@pytest.mark.usefixtures("formula")
def test_a_run_that_fits_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run.yaml", "--slots", "2", "--device", "cpu", "--memory", "1MB", "--fit"]) == 2
    assert "--memory" in (error := capsys.readouterr().err) and "--hosts" in error
    assert cli.main(["plan", "run.yaml", "--slots", "2", "--device", "cpu", "--fit"]) == 2
    assert "--fit = true" in capsys.readouterr().err


@pytest.mark.usefixtures("formula")
def test_the_json_can_be_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """With the printed lines in the YAML it is the first proposal; the global batch stays."""
    words = ["--slots", "4", "--device", "cpu", "--memory", "6MiB", "--fit", "--out", "mine.json"]
    assert cli.main(["plan", "run.yaml", *words]) == 0
    said = capsys.readouterr().out
    assert "  mix " in said.splitlines()[0]
    lines = said.partition("in the YAML of the first:")[2]
    words = [f"--{key}={'null' if value is None else value}" for key, value in yaml.safe_load(lines).items()]
    run = asked.resolved(["run.yaml", *words], 4)
    assert run.config.deepspeed == "mine.json" and run.batch.global_batch == 16


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_is_the_best_of_all_rehearsals() -> None:
    """On tensors without memory, for a global batch of 4 on 2 ranks; the device has room for some choices."""
    machines = Machines(hosts=1, slots=2, device="x", on_gpu=False, memory=4 * MIB, host_memory=None)

    def of_two(form: Form, values: dict[str, Any]) -> Run:
        return resolved(form, values, ranks=2, batch=4)

    fitter = Fitter(of_two(Form(stage=1), {"train.micro_batch": 1}), machines, SPEEDS, of_two)
    best = fitter.fit().best
    every = [
        each.time.seconds
        for form in fitter._legal_forms()
        for each in fitter._rehearse_complete(
            [
                Choice(form=form, micro_batch=rows, recomputed=layers)
                for rows, layers in product(fitter._rows(form), (None, 2, "all"))
            ]
        )
    ]
    assert all(each.left >= 0 for each in best) and best[0].time.seconds <= 1.1 * min(every)
