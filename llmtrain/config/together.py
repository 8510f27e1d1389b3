"""Compatibility of objectives and adapters with forms of training, and of a run's model options with each other: the
resolver checks it, and docs/posttraining.md has it as a table."""

from __future__ import annotations

from typing import Any

from llmtrain.config.objective import check_objective
from llmtrain.config.problems import Problems
from llmtrain.config.rules import check_adapter, check_adapter_form
from llmtrain.config.run import AdapterConfig, ModelConfig, RunConfig
from llmtrain.config.topology import Degrees, Mix, clashes
from llmtrain.objectives.objective import Objective

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

_LORA = {"adapter": {"r": 4}}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "`adapter.r`": _LORA,
    "`rslora`": {"adapter": {"r": 4, "rslora": True}},
    "`dora`": {"adapter": {"r": 4, "dora": True}},
    "`dropout`": {"adapter": {"r": 4, "dropout": 0.1}},
    "`quantize`": {"adapter": {"r": 4, "quantize": "nf4"}},
    "`start`": {"adapter": {"r": 4, "start": "FOLDER"}},
    "`modules_to_save`": {"adapter": {"r": 4, "modules_to_save": ["model.embed_tokens", "[!m]*"]}},
    "a column": {"objective": {"name": "dpo", "reference": "column"}},
    "`online`": {**_LORA, "objective": {"name": "dpo", "reference": "online"}},
    "`teacher`": {"objective": {"name": "distill", "teacher": "FOLDER"}},
    "`top_k`": {"objective": {"name": "distill", "top_k": 7}},
    "`reward`": {"objective": {"name": "reward"}},
    "`freeze`": {"model": {"freeze": ["*.mlp.*"]}},
    "`train_only`": {"model": {"train_only": ["model.embed_tokens.weight", "[!m]*"]}},
    "`vocabulary`": {"model": {"vocabulary": 600}},
}
"""Each option of adapters, references, freezing and growth, as a section of the YAML would have it."""


def pair(one: str, other: str) -> dict[str, dict[str, Any]] | None:
    """The sections of a run with both of OPTIONS; None: a run has one of the two. New rows of a vocabulary train beside
    an adapter where the modules that hold them do."""
    merged: dict[str, dict[str, Any]] = {}
    for option in (one, other):
        for section, fields in OPTIONS[option].items():
            held = merged.setdefault(section, {})
            if any(held.get(key, value) != value for key, value in fields.items()):
                return None
            held.update(fields)
    if "adapter" in merged and "vocabulary" in merged.get("model", {}):
        merged["adapter"] |= OPTIONS["`modules_to_save`"]["adapter"]
    return merged


def against(sections: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """(rule, remedy) of what the resolver has against these sections, whatever the form; empty: they go together."""
    problems = _Kept()
    chosen = dict(sections.get("objective", {"name": "next_token"}))
    run = RunConfig(
        deepspeed="the JSON",
        model=ModelConfig(pretrained="FOLDER", **sections.get("model", {})),
        adapter=AdapterConfig(**sections.get("adapter", {})),
        objective=Objective.of(chosen.pop("name"), **chosen),
    )
    check_adapter(run, problems)
    check_objective(run, problems)
    return problems.refused


class _Kept(Problems):
    """The mistakes one by one, without the value that stood there."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[tuple[str, str]] = []

    def add_text(self, key: str, what: str, rule: str, remedy: str, place: str | None = None) -> None:
        super().add_text(key, what, rule, remedy, place)
        self.refused.append((rule, remedy))


def refusals(adapter: AdapterConfig, form: Mix) -> list[tuple[str, str]]:
    """(rule, remedy) of what the resolver has against it, whatever the objective; empty: it trains."""
    problems = _Kept()
    run = RunConfig(deepspeed="the JSON", adapter=adapter)
    check_adapter_form(run, form.degrees, form.zero_stage, run.deepspeed, problems)
    return [*((rule.reason, rule.remedy) for rule in clashes(form)), *problems.refused]


def markdown() -> str:
    """The table of docs/posttraining.md, and below it why some do not go together."""
    lines = [f"| | {' | '.join(FORMS)} |", "|---" * (len(FORMS) + 1) + "|"]
    notes: list[tuple[str, str]] = []
    objectives = ", ".join(f"`{name}`" for name in Objective.CHOICES if name != "next_token")
    for row, adapter in {objectives: AdapterConfig(), **ADAPTERS}.items():
        lines.append(f"| {row} | {' | '.join(_cell(refusals(adapter, form), notes) for form in FORMS.values())} |")
    lines.append("")
    lines += [f"{number}. {rule}. Remedy: {remedy}." for number, (rule, remedy) in enumerate(notes, 1)]
    return "\n".join([*lines, "", *_pairs()]) + "\n"


def _pairs() -> list[str]:
    """The table of two options."""
    names = list(OPTIONS)
    lines = [f"| | {' | '.join(names[1:])} |", "|---" * len(names) + "|"]
    notes: list[tuple[str, str]] = []
    for row, one in enumerate(names[:-1]):
        cells = []
        for column, other in enumerate(names[1:], 1):
            both = pair(one, other) if column > row else None
            cells.append("" if column <= row else "-" if both is None else _cell(against(both), notes))
        lines.append(f"| {one} | {' | '.join(cells)} |")
    return [*lines, "", *(f"{number}. {rule}. Remedy: {remedy}." for number, (rule, remedy) in enumerate(notes, 1))]


def _cell(against: list[tuple[str, str]], notes: list[tuple[str, str]]) -> str:
    if not against:
        return "yes"
    if against[0] not in notes:
        notes.append(against[0])
    return f"no ({notes.index(against[0]) + 1})"
