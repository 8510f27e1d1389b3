"""Which objectives and adapters go with which form: the resolver asks it, and docs/posttraining.md has its answers."""

from __future__ import annotations

from llmtrain.config.adapter import check_adapter_form
from llmtrain.config.objective import NEXT_TOKEN, OBJECTIVES, check_form
from llmtrain.config.problems import Places, Problems
from llmtrain.config.run import AdapterConfig, ObjectiveConfig, RunConfig
from llmtrain.topology import Degrees, Mix, clashes

FORMS: dict[str, Mix] = {
    **{f"ZeRO {stage}": Mix(zero_stage=stage) for stage in range(4)},
    "optimizer offload": Mix(zero_stage=2, offload_optimizer=True),
    "parameter offload": Mix(zero_stage=3, offload_optimizer=True, offload_param=True),
    "recomputation": Mix(zero_stage=3, recomputes=True),
    "pipeline": Mix(zero_stage=1, degrees=Degrees(pipeline=2)),
    "tensor": Mix(zero_stage=1, degrees=Degrees(tensor=2)),
    "sequence": Mix(zero_stage=3, degrees=Degrees(sequence=2)),
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


def check_together(
    run: RunConfig, degrees: Degrees, zero_stage: int, path: str, places: Places, problems: Problems
) -> None:
    """The forms in which an objective or an adapter does not train. `path`: of the DeepSpeed JSON."""
    check_form(run, degrees, path, problems)
    check_adapter_form(run, degrees, zero_stage, path, places, problems)


def refusals(objective: str, adapter: AdapterConfig, form: Mix) -> list[tuple[str, str]]:
    """(rule, remedy) of what the resolver has against it; empty: it trains."""
    problems = _Kept()
    run = RunConfig(deepspeed="the JSON", adapter=adapter, objective=ObjectiveConfig(name=objective))  # type: ignore[arg-type]
    check_together(run, form.degrees, form.zero_stage, run.deepspeed, {}, problems)
    told = [(rule.replace(f"objective.name {objective}", "the objective"), remedy) for rule, remedy in problems.told]
    return [*((rule.reason, rule.remedy) for rule in clashes(form)), *told]


def rows() -> dict[str, tuple[str, AdapterConfig]]:
    """Name of a row -> (objective, adapter): adapters, then objectives. What all forms treat alike shares a row."""
    found = {name: (NEXT_TOKEN, adapter) for name, adapter in ADAPTERS.items()}
    alike: dict[str, list[str]] = {}
    for name in OBJECTIVES:
        if name != NEXT_TOKEN:
            answers = [refusals(name, AdapterConfig(), form) for form in FORMS.values()]
            alike.setdefault(str(answers), []).append(name)
    found |= {", ".join(f"`{name}`" for name in names): (names[0], AdapterConfig()) for names in alike.values()}
    return found


def markdown() -> str:
    """The table of docs/posttraining.md, and below it why some do not go together."""
    lines = [f"| | {' | '.join(FORMS)} | LoRA |", "|---" * (len(FORMS) + 2) + "|"]
    notes: list[tuple[str, str]] = []
    for row, (objective, adapter) in rows().items():
        cells = []
        for form in FORMS.values():
            cells.append(_cell(refusals(objective, adapter, form), notes))
        alone = objective == NEXT_TOKEN
        cells.append("" if alone else _cell(refusals(objective, ADAPTERS["LoRA, rsLoRA"], Mix()), notes))
        lines.append(f"| {row} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{number}. {rule}. Remedy: {remedy}." for number, (rule, remedy) in enumerate(notes, 1)]
    return "\n".join(lines) + "\n"


def _cell(against: list[tuple[str, str]], notes: list[tuple[str, str]]) -> str:
    if not against:
        return "yes"
    if against[0] not in notes:
        notes.append(against[0])
    return f"no ({notes.index(against[0]) + 1})"
