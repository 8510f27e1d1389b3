"""Proves that a conversion kept every value under its name. If a proof fails, nothing of the conversion is left."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from llmtrain.base import log, units
from llmtrain.base.errors import CheckpointError, UserError
from llmtrain.checkpoint.snapshot import memory_available
from llmtrain.engine.process_memory import return_freed_memory
from llmtrain.models.layout import FolderLayout, Part
from llmtrain.models.parameters import freeze, frozen_tensors, named_tensors
from llmtrain.models.score import gives_scores
from llmtrain.models.skeleton import auto_class, decoder_layers, skeleton
from llmtrain.models.source import RandomSource
from llmtrain.storage.checksum import checksum
from llmtrain.storage.tensorfile import numel

Check = Literal["auto", "logits", "none"]
"""How much of a conversion is proved: `none` does not read back; `auto` reads back, and compares logits if the models
fit in memory; `logits` requires both."""
CHUNK = 4 << 20  # elements in memory at a time
_READERS = 2
_TOKENS = 64
_ROUNDING = 1e-5
"""Allowed difference of logits, relative to the largest logit. Both sides compute in fp32 with the same values, and are
equal bit by bit unless a kernel takes another path. Two matrices of one shape that are exchanged change a new model's
logits by at least 8e-4 (Gemma-2 with a hidden size of 32, the least of five families)."""


class ProofError(CheckpointError):
    """The result of a conversion differs from its source, or cannot be compared with it."""

    exit_code = 1


@dataclass
class Report:
    path: Path
    lines: list[str] = field(default_factory=list)

    def add(self, what: str, text: str) -> None:
        self.lines.append(f"{what:<11} {text}")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A conversion, and the report to which its proofs add lines."""

    layout: FolderLayout
    check: Check
    report: Report
    trust_remote_code: bool


class Values(Protocol):
    """Reads elements of flat parameters, by the model's names."""

    def read(self, name: str, start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True)
class Extent:
    low: float
    high: float
    finite: bool


def read_back(values: Values, layout: FolderLayout, expected: Mapping[str, int], what: str) -> dict[str, Extent]:
    """Read the tensors back and compare each parameter's checksum with `expected`. Returns the least and largest value
    of each tensor, and whether all are finite. Raises ProofError."""
    parts = {tensor: part for tensor, part in layout.tensors.items() if part.parameter in expected}

    def one(part: Part) -> tuple[int, Extent]:
        total, lows, highs = 0, [math.inf], [-math.inf]
        for start in range(part.start, part.start + part.numel, CHUNK):
            chunk = values.read(part.parameter, start, min(part.start + part.numel, start + CHUNK))
            total += checksum(chunk, start)
            low, high = chunk.aminmax()
            lows.append(float(low))
            highs.append(float(high))
            progress.advance(4 * chunk.numel())
        finite = all(map(math.isfinite, (*lows[1:], *highs[1:])))
        return total, Extent(min(lows), max(highs), finite)

    sums, extents = dict.fromkeys(expected, 0), {}
    total = 4 * sum(part.numel for part in parts.values())
    with log.Progress(what, total) as progress, ThreadPoolExecutor(_READERS) as pool:
        for (tensor, part), (value, extent) in zip(parts.items(), pool.map(one, parts.values()), strict=True):
            sums[part.parameter] += value
            extents[tensor] = extent
    bad = [name for name in expected if sums[name] % 2**64 != expected[name]]
    if bad:
        raise ProofError(
            f"{what}: {len(bad)} of {len(expected)} parameters differ from the source, first {', '.join(bad[:3])}. "
            "Nothing was kept. Try again; if it happens again, the disk or the conversion is at fault."
        )
    return extents


def check_extents(extents: Mapping[str, Extent], made: Conversion) -> None:
    """Raise ProofError if a tensor is empty or not finite, or a matrix has one value, unlike a new model's."""
    parts = made.layout.tensors
    odd = [f"{name} holds NaN or infinity" for name, extent in extents.items() if not extent.finite]
    odd += [f"{name} is empty" for name in extents if parts[name].numel == 0]
    constant = {n: e.low for n, e in extents.items() if e.finite and e.low == e.high and parts[n].numel > 1}
    fresh = RandomSource(made.layout.skeleton, 0, torch.device("cpu"))
    for name, value in constant.items():
        # Training starts from norm weights of one and biases of zero, but not from a weight matrix of one value.
        part = parts[name]
        new = fresh.read(part.parameter, part.start, part.start + part.numel) if len(part.shape) > 1 else value
        if not bool(torch.as_tensor(new == value).all()):
            odd.append(f"{name} {list(part.shape)} is {value:g} everywhere")
    if odd:
        raise ProofError(
            f"{len(odd)} tensors look wrong: {'; '.join(odd[:3])}. Nothing was kept. Check the source; if it is "
            "meant to be so, convert with --check none."
        )
    same = ", ".join(f"{count} of {value:g} everywhere" for value, count in sorted(Counter(constant.values()).items()))
    made.report.add("values", f"finite, none empty, {same or 'none of one value'}")


