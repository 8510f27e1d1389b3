"""The kernels that a training step becomes on an H100, compiled where there is none.

    python -m tests.helpers.hopper FOLDER CASES.json

A process of its own: it changes what torch believes of this machine. The run's own code builds the model on tensors
without memory (FakeTensorMode) that say they are on a GPU, and takes a micro-batch forward and backward; each graph
that torch.compile is given there goes through inductor to Triton's source, and by Triton and ptxas to machine code for
sm_90. Nothing runs. Figures of each graph are written to FOLDER/kernels.json: see `Graph`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass(kw_only=True)
class Kernel:
    """One that inductor has written."""

    name: str
    registers: int
    """Of a thread, the most of the variants that a GPU would choose among."""
    local_bytes: int
    """Of a thread, of the variant with fewest: registers that were spilled to memory."""
    shared_bytes: int


@dataclass(kw_only=True)
class Graph:
    """What torch.compile was given once."""

    backward: bool
    kernels: list[Kernel] = field(default_factory=list)
    fused_bytes: int = 0
    """Read and written by these kernels, by inductor's count."""
    externs: list[str] = field(default_factory=list)
    """Operators that are called: products of matrices, attention."""


def pretend_device() -> None:
    """Let torch believe in one H100, for tensors without memory. Before torch is imported."""
    home = Path(next(iter(importlib.util.find_spec("torch").submodule_search_locations)))  # type: ignore[union-attr,arg-type]
    library = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "hopper.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    source, lib = Path(__file__).with_suffix(".cpp"), str(home / "lib")
    argv = ["g++", "-std=c++20", "-shared", "-fPIC", "-O0", f"-I{home / 'include'}", str(source), "-o", str(library)]
    subprocess.run([*argv, f"-L{lib}", "-lc10", "-ltorch_cpu"], check=True)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(f"{lib}/{name}")
    ctypes.CDLL(str(library))

    import torch

    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 * 2**30,
        gcnArchName="",
        shared_memory_per_block_optin=232448,
        shared_memory_per_block=49152,
        L2_cache_size=50 * 2**20,
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "set_device": None,
        "synchronize": None,
        "_lazy_init": None,
        "get_rng_state": torch.get_rng_state(),
        "set_rng_state": None,
        "is_bf16_supported": True,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)

    class Generator(torch.Generator):
        """A GPU's, whose state flash attention takes where it is computed again."""

        device = torch.device("cuda", 0)

        def clone_state(self) -> Generator:
            return type(self)()

        def graphsafe_get_state(self) -> Generator:
            return self

        def graphsafe_set_state(self, state: Generator) -> Generator:
            return self

    torch.cuda.default_generators = (Generator(),)
    torch.version.cuda = "13.0"

    def flash(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Compute as a GPU does without a mask; torch asks code of CUDA for the choice, which is not here."""
        assert attn_mask is None
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]

    torch.nn.functional.scaled_dot_product_attention = flash  # type: ignore[assignment]


def pretend() -> None:
    """Let torch.compile and Triton believe in it as well."""
    pretend_device()
    import torch
    import triton
    from torch._dynamo import device_interface  # which takes these functions as it is imported
    from triton.backends.compiler import GPUTarget

    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, device_interface.CudaInterface)
    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
        )
    )

    from torch._inductor.runtime import triton_helpers

    triton_helpers.set_driver_to_gpu = lambda: None


def backend(found: list[Graph]) -> Any:
    """Of torch.compile: inductor up to the machine code, whose graphs then compute on tensors without memory."""
    import functools

    import torch
    import torch._inductor.config as settings
    from torch._inductor.compile_fx import (
        _recursive_post_grad_passes,
        compile_fx,
        fake_tensor_prop,
        record_original_output_strides,
        view_to_reshape,
    )
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    # Both make tensors with memory. The one looks for attention that is written out; kernels hold constants anyway.
    joint_graph.lazy_init = lambda *_: None
    settings.joint_graph_constant_folding = False
    settings.use_static_triton_launcher = False  # it keeps no machine code

    def lower(module: Any, inputs: Any, *, is_backward: bool = False, is_inference: bool = False, **_: Any) -> Any:
        with _disable_current_modes(), torch.no_grad():  # a backward pass is lowered when it begins, amid ours
            view_to_reshape(module)
            mode = fake_tensor_prop(module, inputs)
            record_original_output_strides(module)
            with V.set_fake_mode(mode):
                _recursive_post_grad_passes(module, is_inference=is_inference)
            graph = GraphLowering(module, example_inputs=inputs, is_backward=is_backward, is_inference=is_inference)
            with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()), V.set_fake_mode(mode):
                graph.run(*inputs)
                code, _lines = graph.codegen()
                nodes = graph.scheduler.nodes
                outside = [node for node in nodes if isinstance(node, ExternKernelSchedulerNode)]
                inside = [node.get_read_write_buffers_sizes() for node in nodes if node not in outside]
            names = [str(getattr(n.node, "python_kernel_name", None) or type(n.node).__name__) for n in outside]
            made = [compiled(name, source) for name, source in sources(code.value)]
        found.append(Graph(backward=is_backward, kernels=made, fused_bytes=sum(inside), externs=names))

        def run(args: list[Any]) -> Any:
            return module(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return functools.partial(compile_fx, inner_compile=lower)


def sources(code: str) -> list[tuple[str, str]]:
    """(name, Python source) of each kernel in what inductor writes for a graph."""
    return re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", code, re.DOTALL)


def compiled(name: str, source: str) -> Kernel:
    """All variants of a kernel as machine code."""
    import triton
    from torch._inductor.async_compile import _load_triton_kernel_from_source

    kernel = _load_triton_kernel_from_source(name, source)
    kernel.precompile(warm_cache_only=True)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    uses = []
    for index, result in enumerate(kernel.compile_results):
        path = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / f"{name}.{index}.cubin"
        path.write_bytes(result.kernel.asm["cubin"])
        said = subprocess.run([tools / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True)
        numbers = dict(re.findall(r"(\w+):(\d+)", said.stdout + said.stderr))
        uses.append((int(numbers["REG"]), int(numbers["STACK"]) + int(numbers["LOCAL"]), int(numbers["SHARED"])))
    return Kernel(
        name=name,
        registers=max(u[0] for u in uses),
        local_bytes=min(u[1] for u in uses),
        shared_bytes=max(u[2] for u in uses),
    )


def graphs_of(case: dict[str, Any], folder: Path) -> list[Graph]:
    """Of a micro-batch of one row in bf16 under ZeRO 1. `case`: its tokens, and the section model of a run."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode

    from llmtrain.config.load import resolve
    from llmtrain.config.run import DataConfig, ModelConfig, RecomputeConfig, RunConfig, TrainConfig
    from llmtrain.models import compiler, loss
    from llmtrain.models.run.build_for_rank import build_model
    from llmtrain.models.spec import ModelSpec
    from llmtrain.optim.optimizers import AdamW
    from llmtrain.optim.schedules import Constant
    from tests.helpers.families import summed_loss

    found: list[Graph] = []
    plain = torch.compile
    torch.compile = lambda function, **given: plain(function, backend=backend(found), **given)  # type: ignore[assignment]
    compiler._answers["cuda"] = None
    assert loss._tried_in_fp32
    loss._tried_in_fp32 = lambda kind, dtype: True  # type: ignore[assignment]
    loss._compiled.cache_clear()
    try:
        tree = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
        (folder / "ds.json").write_text(json.dumps(tree))
        model = dict(case["model"])
        model["recompute"] = RecomputeConfig(**model.pop("recompute", {}))
        config = RunConfig(
            deepspeed=str(folder / "ds.json"),
            model=ModelConfig(**model),
            data=DataConfig(path="(none)", sequence_length=case["tokens"]),
            optim=AdamW(lr=1e-4),
            schedule=Constant(),
            train=TrainConfig(micro_batch=1, accumulation=1, max_steps=1),
        )
        run = resolve(config, 1, "one process")
        torch._dynamo.reset()
        with FakeTensorMode():
            spec = ModelSpec.of(config.model)
            for buffer in spec.skeleton.buffers():
                buffer.constant = None  # type: ignore[attr-defined]  # of small tensors the mode keeps the values, too
            mesh = SimpleNamespace(data_and_sequence=dist.group.WORLD)
            module: Any = build_model(run, spec, torch.device("cuda"), mesh)  # type: ignore[arg-type]
            inputs = torch.zeros(1, case["tokens"], dtype=torch.int64, device="cuda")
            summed_loss(module.train(), inputs, inputs).backward()
    finally:
        torch.compile = plain
    return found


def main(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", TORCHINDUCTOR_COMPILE_THREADS="1")
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"), TRITON_CACHE_DIR=str(folder / "triton"))
    pretend()
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    figures = {}
    for name, case in cases.items():
        figures[name] = [asdict(graph) for graph in graphs_of(case, folder)]
        (folder / "kernels.json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
