"""The largest presets of the benchmarks on tensors without memory: do the shapes agree, and does the step fit a GPU?

FakeTensorMode knows the shape of each result and computes none, so that a step of 8B takes seconds and no memory. Its
tensors say that they are on a CPU; attention's CPU kernel keeps what a GPU's flash kernel keeps. Bytes are those of the
tensors: what an allocator loses between them is not in here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef

from llmtrain.config.run import AdapterConfig, ModelConfig
from llmtrain.models import loss
from llmtrain.models.parallel import recompute
from llmtrain.models.run import build_for_rank
from llmtrain.models.skeleton import decoder_layers
from llmtrain.models.spec import ModelSpec
from llmtrain.models.structure import projections
from llmtrain.models.transformers_private import OperatorMode, storage_of
from tests.helpers.families import summed_loss
from tests.helpers.launching import REPO
from tests.runs.test_bench import load
from tests.unit.training.test_attention_auto import run_of

pytestmark = pytest.mark.long

GIB = 2**30
H200, H100 = 139 * GIB, 78 * GIB
ZERO_1 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
STATE = 16
"""Bytes a parameter between steps, gradients summed in bf16: weight 2, master 4, moments 8, gradient 2."""
WORKING = 3_000_000_000
"""Bytes that DeepSpeed's buckets take in the backward pass, or the step of a group (6 for each of 5e8 elements)."""


class LiveOnDevice(OperatorMode):
    """Counts the live bytes of storages that are made inside, without those of `others`, their peak, and operators by
    name, but for what a function makes that is not there on a GPU."""

    def __init__(self, others: list[torch.Tensor]) -> None:
        super().__init__()
        self.most = self._now = 0
        self.ran: Counter[str] = Counter()
        self._others = {storage_of(tensor) for tensor in others}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.ran[function.overloadpacket.__name__] += 1
        self.add(made)
        return made

    def uncounted(self, function: Callable[..., Any], *, result: bool) -> Callable[..., Any]:
        """`function`, of which nothing counts, or its `result` only: a compiled kernel, a copy on the host."""

        def run(*args: Any) -> Any:
            self._paused = True
            try:
                made = function(*args)
            finally:
                self._paused = False
            if result:
                self.add(made)
            return made

        return run

    def add(self, made: Any) -> None:
        for tensor in () if self._paused else made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage_of(tensor), storage.nbytes()
                held = self._live.get(key)
                if key in self._others or (held is not None and not held[0].expired()):
                    continue
                self._live[key] = StorageWeakRef(storage), size
                self._now += size - (0 if held is None else held[1])
        if self._now > self.most:  # freed storages are searched only when it matters
            self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
            self._now = sum(size for _, size in self._live.values())
            self.most = max(self.most, self._now)


def step_counted(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    json_keys: dict[str, Any],
    model: ModelConfig,
    tokens: int,
    micro_batch: int = 1,
    *,
    passes: int = 2,
) -> tuple[int, LiveOnDevice]:
    """(parameters, what forward and backward of a micro-batch made beside parameters and gradients)."""
    run = run_of(folder, json_keys, model, isolate=False, length=tokens, micro_batch=micro_batch)
    find = projections.dense_mlps

    def find_really(*args: Any) -> Any:  # it looks at the numbers of a small copy
        with unset_fake_temporarily():
            return find(*args)

    monkeypatch.setattr(projections, "dense_mlps", find_really)
    with FakeTensorMode():
        spec = ModelSpec.of(model)
        module: Any = build_for_rank.build_model(run, spec, torch.device("cpu"), None)  # type: ignore[arg-type]
        parameters = list(module.parameters())
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        inputs = torch.zeros(micro_batch, tokens, dtype=torch.int64)
        mode = LiveOnDevice([*parameters, *(p.grad for p in parameters)])
        monkeypatch.setattr(loss, "_elementwise", lambda device: loss._fused)  # as on CUDA
        monkeypatch.setattr(loss, "adds_in_fp32", lambda kind, dtype: True)
        monkeypatch.setattr(loss, "_compiled", lambda function: mode.uncounted(function, result=True))
        monkeypatch.setattr(recompute, "to_host", mode.uncounted(recompute.to_host, result=False))
        with mode:
            total = summed_loss(module.train(), inputs, inputs)
            total.backward()
    assert total.shape == () and total.dtype == torch.float32
    assert all(p.dtype == torch.bfloat16 for p in parameters)
    kernels = {name: count for name, count in mode.ran.items() if "scaled_dot_product" in name}
    layers = len(decoder_layers(module.hf))
    assert set(kernels) == {f"_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward")}, kernels
    assert kernels["_scaled_dot_product_flash_attention_for_cpu"] == passes * layers  # the recomputed ones among them
    return sum(p.numel() for p in parameters), mode


