"""Training on CUDA against plain PyTorch on the CPU in fp32: every ZeRO stage, precision, offload, compiled layers.

Tolerances of the loss (about 6 nats): fp32 1e-4, as CPU and GPU sum in another order and 20 steps amplify it;
bf16 2e-2: 8 bits of mantissa in the weights and activations of the forward pass, of which the mean over 200 tokens
keeps far less (measured on a CPU: 1e-3).
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from llmtrain.engine.deepspeed.state import base_optimizer
from llmtrain.models import compiler, varlen
from llmtrain.models.head import Head
from llmtrain.models.loss import About, HeadForm, chunked_nll_sums
from tests.helpers.compiled import graphs_of
from tests.helpers.training import LLAMA, Case, Trace, make_engine, plain_pytorch, run_case, train_steps

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
STEPS = 20


@functools.cache
def reference(data: str) -> Trace:
    return plain_pytorch(Case(data=data, steps=STEPS))


def largest_loss_difference(got: Trace, data: str) -> float:
    return max(abs(a - b) for a, b in zip(got.losses, reference(data).losses, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loss_agrees_with_plain_pytorch(pools, small_data, stage, precision):
    case = Case(data=small_data, stage=stage, precision=precision, accumulation=3, steps=STEPS)
    (got,) = pools(1).run(run_case, case)
    assert largest_loss_difference(got, small_data) < TOLERANCE[precision]
    assert got.losses[-1] < got.losses[0] - 0.05


@pytest.mark.parametrize("stage", [1, 2])
def test_the_shipped_overlapping_buckets_agree(pools, small_data, stage):
    """overlap_comm reduces on a stream of its own: a missing wait would show as another loss."""
    section = {
        "stage": stage,
        "overlap_comm": True,
        "use_multi_rank_bucket_allreduce": False,
        "reduce_bucket_size": 20000,
        "allgather_bucket_size": 20000,
    }
    case = Case(
        data=small_data,
        stage=stage,
        precision="bf16",
        accumulation=3,
        steps=STEPS,
        extra={"zero_optimization": section},
    )
    (got,) = pools(1).run(run_case, case)
    assert largest_loss_difference(got, small_data) < TOLERANCE["bf16"]


@pytest.mark.parametrize(("stage", "offload"), [(2, "optimizer"), (3, "all")])
def test_offload_agrees(pools, small_data, stage, offload):
    case = Case(data=small_data, stage=stage, precision="bf16", offload=offload, steps=STEPS)
    name, got = pools(1).run(run_named, case)[0]
    assert largest_loss_difference(got, small_data) < TOLERANCE["bf16"]
    if name != "DeepSpeedCPUAdam":
        pytest.skip("the losses agree, but with torch's AdamW on the CPU: CPUAdam cannot be built on this machine")


def run_named(case: Case) -> tuple[str, Trace]:
    """(class of the optimizer that does the work, trace)."""
    engine, ranks = make_engine(case)
    name = type(base_optimizer(engine.deepspeed)).__name__
    trace = train_steps(case, engine, ranks, 0, case.steps)
    engine.close()
    return name, trace


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_compiled_layers_agree(pools, small_data, stage):
    case = Case(data=small_data, stage=stage, precision="bf16", steps=STEPS, compile_layers=True)
    frames, got = pools(1).run(run_compiled, case)[0]
    assert frames > 0, "nothing was compiled"
    assert largest_loss_difference(got, small_data) < TOLERANCE["bf16"]


@pytest.mark.needs("torchao")
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_fp8_agrees(pools, small_data, recipe, compiled):
    """Twice bf16's tolerance: on a CPU, which emulates it, fp8 adds as much to a loss as bf16 does, and 1e-3 more."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    case = Case(data=small_data, stage=3, precision="bf16", steps=STEPS, fp8=recipe, compile_layers=compiled)
    (got,) = pools(1).run(run_case, case)
    assert largest_loss_difference(got, small_data) < 2 * TOLERANCE["bf16"]
    assert got.losses[-1] < got.losses[0] - 0.05


def run_compiled(case: Case) -> tuple[int, Trace]:
    """(frames that torch.compile compiled, trace)."""
    import torch._dynamo.utils

    torch._dynamo.reset()  # another test of this process may have compiled the same layers
    torch._dynamo.utils.counters.clear()
    trace = run_case(case)
    return torch._dynamo.utils.counters["frames"]["ok"], trace


def test_layers_are_compiled_by_default(pools, small_data, cuda):
    case = Case(data=small_data, stage=1, precision="bf16", compile_layers=None)
    (graphs,) = pools(1).run(graphs_of, case)
    assert graphs == [(True, []), (False, [])], "one for training, one for evaluation, of fixed sizes"


@pytest.mark.parametrize("stage", [1, 2])
def test_muon_is_the_same_compiled_or_not(pools, small_data, cuda, stage):
    """1.5e-3: bf16's rounding, as between Newton-Schulz iterations in fp16 and in fp32 (tests/ranks/test_forms.py)."""
    case = Case(data=small_data, stage=stage, precision="bf16", optimizer="muon", steps=STEPS)
    compiled, plain = pools(1).run(muon_both_ways, case)[0]
    assert compiled.losses[-1] < compiled.losses[0] - 0.2
    assert max(abs(a - b) for a, b in zip(compiled.losses, plain.losses, strict=True)) < 1.5e-3


def muon_both_ways(case: Case) -> tuple[Trace, Trace]:
    """Through torch.compile, and as on a machine without a compiler."""

    def is_compiled() -> bool:
        from deepspeed.runtime.zero.muon import original_muon  # an engine may import it anew

        return hasattr(original_muon.muon_update, "_torchdynamo_orig_callable")

    compiled = run_case(case)
    assert is_compiled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_answers", {"cuda": "a test"})
        plain = run_case(case)
    assert not is_compiled()
    return compiled, plain


