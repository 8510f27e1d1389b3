"""Adapters on real ranks: plain PyTorch with LoRA and DoRA written from their definitions is the measure.

More than 20 CPU s: each form trains, and the first one starts the pool of ranks.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from llmtrain.checkpoint.format import Manifest, frozen_source
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.proofs import ProofError, Report
from llmtrain.config.run import AdapterConfig, ModelConfig
from llmtrain.engine.weights import prove_weights
from llmtrain.models.adapter import lora_config, other_maps, plain_name, scale, target_paths
from llmtrain.models.parameters import PREFIX
from llmtrain.models.spec import ModelSpec
from llmtrain.optim.optimizers import PARAM
from tests.helpers.adapters import plain_adapted
from tests.helpers.checkpoints import trainer_state
from tests.helpers.families import FAMILIES, FROZEN, LOW_RANK
from tests.helpers.ranks import RankFailed
from tests.helpers.training import (
    LLAMA,
    Case,
    Trace,
    assembled,
    assert_agrees,
    largest_difference,
    make_engine,
    plain_model,
    plain_pytorch,
    resolved_run,
    resume_from,
    save_checkpoint,
    train_steps,
)

pytestmark = pytest.mark.needs("peft")

LORA: dict[str, Any] = {"r": 4, "alpha": 16.0}
DORA: dict[str, Any] = {"r": 4, "alpha": 8.0, "dora": True, "targets": ["*.q_proj", "*.down_proj"]}
LR = 3e-3


def written(
    folder: Path, model: dict[str, Any], dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB"
) -> str:
    """The folder of a new model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(2)
    fields = dict(model)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return str(folder)


def same(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> bool:
    return all(torch.equal(a[kind][name].nan_to_num(9), b[kind][name].nan_to_num(9)) for kind in a for name in a[kind])


@functools.cache
def reference(data: str, kind: str) -> Trace:
    case = Case(data=data, model=MODELS.get(kind, LLAMA), adapter=KINDS[kind], lr=LR)
    trace = plain_pytorch(case, model=(model := plain_adapted(case)))
    trace.parameters |= {name: value for name, value in model.named_buffers() if name.endswith(ROUTING)}
    return trace


ROUTING = "e_score_correction_bias"
"""A buffer of a router, which no training here changes."""
TIED = {**LLAMA, "tie_word_embeddings": True}
KINDS = {"lora": LORA, "tied": LORA | {"modules_to_save": ["lm_head"]}, "experts": LORA, "routed": LORA}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {"tied": TIED, "experts": MIXTRAL, "routed": FROZEN["deepseek_v3"]}
"""Of the last, the dense layer and the shared experts have maps of the names that the experts' once had."""


def trained(case: Case) -> tuple[Trace, set[str]]:
    """A training; names of which this rank keeps state of the optimizer."""
    engine, ranks = make_engine(case)
    before = assembled(engine, ranks)
    trace = train_steps(case, engine, ranks, 0, case.steps)
    stepped = {piece.name for piece in engine.state() if piece.kind != PARAM}
    trace.parameters = assembled(engine, ranks)
    spec = ModelSpec.of(resolved_run(case, ranks.world_size).config.model, AdapterConfig(**case.adapter))
    assert all(torch.equal(before[name], trace.parameters[name]) for name in spec.frozen)
    engine.close()
    return trace, stepped


BESIDE = {"tied": ("embed_tokens",)}
"""Ends of the names of modules that train whole."""
APART = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 1,
    "stage3_max_reuse_distance": 1,
}
"""Parameters of a small model would all stay gathered."""
FORMS: list[tuple[str, int, dict[str, Any]]] = [
    ("lora", 2, {"stage": 3, "extra": {"zero_optimization": APART, "activation_checkpointing": {}}}),
    ("tied", 2, {"stage": 1, "pipeline": 2, "accumulation": 2}),
    ("routed", 2, {"stage": 2}),
]


