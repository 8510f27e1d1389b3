"""`llmtrain plan`: its answer, wrong words, and its changes. test_plan_ranks.py proves the peaks."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmtrain import cli
from llmtrain.base.errors import ConfigError
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.units import GIB, size
from llmtrain.commands.config import summary
from llmtrain.config.load import parse
from llmtrain.config.resolve import resolve
from llmtrain.config.run import RecomputeConfig, Run
from llmtrain.config.stages import Batch
from llmtrain.config.topology import Degrees
from llmtrain.engine.ranks.ranks import AgreedError
from llmtrain.features import features
from llmtrain.features.plan.device import DEVICES, MIB, parse_size
from llmtrain.features.plan.out_of_memory import explain
from llmtrain.features.plan.planned import Planned, refuse_without_room, store, stored, with_chosen
from llmtrain.features.plan.planned import summary as planned_lines
from llmtrain.features.plan.rehearsal import kinds, prepared, walk
from llmtrain.features.plan.speed import Speeds, message_s
from llmtrain.features.plan.work import Message
from llmtrain.models.loss import IGNORE
from llmtrain.models.run.check import check_model
from llmtrain.models.spec import ModelFacts, ModelSpec
from tests.unit import test_cli

LAYERS = 2
RUN = """\
deepspeed: ds.json
model:
  config: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}
data: {path: not/prepared/yet, sequence_length: 64}
optim: {name: adamw, lr: 1.0e-3}
train: {micro_batch: 4, max_steps: 10}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    write_json(stage=1)
    return tmp_path


def write_json(**zero: Any) -> None:
    small = {"reduce_bucket_size": 40_000} if zero["stage"] else {}
    Path("ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {**zero, **small}}))


def plan(capsys: pytest.CaptureFixture[str], line: str = "", code: int = 0) -> dict[str, Any]:
    assert cli.main(["plan", "run.yaml", "--json", *line.split()]) == code
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_static_part_is_that_of_arithmetic(folder: Path, capsys: pytest.CaptureFixture[str], stage: int) -> None:
    """Bytes of a parameter: 2 for weights, 12 for masters and moments; a quarter of shared ones on four ranks."""
    write_json(stage=stage, stage3_param_persistence_threshold=0)
    [kind] = plan(capsys, "--slots 4")["kinds"]
    parameters = 2 * 512 * 64 + LAYERS * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 128 + 2 * 64) + 64
    parts = kind["rehearsed"]["phases"][kind["rehearsed"]["at"]]
    shares = 4 if stage else 1
    assert parts["weights"] == pytest.approx(2 * parameters / (4 if stage == 3 else 1), rel=0.01)
    assert parts["masters"] == pytest.approx(4 * parameters / shares, rel=0.01)
    assert parts["moments"] == pytest.approx(8 * parameters / shares, rel=0.01)
    assert kind["rehearsed"]["ahead"] == (2 * parameters if stage == 3 else 0)  # of a model less than its bucket
    # Twice for an all-reduce of gradients; once for their scatter at ZeRO 3, and for weights, gathered and kept.
    passes = {0: 2, 1: 2 + 1, 2: 2 + 1, 3: 1 + 1}[stage]
    assert kind["rehearsed"]["step"]["sent"] == pytest.approx(passes * 2 * parameters * 3 / 4, rel=0.02)
    assert kind["ranks"] == 4 and kind["rehearsed"]["peak"] >= kind["rehearsed"]["kept"] > 0