@pytest.mark.parametrize("name", ["0.5b", "1.2b", "8b"])
def test_the_benchmark_knows_what_each_contestant_needs(monkeypatch, tmp_path, name):
    """`make gpu-check` plans with these needs (train_speed.arrange). Peers make whole logits; llmtrain is counted
    without compiled layers, which need less."""
    bench = load("train_speed")
    preset = bench.PRESETS[name]
    keys = {**ZERO_1, **({"activation_checkpointing": {}} if preset.recompute else {})}
    model, passes = ModelConfig(config=preset.model), 1 + preset.recompute
    parameters, ours = step_counted(
        monkeypatch, tmp_path, keys, model, preset.sequence, preset.micro_batch, passes=passes
    )
    made = {"llmtrain": ours.most + WORKING}
    for peer, dtype, working in (("plain", torch.float32, 0), ("trainer", torch.bfloat16, WORKING)):
        if peer in preset.needs:
            made[peer] = peers_step(preset, dtype) + working
    for contestant, need in preset.needs.items():
        if contestant == "llmtrain lora":
            continue
        print(f"{name} {contestant}: {made[contestant] / GIB:.1f} GiB")
        assert abs(need.held - STATE * parameters / GIB) < 0.1
        assert abs(need.made / (made[contestant] / GIB) - 1) < 0.03, contestant


@pytest.mark.parametrize("name", ["1.2b", "8b"])
def test_the_benchmark_knows_what_lora_needs(tmp_path, name):
    """Weights in bf16 between its rounds, and a step without the head's gradient: 8B with 2 rows fits an H100."""
    bench, tuners = load("train_speed"), load("tuners")
    preset, adapter = bench.PRESETS[name], AdapterConfig(**tuners.ADAPTER)
    model = ModelConfig(config=preset.model, attention="varlen")
    run = run_of(tmp_path, ZERO_1, model, length=preset.sequence, micro_batch=preset.micro_batch, adapter=adapter)
    spec, need = ModelSpec.of(model, adapter), preset.needs["llmtrain lora"]
    module: Any = build_for_rank.build_model(run, spec, torch.device("meta"), None).train()  # type: ignore[arg-type]
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        for parameter in module.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        inputs = torch.zeros(preset.micro_batch, preset.sequence, dtype=torch.int64)
        grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        with LiveOnDevice([*module.parameters(), *grads]) as made:
            module(inputs, lambda head, hidden: head.nll_sum(hidden, inputs), torch.zeros_like(inputs)).backward()
    held = (2 * spec.facts.parameters + STATE * spec.facts.trained) / GIB
    print(f"{name}: {held:.1f} and {made.most / GIB:.1f} GiB")
    assert abs(need.held - held) < 0.1 and abs(need.made / (made.most / GIB) - 1) < 0.03
    words = ["--only", "lora", "--preset", name, "--batch", "2", "--contestants", "llmtrain-lora"]
    posttraining = load("posttraining")
    assert posttraining.what_fits(posttraining.arguments(words), ("llmtrain lora",), 78)[0] == 2


def test_the_peer_of_packed_rows_fits_an_h100_at_the_longest_rows():
    """TRL pads rows of 4,096 tokens, --at-once of them, and makes whole logits: 8 rows of 16,384 fit no GPU."""
    line = re.search(r"^packing=.* --at-once (\d+)( --recompute)?", (REPO / "tools/gpu_check.sh").read_text(), re.M)
    assert line is not None and line[2]
    preset = load("train_speed").PRESETS["1.2b"]
    made = peers_step(replace(preset, micro_batch=int(line[1])), torch.bfloat16, recompute=True)
    logits = int(line[1]) * preset.sequence * preset.model["vocab_size"] * 4  # its own figures take a copy in fp32
    need = preset.needs["trainer"].held + (made + logits + WORKING) / GIB
    print(f"packing: {need:.1f} GiB")
    assert need < 0.95 * H100 / GIB


