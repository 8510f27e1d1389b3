"""What a section `adapter` goes with."""

from __future__ import annotations

from llmtrain.config.problems import Places, Problems
from llmtrain.config.run import AdapterConfig, RunConfig
from llmtrain.topology import Degrees


def check_adapter(run: RunConfig, places: Places, problems: Problems) -> None:
    """Of the model itself nothing trains beside an adapter, and an adapter has a rank."""
    if run.adapter.r is None:
        if run.adapter != AdapterConfig():
            rule = "other keys of the section are given, and without a rank there is no adapter"
            remedy = "write a rank, 16 is common, or remove the section"
            problems.add("adapter.r", None, rule, remedy, places.get("adapter"))
        return
    for key in ("freeze", "train_only"):
        if patterns := getattr(run.model, key):
            rule = "beside an adapter (adapter.r) all parameters of the model are frozen"
            problems.add(f"model.{key}", patterns, rule, "remove it", places.get(f"model.{key}"))
    if run.adapter.quantize is not None:
        rule = (
            "a model's values are written slice by slice and proved by their checksums, and bitsandbytes' blocks of 4 "
            "bits have none of the folder's values: QLoRA does not train here"
        )
        remedy = "remove it: ZeRO 3 shards the frozen weights in bf16, offload_param keeps them on the host"
        problems.add("adapter.quantize", run.adapter.quantize, rule, remedy, places.get("adapter.quantize"))
    if not run.adapter.targets:
        problems.add("adapter.targets", [], "names no module", 'write ["all-linear"]', places.get("adapter.targets"))


def check_adapter_form(run: RunConfig, degrees: Degrees, path: str, places: Places, problems: Problems) -> None:
    """The forms in which an adapter does not train."""
    if run.adapter.r is None:
        return
    if degrees.expert > 1:
        rule = f"adapters are trained on whole layers, not with expert_parallel.autoep_size = {degrees.expert} ({path})"
        remedy = "remove that key: ZeRO 3 shards frozen experts, too"
        problems.add("adapter.r", run.adapter.r, rule, remedy, places.get("adapter.r"))
    asked: dict[str, bool | float] = {"adapter.dora": run.adapter.dora, "adapter.dropout": run.adapter.dropout}
    for key, value in asked.items():
        if value and degrees.tensor > 1:
            rule = f"needs whole maps on each rank, not tensor_parallel.autotp_size = {degrees.tensor} ({path})"
            remedy = "remove one of them: ZeRO 3, sequence parallelism and pipelines keep maps whole"
            problems.add(key, value, rule, remedy, places.get(key))
