"""What this machine is, and what its GPU alone can do: the ceilings that a benchmark's figures are held against.

    python tools/bench/facts.py                    # the line of versions; 2: no CUDA device, 3: packages are missing
    python tools/bench/facts.py --json facts.json  # and the ceilings, in about 15 s

`--device cpu --size 64` tries the same on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import mmap
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

PACKAGES = ("deepspeed", "accelerate", "jsonargparse", "peft", "psutil", "torchao", "xxhash", "pytest_timeout")
"""What tests/gpu and the benchmarks import, and a bare machine may lack."""
NO_CUDA, NO_PACKAGES = 2, 3
HEADS = 16


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="measure the ceilings, and write them to this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of the products (default 8192)")
    return parser.parse_args(argv)


def line() -> str:
    """Device and versions, once everything that the parts need has been imported."""
    import torch

    for name in PACKAGES:
        importlib.import_module(name)
    names = ("torch", "transformers", "deepspeed")
    versions = [f"{name} {importlib.import_module(name).__version__}" for name in names]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return " | ".join([device, f"python {platform.python_version()}", *versions])


class Ceilings:
    """Products, copies and attention of one device, each timed alone."""

    def __init__(self, device: str, size: int) -> None:
        import torch

        self._torch, self._device, self._size = torch, torch.device(device), size

    def _seconds(self, run: Callable[[], Any], least_s: float = 0.3) -> float:
        """Of one call: after one that warms up, as many as take so long."""
        count = 1
        run()
        while True:
            self._wait()
            began = time.perf_counter()
            for _ in range(count):
                run()
            self._wait()
            if (took := time.perf_counter() - began) >= least_s or count >= 1 << 14:
                return took / count
            count = max(count + 1, int(count * min(16.0, 1.05 * least_s / took)))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize()

    def _draw(self, *shape: int) -> Any:
        return self._torch.randn(*shape, device=self._device, dtype=self._torch.bfloat16)

    def products(self) -> dict[str, float]:
        """TFLOP/s of a square product, which warms the card for 3 s first."""
        torch, n = self._torch, self._size
        a, b = self._draw(n, n), self._draw(n, n)
        self._seconds(lambda: a @ b, least_s=3.0 if self._device.type == "cuda" else 0.01)
        flops = 2 * n**3
        found = {"bf16_tflops": flops / self._seconds(lambda: a @ b) / 1e12}
        x, y = (each.contiguous().to(torch.float8_e4m3fn) for each in (a, b.t()))
        one = torch.ones((), device=a.device)
        took = self._seconds(
            lambda: torch._scaled_mm(x, y.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        )
        return {**found, "fp8_tflops": flops / took / 1e12}

    def maps_of_one_input(self) -> dict[str, float]:
        """TFLOP/s of the maps to queries, keys and values, forward and backward: a product for each, and one for all.

        At size 8192 they are those of Llama 3 8B, whose keys and values have a quarter of the columns.
        """
        torch, tokens, hidden = self._torch, self._size, self._size // 2
        columns = [hidden, hidden // 4, hidden // 4]
        flops = 3 * 2 * tokens * hidden * sum(columns)
        x = self._draw(tokens, hidden).requires_grad_()
        together = self._draw(sum(columns), hidden).requires_grad_()
        apart = [part.detach().clone().requires_grad_() for part in together.split(columns)]
        gradients = [self._draw(tokens, width) for width in columns]

        def step(weights: list[Any]) -> None:
            x.grad = None
            for weight in weights:
                weight.grad = None
            outputs = [torch.nn.functional.linear(x, weight) for weight in weights]
            parts = outputs if len(outputs) > 1 else outputs[0].split(columns, dim=-1)
            torch.autograd.backward(list(parts), gradients)

        return {
            "qkv_apart_tflops": flops / self._seconds(lambda: step(apart)) / 1e12,
            "qkv_together_tflops": flops / self._seconds(lambda: step([together])) / 1e12,
        }

    def copies(self) -> dict[str, float]:
        """GB/s, bytes read and written together: within the device, and to and from page-locked memory."""
        torch = self._torch
        here = torch.empty(self._size**2 * 16, dtype=torch.uint8, device=self._device)
        there = torch.empty_like(here)
        host = torch.empty(len(here) // 4, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        part = here[: len(host)]
        return {
            "copy_gb_s": 2 * len(here) / self._seconds(lambda: there.copy_(here)) / 1e9,
            "to_host_gb_s": len(host) / self._seconds(lambda: host.copy_(part)) / 1e9,
            "from_host_gb_s": len(host) / self._seconds(lambda: part.copy_(host)) / 1e9,
        }

    def page_locks(self) -> dict[str, bool]:
        """Whether CUDA takes a copy over two registrations of page-locked memory as one, and cut between them."""
        torch = self._torch
        from llmtrain.checkpoint import snapshot

        size = snapshot.LOCKED_AT_ONCE + (1 << 24)
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        here, low, found = torch.ones(1 << 24, dtype=torch.uint8, device=self._device), size - (3 << 23), {}
        stop, address = low + len(here), memory.data_ptr()
        if self._device.type == "cuda" and not snapshot.lock_pages(address, size):
            return {"locks_pages": False}
        ways = {
            "copies_over_locks": [memory[low:stop]],
            "copies_between_locks": snapshot.between_locks(memory, low, stop),
        }
        for name, places in ways.items():
            try:
                for place, part in zip(places, here.split([len(each) for each in places]), strict=True):
                    place.copy_(part, non_blocking=True)
                self._wait()
                found[name] = bool(memory[low:stop].all())
            except RuntimeError as error:
                print(f"{name}: {str(error).splitlines()[0]}", flush=True)
                found[name] = False
            memory.zero_()
        if self._device.type == "cuda":
            snapshot.unlock_pages(address, size)
        return found

    def attention(self) -> dict[str, float]:
        """TFLOP/s of causal attention forward and backward, half of the pairs counted, by kernel and head size."""
        length, found = min(4096, self._size), {}
        for width in (64, 128):
            flops = 2 * HEADS * length**2 * width * 2 * 3.5  # 2 products forward, 5 backward; a causal mask halves them
            for name, forward in self._ways(length, width).items():

                def step(forward: Callable[[], Any] = forward) -> None:
                    out = forward()
                    out.backward(out)

                key = f"attention_{name}_{width}_tflops"
                try:
                    found[key] = flops / self._seconds(step) / 1e12
                except Exception as error:  # a kernel that this build or card lacks
                    print(f"{key}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
        return found

    def _ways(self, length: int, width: int) -> dict[str, Callable[[], Any]]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as sdpa

        from llmtrain.models.varlen import Documents, within_documents

        q, k, v = (self._draw(2, HEADS, length, width).requires_grad_() for _ in range(3))
        flat = [each.detach().transpose(1, 2).flatten(0, 1).contiguous().requires_grad_() for each in (q, k, v)]
        rows = Documents.rows(2, length, self._device)
        seen = self._torch.ones(length, length, dtype=self._torch.bool, device=self._device).tril()

        def kernel(backend: Any, mask: Any = None) -> Any:
            with sdpa_kernel(backend):
                return sdpa(q, k, v, mask, is_causal=mask is None)

        return {
            "cudnn": lambda: kernel(SDPBackend.CUDNN_ATTENTION),
            "flash": lambda: kernel(SDPBackend.FLASH_ATTENTION),
            "mask": lambda: kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], seen),
            "varlen": lambda: within_documents(*flat, rows.bounds, rows.sizes, None, None)[0],
        }


def disk() -> dict[str, float]:
    """GB/s of a durable write to the folder for temporary files."""
    block = os.urandom(1 << 24)
    with tempfile.TemporaryFile() as file:
        began = time.perf_counter()
        for _ in range(32):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return {"write_gb_s": 32 * len(block) / (time.perf_counter() - began) / 1e9}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the line, and measure if asked to; 1 if something could not be."""
    options = arguments(argv)
    if importlib.util.find_spec("torch") is None:
        return NO_CUDA
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        print(f"{sys.executable} lacks {', '.join(missing)}")
        return NO_PACKAGES
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        return NO_CUDA
    print(line(), flush=True)
    if options.json is None:
        return 0
    from machine import Card, about, write

    found: dict[str, Any] = {"machine": about()}
    found["programs"] = [name for name in ("git", "g++", "nvcc", "nvidia-smi") if shutil.which(name)]
    ceilings, failed = Ceilings(options.device, options.size), False
    with Card() as card:
        for measure in (
            ceilings.products,
            ceilings.maps_of_one_input,
            ceilings.copies,
            ceilings.page_locks,
            ceilings.attention,
            disk,
        ):
            try:
                found |= measure()
            except Exception as error:  # the others are worth having
                print(f"{measure.__name__}: {type(error).__name__}: {error}", flush=True)
                failed = True
            found |= card.figures()
            write(options.json, found)
    print(
        ", ".join(f"{key} {value:.4g}" for key, value in found.items() if isinstance(value, (float, bool))), flush=True
    )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
