"""The generated tables of the documentation: fields, rules, metrics, DeepSpeed's keys, settings with each other.

`python -m tools.pages docs` writes the tables into their pages.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtrain.base.choice import Rule, Rules
from llmtrain.config import rules
from llmtrain.config.deepspeed.join import join_values, read_run
from llmtrain.config.deepspeed.keys import LEAVES, STAGES, Key, Why
from llmtrain.config.help import all_rules, entries
from llmtrain.config.problems import Problems, show
from llmtrain.config.reader import read
from llmtrain.config.resolve import spread, with_stages
from llmtrain.config.run import AdapterConfig, Run, RunConfig
from llmtrain.config.topology import Degrees, Mix, clashes
from llmtrain.features import features
from llmtrain.objectives.objective import Objective
from llmtrain.tracking import metrics

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
    """Return the sections of a run with two of OPTIONS; None: they differ in a key.

    New rows of a vocabulary need an adapter with the modules that hold them."""
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
    """Return (reason, remedy) of the rules that these sections break in any form."""
    model = {"pretrained": "FOLDER", **sections.get("model", {})}
    return _broken(rules.RULES, _read({**BASE, **sections, "model": model}))


def refusals(adapter: AdapterConfig, form: Mix) -> list[tuple[str, str]]:
    """Return (reason, remedy) of the rules that an adapter breaks in a form with any objective."""
    run = Run(config=RunConfig(deepspeed="the JSON", adapter=adapter), mix=form)
    return _broken(clashes(form), form) + _broken(rules.OF_FORMS, run)


def _broken(rows: Iterable[Rule], subject: Any) -> list[tuple[str, str]]:
    return [(reason, remedy) for rule in rows for _, reason, remedy in rule.breaks(subject)]


def markdown() -> str:
    """The tables of docs/adapters.md: objectives and adapters with forms, and options that refuse each other."""
    objectives = ", ".join(f"`{name}`" for name in Objective.CHOICES if name != "next_token")
    rows = {objectives: AdapterConfig(), **ADAPTERS}
    forms = _matrix(rows, FORMS, lambda row, form: refusals(rows[row], FORMS[form]))
    refused: dict[tuple[str, tuple[str, str]], list[str]] = {}
    for one, other in itertools.combinations(OPTIONS, 2):
        for why in against(pair(one, other) or {}):
            refused.setdefault((other, why), []).append(one)
    lines = [
        f"Any two of {', '.join(OPTIONS)} go together (a column, `online`, `teacher` or `reward` in a run), but for:",
        "",
        "| refused | because | instead |",
        "|---|---|---|",
    ]
    lines += [
        f"| {option} with {', '.join(others)} | {why} | {remedy} |"
        for (option, (why, remedy)), others in refused.items()
    ]
    return "\n".join([*forms, "", *lines]) + "\n"


def parallelism() -> str:
    """The table of docs/parallelism.md: ways of sharing the work with each other. Data parallelism goes with all."""
    shared = [name for name, form in FORMS.items() if form.degrees != Degrees()]
    stages = [name for name in FORMS if name.startswith("ZeRO")]

    def of_two(one: str, other: str) -> list[tuple[str, str]] | str:
        ways = {key: degree for way in (one, other) for key, degree in vars(FORMS[way].degrees).items() if degree > 1}
        mix = Mix(zero_stage=FORMS[one].zero_stage if one in stages else 0, degrees=Degrees(**ways))
        return "" if one == other else _broken(clashes(mix), mix)

    return "\n".join(_matrix([*stages, *shared], shared, of_two)) + "\n"


def _matrix(
    rows: Iterable[str], columns: Iterable[str], refused: Callable[[str, str], list[tuple[str, str]] | str]
) -> list[str]:
    """A table of settings that go together, and below it why some do not. `refused`: of a row and a column, (reason,
    remedy) of the rules that they break, or the text of the cell."""
    lines, notes = [f"| | {' | '.join(columns)} |", "|---" * (len(list(columns)) + 1) + "|"], list[tuple[str, str]]()
    for row in rows:
        cells = []
        for column in columns:
            broken = refused(row, column)
            if broken and not isinstance(broken, str):
                notes += [broken[0]] if broken[0] not in notes else []
                broken = f"no ({notes.index(broken[0]) + 1})"
            cells.append("yes" if broken == [] else str(broken))
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return [*lines, "", *(f"{number}. {why}. Remedy: {remedy}." for number, (why, remedy) in enumerate(notes, 1))]


BASE: dict[str, Any] = {
    "deepspeed": "ds.json",
    "model": {"config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}},
    "data": {"path": "data/x", "sequence_length": 128},
    "train": {"global_batch": 8, "micro_batch": 2, "max_steps": 100},
}
"""The YAML that the examples of the rules change; it breaks none."""
BASE_JSON: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}
RANKS = 2


def example_of(rule: Rule) -> tuple[dict[str, Any], dict[str, Any]]:
    """The YAML and the DeepSpeed JSON of a run that breaks a rule."""
    trees = copy.deepcopy(BASE), copy.deepcopy(BASE_JSON)
    for key, value in rule.example.items():
        *sections, name = key.split(".")
        tree = trees[key.partition(".")[0] not in RunConfig.__dataclass_fields__]
        functools.reduce(lambda held, section: held.setdefault(section, {}), sections, tree)[name] = value
    return trees


def texts(rule: Rule) -> tuple[str, str]:
    """The reason and the remedy of a rule, with the figures of its example."""
    if isinstance(rule.reason, str) and isinstance(rule.remedy, str):
        return rule.reason, rule.remedy
    ours, theirs = example_of(rule)
    metrics = ours.pop("metrics", {})
    config = replace(_read(ours), metrics=metrics)
    return _broken([rule], _run(config, theirs) if _is_of_runs(rule) else config)[0]


def _is_of_runs(rule: Rule) -> bool:
    """True if the rule asks a Run, and not a RunConfig."""
    own = sum((feature.rules() for feature in features().values()), Rules())
    of_core = (*rules.OF_FORMS, *rules.OF_STAGES, *rules.OF_MASKS, *rules.OF_STEPS)
    return rule in (*of_core, *own.of_forms, *own.of_steps)


def _read(tree: dict[str, Any]) -> RunConfig:
    problems = Problems()
    config = read(RunConfig, tree, "", problems)
    problems.raise_if_any()
    assert isinstance(config, RunConfig)
    return config


def _run(config: RunConfig, tree: dict[str, Any]) -> Run:
    """A run with a DeepSpeed JSON, as `resolve` would check it."""
    problems = Problems()
    config = join_values(config, tree, problems)
    run = read_run(config, tree, problems)
    degrees = spread(run.mix.degrees, config.deepspeed, RANKS, "", problems)
    return with_stages(replace(run, mix=replace(run.mix, degrees=degrees)), "", None, problems)


def rules_markdown() -> str:
    """The table of docs/configuration.md: settings that are refused."""
    lines = ["| refused, for example | because |", "|---|---|"]
    for rule in all_rules():
        settings = ", ".join(f"`{key}: {show(value)}`" for key, value in rule.example.items())
        lines.append(f"| {settings} | {texts(rule)[0]} |")
    return "\n".join(lines) + "\n"


def of_fields() -> str:
    """The tables of docs/configuration.md, one per section."""
    lines: list[str] = []
    section = None
    for entry in entries():
        head, _, name = entry.key.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"### `{head}`" if head else "### top level", ""]
            lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        meaning = entry.meaning.replace("|", "\\|")
        values = entry.values.replace("a whole number", "integer").replace("a number", "number").removeprefix("one of ")
        lines.append(f"| `{name}` | {values} | `{entry.default}` | {meaning} |")
    return "\n".join(lines).strip() + "\n"


def of_keys() -> str:
    """The lists of docs/deepspeed.md: for each section the keys that are proved, without effect and refused."""
    by_section: dict[str, list[tuple[str, Key]]] = {}
    for dotted, key in LEAVES.items():
        section, _, name = dotted.partition(".")
        by_section.setdefault(section if name else "", []).append((name or dotted, key))
    lines: list[str] = []
    for section, keys in by_section.items():
        lines += [f"### `{section}`" if section else "### Keys at the top", ""]
        for effect in ("proved", "no effect"):
            if names := [_at(name, _taken(key)) for name, key in keys if key.effect == effect and _taken(key)]:
                lines += [f"{effect.capitalize()}: {', '.join(names)}.", ""]
        refused: dict[Why, list[str]] = {}
        for name, key in keys:
            for value, why in key.values:
                refused.setdefault(why, []).append(f"`{name}: {json.dumps(value)}`")
            for why in dict.fromkeys(key.at.values()):
                at = tuple(stage for stage, reason in key.at.items() if reason == why)
                refused.setdefault(why, []).append(_at(name, at))
        if refused:
            lines += ["| refused | because | instead |", "|---|---|---|"]
            lines += [f"| {', '.join(names)} | {why.rule} | {why.remedy} |" for why, names in refused.items()]
            lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _taken(key: Key) -> tuple[int, ...]:
    """The ZeRO stages at which a value other than the default is accepted."""
    return tuple(stage for stage in STAGES if stage not in key.at)


def _at(name: str, stages: tuple[int, ...]) -> str:
    return f"`{name}`" if stages == STAGES else f"`{name}` (ZeRO {', '.join(map(str, stages))})"


def of_metrics() -> str:
    """The table of docs/tracking.md; the objectives' figures of the validation data share one row."""
    shown = {key: metric for key, metric in metrics.metrics().items() if not metric.meaning.startswith("`")}
    rows = (f"| `{key}` | {metric.unit} | {metric.meaning} |" for key, metric in shown.items())
    return "\n".join(["| key | unit | meaning |", "|---|---|---|", *rows]) + "\n"


BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
_RULES = """### Settings that do not go together

Each example is refused in a run that is right without it. The message names the lines of your values and the remedy.
"""
PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": lambda: "\n".join([of_fields(), _RULES, rules_markdown()]),
    "deepspeed.md": of_keys,
    "parallelism.md": parallelism,
    "adapters.md": markdown,
    "tracking.md": of_metrics,
}


def write_into(page: Path, generated: str) -> None:
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{generated}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    for name, generated in PAGES.items():
        write_into(Path(sys.argv[1]) / name, generated())
