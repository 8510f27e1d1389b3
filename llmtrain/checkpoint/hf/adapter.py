"""An adapter out of a checkpoint: as a PEFT folder, or added to the model's own weights."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.format import TRAINER
from llmtrain.checkpoint.hf.proofs import Check, ProofError, Report, compare_logits, logits_of
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.config.run import AdapterConfig
from llmtrain.models.adapter import (
    CONFIG,
    MAGNITUDE,
    PREFIX,
    WEIGHTS,
    A,
    B,
    aliases,
    lora_config,
    plain_name,
    saved_names,
    saved_paths,
    scale,
)
from llmtrain.models.layout import FolderLayout
from llmtrain.models.score import gives_scores
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.checksum import checksum
from llmtrain.storage.hub.names import is_name
from llmtrain.storage.pieces import DTYPE_OF
from llmtrain.storage.tensorfile import numel

_ROUNDING = 1e-4
"""Allowed difference of logits as a share of the largest: (W + s B A) x and Wx + s B A x are rounded otherwise."""


def adapter_of(reader: CheckpointReader, trainer: Mapping[str, Any]) -> AdapterConfig | None:
    """The adapter that the checkpoint holds, by its run. Raises CheckpointError: trainer.json tells none that fits."""
    if not any(name.endswith(A) for name in reader.order()):
        return None
    try:
        adapter = AdapterConfig(**trainer["run"]["adapter"])
        ranks = {reader.shape(name)[0] for name in reader.order() if name.endswith(A)}
        if ranks != {adapter.r}:
            raise ValueError(f"adapter.r is {adapter.r}, its matrices have {sorted(ranks)}")
        scale(adapter)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{reader.folder / TRAINER} does not tell the adapter whose matrices the checkpoint holds ({error!r}), so "
            "its scale is not known. Take another checkpoint."
        ) from error
    return adapter


class Merge:
    """The model's own weights, each with its part of the adapter, in fp32. Threads may call it."""

    def __init__(
        self,
        reader: CheckpointReader,
        adapter: AdapterConfig | None,
        dtype: torch.dtype = torch.float32,
        saved: Collection[str] = (),
    ) -> None:
        """
        Args:
            adapter: None leaves all values as they are.
            dtype: to which the adapter's values are rounded first.
            saved: parameters of the model that train beside it, which are rounded likewise.
        """
        self._reader, self._adapter, self._dtype = reader, adapter, dtype
        names = reader.order() if adapter is not None else []
        self.names = {name for name in names if name.endswith((A, B, MAGNITUDE))}
        """Names of the adapter's tensors."""
        self.trained = self.names | set(saved)
        """Also the model's own parameters that train beside it."""
        self.paths = [name.removesuffix(A) for name in names if name.endswith(A)]
        """Paths of the linear maps."""
        self._path_of = {f"{path}.weight": path for path in self.paths}

    def check(self) -> None:
        """The adapter's values are those that were saved. Raises CheckpointError."""
        sums = self._reader.manifest.checksums()
        for name in sorted(self.trained):
            if checksum(self._reader.read(name, 0, numel(self._reader.shape(name)))) != sums[PARAM, name]:
                raise CheckpointError(
                    f"{self._reader.folder}: the values of {name} are not those that were saved. Nothing was written. "
                    "Look at it with `llmtrain checkpoint verify`, and take another checkpoint."
                )

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements of a flat tensor of the checkpoint, in fp32; the adapter's are rounded. Raises CheckpointError."""
        values = self._reader.read(name, start, stop)
        return values.to(self._dtype).float() if name in self.trained else values

    def value(self, name: str, start: int, stop: int) -> Tensor:
        """Elements of a flat parameter of the model, merged. Raises CheckpointError."""
        return self(name, start, self.read(name, start, stop))

    def __call__(self, name: str, start: int, values: Tensor) -> Tensor:
        """What becomes of `values`, the elements of a flat parameter from `start` on. Raises CheckpointError."""
        if self._adapter is None or name not in self._path_of:
            return values
        path, read, (_, inputs) = self._path_of[name], self.read, self._reader.shape(name)
        first, last = start // inputs, -(-(start + values.numel()) // inputs)  # its rows
        r, _ = self._reader.shape(path + A)
        product = read(path + B, first * r, last * r).view(-1, r) @ read(path + A, 0, r * inputs).view(r, inputs)
        rows = read(name, first * inputs, last * inputs).view(-1, inputs).add_(product, alpha=scale(self._adapter))
        if self._adapter.dora:
            magnitude = read(path + MAGNITUDE, first, last)
            rows *= (magnitude / torch.linalg.vector_norm(rows, dim=1)).unsqueeze(1)
        return rows.view(-1)[start - first * inputs :][: values.numel()]


