"""The parts of `llmtrain parity`: the small run, the data, the reference, the comparison, the processes."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmtrain.base.errors import ConfigError, UserError
from llmtrain.config.deepspeed.read import read_json
from llmtrain.config.run import DataConfig, ModelConfig, Run, RunConfig, TrainConfig
from llmtrain.config.topology import Degrees, Mix
from llmtrain.data.sequences import positions_of
from llmtrain.engine.ranks.local_ranks import RankError, Ranks
from llmtrain.models.skeleton import load_config
from llmtrain.optim.optimizers import AdamW
from llmtrain.optim.schedules import Wsd
from llmtrain.parity.compare import KINDS, Trace, compare, hint
from llmtrain.parity.plain import (
    PlainOptimizer,
    _documents,
    _losses,
    _rows,
    newton_schulz_dtype,
    orders,
    orthogonalised,
    train_plainly,
)
from llmtrain.parity.small_run import resolve_in, small_run, small_tree, usual_ranks
from llmtrain.parity.tokens import Tokens
from tests.helpers.families import FAMILIES
from tests.helpers.parity import references, resolved
from tests.helpers.processors import fp16
from tests.helpers.training import Case

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]


def user(train: TrainConfig, degrees: Degrees | None = None, **sections: Any) -> Run:
    config = RunConfig(deepspeed="ds.json", train=train, **sections)
    return Run(config=config, mix=Mix(bf16=True, degrees=degrees or Degrees()))


def small(wanted: Run, ranks: int = 2) -> RunConfig:
    return small_run(wanted, {"model_type": "llama"}, 1e-3, ranks, 20, cpu=True)


def test_a_small_tile_suits_the_products_of_fp8() -> None:
    tiled = ModelConfig(config={"model_type": "llama"}, mlp_tile_tokens=64)
    assert small(user(TrainConfig(), model=tiled)).model.mlp_tile_tokens == 8
    assert small(user(TrainConfig(), model=replace(tiled, fp8="rowwise"))).model.mlp_tile_tokens == 16


def test_a_small_run_is_checked_by_the_rules_of_a_run(tmp_path: Path) -> None:
    """Its values are not those of the run that was parsed."""
    wanted = user(TrainConfig(micro_batch=2, global_batch=8, max_steps=20))
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    run = small_run(wanted, config, 1e-3, 2, 20, cpu=True)
    assert resolve_in(tmp_path, wanted, run, 1e-3, 2, "fp32").max_steps == 20
    broken = replace(run, model=replace(run.model, attention="varlen"))
    with pytest.raises(ConfigError, match="varlen", check=lambda e: e.keys == {"model.attention"}):
        resolve_in(tmp_path, wanted, broken, 1e-3, 2, "fp32")


def test_the_small_run_keeps_what_the_user_chose_and_shrinks_what_is_long() -> None:
    sections = {
        "optim": AdamW(lr=3.0, clip_norm=0.5, weight_decay=0.3),
        "schedule": Wsd(warmup_steps=2000, decay_steps=500),
        "data": DataConfig(path="there", sequence_length=4096, isolate_documents=True, mask_document_starts=False),
    }
    run = small(user(TrainConfig(global_batch=512, micro_batch=4, max_tokens=10**9), **sections))  # type: ignore[arg-type]
    assert (run.optim.clip_norm, run.optim.weight_decay, run.optim.lr) == (0.5, 0.3, 3e-4)
    assert run.schedule == Wsd(warmup_steps=2)
    assert (run.data.sequence_length, run.data.isolate_documents, run.data.mask_document_starts) == (32, True, False)
    # 512 rows of 4 x 2 ranks are 64 micro-batches: several stay several
    assert (run.train.micro_batch, run.train.accumulation, run.train.global_batch) == (2, 4, None)
    assert run.train.max_steps == 20 and run.train.max_tokens is None


def test_a_pipeline_keeps_micro_batches_enough_to_fill_it_and_lengths_divide() -> None:
    run = small(user(TrainConfig(accumulation=64, max_steps=9), Degrees(pipeline=4, sequence=3)), ranks=12)
    assert run.train.accumulation == 8 and run.data.sequence_length % 3 == 0
    assert small(user(TrainConfig(accumulation=1, max_steps=9))).train.accumulation == 1


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (Degrees(), [2]),
        (Degrees(pipeline=2), [2, 4]),
        (Degrees(pipeline=2, tensor=2), [4]),
        (Degrees(expert=4), [4]),
        (Degrees(expert=4, sequence=2), [4]),
        (Degrees(sequence=8), [8]),
    ],
)
def test_usual_world_sizes(degrees: Degrees, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert usual_ranks(degrees) == expected


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_the_small_json_differs_in_sizes_and_precision_alone(path: Path) -> None:
    tree = read_json(str(path))
    before = copy.deepcopy(tree)
    own = small_tree(tree, 1e-4, "fp16" if "fp16" in tree else "bf16", 4)
    full = small_tree(tree, 1e-4, "fp32", 4)
    assert tree == before
    assert not {"bf16", "fp16", "train_batch_size"} & full.keys()
    of_precision = ("bf16", "fp16", "data_types", "communication_data_type")
    assert {k: v for k, v in own.items() if k not in of_precision} == full
    zero, there = full["zero_optimization"], tree["zero_optimization"]
    assert {k: v for k, v in zero.items() if type(v) is not int or k == "stage"} == {
        k: v for k, v in there.items() if v != "auto" and (type(v) is not int or k == "stage")
    }
    assert zero["stage3_param_persistence_threshold"] == 10  # DeepSpeed's 100,000: so not all parameters stay whole
    if "reduce_bucket_size" in there and there["reduce_bucket_size"] != "auto":
        assert zero["reduce_bucket_size"] == there["reduce_bucket_size"] * 1e-4


def test_fp16_becomes_bf16_where_asked_and_begins_with_a_small_scale() -> None:
    tree = {"fp16": {"enabled": True, "initial_scale_power": 16}}
    assert small_tree(tree, 1.0, "bf16", 4) == {"bf16": {"enabled": True}}
    assert small_tree(tree, 1.0, "fp16", 4)["fp16"] == {"enabled": True, "initial_scale_power": 8}


@pytest.mark.parametrize(
    ("given", "layers", "expected"),
    [
        ([16, 16], 4, [2, 2]),
        ([7, 9], 4, [2, 2]),
        ([1, 31], 4, [1, 3]),
        ([10, 20, 10], 6, [1, 3, 2]),
        ([3, 1], 4, [3, 1]),
    ],
)
def test_stages_that_are_given_keep_their_shares(given: list[int], layers: int, expected: list[int]) -> None:
    tree = {"pipeline": {"stages": len(given), "partition": given}}
    got = small_tree(tree, 1.0, "fp32", layers)["pipeline"]["partition"]
    assert sum(got) == layers and min(got) >= 1 and sorted(got) == sorted(expected)


def test_the_data_is_uneven_has_documents_and_depends_on_the_index_alone() -> None:
    tokens = Tokens(DataConfig(path="x", sequence_length=32), 512)
    again = Tokens(DataConfig(path="x", sequence_length=32), 512)
    rows = [tokens.sequence(index) for index in range(64)]
    for index in (63, 5):
        assert all(map(np.array_equal, rows[index], again.sequence(index)))
    counted = [int((labels >= 0).sum()) for _, labels in rows]
    assert len(set(counted)) > 10 and min(counted) > 0 and max(counted) > 24
    separators = sum(int((inputs == tokens.separator_id).sum()) for inputs, _ in rows)
    assert 64 < separators < 64 * 6
    inputs = np.concatenate([inputs for inputs, _ in rows])
    assert inputs.min() >= 0 and inputs.max() == 511
    after = np.concatenate([labels[inputs == tokens.separator_id] for inputs, labels in rows])
    assert (after == -100).all()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_plain_optimizer_is_torchs_adamw(decay: float) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7))
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    optim = replace(resolved(FORM).config.optim, lr=0.01, weight_decay=decay, clip_norm=0.5)
    plain = PlainOptimizer(model, masters, optim)
    (bias, weight) = sorted(model.parameters(), key=lambda p: p.dim())
    groups = [{"params": [weight], "weight_decay": decay}, {"params": [bias], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(5):
        theirs.zero_grad()
        model(torch.randn(3, 5)).square().sum().backward()
        norm = plain.step(1.0)
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)), rel=1e-6)
        theirs.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(masters[name], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_the_reference_takes_nothing_from_a_run_but_its_settings_and_its_first_weights() -> None:
    """A fault in what both sides call passes in silence."""
    tree = ast.parse((ROOT / "llmtrain/parity/plain.py").read_text())
    allowed = {
        "config.run": "ModelConfig Run",
        "config.stages": "Batch",
        "features": "asked",
        "models.skeleton": "DTYPES load_config",
        "models.source": "ParameterSource",
        "models.spec": "ModelSpec",
        "objectives.by_token": "ByToken NextToken",
        "objectives.objective": "Objective",
        "optim.optimizers": "AdamW Lion Muon Optimizer",
        "optim.schedules": "Constant Cosine Falling Schedule Wsd",
        "parity.compare": "VARIANT Trace",
        "parity.plain_maps": "adapt_plainly base_of compute_in_fp8 frozen_beside loud_source pack_plainly",
        "parity.plain_objectives": "PLAIN PlainTeacher divergence plain_loss",
        "parity.tokens": "Answers Tokens synthetic",
    }
    taken: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("llmtrain"):
            taken.setdefault(str(node.module).removeprefix("llmtrain."), set()).update(each.name for each in node.names)
    assert not {module: names for module, names in taken.items() if names - {*allowed.get(module, "").split()}}
    assert not any(isinstance(node, ast.Import) and "llmtrain" in ast.unparse(node) for node in ast.walk(tree))


def test_the_reference_cuts_rows_itself() -> None:
    tokens = Tokens(DataConfig(path="x", sequence_length=32), 64)
    with patch("llmtrain.parity.tokens.labels_of", side_effect=AssertionError):
        inputs, labels = _rows(tokens, [5, 6])
    for row, index in enumerate((5, 6)):
        for mine, theirs in zip((inputs[row], labels[row]), tokens.sequence(index), strict=True):
            assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_in_fp16_it_is_as_near_to_deepspeeds_as_fp16_allows(shape: tuple[int, int]) -> None:
    """A run in bf16 has its iteration in fp16 where the device has that, and so has the reference."""
    from deepspeed.runtime.zero.muon import original_muon

    theirs = inspect.unwrap(original_muon.zeropower_via_gram_newtonschulz)  # without torch.compile
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    got = {}
    for there in (False, True):
        with fp16(there):
            got[there] = orthogonalised(matrix, newton_schulz_dtype("muon", "bf16")).float()
            assert torch.allclose(got[there], theirs(matrix, steps=5).float(), atol=2e-2 if there else 1e-5)
            assert newton_schulz_dtype("muon", "fp32") is torch.float32
    assert 1e-5 < float((got[True] - got[False]).abs().max()) < 2e-2


@torch.no_grad()
def test_documents_alone_are_what_transformers_makes_of_positions() -> None:
    config = resolved(Case(model=FAMILIES["llama"], isolate_documents=True)).config
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(load_config(config.model), attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data *= 6
    tokens = Tokens(config.data, 512)
    pairs = [tokens.sequence(index) for index in range(4)]
    inputs, labels = (torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True))
    alone = sum(float(_losses(model, None, *document)[0].sum()) for document in _documents((inputs, labels), tokens))
    positions = torch.from_numpy(positions_of(inputs.numpy(), tokens.separator_id))
    logits = model(input_ids=inputs, position_ids=positions, use_cache=False).logits
    packed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    one_text = float(_losses(model, None, inputs, labels)[0].sum())
    assert alone == pytest.approx(float(packed), rel=1e-6)
    assert abs(alone - one_text) > 0.1, "the documents matter"


FORM = Case(model=FAMILIES["llama"], steps=6)


def test_orders_of_summation_differ_by_rounding_only() -> None:
    reference, *others = references(FORM)
    assert reference.losses[-1] != reference.losses[0]
    for other in others:
        assert compare(other, [reference, reference], fp32=True, split=False).passed
        assert abs(other.losses[-1] - reference.losses[-1]) < 1e-5
        # Of all elements, as one loss may round to the same on a processor.
        pairs = ((values, reference.parameters[-1][name]) for name, values in other.parameters[-1].items())
        assert not all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_bf16_is_as_far_from_fp32_as_it_should_be() -> None:
    half = replace(resolved(FORM), mix=replace(resolved(FORM).mix, bf16=True))
    trace = train_plainly(half, 6, _order(), torch.device("cpu"))
    verdict = compare(trace, references(FORM), fp32=True, split=False)
    assert not verdict.passed and verdict.worst["loss"].got < 2e-2


def _order() -> Any:
    return orders(resolved(FORM).config.model, resolved(FORM).batch)[0]


def changed(**changes: Any) -> Trace:
    return replace(copy.deepcopy(references(FORM)[0]), **changes)


def test_a_comparison_names_the_first_step_and_parameter_in_the_models_order() -> None:
    trace = changed()
    for step in (3, 4, 5, 6):
        for name in ("model.norm.weight", "model.layers.1.mlp.down_proj.weight"):
            trace.parameters[step][name] += 1e-3
    verdict = compare(trace, references(FORM), fp32=True, split=False)
    assert {difference.step for difference in verdict.first} == {3}
    named = [difference.name for difference in verdict.first if difference.kind == "parameter"]
    assert named == ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
    assert list(verdict.worst) == list(KINDS)
    assert verdict.worst["parameter"].got == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"losses": [float("nan")] * 6}, "not finite"),
        ({"losses": [2 * loss for loss in range(6)]}, "forward pass"),
        ({"norms": [0.5] * 6}, "norm is wrong"),
        ({"skipped": [1], "norms": [0.1] * 6}, "skipped"),
    ],
)
def test_hints(change: dict[str, Any], words: str) -> None:
    trace = changed(**change)
    verdict = compare(trace, references(FORM), fp32=True, split=False)
    assert not verdict.passed and words in hint(trace, references(FORM)[0], verdict, 0.0)


def test_what_no_rank_holds_is_not_taken_for_equal() -> None:
    for spoil in (lambda d: d.pop("model.norm.weight"), lambda d: d["model.norm.weight"].fill_(float("nan"))):
        trace = changed()
        spoil(trace.parameters[0])
        verdict = compare(trace, references(FORM), fp32=True, split=False)
        assert verdict.first[0].name == "model.norm.weight" and verdict.first[0].step == 0
        assert hint(trace, references(FORM)[0], verdict, 0.0)


def start(folder: Path, *how: Any, timeout_s: float | None = None) -> Ranks:
    (folder / "how.json").write_text(json.dumps(how))
    return Ranks(folder, len(how), cpu=True, module="tests.helpers.failing_worker", timeout_s=timeout_s)


def alive(folder: Path) -> list[int]:
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(autouse=True)
def _from_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize(
    ("how", "error", "words", "timeout_s"),
    [
        (
            [[1, False, "an answer to rank 1"], [None, False, "the cause"], "waits"],
            RankError,
            "rank 1 of 3:\nthe cause",
            None,
        ),
        ([[None, True, "model.config: wrong"], "waits"], UserError, "wrong", None),
        (["waits", "killed"], RankError, r"(?s)rank 1.*SIGKILL.*last words", None),
        (["ends", "waits"], RankError, r"ranks \[1\] did not end", 0.5),
    ],
    ids=["first traceback", "mistake", "killed", "late"],
)
def test_what_one_rank_meets_is_told_and_no_rank_is_left(
    tmp_path: Path, how: list[Any], error: type[Exception], words: str, timeout_s: float | None
) -> None:
    with start(tmp_path, *how, timeout_s=timeout_s) as ranks, pytest.raises(error, match=words):
        ranks.wait()
    assert not alive(tmp_path)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM], ids=lambda by: by.name)
def test_no_rank_outlives_the_command(tmp_path: Path, by: signal.Signals) -> None:
    (tmp_path / "how.json").write_text('["waits", "waits"]')
    code = """
from pathlib import Path
import sys
from llmtrain.engine.ranks.local_ranks import Ranks, ending_on_sigterm
with ending_on_sigterm(), Ranks(Path(sys.argv[1]), 2, cpu=True, module="tests.helpers.failing_worker") as ranks:
    ranks.wait()
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL) as command:
        try:
            deadline = time.monotonic() + 60
            while len([path for path in tmp_path.glob("pid-*") if path.read_text()]) < 2:
                assert time.monotonic() < deadline and command.poll() is None
                time.sleep(0.05)
            assert len(alive(tmp_path)) == 2
            command.send_signal(by)
            assert command.wait(30) == (-signal.SIGINT if by is signal.SIGTERM else -by)
        finally:
            command.kill()
    deadline = time.monotonic() + 10
    while alive(tmp_path):
        assert time.monotonic() < deadline, "the ranks live on"
        time.sleep(0.05)