def test_the_copy_for_a_save_is_in_the_hosts_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A device holds the same with it and without: when the engine is built, in a step, and in the stored words."""
    write_json(stage=1)
    found = {mode: plan(capsys, f"--device h100-80 --checkpoint.mode {mode}") for mode in ("sync", "async")}
    kinds = {mode: each["kinds"][0]["rehearsed"] for mode, each in found.items()}
    copied = kinds["async"]["phases"]["forward"]["copy for a save (host)"]
    assert 0 < copied == kinds["async"]["host"] <= kinds["async"]["saved"] and kinds["sync"]["host"] == 0
    for phase in ("setup", "forward", "step"):
        assert sum(kinds["async"]["phases"][phase].values()) - copied * (phase != "setup") == sum(
            kinds["sync"]["phases"][phase].values()
        )


@pytest.mark.parametrize("stage", [1, 3])
def test_page_locked_tensors_take_blocks_of_powers_of_two(
    folder: Path, capsys: pytest.CaptureFixture[str], stage: int
) -> None:
    """A flat tensor of a little more than 2^n elements takes twice as much; the copy for a save is not torch's."""
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    write_json(stage=stage, **offload)
    locked = plan(capsys, "--device h100-80")["kinds"][0]["rehearsed"]
    offload["offload_optimizer"]["pin_memory"] = False
    write_json(stage=stage, **offload)
    free = plan(capsys, "--device h100-80")["kinds"][0]["rehearsed"]
    parameters = 2 * 512 * 64 + LAYERS * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 128)
    block = 1 << (parameters - 1).bit_length()
    # Of the matrices: masters and gradients, and at ZeRO 1 a copy in bf16; ZeRO 3 keeps gradients in bf16.
    beyond = (block - parameters) * (4 + 4 + 2 if stage == 1 else 4 + 2)
    assert locked["host"] - free["host"] == pytest.approx(beyond, rel=0.1) and locked["peak"] == free["peak"]


def test_the_text_and_the_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without data on this machine; a device that has far too much room."""
    assert cli.main(["plan", "run.yaml", "--slots", "2", "--device", "h100-80", "--png", "plan.png"]) == 0
    said = capsys.readouterr().out
    values = ("run.yaml", "h100-80", "79.65 GiB", "weights", "moments", "disk:", "tokens/s", "MFU", "10 steps", "64%")
    assert all(value in said for value in (*values, "989 TFLOP/s")), said
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    Path("none").mkdir()
    assert cli.main(["plan", "run.yaml", "--png", "none"]) == 2
    output, error = capsys.readouterr()
    assert "peak" in output and '--png = "none"' in error and os.strerror(errno.EISDIR) in error


def test_what_does_not_fit_is_told_with_changes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each change is rehearsed: recomputed layers, ZeRO 2, half a micro-batch and offload. The JSON has a comment."""
    Path("ds.json").write_text("// ours\n" + Path("ds.json").read_text())
    found = plan(capsys, "--slots 2 --memory 3MB", code=1)
    assert found["fits"] is False
    changes = found["changes"]
    assert list(changes) == [
        "model.recompute.layers: all",
        "zero_optimization.stage 2",
        "train.micro_batch: 2",
        "zero_optimization.offload_optimizer on the CPU",
    ]
    assert changes["model.recompute.layers: all"] < found["peak"] > changes["train.micro_batch: 2"]


def test_each_stage_of_a_pipeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first stage of a pipeline holds more micro-batches than the last."""
    tree = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 40_000}, "pipeline": {"stages": 2}}
    Path("ds.json").write_text(json.dumps(tree))
    found = plan(capsys, "--slots 2 --train.accumulation 4")
    assert [(kind["name"], kind["ranks"]) for kind in found["kinds"]] == [("stage 1 of 2", 1), ("stage 2 of 2", 1)]
    assert all("messages of stages" in kind["rehearsed"]["highest"] for kind in found["kinds"])


def test_bytes_have_the_labels_of_the_modules_that_make_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(stage=3, stage3_param_persistence_threshold=0)
    [kind] = plan(capsys, "--slots 2 --optim.name lion")["kinds"]
    labels = {"gathered parameters", "logits and loss", "optimizer", "gradients", "buckets"}
    assert labels <= kind["rehearsed"]["highest"].keys()


def test_a_slower_network_and_a_price(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Doctor's rates are those of a host; ZeRO 1 sends 6 bytes of each parameter on a ring of all ranks."""
    pairs = [{"error": None, "up": 1e6, "trip_s": 0.01}, {"error": "no route", "up": 0.0, "trip_s": 0.0}]
    Path("doctor.json").write_text(json.dumps({"fabric": {"pairs": pairs}}))
    found = plan(capsys, "--hosts 2 --device h100-80 --link doctor.json --price 2")
    sent, took = found["kinds"][0]["rehearsed"]["step"]["sent_to_other_hosts"], found["time"]["parts"]["messages"]
    assert took == pytest.approx(8 * sent / 1e6, rel=0.15) and took > 0.9 * found["time"]["seconds"]
    assert found["time"]["cost"] == pytest.approx(10 * found["time"]["seconds"] / 3600 * 2 * 2)
    assert found["time"]["tokens_per_s"] == pytest.approx(4 * 64 * 2 / found["time"]["seconds"])