def test_grouped_experts_are_the_loop_over_experts(cuda):
    """What AutoEP takes in bf16 (torch's grouped product, a Triton kernel) against one product an expert."""
    from deepspeed.moe.ep_experts import GroupedExperts

    torch.manual_seed(0)
    counts = torch.tensor([16, 0, 40, 8], device="cuda")
    tokens = torch.randn(int(counts.sum()), 64, device="cuda", dtype=torch.bfloat16)
    results = []
    for grouped in (True, False):
        experts = GroupedExperts(64, 96, 4, use_grouped_mm=grouped).to("cuda", torch.bfloat16)
        with torch.no_grad():
            for seed, parameter in enumerate(experts.parameters()):
                parameter.normal_(std=0.1, generator=torch.Generator("cuda").manual_seed(seed))
        given = tokens.clone().requires_grad_()
        out = experts(given, counts)
        out.float().square().sum().backward()
        results.append([out.detach(), given.grad, *(p.grad for p in experts.parameters())])
    for a, b in zip(*results, strict=True):
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 2e-2  # bf16: 8 bits, four roundings


def test_one_fused_kernel_updates_the_parameters(pools, small_data):
    ops = pools(1).run(ops_of_a_step, Case(data=small_data, stage=1, precision="bf16"))[0]
    assert "aten::_fused_adamw_" in ops
    assert not any("foreach" in op and "addcdiv" in op for op in ops)


@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
def test_cudnn_attention_on_hopper_but_not_with_masks(pools, small_data, cuda, documents):
    if torch.cuda.get_device_capability()[0] != 9 or (torch.backends.cudnn.version() or 0) <= 91501:
        pytest.skip("torch takes cuDNN's attention first on Hopper, from cuDNN 9.15.2 on")
    model = {**LLAMA, "hidden_size": 256, "num_attention_heads": 4}  # heads of 64, as real models have
    case = Case(data=small_data, stage=1, precision="bf16", model=model, isolate_documents=documents)
    ops = pools(1).run(ops_of_a_step, case)[0]
    attention = {op for op in ops if "attention" in op}
    assert ("aten::_scaled_dot_product_cudnn_attention" in attention) is not documents, attention


def test_isolated_documents_go_without_a_mask_unasked(pools, small_data, cuda):
    case = Case(data=small_data, stage=1, precision="bf16", isolate_documents=True, attention="auto")
    attention = {op for op in pools(1).run(ops_of_a_step, case)[0] if "attention" in op or "documents" in op}
    assert "llmtrain::within_documents" in attention and not any("dot_product" in op for op in attention), attention


def ops_of_a_step(case: Case) -> set[str]:
    """Names of the operators of one optimizer step."""
    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, 2)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train_steps(case, engine, ranks, 2, 3)
    engine.close()
    return {event.key for event in profiled.key_averages()}


def test_varlen_attention_computes_what_a_mask_would(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    query, key, value = (torch.randn(300, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    documents = varlen.Documents.of(torch.cat([torch.arange(n) for n in (120, 1, 179)])[None], device)
    upstream = torch.randn_like(query)
    for window in (None, 50):
        results = []
        for dtype, kernels in (
            (torch.float32, (varlen._one_by_one, varlen._one_by_one_backward)),
            (torch.bfloat16, (varlen._flash, varlen._flash_backward)),
        ):
            monkeypatch.setattr(varlen, "_kernels", lambda device, kernels=kernels: kernels)
            given = [each.to(dtype).requires_grad_() for each in (query, key, value)]
            out, _ = varlen.within_documents(*given, documents.bounds, documents.sizes, 0.125, window)
            results.append([out, *torch.autograd.grad(out, given, upstream.to(dtype))])
        for got, want in zip(*results, strict=True):
            assert float((got.float() - want).norm() / want.norm()) < 2e-2, window  # bf16


@pytest.mark.parametrize("known", [False, True], ids=["all tokens", "those that count"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunked_loss_is_the_one_of_transformers(dtype: torch.dtype, known: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    hidden = torch.randn(2, 50, 64, device=device, dtype=dtype, requires_grad=True)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=500,
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        initializer_range=0.3,
    )
    hf = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    weight = hf.get_output_embeddings().weight
    labels = torch.randint(0, 500, (2, 50), device=device)
    labels[:, ::2] = -100
    counted = int((labels >= 0).sum())

    logits = torch.nn.functional.linear(hidden, weight)
    want = ForCausalLMLoss(logits, labels, 500, num_items_in_batch=torch.tensor(counted), shift_labels=labels)
    want_grads = torch.autograd.grad(want, (hidden, weight))
    got = Head(hf, 33).nll_sum(hidden, labels, counted if known else None) / counted
    got_grads = torch.autograd.grad(got, (hidden, weight))

    rounding = 1e-5 if dtype == torch.float32 else 1e-2  # of the largest element
    assert abs(got.item() - want.item()) < 1e-5 * want.item()
    for a, b in zip(got_grads, want_grads, strict=True):
        assert float((a - b).abs().max()) < rounding * float(b.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gradients_are_scaled_in_fp32(dtype: torch.dtype) -> None:
    """A factor that the dtype cannot hold; it carries the loss scale."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    hidden = torch.randn(50, 64, device=device).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(500, 64, device=device)).to(dtype)
    labels = torch.randint(0, 500, (50,), device=device)
    one, scaled = (
        torch.autograd.grad(chunked_nll_sums(hidden, weight, None, labels, About(64, HeadForm())) * factor, hidden)
        for factor in (1.0, 0.3007)
    )
    assert torch.equal(scaled[0], (one[0].float() * 0.3007).to(dtype))
