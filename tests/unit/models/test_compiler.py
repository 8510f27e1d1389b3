"""Whether torch.compile works here is found out once; a machine without a compiler trains without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmtrain.models import compiler

pytestmark = pytest.mark.long

WITHOUT = """
import torch
from types import SimpleNamespace
from llmtrain.engine.deepspeed import optimizers
from llmtrain.models import compiler, loss
from llmtrain.optim.optimizers import Muon
from llmtrain.config.topology import Mix

reason = compiler.trouble(torch.device("cpu"))
assert reason and "build-essential" in reason and "TORCHDYNAMO" not in reason, reason
assert compiler.trouble(torch.device("cpu")) is reason

# The same answer on CUDA: the loss and Muon go on as plain PyTorch.
compiler._answers["cuda"] = None
optimizers.get_accelerator = lambda: SimpleNamespace(device_name=lambda: "cuda")
optimizers.parameter_groups = lambda *_: [
    {"params": [torch.nn.Parameter(torch.eye(4))], "use_muon": True, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
]
run = Muon(), {}, Mix(zero_stage=1, optimizer="muon")

optimizers.build_optimizer(None, *run)
from deepspeed.runtime.zero.muon import original_muon
assert hasattr(original_muon.muon_update, "_torchdynamo_orig_callable")  # where a compiler works it is compiled

compiler._answers["cuda"] = reason
assert loss._elementwise(torch.device("cuda")) is loss._in_place
optimizers.build_optimizer(None, *run)
from deepspeed.runtime.zero.muon import original_muon
for function in (original_muon.muon_update, original_muon.zeropower_via_gram_newtonschulz):
    assert not hasattr(function, "_torchdynamo_orig_callable")
assert original_muon.muon_update(torch.eye(4), torch.zeros(4, 4)).isfinite().all()
print("went on")
"""


def test_without_a_compiler_the_run_goes_on_uncompiled(tmp_path: Path):
    environment = {
        **os.environ,
        "CC": "/bin/false",
        "CXX": "/bin/false",
        "TMPDIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("went on\n"), done.stdout + done.stderr
    assert done.stderr.count("warning: torch.compile is not used on this device (cpu)") == 1
    assert [name for name in os.listdir(tmp_path) if not name.startswith("torchinductor_")] == []  # torch's own, empty


def test_the_trial_starts_no_processes_that_would_remember_its_folder(monkeypatch):
    """Torch's workers keep TRITON_CACHE_DIR of the time when they were started, and the trial's folder is deleted."""
    from torch._inductor import config
    from torch._inductor.async_compile import get_compile_threads

    monkeypatch.setattr(compiler, "share_cores", lambda: None)
    plain, asked = torch.compile, []

    def backend(graph, inputs):
        asked.append((get_compile_threads(), os.environ["TRITON_CACHE_DIR"]))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **_: plain(function, backend=backend))
    torch._dynamo.reset()
    with config.patch(compile_threads=4):
        assert compiler._attempt("cpu") is None
        assert get_compile_threads() == 4
    ((threads, folder),) = asked
    assert threads == 1 and not os.path.exists(folder)


def test_compiling_takes_a_ranks_share_of_the_cores(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(24))
    monkeypatch.setenv("LOCAL_SIZE", "8")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "5")
    with config.patch(compile_threads=32):
        compiler.share_cores()
        assert config.compile_threads == 32 and os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "5"
        monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
        compiler.share_cores()
        assert config.compile_threads == 3 and os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "3"


@pytest.mark.parametrize("disabled", [False, True])
def test_what_is_not_really_compiled_does_not_count(monkeypatch, disabled):
    """TORCHDYNAMO_DISABLE makes torch.compile a no-op: the loss would then run its kernels' source as plain PyTorch."""
    monkeypatch.setattr(compiler, "share_cores", lambda: None)
    plain = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: function if disabled else plain(function, backend="eager")
    )
    found = compiler._attempt("cpu")
    assert (found is not None and "TORCHDYNAMO_DISABLE" in found) if disabled else found is None


def test_the_trial_is_made_once_for_all_processes_of_a_machine(monkeypatch, tmp_path):
    """It takes 6 to 8 s on a GPU, in each rank and each start. Another compiler, or a failure, is tried anew."""
    tried = []
    cpu = torch.device("cpu")

    def trouble(outcome: str | None = None) -> str | None:
        monkeypatch.setattr(compiler, "_answers", {})  # a new process
        monkeypatch.setattr(compiler, "_attempt", lambda kind: tried.append(kind) or outcome)
        return compiler.trouble(cpu)

    gcc = tmp_path / "gcc"
    gcc.write_text("")
    gcc.chmod(0o755)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(gcc))
    monkeypatch.setattr(compiler, "share_cores", lambda: None)
    assert "no" in str(trouble("no")) and trouble() is None and trouble("not asked") is None
    assert len(tried) == 2
    os.utime(gcc, ns=(1, 1))
    assert trouble() is None and len(tried) == 3
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert trouble() is None and len(tried) == 4
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "gcc"))  # which is no folder
    assert trouble() is None and trouble() is None and len(tried) == 6