def prove_logits(
    made: Conversion, values: Callable[[str, int, int], Tensor], folder: Path, dtypes: Collection[torch.dtype]
) -> None:
    """Compare the logits of `folder`, loaded by transformers, with those of a model filled from `values`: (parameter,
    start, stop) -> elements, rounded as in the folder. Both run in fp32, layer by layer. Raises ProofError."""
    # transformers loads tensors of one dtype unchanged; with several it would round some to the model's.
    loads_as = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
    compare_logits(
        made,
        values,
        OtherModel(
            logits=lambda tokens: _folder_logits(folder, made, tokens, loads_as),
            title="logits",
            name=f"{folder}, loaded by transformers,",
            bytes=loads_as.itemsize * sum(map(numel, made.layout.shapes.values())),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class OtherModel:
    """A model whose logits must equal the source's."""

    logits: Callable[[Tensor], Tensor]
    """tokens [1, T] -> logits."""
    title: str
    """Title of its line in the report."""
    name: str
    """The model's name in messages."""
    bytes: int
    """Bytes of memory that the model needs, in addition to one layer in fp32."""
    rounding: float = _ROUNDING
    """Allowed difference, relative to the largest logit."""


def compare_logits(made: Conversion, values: Callable[[str, int, int], Tensor], other: OtherModel) -> None:
    """Compare the logits of a model filled from `values` with those of the other model. Raises ProofError."""
    layout, report, title = made.layout, made.report, other.title
    rest, layers = _parts(layout.skeleton)
    largest = max(map(numel, layout.shapes.values()))
    at_once = 4 * (_elements(rest) + max((_elements(layer.modules()) for layer in layers), default=0))
    need = other.bytes + at_once + 12 * largest + (256 << 20)
    free = memory_available()
    if made.check == "auto" and need > 0.9 * free:
        report.add(title, f"not compared: {units.size(need)} of memory needed, {units.size(free)} free")
        return
    config = layout.skeleton.config.get_text_config()
    length = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
    tokens = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    return_freed_memory()  # else glibc keeps a layer's memory: 1.0 GB instead of 0.7 for 0.1 B parameters
    want, got = logits_of(layout.skeleton, values, tokens), other.logits(tokens)
    worst, scale = float((got - want).abs().max()), float(want.abs().max())
    if not worst <= other.rounding * scale:
        raise ProofError(
            f"the logits of {other.name} differ from those of the source by {worst:.3g} (largest logit {scale:.3g}): a "
            "tensor has the wrong name, or is used differently. Nothing was kept; this is a fault of "
            "the conversion, report it with the model's config.json."
        )
    report.add(title, f"{length} x {want.shape[-1]} logits agree with the source's, largest difference {worst:.3g}")


def _parts(hf: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """(all modules outside of the decoder layers, the layers)."""
    layers = list(dict.fromkeys(decoder_layers(hf)))
    inside = {module for layer in layers for module in layer.modules()}
    return [module for module in hf.modules() if module not in inside], layers


def _elements(modules: Iterable[nn.Module]) -> int:
    return sum(p.numel() for p in {p for module in modules for p in module.parameters(recurse=False)})


@torch.no_grad()
def logits_of(hf: nn.Module, values: Callable[[str, int, int], Tensor], tokens: Tensor) -> Tensor:
    """Return the logits of a skeleton with these values; each layer has its values only while it computes."""
    names = {id(tensor): name for name, tensor in named_tensors(hf)}
    rest, layers = _parts(hf)

    def fill(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Give the modules their values. Returns (module, name, former parameter) for each."""
        made: dict[int, nn.Parameter] = {}
        before = []
        for module in modules:
            for name, meta in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                before.append((module, name, meta))
                if id(meta) not in made:
                    made[id(meta)] = nn.Parameter(torch.empty(meta.shape), requires_grad=False)
                    _copy(made[id(meta)], names[id(meta)], values)
                setattr(module, name, made[id(meta)])
        return before

    def empty(before: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
        for module, name, meta in before:
            setattr(module, name, meta)

    for name, tensor in frozen_tensors(hf).items():
        _copy(tensor, name, values)
    former: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter]]] = {}
    with contextlib.ExitStack() as stack:
        for layer in layers:
            hooks = (
                layer.register_forward_pre_hook(lambda layer, _: former.update({layer: fill(layer.modules())})),
                layer.register_forward_hook(lambda layer, *_: empty(former.pop(layer))),
            )
            for hook in hooks:
                stack.callback(hook.remove)
        stack.callback(empty, fill(rest))
        return _said_of(hf.eval(), tokens)


def _said_of(hf: Any, tokens: Tensor) -> Tensor:
    """Return logits [1, T, V]; of a reward model the score at each token and the one that it returns, [1, T + 1, 1]."""
    if not gives_scores(hf.config):
        return hf(input_ids=tokens, use_cache=False).logits.float()
    seen: list[Tensor] = []
    hook = hf.score.register_forward_hook(lambda _module, _given, scores: seen.append(scores))
    try:
        read = hf(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()
    return torch.cat([seen[0], read.unsqueeze(0)], dim=1).float()


def _copy(tensor: Tensor, name: str, values: Callable[[str, int, int], Tensor]) -> None:
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        flat[start : start + CHUNK] = values(name, start, min(flat.numel(), start + CHUNK))


@torch.no_grad()
def _folder_logits(folder: Path, made: Conversion, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = auto_class(made.layout.skeleton.config).from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            trust_remote_code=made.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
        hf, info = loaded
        lacking = sorted({*info["missing_keys"], *map(str, info["mismatched_keys"])})
        if lacking:
            raise ProofError(f"transformers does not find {', '.join(lacking[:3])} in {folder}. Nothing was kept.")
        freeze(hf)
        flat = {name: tensor.detach().reshape(-1) for name, tensor in named_tensors(hf)}
        # The buffers of `hf` may have been rounded to `dtype`; those of a skeleton are in fp32.
        exact = skeleton(hf.config, trust_remote_code=made.trust_remote_code)
        return logits_of(exact, lambda name, start, stop: flat[name][start:stop].float(), tokens)
    except UserError:
        raise
    except Exception as error:
        raise ProofError(f"transformers cannot load {folder}: {error}. Nothing was kept.") from error
