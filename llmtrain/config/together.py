"""Which objectives and adapters go with which form: the resolver asks it, and docs/posttraining.md has its answers."""

from __future__ import annotations

from llmtrain.config.adapter import check_adapter_form
from llmtrain.config.objective import NEXT_TOKEN, OBJECTIVES
from llmtrain.config.problems import Problems
from llmtrain.config.run import AdapterConfig, RunConfig
from llmtrain.topology import Degrees, Mix, clashes

FORMS: dict[str, Mix] = {
    **{f"ZeRO {stage}": Mix(zero_stage=stage) for stage in range(4)},
    "optimizer offload": Mix(zero_stage=2, offload_optimizer=True),
    "parameter offload": Mix(zero_stage=3, offload_optimizer=True, offload_param=True),
    "recomputation": Mix(zero_stage=3, recomputes=True),
    "pipeline": Mix(zero_stage=1, degrees=Degrees(pipeline=2)),
    "tensor": Mix(zero_stage=1, degrees=Degrees(tensor=2)),
    "sequence": Mix(zero_stage=2, degrees=Degrees(sequence=2)),
    "experts": Mix(zero_stage=2, degrees=Degrees(expert=2, data=2)),
}
"""The columns: forms, each at one of the ZeRO stages that it goes with."""
ADAPTERS: dict[str, AdapterConfig] = {
    "LoRA, rsLoRA": AdapterConfig(r=8),
    "DoRA": AdapterConfig(r=8, dora=True),
    "`adapter.dropout`": AdapterConfig(r=8, dropout=0.1),
    "`adapter.quantize`": AdapterConfig(r=8, quantize="nf4"),
}


class _Kept(Problems):
    """The mistakes one by one, without the value that stood there."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []

    def add_text(self, key: str, what: str, rule: str, remedy: str, place: str | None = None) -> None:
        super().add_text(key, what, rule, remedy, place)
        self.told.append((rule, remedy))


def refusals(adapter: AdapterConfig, form: Mix) -> list[tuple[str, str]]:
    """(rule, remedy) of what the resolver has against it, whatever the objective; empty: it trains."""
    problems = _Kept()
    run = RunConfig(deepspeed="the JSON", adapter=adapter)
    check_adapter_form(run, form.degrees, form.zero_stage, run.deepspeed, {}, problems)
    return [*((rule.reason, rule.remedy) for rule in clashes(form)), *problems.told]


def markdown() -> str:
    """The table of docs/posttraining.md, and below it why some do not go together."""
    lines = [f"| | {' | '.join(FORMS)} |", "|---" * (len(FORMS) + 1) + "|"]
    notes: list[tuple[str, str]] = []
    objectives = ", ".join(f"`{name}`" for name in OBJECTIVES if name != NEXT_TOKEN)
    for row, adapter in {objectives: AdapterConfig(), **ADAPTERS}.items():
        lines.append(f"| {row} | {' | '.join(_cell(refusals(adapter, form), notes) for form in FORMS.values())} |")
    lines.append("")
    lines += [f"{number}. {rule}. Remedy: {remedy}." for number, (rule, remedy) in enumerate(notes, 1)]
    return "\n".join(lines) + "\n"


def _cell(against: list[tuple[str, str]], notes: list[tuple[str, str]]) -> str:
    if not against:
        return "yes"
    if against[0] not in notes:
        notes.append(against[0])
    return f"no ({notes.index(against[0]) + 1})"