@pytest.mark.parametrize(("kind", "ranks", "form"), FORMS, ids=str)
def test_every_form_agrees_with_the_definition_in_plain_pytorch(pools, small_data, kind, ranks, form):
    want = reference(small_data, kind)
    case = Case(data=small_data, model=MODELS.get(kind, LLAMA), adapter=KINDS[kind], lr=LR, **form)
    outcomes = pools(ranks).run(trained, case)
    got, _ = outcomes[0]
    assert_agrees(got, want, loss=2e-6, norm=1e-5)
    assert largest_difference(got.parameters, want.parameters) < 1e-5
    adapter = {name for name in want.parameters if ".lora_" in name}
    beside = {name for name in want.parameters if name.removesuffix(".weight").endswith(BESIDE.get(kind, ()))}
    assert set().union(*(stepped for _, stepped in outcomes)) == adapter | beside
    assert all(bool(got.parameters[name].any()) for name in adapter), "a lora_B has not moved"


def trained_as_on_a_gpu(case: Case) -> tuple[Trace, set[str], int]:
    """`trained`, and how many layers share their input, which they do on a GPU only."""
    from llmtrain.models import adapter
    from llmtrain.models.lora import ScaledFirst

    put_around, layers = adapter.put_around, list[Any]()

    def sharing(*args: Any, **options: Any) -> list[Any]:
        layers.extend(made := put_around(*args, **{**options, "shares_inputs": True}))
        return made

    with patch.object(adapter, "put_around", sharing):
        trace, stepped = trained(case)
    return trace, stepped, sum(isinstance(layer, ScaledFirst) and layer.shared is not None for layer in layers)


@pytest.mark.parametrize(
    "form", [{"stage": 2, "accumulation": 2}, {"stage": 1, "recompute": {"layers": "all"}}], ids=str
)
def test_layers_that_share_their_input_agree_with_the_definition(pools, small_data, form):
    want = reference(small_data, "lora")
    got, stepped, shared = pools(2).run(trained_as_on_a_gpu, Case(data=small_data, adapter=LORA, lr=LR, **form))[0]
    assert_agrees(got, want, loss=2e-6, norm=1e-5)
    assert largest_difference(got.parameters, want.parameters) < 1e-5
    assert shared == 5 * LLAMA["num_hidden_layers"]  # q, k and v, gate and up
    assert stepped <= {name for name in want.parameters if ".lora_" in name}


def test_a_stage_without_a_target_is_refused_by_name(pools, small_data):
    case = Case(data=small_data, adapter=LORA | {"targets": ["model.layers.0.*"]}, stage=1, pipeline=2, accumulation=2)
    with pytest.raises(RankFailed, match=r"(?s)adapter.targets.*pipeline.stages 2"):
        pools(2).run(make_engine, case)


def test_the_steps_are_those_of_peft_in_a_plain_loop(pools, small_data, tmp_path):
    """From a folder that peft has written, with a B that is not zero."""
    from peft import LoraConfig, get_peft_model

    case = Case(data=small_data, adapter=DORA, lr=LR, stage=2)
    config = LoraConfig(
        r=DORA["r"],
        lora_alpha=DORA["alpha"],
        use_dora=True,
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        target_modules=["q_proj", "down_proj"],
    )
    torch.manual_seed(3)
    model = get_peft_model(plain_model(case), config)
    model.save_pretrained(tmp_path / "peft")
    want = plain_pytorch(case, model=model)
    got, _ = pools(2).run(trained, replace(case, adapter=DORA | {"start": str(tmp_path / "peft")}))[0]
    assert max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) < 1e-5
    adapter = {
        plain_name(name.removeprefix(PREFIX)): value for name, value in want.parameters.items() if ".lora_" in name
    }
    assert adapter.keys() == {name for name in got.parameters if ".lora_" in name}
    assert largest_difference({name: got.parameters[name] for name in adapter}, adapter) < 1e-5


def state_of(engine: Any, ranks: Any) -> dict[str, dict[str, Tensor]]:
    """All values by kind and name; of what has no moments NaN."""
    return {kind: assembled(engine, ranks, kind) for kind in (PARAM, "exp_avg", "exp_avg_sq")}