def test_seconds_of_a_message() -> None:
    """A ring of ranks on two hosts leaves each host once; an all-to-all leaves it for each of its ranks."""
    fast = Speeds(products=1, attention=1, memory=1, inside=1e12, to_host=1, across=1e9, trip_s=0)
    ring, among = Message("step", "allreduce", (0, 1, 2, 3), 10**9), Message("step", "alltoall", (0, 1, 2, 3), 10**9)
    assert message_s(ring, 2, fast) == pytest.approx(1.5) and message_s(among, 2, fast) == pytest.approx(1.0)
    assert message_s(replace(ring, group=(0, 2)), 2, fast) == pytest.approx(2.0)  # ranks 1 and 3 do it at the same time
    assert message_s(ring, 4, fast) == pytest.approx(0.0015) and message_s(replace(ring, kind="barrier"), 2, fast) == 0
    across = replace(ring, group=(0, 2))
    assert {message_s(replace(across, kind=kind), 2, fast) for kind in ("send", "recv")} == {2.0}
    assert message_s(replace(across, kind="allgather"), 2, replace(fast, overlaps=False)) == pytest.approx(1.5)


def test_a_rank_of_many_is_rehearsed_as_soon(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed's own functions make a tensor for each of the ranks, and take six times as long."""
    write_json(stage=3, stage3_param_persistence_threshold=0)
    few, many = (plan(capsys, line)["seconds"] for line in ("--slots 8", "--hosts 64 --slots 8"))
    assert many < 2 * few


def test_kinds_of_ranks() -> None:
    assert kinds(Degrees(data=8, tensor=2)) == {0: 1}
    assert kinds(Degrees(data=2, pipeline=3)) == {0: 1, 2: 1, 4: 1}
    assert kinds(Degrees(data=2, pipeline=16)) == {0: 1, 2: 14, 30: 1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--device h1000", ['--device = "h1000"', "h100-80"]),
        ("--memory lots", ['--memory = "lots"', "80GiB"]),
        ("--slots 0", ["--slots = 0"]),
        ("--link token-ring", ['--link = "token-ring"', "eth100"]),
        ("--link run.yaml.json", ["--json"]),
        ("--price nan", ["--price = NaN"]),
        ("--out mine.json", ['--out = "mine.json"', "--fit"]),
        ("--fit --device h100-80 --out gone/mine.json", ['--out = "gone/mine.json"']),
        ("--png gone/mine.png", ['--png = "gone/mine.png"']),
        ("--fit --device h100-80 --imbalance 2", ["--imbalance = 2", "--fit"]),
        ("--disk fast", ['--disk = "fast"']),
        ("--imbalance nan", ["--imbalance = "]),
        ("--hostfile hosts --imbalance nan", ["--imbalance = NaN"]),
        ("--hostfile hosts --slots 2", ["says both", "remove these"]),
        ("--hostfile hosts", ["--hosts", "--slots"]),
        ("--slots 3 --deepspeed tensor.json", ["autotp_size"]),
        ("--model.config.num_attention_heads 5", ["num_attention_heads"]),
        ("--objective.name distill --objective.teacher none", ['objective.teacher = "none"']),
        ("--model.config null --model.pretrained none", ['model.pretrained = "none"']),
        (
            "--model.config.model_type qwen3_moe --model.config.moe_intermediate_size 20 --model.config.head_dim 16 "
            "--model.config.num_experts 4 --model.config.num_experts_per_tok 2",
            ["aten.nonzero"],
        ),
    ],
)
def test_wrong_words(folder: Path, capsys: pytest.CaptureFixture[str], line: str, said: list[str]) -> None:
    Path("hosts").write_text("one slots=2\ntwo slots=4\n")
    Path("tensor.json").write_text(json.dumps({"tensor_parallel": {"autotp_size": 2}}))
    assert cli.main(["plan", "run.yaml", *line.split()]) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in said), error


def test_the_command_is_like_those_of_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    test_cli.test_every_command_takes_a_run_alike("plan", tmp_path, monkeypatch, capsys)
    code = "import sys; from llmtrain import cli; print(cli.main(['plan', 'no.yaml']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2 False\n", done


