"""Values for auto: the fewest layers and the largest micro-batch that fit, from peaks that are given here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain import cli
from llmtrain.config.load import parse
from llmtrain.config.resolve import resolve
from llmtrain.config.run import RecomputeConfig, Run
from llmtrain.features.plan.auto import free_bytes
from llmtrain.features.plan.decide import decide, fewest_layers, micro_batches
from llmtrain.features.plan.device import MIB, Machines
from tests.features.plan.test_plan import RUN

LAYERS = 4
GIB = 2**30
AUTO = ["--train.micro_batch=auto", "--train.global_batch=48"]


def peak(rows: int, again: RecomputeConfig) -> int:
    """100 bytes that stay, and for each row 10 of a layer, of which a recomputed one keeps 3, or 4 with attention."""
    layers = {None: 0, "all": LAYERS}.get(again.layers, again.layers)
    assert isinstance(layers, int)
    return 100 + rows * ((LAYERS - layers) * 10 + layers * (4 if again.keep else 3))


def asked(folder: Path, *words: str, ranks: int = 2, **json_keys: Any) -> Run:
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}} | json_keys))
    (folder / "run.yaml").write_text(RUN.replace("micro_batch: 4, ", "").replace("ds.json", f"{folder}/ds.json"))
    return resolve(parse([str(folder / "run.yaml"), *words], check_paths=False).config, ranks)


def decided(run: Run, room: int) -> tuple[int, RecomputeConfig, list[int]]:
    """(micro-batch, recomputation, micro-batches of the rehearsals) with so many bytes for a step."""
    tried: list[int] = []

    def rehearsed(this: Run) -> dict[int, Any]:
        tried.append(this.batch.micro_batch)
        most = peak(this.batch.micro_batch, this.config.model.recompute)
        return {0: SimpleNamespace(peak=most - 1, ahead=1)}

    machines: Any = SimpleNamespace(memory=room, room=lambda most, memory: (memory - most, memory - most))
    chosen, found = decide(run, machines, rehearsed)
    again = chosen.config.model.recompute
    assert found[0].peak + found[0].ahead == peak(chosen.batch.micro_batch, again)
    assert chosen.batch.global_batch == run.batch.global_batch
    return chosen.batch.micro_batch, again, tried


@pytest.mark.parametrize(("room", "wanted"), [(140, None), (139, 1), (122, 3), (121, 4), (116, 4)])
def test_as_few_layers_as_fit(room: int, wanted: int | None) -> None:
    found = fewest_layers(lambda again: peak(1, again), LAYERS, room, ("attention",))
    assert found == RecomputeConfig(layers=wanted, keep="attention" if wanted else None)


def test_attention_is_kept_where_there_is_room() -> None:
    either = ("attention", None)
    assert fewest_layers(lambda again: peak(1, again), LAYERS, 116, either).keep == "attention"
    assert fewest_layers(lambda again: peak(1, again), LAYERS, 115, either) == RecomputeConfig(layers=4)
    assert fewest_layers(lambda again: peak(1, again), LAYERS, 111, either) == RecomputeConfig(layers="all")


@pytest.mark.parametrize(
    ("room", "rows"), [(99, 1), (140, 1), (179, 1), (180, 2), (420, 8), (500, 8), (1059, 12), (1060, 24)]
)
def test_the_largest_micro_batch_that_fits(tmp_path: Path, room: int, rows: int) -> None:
    found, again, tried = decided(asked(tmp_path, *AUTO), room)
    assert (found, again) == (rows, RecomputeConfig()) and len(tried) <= 4


def test_layers_are_recomputed_where_one_row_does_not_fit(tmp_path: Path) -> None:
    run = asked(tmp_path, *AUTO, "--model.recompute.layers=auto")
    assert decided(run, 181)[:2] == (2, RecomputeConfig())
    assert decided(run, 139) == (1, RecomputeConfig(layers=1, keep="attention"), [1, 1, 1])
    fixed = asked(tmp_path, "--train.micro_batch=2", "--model.recompute.layers=auto")
    assert decided(fixed, 179)[:2] == (2, RecomputeConfig(layers=1, keep="attention"))


def test_micro_batches_that_make_up_each_stage(tmp_path: Path) -> None:
    """An own number of a stage counts for the stage alone; others inherit what is chosen."""
    assert micro_batches(asked(tmp_path, *AUTO)) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert micro_batches(asked(tmp_path, *AUTO, ranks=6)) == [1, 2, 4, 8]
    stages = "--data.stages=[{from_step: 5, train: {global_batch: 32}}, {from_step: 7, train: {micro_batch: 16}}]"
    run = asked(tmp_path, *AUTO, stages)
    assert micro_batches(run) == [1, 2, 4, 8]
    chosen, _, _ = decided(run, 300)
    assert chosen == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([AUTO[0]], "train.global_batch"),
        ([*AUTO, "--train.accumulation=4"], "train.global_batch"),
        ([*AUTO, "--data.stages=[{from_step: 5, train: {accumulation: 2}}]"], "global_batch"),
        ([*AUTO, "--train.global_batch=7"], "global_batch 7 = "),
        ([*AUTO, "--deepspeed=pipeline.json"], "pipeline.stages"),
        ([*AUTO, "--deepspeed=rows.json"], "train_micro_batch_size_per_gpu"),
    ],
)
def test_what_auto_does_not_go_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    asked(tmp_path)
    Path("pipeline.json").write_text(json.dumps({"pipeline": {"stages": 2}}))
    Path("rows.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 4}))
    assert cli.main(["plan", "run.yaml", "--slots", "2", "--memory", "1GiB", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_json_leaves_the_micro_batch_to_the_yaml(tmp_path: Path) -> None:
    run = asked(tmp_path, AUTO[0], train_batch_size=16, train_micro_batch_size_per_gpu="auto")
    assert micro_batches(run) == [1, 2, 4, 8]


def test_free_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit without the memory that it has taken; the page cache gives way, shared memory does not."""
    for name, text in {"max": "1000", "current": "300", "stat": "file 100\nshmem 20\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr("llmtrain.checkpoint.snapshot._GROUP", tmp_path)
    monkeypatch.setattr("llmtrain.features.plan.auto.ranks_of_this_host", lambda: 2)
    assert free_bytes(torch.device("cpu")) == (1000 - 300 + 80) // 2


def test_memory_that_a_begun_process_finds_free_is_charged_once() -> None:
    """CUDA's context and NCCL's buffers are there when a start measures, and so is the process of a run on CPUs."""
    gpu = Machines(hosts=1, slots=8, device="", on_gpu=True, memory=80 * GIB, host_memory=None)
    before, after = (replace(gpu, begun=begun).room(60 * GIB, 80 * GIB) for begun in (False, True))
    assert after[0] - before[0] == 1300 * MIB and after[1] - before[1] == 400 * MIB
    cpu = replace(gpu, on_gpu=False)
    before, after = (replace(cpu, begun=begun).room(1, 1) for begun in (False, True))
    assert after[0] - before[0] == 300 * MIB
