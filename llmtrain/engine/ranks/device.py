"""The device of a rank, and checks that this machine's driver and torch can use it."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import psutil
import torch

from llmtrain.base import units
from llmtrain.base.errors import ConfigError, number_in
from llmtrain.base.imports import without
from llmtrain.config.topology import Mix, ranks_of_this_host

with without("mlflow"):
    from deepspeed.accelerator import get_accelerator

_BUILDS = (
    f"Install a build of torch for it: `pip install --force-reinstall torch=={torch.__version__.partition('+')[0]} "
    "--index-url https://download.pytorch.org/whl/cu126` (CUDA 12.6 runs on drivers from 525 on, a build for CUDA 13 "
    "on drivers from 580 on)"
)
_BF16_CAPABILITY = 8
"""Compute capability from which NVIDIA's GPUs have bf16 (Ampere). torch also accepts older GPUs, which emulate it."""
_FP8_CAPABILITY = (8, 9)


def own_device() -> torch.device:
    """Make this rank's device the current one and return it: the GPU of LOCAL_RANK, or the CPU. Raises ConfigError if
    there is no such device or torch cannot use it."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        _refuse_idle_gpus()
        return torch.device("cpu")
    local_rank = number_in("LOCAL_RANK")
    index = device_index(local_rank, ranks_of_this_host(), accelerator.device_count(), accelerator.device_name())
    if index != local_rank:
        _renumber(accelerator, local_rank, index)
    try:
        accelerator.set_device(index)
    except RuntimeError as error:
        if "driver" not in str(error):
            raise
        raise ConfigError(
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, and this machine's driver cannot run "
            f"it: {str(error).splitlines()[0]} {_BUILDS}; or update the driver."
        ) from error
    return torch.device(accelerator.current_device_name())


def device_index(local_rank: int, ranks: int, visible: int, kind: str = "cuda") -> int:
    """Return the index of a rank's device among the `visible` ones; 0 if a scheduler shows each task only its own
    device (srun --gpus-per-task=1, Kubernetes). `ranks`: number of ranks on this host, for the message. Raises
    ConfigError if the rank has no device."""
    if local_rank < visible:
        return local_rank
    if visible == 1:
        return 0
    shown = f"(CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
    if not visible:
        raise ConfigError(
            f"DS_ACCELERATOR = {kind}: torch {torch.__version__} sees no {kind} device here {shown}. "
            "Remove the variable, or set it to cpu"
        )
    raise ConfigError(
        f"this host has {units.counted(visible, f'{kind} device')} for {ranks} ranks {shown}: set its slots in the "
        f"hostfile to {visible}."
    )


def _renumber(accelerator: Any, local_rank: int, index: int) -> None:
    """Make DeepSpeed use device `index` wherever it asks for device `local_rank`, for the rest of the process.

    DeepSpeed takes LOCAL_RANK for the device's index in its engine, in zero.Init, in pipelines and in ZeRO 3's first
    steps (runtime/engine.py:1017 and 1943, zero/partition_parameters.py:1138, pipe/module.py:215, zero/utils.py:85).
    The variable itself stays: the rank where it is 0 speaks for its host.
    """

    def own(given: Any) -> Any:
        return index if str(given) == str(local_rank) else given

    set_device, device_name = accelerator.set_device, accelerator.device_name
    accelerator.set_device = lambda number: set_device(own(number))
    accelerator.device_name = lambda number=None: device_name(own(number))


def _refuse_idle_gpus() -> None:
    """Raise ConfigError on a machine with GPUs if torch is a CPU build, or the driver is broken."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if os.environ.get("DS_ACCELERATOR") or hidden or not Path("/dev/nvidia0").exists():
        return
    what = (
        f"torch {torch.__version__} is a build without CUDA. {_BUILDS}"
        if torch.version.cuda is None and torch.version.hip is None
        else f"torch {torch.__version__} cannot use them: `nvidia-smi` shows whether the driver answers. {_BUILDS}"
    )
    raise ConfigError(
        f"this machine has NVIDIA GPUs (/dev/nvidia0), but {what}; or set DS_ACCELERATOR=cpu to train on the processor."
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def device_id(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def use_deterministic_kernels() -> None:
    """Use only kernels that sum in a fixed order. CUBLAS_WORKSPACE_CONFIG must have been set before cuBLAS starts. An
    operation without a deterministic kernel raises torch's RuntimeError with the operation's name."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # else each new tensor is written twice


def check_device(mix: Mix, attention: str, fp8: str | None, json_path: str) -> None:
    """Check that this device supports the run's precision, and that `attention` and `fp8` (of the section model) work
    in that precision. `json_path`: the run's DeepSpeed JSON. Raises ConfigError."""
    accelerator, precision, products = get_accelerator(), mix.precision, mix.products
    name = accelerator.device_name()
    if name == "cuda" and torch.version.cuda is not None:
        has_bf16 = torch.cuda.get_device_capability()[0] >= _BF16_CAPABILITY
    else:
        has_bf16 = accelerator.is_bf16_supported()
    supported = {"fp32": True, "bf16": has_bf16, "fp16": accelerator.is_fp16_supported()}
    if not supported[products]:
        other = "fp16" if products == "bf16" and name != "cpu" else "bf16"
        section = "torch_autocast" if mix.autocast else products
        raise ConfigError(
            f"{json_path}: {section}.enabled is true, but the device ({name}) does not "
            f"support {products}. Set {section}.enabled to false, or use {other}."
        )

    if name != "cpu" and precision == "fp32" and attention == "varlen":
        raise ConfigError(
            "model.attention is varlen, whose kernel computes only in bf16 and fp16, but the run is in fp32: set "
            f"bf16.enabled to true in {json_path}, or model.attention to sdpa."
        )
    if fp8 is not None and name != "cpu":
        _check_fp8(fp8, precision, json_path)


def _check_fp8(recipe: str, precision: str, json_path: str) -> None:
    """Check that this GPU can multiply in fp8, and that the run is in bf16. Raises ConfigError."""
    cuda = get_accelerator().device_name() == "cuda"
    capability = torch.cuda.get_device_capability() if cuda else (0, 0)
    if capability < _FP8_CAPABILITY:
        device = torch.cuda.get_device_name() if cuda else get_accelerator().device_name()
        has = f" (compute capability {capability[0]}.{capability[1]})" if cuda else ""
        raise ConfigError(
            f"model.fp8 is {recipe}, but this device, {device}{has}, cannot multiply in fp8: NVIDIA's GPUs can from "
            "compute capability 8.9 on (Ada, Hopper, Blackwell). Set model.fp8 to null, or use one of these GPUs."
        )
    if precision != "bf16":
        raise ConfigError(
            f"model.fp8 is {recipe}, whose products are bf16, but the run is in {precision}: set bf16.enabled to true "
            f"in {json_path}, or model.fp8 to null."
        )


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory of a rank's device: the GPU's, or the rank's share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total) // ranks_of_this_host()


def max_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: allocated on the GPU, or resident in a run on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / units.GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / units.GIB