def saved(case: Case, folder: str) -> dict[str, dict[str, Tensor]]:
    """Some steps from a folder of weights, and a checkpoint as a run saves it."""
    engine, ranks = make_engine(case)
    run = resolved_run(case, ranks.world_size)
    spec = ModelSpec.of(run.config.model, run.config.adapter)
    source: Any = spec.initial_weights(0, torch.device("cpu"))
    left_out = frozen_source(getattr(source, "base", source), spec.frozen, prove_weights(engine, source, ranks))
    train_steps(case, engine, ranks, 0, 3)
    trainer = trainer_state(3) | {"run": asdict(run.config), "model_config": spec.config.to_dict()}
    save_checkpoint(engine, Path(folder) / "checkpoints", 3, trainer, run, ranks, left_out)
    state = state_of(engine, ranks)
    engine.close()
    return state


def resumed(case: Case, folder: str) -> dict[str, dict[str, Tensor]]:
    """The state after a resume into an engine with other values."""
    engine, ranks = make_engine(case)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.data.add_(1.0)
    config = resolved_run(case, ranks.world_size).config
    now = trainer_state(3) | {"run": asdict(config), "model_config": engine.module.config.to_dict()}
    assert resume_from(engine, config, folder, now, ranks) is not None
    state = state_of(engine, ranks)
    engine.close()
    return state


RESUMED: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "lora": [(2, {"stage": 1, "pipeline": 2}), (2, {"stage": 2, "tensor": 2})],
    "tied": [(2, {"stage": 1, "pipeline": 2})],
    "routed": [(2, {"stage": 3})],
    "experts": [(1, {"stage": 0, "expert": 1}), (2, {"stage": 3})],
}
"""test_cells.py resumes each kind in other forms, too."""


@pytest.mark.parametrize(("kind", "stage"), [("lora", 3), ("tied", 3), ("experts", 1), ("routed", 2)])
def test_a_checkpoint_holds_the_adapter_alone_and_goes_through_every_form_and_to_peft(
    pools, small_data, tmp_path, kind, stage
):
    base = written(tmp_path / "hf", MODELS.get(kind, LLAMA))
    model = MODELS.get(kind, LLAMA)
    expert = 2 if kind == "experts" else 1
    case = Case(data=small_data, model=model, pretrained=base, adapter=KINDS[kind], lr=LR, stage=stage, expert=expert)
    want = pools(2).run(saved, case, str(tmp_path / "run"))[0]
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    manifest = Manifest.read(path)
    adapter = {name for name in want[PARAM] if ".lora_" in name}
    adapter |= {name for name in want[PARAM] if name.removesuffix(".weight").endswith(BESIDE.get(kind, ()))}
    adapter |= {name for name in want[PARAM] if name.endswith(ROUTING)}
    assert {piece.name for entry in manifest.files.values() for piece in entry.pieces} == adapter
    assert manifest.frozen.parts.keys() == want[PARAM].keys() - adapter
    for ranks, form in RESUMED[kind]:
        assert same(pools(ranks).run(resumed, replace(case, **form), str(tmp_path / "run"))[0], want), form
    scaled = replace(case, adapter={**case.adapter, "alpha": 2.0})
    with pytest.raises(RankFailed, match=r"adapter.alpha: (16|8)\.0 -> 2\.0 in this run"):
        pools(2).run(resumed, scaled, str(tmp_path / "run"))
    is_what_peft_loads(path, tmp_path, base, replace(case, expert=1), want[PARAM])


