"""Rules of the section `adapter`."""

from __future__ import annotations

from llmtrain.config.objective import wants_column
from llmtrain.config.problems import Places, Problems
from llmtrain.config.run import AdapterConfig, RunConfig
from llmtrain.config.topology import Degrees


def check_adapter(run: RunConfig, places: Places, problems: Problems) -> None:
    """Check `adapter`, model.freeze and model.train_only together: an adapter needs a rank and freezes the model."""
    if run.model.freeze and run.model.train_only:
        problems.add("model.train_only", run.model.train_only, "says the opposite of model.freeze, which is given, too",
                     "keep one of them", places.get("model.train_only"))  # fmt: skip
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
        _check_quantize(run, places, problems)
    if not run.adapter.targets:
        problems.add("adapter.targets", [], "names no module", 'write ["all-linear"]', places.get("adapter.targets"))


def _check_quantize(run: RunConfig, places: Places, problems: Problems) -> None:
    """Packed weights are those of whole maps that compute as the run says, and what it compares with has them too."""
    value, place = run.adapter.quantize, places.get("adapter.quantize")
    if run.adapter.dora:
        rule = "the lengths that DoRA begins with are those of the folder's rows (adapter.dora), not of packed ones"
        problems.add("adapter.quantize", value, rule, "remove one of them", place)
    if run.model.compile_layers:
        rule = "bitsandbytes' maps are not compiled here (model.compile_layers)"
        problems.add("adapter.quantize", value, rule, "remove one of them", place)
    if wants_column(run.objective):
        rule = "the log-probabilities of `llmtrain reference` are of weights that are not packed"
        problems.add("adapter.quantize", value, rule, "set objective.reference to online: the packed base", place)


def check_adapter_form(
    run: RunConfig, degrees: Degrees, zero_stage: int, path: str, places: Places, problems: Problems
) -> None:
    """The forms in which an adapter does not train."""
    if run.adapter.r is None:
        return
    if run.adapter.quantize is not None:
        forms = {"zero_optimization.stage": (zero_stage, zero_stage == 3),
                 "tensor_parallel.autotp_size": (degrees.tensor, degrees.tensor > 1),
                 "pipeline.stages": (degrees.pipeline, degrees.pipeline > 1)}  # fmt: skip
        for key, (degree, wrong) in forms.items():
            if wrong:
                rule = f"blocks of 4 bits are of whole maps that each rank has, not with {key} = {degree} ({path})"
                remedy = "remove one of them: sharded over the ranks, weights in bf16 may take as little"
                place = places.get("adapter.quantize")
                problems.add("adapter.quantize", run.adapter.quantize, rule, remedy, place)
    asked: dict[str, bool | float] = {"adapter.dora": run.adapter.dora, "adapter.dropout": run.adapter.dropout}
    for key, value in asked.items():
        if value and degrees.tensor > 1:
            rule = f"needs whole maps on each rank, not tensor_parallel.autotp_size = {degrees.tensor} ({path})"
            remedy = "remove one of them: ZeRO 3, sequence parallelism and pipelines keep maps whole"
            problems.add(key, value, rule, remedy, places.get(key))