def test_sizes() -> None:
    assert parse_size("--memory", "80GiB") == 80 * GIB and parse_size("--memory", "1.5TB") == 1_500_000_000_000
    assert parse_size("--memory", "40960mib") == DEVICES["a100-40"] * MIB
    assert parse_size("--memory", str(80 * GIB)) == 80 * GIB
    with pytest.raises(ConfigError, match="80GiB") as refused:
        parse_size("--memory", "80")
    assert refused.value.keys == {"--memory"}


def test_the_answer_is_kept(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`config check` prints it, plan.memory_margin asks it; other values of the run have no plan."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
    found = plan(capsys, "--slots 2 --device cpu")

    def resolved(*more: str) -> Run:
        return resolve(parse(["run.yaml", *more], check_paths=False).config, 2)

    kept = stored(resolved(), on_gpu=False)
    assert kept is not None and kept.peak == found["peak"] and kept.of_rank_0 == found["peak"]
    assert stored(resolved(), on_gpu=True) is None and stored(resolved("--train.micro_batch=2"), on_gpu=False) is None
    assert f"memory:  {kept.text()} on the CPU" in summary(resolved(), facts_of(resolved()))
    strict = resolved("--plan.memory_margin=0.5")
    least = kept.peak + kept.more_at_least
    refuse_without_room(strict, 2 * least, on_gpu=False)
    for memory, on_gpu, told in ((2 * least - 1, False, size(kept.peak)), (1 << 40, True, "`llmtrain plan`")):
        with pytest.raises(ConfigError, match=re.escape(told)) as refused:
            refuse_without_room(strict, memory, on_gpu=on_gpu)
        assert refused.value.keys == {"plan.memory_margin"}
    plan(capsys, "--slots 2 --device cpu --imbalance 2")  # is not what a run is compared with
    assert stored(resolved(), on_gpu=False) == kept
    [file] = (folder / "cache/plans").iterdir()
    whole = json.loads(file.read_text())
    lacks = {key: value for key, value in whole.items() if key != "phases"}
    wrong: list[dict[str, Any]] = [{"peak": "much"}, {"changes": []}, {"changes": {"a": "b"}}, {"memory": "much"}]
    wrong += [
        {"more": 1},
        {"date": "\x1b[31m"},
        {"changes": {"\x1b[31m": 1}},
        {"phases": {"step": []}},
        {"step_s": {"computing": None}},
        {"chosen": ["a"]},
    ]
    for damaged in ("", "[]", "null", json.dumps(lacks), *(json.dumps(whole | each) for each in wrong)):
        file.write_text(damaged)
        assert stored(resolved(), on_gpu=False) is None, damaged
    file.unlink()
    os.mkfifo(file)
    assert stored(resolved(), on_gpu=False) is None


def facts_of(run: Run) -> ModelFacts:
    return ModelSpec.of(run.config.model).facts


def test_layers_and_micro_batch_for_a_memory(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice is stored for the run as it is written, and with its numbers."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
    monkeypatch.setattr("llmtrain.features.plan.device.Machines.others", lambda *_: [])  # more than these megabytes
    layers = ["--model.recompute.layers=auto"]
    all_kept = plan(capsys, f"--slots 2 --device cpu {layers[0]}")["peak"]
    tight = plan(capsys, f"--slots 2 --device cpu {layers[0]} --memory {0.9 * all_kept:.0f}")
    assert tight["peak"] < 0.9 * all_kept and tight["fits"]
    assert 1 <= tight["chosen"]["recompute"]["layers"] <= LAYERS and tight["chosen"]["micro_batch"] == 4

    rows = ["--train.micro_batch=auto", "--train.global_batch=32"]
    whole = plan(capsys, f"--slots 2 --device cpu --memory 1GiB {' '.join(rows)}")
    assert whole["chosen"]["micro_batch"] == 16
    half = plan(capsys, f"--slots 2 --device cpu --memory {whole['peak'] - 1} {' '.join(rows)}")
    assert half["chosen"]["micro_batch"] == 8 and half["peak"] < whole["peak"]
    asked = resolve(parse(["run.yaml", *rows], check_paths=False).config, 2)
    kept = stored(asked, on_gpu=False)
    assert kept is not None and kept.chosen == half["chosen"] and kept.peak == half["peak"]
    decided = with_chosen(asked, 8, RecomputeConfig())
    assert stored(decided, on_gpu=False) == kept
    assert decided.batch == Batch(global_batch=32, micro_batch=8, accumulation=2, data_parallel=2, sequence_length=64)
    assert decided.config.train.accumulation == 2 and decided.deepspeed["train_micro_batch_size_per_gpu"] == 8
    wrong_ones = [{"micro_batch": 3}, {"micro_batch": -1}, {"micro_batch": 0}, {"micro_batch": "x"}, {"recompute": 4}]
    wrong_ones += [{"recompute": {"layers": "some"}}, {"recompute": {"layers": -2}}]
    for wrong in ("many", [8], {"micro_batch": 8}, *({**half["chosen"], **each} for each in wrong_ones)):
        store(asked, replace(kept, chosen=wrong), on_gpu=False)
        assert stored(asked, on_gpu=False) is None, wrong
        assert "micro-batch" not in "".join(planned_lines(asked))
    store(asked, kept, on_gpu=False)
    [said] = [line for line in planned_lines(asked) if "train.micro_batch auto" in line]
    assert "micro-batch 8" in said and said in summary(asked)
    assert cli.main(["plan", "run.yaml", *rows]) == 2
    error = capsys.readouterr().err
    assert 'train.micro_batch = "auto"' in error and "--memory 80GiB" in error


def test_memory_that_runs_out_is_explained(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another error is not; without a plan the command is named, with one its parts and changes."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
    run, cpu = resolve(parse(["run.yaml"], check_paths=False).config, 2), torch.device("cpu")
    assert explain(ValueError("shapes differ"), run, cpu) == ""
    assert "`llmtrain plan RUN.yaml --memory SIZE`" in explain(MemoryError(), run, cpu)
    found = plan(capsys, "--slots 2 --device cpu --memory 3MB", code=1)
    said = explain(MemoryError(), run, cpu)
    assert size(found["peak"]) in said, said
    assert all(change in said and size(peak) in said for change, peak in found["changes"].items()), said


CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
ON_CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory")
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ONLINE = "--objective.name=dpo --objective.reference=online --adapter.r=4 --data.isolate_documents=true"
FEW = "--model.config.vocab_size=64"
ACTIVATIONS, LOGITS = "(activations of", "(logits and loss"  # first in the list of what the phase adds
ENDS = {
    "a long sequence": ("forward", ON_CPU, f"--data.sequence_length=64 {FEW}", {}, ACTIVATIONS),
    "a large micro-batch": ("backward", CUDA, "--train.micro_batch=64", {}, ACTIVATIONS),
    "a large vocabulary": ("forward", CUDA, "--model.config.vocab_size=65536", {}, LOGITS),
    "a later stage": (
        "forward",
        ON_CPU,
        f'--data.stages=[{{"from_step":5,"sequence_length":32}}] {FEW}',
        {},
        ACTIVATIONS,
    ),
    "an evaluation": ("evaluate", ON_CPU, "--model.config.vocab_size=16384", {}, LOGITS),
    "an online reference": ("reference", ON_CPU, ONLINE, {}, LOGITS),
    "offload": ("step", MemoryError(), "", OFFLOAD, ", moments (host) 1.065 MiB"),
    "a save's copy": ("save", OSError(12, "Cannot allocate memory"), "", {}, "(copy for a save (host) 1.597 MiB"),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_contents_of_the_memory_that_ran_out_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The largest that stay between steps, and the largest that the phase adds."""
    phase, error, more, zero, content = ENDS[end]
    monkeypatch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
    write_json(stage=1, **zero)
    plan(capsys, f"--device cpu {more}")
    run = resolve(parse(["run.yaml", *more.split()], check_paths=False).config, 1)
    monkeypatch.setattr(heart, "in_phase", lambda: phase)
    said = explain(error, run, torch.device("cpu"))
    assert f"'{phase}'" in said and content in said, said
    assert "masters" in said, said  # they stay between steps


@pytest.mark.skipif("ema" not in features(), reason="the feature is not here")
def test_tensors_of_a_feature_have_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
    [kind] = plan(capsys, "--device cpu --ema.decay=0.9")["kinds"]
    assert "ema" in kind["rehearsed"]["highest"] and "plan" not in kind["rehearsed"]["highest"]
    run = resolve(parse(["run.yaml", "--ema.decay=0.9"], check_paths=False).config, 1)
    monkeypatch.setattr(heart, "in_phase", lambda: "step")
    said = explain(MemoryError(), run, torch.device("cpu"))
    assert "'step'" in said and "ema 544 KiB" in said, said


@pytest.mark.parametrize("key", ["mlp_tile_tokens 16", "compile_layers true"])
def test_layers_that_are_sliced_or_compiled(folder: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    assert plan(capsys, f"--device cpu --model.{key}")["peak"] <= plan(capsys, "--device cpu")["peak"]


def test_recomputed_layers_of_experts_are_a_number(folder: Path) -> None:
    experts = "model_type: mixtral, num_local_experts: 4, num_experts_per_tok: 2"
    Path("run.yaml").write_text(RUN.replace("model_type: llama", experts))
    run = resolve(parse(["run.yaml", "--model.recompute.layers=auto"], check_paths=False).config, 1)
    with pytest.raises(ConfigError, match="tokens") as refused:
        check_model(run)
    assert refused.value.keys == {"model.recompute.layers"}


def test_room_on_the_host_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No device is named: the host's memory decides the exit code."""
    assert plan(capsys, "--host-memory 1TiB")["fits"] is True


def test_models_without_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A teacher, and maps in 4 bits, from a folder that holds a config.json alone."""
    Path("other").mkdir()
    config = {**parse(["run.yaml"], check_paths=False).config.model.config, "torch_dtype": "bfloat16"}
    Path("other/config.json").write_text(json.dumps(config))
    taught = plan(capsys, "--objective.name distill --objective.teacher other")
    assert taught["peak"] > plan(capsys)["peak"]
    Path("run.yaml").write_text(yaml.safe_dump(yaml.safe_load(RUN) | {"model": {"pretrained": "other"}}))
    packed = plan(capsys, "--adapter.r 4 --adapter.quantize nf4")
    assert packed["peak"] < plan(capsys, "--adapter.r 4")["peak"]


def test_an_error_on_a_rehearsed_rank(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's mistake is told as one; a bug keeps its traceback."""

    def raises(error: Exception) -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        return fail

    monkeypatch.setattr("llmtrain.features.plan.rehearsal.walk", raises(AgreedError("model.x = 1: too much", 2)))
    assert cli.main(["plan", "run.yaml"]) == 2
    assert capsys.readouterr().err == "error: model.x = 1: too much\n"
    monkeypatch.setattr("llmtrain.features.plan.rehearsal.walk", raises(KeyError("x")))
    with pytest.raises(RuntimeError, match="KeyError: 'x'"):
        cli.main(["plan", "run.yaml"])


def test_a_bug_in_a_change_leaves_the_answer(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk_some(examined: Any, *args: Any, **more: Any) -> Any:
        if examined[0].config.model.recompute.layers == "all":
            raise KeyError("x")
        return walk(examined, *args, **more)

    monkeypatch.setattr("llmtrain.features.plan.rehearsal.walk", walk_some)
    assert cli.main(["plan", "run.yaml", "--device", "cpu", "--memory", "3MB"]) == 1
    said = capsys.readouterr()
    assert "model.recompute.layers" in said.err and "KeyError: 'x'" in said.err
    assert "train.micro_batch: 2" in said.out and "layers: all" not in said.out


def test_a_folder_with_another_model_has_no_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
    Path("base").mkdir()
    run = resolve(parse(["run.yaml", "--model.config=null", "--model.pretrained=base"], check_paths=False).config, 1)
    planned = Planned(peak=1, of_rank_0=1, more_at_least=0, more_at_most=0, phases={}, changes={})
    Path("base/config.json").write_text("{}")
    store(run, planned, on_gpu=True)
    assert stored(run, on_gpu=True) is not None
    Path("base/config.json").write_text('{"hidden_size": 8192}')
    assert stored(run, on_gpu=True) is None


@pytest.mark.parametrize(("objective", "uncounted"), [("next_token", 0), ("simpo", 2), ("kto", 2)])
def test_rows_are_full(folder: Path, objective: str, uncounted: int) -> None:
    """All tokens of a window count, but the first of each answer."""
    words = ["run.yaml", f"--objective.name={objective}", *(["--objective.reference=column"] * (objective == "kto"))]
    *_, data = prepared(resolve(parse(words, check_paths=False).config, 1), on_gpu=True)
    rows = data.first
    assert (rows.sequence(0)[1] == IGNORE).sum() == uncounted