def is_what_peft_loads(path: Path, out: Path, base: str, case: Case, values: dict[str, Tensor]) -> None:
    """As a PEFT folder and merged, beside the definition with the same values."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    plain = plain_adapted(case)
    tied = case.model.get("tie_word_embeddings")
    plain.load_state_dict(values | ({"lm_head.weight": values["model.embed_tokens.weight"]} if tied else {}))
    tokens = torch.arange(40).view(2, 20) * 7 % 512
    with torch.no_grad():
        want = plain(tokens).logits
        assert proved(export_hf(path, out / "peft"), "adapter") < 1e-5
        model = PeftModel.from_pretrained(load(base), str(out / "peft"))
        assert sum(".lora_" in name for name, _ in model.named_parameters()) == sum(".lora_" in name for name in values)
        assert float((model(tokens).logits - want).abs().max()) < 1e-5
        (theirs := load(base)).load_adapter(str(out / "peft"))
        assert float((theirs(tokens).logits - want).abs().max()) < 1e-5, "as transformers loads it"
        united = model.merge_and_unload()
        assert float((united(tokens).logits - want).abs().max()) < 1e-5
        assert (united.lm_head.weight is united.model.embed_tokens.weight) == bool(tied)
        again = ModelSpec.of(ModelConfig(pretrained=base), AdapterConfig(**case.adapter, start=str(out / "peft")))
        begun = again.initial_weights(1, torch.device("cpu"))
        assert all(torch.equal(begun.read(name, 0, v.numel()).float(), v.view(-1)) for name, v in values.items())
        assert float((load(base)(tokens).logits - want).abs().max()) > 1e-3, "the adapter does nothing"
        assert proved(export_hf(path, out / "merged", merge=True), "adapter") < 1e-5
        assert float((load(str(out / "merged"))(tokens).logits - want).abs().max()) < 1e-5
    for merge in (False, True):  # what the export believes of the scale is not what peft computes with
        other = patch("llmtrain.models.adapter.scale", lambda adapter: 0.9 * scale(adapter))
        with other, pytest.raises(ProofError, match="peft's layers"):
            export_hf(path, out / "wrong", merge=merge)
    assert not (out / "wrong").exists()


def proved(report: Report, what: str) -> float:
    """The difference of logits that an export tells."""
    (line,) = [line for line in report.lines if line.startswith(what)]
    return float(line.split()[-1])


def test_a_bf16_base_is_merged_in_fp32_and_rounded_once(pools, small_data, tmp_path):
    from safetensors.torch import load_file

    base = written(tmp_path / "hf", LLAMA, torch.bfloat16)
    case = Case(data=small_data, pretrained=base, adapter=LORA, lr=LR, stage=2, precision="bf16")
    state = pools(2).run(saved, case, str(tmp_path / "run"))[0][PARAM]
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    export_hf(path, tmp_path / "merged", merge=True)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, value in merged.items():
        exact, adapter = state[name], f"{name.removesuffix('.weight')}.lora_"
        if adapter + "A.weight" in state:
            exact = exact + 4.0 * (state[adapter + "B.weight"] @ state[adapter + "A.weight"])
        assert value.dtype == torch.bfloat16 and torch.equal(value, exact.bfloat16()), name


def test_masters_of_an_adapter_move_by_less_than_bf16_can_tell(pools, small_data):
    """At a rate of 1e-6 five steps change a value by 5e-6 at most: one near 0.1 in bf16 would stay for ever."""
    case = Case(data=small_data, adapter=KINDS["lora"], lr=1e-6, stage=2, precision="bf16")
    begin = {name: p.detach() for name, p in plain_adapted(case).named_parameters() if ".lora_" in name}
    got, _ = pools(2).run(trained, case)[0]
    for name, value in begin.items():
        moved = (got.parameters[name] - value).abs()
        assert 0 < float(moved.max()) < 1.2e-5, name
        if not name.endswith("lora_B.weight"):  # those begin at 0, where any value can be told
            assert float((moved > 0).float().mean()) > 0.5, name
            assert float(((value + moved).bfloat16() == value.bfloat16()).float().mean()) > 0.9, "bf16 tells it"


def test_the_first_a_is_as_peft_has_it_and_of_the_seed_and_its_name():
    spec = ModelSpec.of(ModelConfig(config=dict(LLAMA)), AdapterConfig(r=8))
    one, other = (spec.initial_weights(seed, torch.device("cpu")) for seed in (0, 1))
    name = "model.layers.1.mlp.down_proj.lora_A.weight"
    r, inputs = one.shape(name)
    values = one.read(name, 0, r * inputs)
    bound = 1 / math.sqrt(inputs)
    assert r == 8 and 0.95 * bound < float(values.abs().max()) <= bound
    assert torch.equal(values[5:9], one.read(name, 5, 9)) and not torch.equal(values, other.read(name, 0, r * inputs))
    assert not torch.equal(values, one.read(name.replace("1", "2"), 0, r * inputs))


ROUTED = {name: FAMILIES[name] for name in ("mixtral", "qwen3_moe")} | FROZEN | {"deepseek_v2": LOW_RANK}
ROUTED |= {"olmoe": {**MIXTRAL, "model_type": "olmoe", "num_experts": 4}}
ROUTED |= {"qwen2_moe": {**FAMILIES["qwen3_moe"], "model_type": "qwen2_moe"}}


@pytest.mark.parametrize("family", ROUTED)
def test_each_linear_map_beside_experts_in_one_tensor_has_an_adapter_and_in_peft_the_same(family):
    """peft 0.21 takes gate_proj, up_proj and down_proj of most of these for the experts, also by a full path."""
    from peft import inject_adapter_in_model

    adapter = AdapterConfig(**LORA)
    spec = ModelSpec.of(ModelConfig(config=dict(ROUTED[family])), adapter)
    paths = target_paths(spec.skeleton, adapter)
    assert other_maps(spec.skeleton) and not any(path in other_maps(spec.skeleton) for path in paths)
    names = {f"{path}.lora_{part}.weight" for path in paths for part in "AB"}
    assert {name for name in spec.shapes if ".lora_" in name} == names
    config = lora_config(spec.skeleton, adapter, paths)
    theirs = inject_adapter_in_model(config, copy.deepcopy(spec.skeleton), low_cpu_mem_usage=True)
    assert {plain_name(name) for name, _ in theirs.named_parameters() if ".lora_" in name} == names


def gathered(case: Case) -> tuple[list[float], list[int]]:
    """Losses; the messages in which ZeRO 3 gathers parameters in each micro-batch after the first step."""
    from deepspeed.runtime.zero import partition_parameters

    engine, ranks = make_engine(case)
    sent, before, plain = [0], list[int](), engine.micro_step

    def gather(*given: Any, **named: Any) -> Any:
        sent[0] += 1
        return gather_one(*given, **named)

    def micro_step(*given: Any) -> Any:
        before.append(sent[0])
        result = plain(*given)
        before[-1] = sent[0] - before[-1]
        return result

    gather_one = partition_parameters._dist_allgather_fn
    engine.micro_step = micro_step
    with patch.object(partition_parameters, "_dist_allgather_fn", gather):
        trace = train_steps(case, engine, ranks, 0, case.steps)
    engine.close()
    return trace.losses, before[case.accumulation :]


WIDE = {**LLAMA, "hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8}


def test_an_adapter_stays_whole_under_zero_3(pools, small_data):
    """DeepSpeed's threshold, 100,000 elements, shares each of these matrices of 128 x 1,024: a message for each use."""
    zero = {
        "stage": 3,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
    attention = {"r": 128, "alpha": 128.0, "targets": ["*_proj"]}
    case = Case(
        data=small_data,
        model=WIDE,
        adapter=attention,
        lr=LR,
        stage=3,
        steps=2,
        accumulation=2,
        extra={"zero_optimization": zero, "activation_checkpointing": {}},
    )
    shared = {**case.extra, "zero_optimization": {**zero, "stage3_param_persistence_threshold": 100_000}}
    (losses, whole), (same, apart) = (pools(2).run(gathered, each)[0] for each in (case, replace(case, extra=shared)))
    maps = 4  # of attention; those of the MLP are narrow here, and their adapters stay whole on both sides
    # A and B of each in the forward, the recomputed and the backward pass; some find those of the pass before.
    assert losses == pytest.approx(same, abs=1e-6)
    assert all(a - w >= 2 * 2 * maps for w, a in zip(whole, apart, strict=True)), (whole, apart)