def peers_step(preset: Any, dtype: torch.dtype, *, recompute: bool = False) -> int:
    """Bytes that a micro-batch makes in transformers' model with its own loss, as contestants.py has it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(preset.model)
    with FakeTensorMode():
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        config.use_cache = False
        module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        if recompute:
            module.gradient_checkpointing_enable({"preserve_rng_state": False})  # there is none to be kept
        parameters = list(module.parameters())
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        ids = torch.zeros(preset.micro_batch, preset.sequence, dtype=torch.int64)
        mode = LiveOnDevice([*parameters, *(p.grad for p in parameters)])
        with mode:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                loss = module(input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=100).loss
            loss.backward()
    return mode.most


def test_the_long_rows_of_8b_fit_one_gpu(monkeypatch, tmp_path, record_property):
    """`make gpu-check`, part context-8b: the layers' inputs on the host, MLPs in tiles.

    So one layer needs as much at one time as all: 2 were counted, too, with the same 9.79 GiB.
    """
    words = re.search(r"context-8b\).*--tokens (\d+)", (REPO / "tools/gpu_check.sh").read_text())
    assert words is not None
    bench, tokens = load("long_context"), int(words[1])
    file = Path(bench.json_for(bench.arguments([]), True, tmp_path))
    tree = json.loads(file.read_text())
    assert "data_types" not in tree
    tree["zero_optimization"] = {"stage": 1}  # 3 gathers what this rank has anyway, 2 GB of it at a time (WORKING)
    parameters = ModelSpec.of(ModelConfig(config=bench.PRESETS["8b"])).facts.parameters
    config = {**bench.PRESETS["8b"], "max_position_embeddings": tokens, "num_hidden_layers": 1}
    model = ModelConfig(config=config, mlp_tile_tokens=4096, loss_chunk_tokens=2048)
    _, made = step_counted(monkeypatch, tmp_path, tree, model, tokens)
    need = STATE * parameters + WORKING + made.most
    record_property("GiB", (made.most / GIB, need / GIB))
    print(f"8b, {tokens:,} tokens: activations {made.most / GIB:.2f} GiB, together {need / GIB:.1f} GiB")
    assert need < 0.97 * H200  # the allocator loses some


LLAMA_3: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
RECIPES: dict[str, tuple[dict[str, Any], float, int]] = {
    "llama_1b": ({}, 6 + 12 / 8, 0),
    "sft_8b": ({**LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32}, 18 / 8, 2),
    "lora_70b": ({**LLAMA_3, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                  "num_attention_heads": 64}, 2 / 8, 2),
}  # fmt: skip
"""Of a model whose recipe names none its shape; bytes a parameter on one of 8 GPUs (ds_configs/README.md); gathered
layers at a time."""


@pytest.mark.parametrize("name", ["llama_1b", "lora_70b"])
def test_a_recipe_uses_the_memory_of_its_gpus(monkeypatch, tmp_path, name):
    """Its micro-batch takes about half of an H100 at least, and leaves something to CUDA, NCCL and the allocator. As in
    a run, but for attention's kernel and uncompiled; an adapter's maps are counted as if their own gradients were made.
    """
    tree = yaml.safe_load((REPO / f"launch/recipes/{name}.yaml").read_text())
    shape, state, gathered = RECIPES[name]
    keys = {**ZERO_1, **({"activation_checkpointing": {}} if gathered else {})}
    model, tokens = ModelConfig(config=shape or tree["model"]["config"]), tree["data"]["sequence_length"]
    rows, passes = tree["train"]["micro_batch"], 2 if gathered else 1
    parameters, made = step_counted(monkeypatch, tmp_path, keys, model, tokens, rows, passes=passes)
    layer = parameters / (shape or tree["model"]["config"])["num_hidden_layers"]
    need = state * parameters + gathered * 2 * layer + WORKING + made.most
    print(f"{name}: {rows} x {tokens}: {need / GIB:.1f} GiB")
    said = (REPO / f"launch/recipes/{name}.yaml").read_text()
    assert f"{need / GIB:.0f} GiB of an H100's 78" in said
    assert 0.45 * H100 < need < 0.93 * H100