def prove_merge(
    merge: Merge,
    hf: nn.Module,
    layout: FolderLayout,
    check: Check,
    report: Report,
    file: Mapping[str, Tensor] | None = None,
) -> None:
    """The merged weights give the logits that peft's layers give beside the model's own weights, both in fp32.

    Args:
        hf: the skeleton with peft's layers.
        file: the tensors of a PEFT folder, to be used as the adapter's values; default: the checkpoint's.

    Raises:
        ProofError: they do not.
    """
    there = {name.removeprefix(PREFIX): tensor for name, tensor in (file or {}).items()}

    def value(name: str, start: int, stop: int) -> Tensor:
        plain = plain_name(name)
        return there[plain].reshape(-1)[start:stop].float() if plain in there else merge.read(plain, start, stop)

    compare_logits(
        layout,
        lambda tokens: logits_of(layout.skeleton, merge.value, tokens),
        lambda tokens: logits_of(hf, value, tokens),
        check,
        report,
        title="adapter",
        what="peft's layers beside the model's own weights",
        resident=4 * sum(tensor.numel() for tensor in there.values()),
        rounding=_ROUNDING,
    )


def _as_peft_loads(folder: Path, layout: FolderLayout) -> nn.Module:
    """The skeleton as peft adapts it by the folder's configuration. Raises ProofError: it wants other tensors."""
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    with warnings.catch_warnings():  # peft 0.21 asks transformers 5.23 for a name that goes: no affair of the user's
        warnings.simplefilter("ignore", FutureWarning)
        model = PeftModel.from_pretrained(copy.deepcopy(layout.skeleton), str(folder), low_cpu_mem_usage=True)
    # By default it adds embeddings that are longer than the base's, which the folder has by their own names.
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    held = load_peft_weights(str(folder), device="cpu").keys()
    if odd := sorted(wanted ^ held):
        raise ProofError(f"{folder}: peft wants other tensors than it holds, first {odd[0]}. Nothing was kept.")
    hf: nn.Module = model.get_base_model()
    return hf


def base_fields(model: Mapping[str, Any]) -> dict[str, str | None]:
    """The fields of adapter_config.json that name the base. `model`: that section of the run.

    A base on the Hub goes by its name and commit, with which peft finds it on any host.
    """
    base, commit = model.get("pretrained"), model.get("revision")
    if base and commit and is_name(base):
        return {"base_model_name_or_path": base, "revision": commit}
    return {"base_model_name_or_path": base and str(Path(base).absolute()), "revision": None}


def write_peft(
    folder: Path,
    reader: CheckpointReader,
    trainer: Mapping[str, Any],
    layout: FolderLayout,
    adapter: AdapterConfig,
    dtype: str,
    check: Check,
    report: Report,
) -> int:
    """Write the adapter's two files as `PeftModel.save_pretrained` does, and prove them. Returns the first's bytes.

    Args:
        dtype: safetensors' name of the values' type.

    Raises:
        ProofError: the file does not hold what was written, or peft computes something else from the folder.
        ConfigError: peft is not installed.
    """
    from safetensors.torch import load_file, save_file

    saved = saved_names(layout.skeleton, adapter)
    merge, tensors = Merge(reader, adapter, DTYPE_OF[dtype], saved), {}
    for name in sorted(merge.trained):
        values = reader.read(name, 0, numel(reader.shape(name))).view(reader.shape(name))
        tensors[PREFIX + name] = values.to(DTYPE_OF[dtype])
    for other, name in aliases(layout.skeleton).items():
        if name in saved:  # by each of its names, as peft writes and wants it
            tensors[PREFIX + other] = tensors[PREFIX + name].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    back = load_file(folder / WEIGHTS)
    if bad := [name for name, values in tensors.items() if not torch.equal(back[name], values)]:
        raise ProofError(f"{folder / WEIGHTS}: {bad[0]} reads otherwise than it was written. Nothing was kept.")
    whole = saved_paths(layout.skeleton, adapter)
    config = lora_config(layout.skeleton, adapter, merge.paths, whole).to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    if gives_scores(layout.skeleton.config):
        config["task_type"] = "SEQ_CLS"
        report.add("head", "the score stands in the folder; load the base with num_labels=1")
    config |= {**base_fields(trainer["run"].get("model", {})), "inference_mode": True}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    unmoved = [name for name in merge.names if name.endswith(B) and not bool(tensors[PREFIX + name].any())]
    moved = f"; {len(unmoved)} of the lora_B are still zero" if unmoved else ""
    also = f" and of {len(whole)} whole modules" if whole else ""
    report.add("read back", f"{len(tensors)} tensors on {len(merge.paths)} maps{also}, equal bit by bit{moved}")
    if check != "none":
        prove_merge(merge, _as_peft_loads(folder, layout), layout, check, report, back)
    if vocabulary := trainer["run"].get("model", {}).get("vocabulary"):
        report.add("tokens", f"of the base, first resize_token_embeddings({vocabulary}); `llmtrain generate` does it")
    if adapter.dora:
        report.add("vLLM", "does not load DoRA: serve the whole model there (--merge)")
    elif whole:
        report.add("vLLM", "does not load modules_to_save: serve the whole model there (--merge)")
    elif (r := adapter.r or 0) > 16:
        report.add("vLLM", f"takes ranks up to 16 unless it is started with --max-lora-rank {r}")
    return (folder / WEIGHTS).stat().st_size
