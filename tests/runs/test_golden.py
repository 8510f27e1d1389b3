"""The first figures of each form of training: a change that means to change no number leaves them alone.

The table, tests/runs/golden.json, holds them for each kind of processor and version of torch that wrote one:
`python -m tests.runs.test_golden` adds this machine's, and prints the CPU-seconds of each case. On such a machine the
figures are equal to the last bit, on others within the case's tolerance.

More than 20 CPU s: each form is a launch of real ranks.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import forked
from tests.helpers.launching import REPO, TINY, rows, write_recipe, write_run
from tests.helpers.preference import prepared_preferences
from tests.helpers.stored import BF16, FP32, machine

TABLE = Path(__file__).with_name("golden.json")
TWO = (("pipeline", "stages"), ("tensor_parallel", "autotp_size"), ("expert_parallel", "autoep_size"))
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
STEPS = 4
_BUILD_S = 900.0
"""The file with offload may have to wait until DeepSpeed's CPUAdam is built."""


@dataclass(frozen=True)
class Case:
    """Four steps of `llmtrain train` with an own JSON and own sections of the YAML."""

    deepspeed: dict[str, Any]
    sections: dict[str, Any] = field(default_factory=dict)
    """In the place of those of `write_run`. The names of `folders` are paths."""
    train: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    figures: tuple[str, ...] = ("loss",)
    """Keys of metrics.jsonl."""
    tolerance: float = 1e-6
    """Relative, from the figures of another machine. Larger for losses of differences of log-probabilities, which are
    a hundred times their difference."""
    first: Callable[[Path, int], None] | None = None
    """What a rank does before it trains; it gets the recipe and its number."""


def column(recipe: Path, _: int) -> None:
    """Write the reference's column as a user does."""
    from llmtrain.cli import main

    assert main(["reference", str(recipe)]) == 0


ZERO = [{"zero_optimization": {"stage": stage}} for stage in range(4)]
IN_BF16 = {"bf16": {"enabled": True}}
LORA = {"r": 4, "alpha": 8}
ANSWERS = {"path": "ANSWERS", "sequence_length": 160, "isolate_documents": True}
STAGES = [
    {"from_step": 1, "path": "OTHER", "sequence_length": 64, "train": {"global_batch": 2}},
    {
        "from_step": 2,
        "mixture": {"TEXT": 1, "OTHER": 3},
        "schedule": {"name": "cosine", "warmup_steps": 1},
        "rope": {"rope_theta": 50.0},
    },
]
CASES = {
    "dora": Case(ZERO[1], {"adapter": LORA | {"dora": True, "modules_to_save": ["*norm"]},
                           "model": {"pretrained": "BASE"}}),
    "lora_zero3": Case(ZERO[3], {"adapter": LORA, "model": {"pretrained": "BASE"}}, ranks=2),
    "dpo": Case(ZERO[1], {"objective": {"name": "dpo"}, "data": ANSWERS, "model": {"pretrained": "BASE"}},
                first=column, tolerance=FP32),
    "dpo_online": Case(ZERO[1], {"objective": {"name": "dpo", "reference": "online"}, "data": ANSWERS,
                                 "adapter": LORA, "model": {"pretrained": "BASE"}}, tolerance=FP32),
    "ema": Case(ZERO[2], {"ema": {"decay": 0.5}}, {"eval": True, "eval_every": 1, "eval_sequences": 8},
                figures=("loss", "eval/loss", "eval/ema/loss"), ranks=2),
    "stages": Case(ZERO[1], {"data": {"path": "TEXT", "sequence_length": 32, "stages": STAGES}}),
    "mixture": Case(ZERO[1], {"data": {"mixture": {"TEXT": 0.7, "OTHER": 0.3}, "sequence_length": 32}}),
    "bf16": Case(ZERO[1] | IN_BF16, tolerance=BF16),
    "bf16_zero3": Case(ZERO[3] | IN_BF16, ranks=2, tolerance=BF16),
    "muon": Case(ZERO[1], {"optim": {"name": "muon", "lr": 5e-3, "muon_lr": 0.02}}),
    "muon_zero2": Case(ZERO[2], {"optim": {"name": "muon", "lr": 5e-3, "muon_lr": 0.02}}, ranks=2),
}  # fmt: skip
"""Beside the shipped DeepSpeed files, which have pipelines, tensor parallelism, sequence parallelism and experts."""
FILES = {path.stem: path for path in sorted((REPO / "ds_configs").glob("*.json"))}


def small(path: Path) -> tuple[dict[str, Any], int]:
    """The file in fp32 with each of its degrees at 2, and the ranks for it: at least two."""
    tree = json.loads(path.read_text())
    for key in ("bf16", "fp16"):
        tree.pop(key, None)
    ranks = 1
    for section, key in TWO:
        if section in tree:
            tree[section][key], ranks = 2, 2 * ranks
    if "sequence_parallel_size" in tree:
        tree["sequence_parallel_size"], ranks = 2, 2 * ranks
    return tree, max(2, ranks)


def launch_file(name: str, data: dict[str, str], folder: Path) -> forked.Launch:
    """A training with a shipped DeepSpeed file."""
    tree, ranks = small(FILES[name])
    (folder / "ds.json").write_text(json.dumps(tree))
    words = ["--deepspeed", str(folder / "ds.json"), "--train.max_steps", str(STEPS), "--schedule.name", "constant"]
    words += ["--model.config.num_hidden_layers", "2", "--checkpoint.every_steps", "null", "--train.eval", "false"]
    words += ["--model.config.attention_dropout", "0.0", "--train.micro_batch", "null", "--train.accumulation", "2"]
    if "expert_parallel" in tree:
        words += [word for key, value in EXPERTS.items() for word in (f"--model.config.{key}", str(value))]
    return forked.Launch(write_recipe(folder, data["TEXT"]), *words, world_size=ranks)


def launch_case(case: Case, data: dict[str, str], folder: Path) -> forked.Launch:
    """A training of CASES."""
    told = json.dumps(case.sections)
    for name, path in data.items():
        told = told.replace(f'"{name}"', json.dumps(path))
    train = {"max_steps": STEPS, "global_batch": 4, "micro_batch": 2} | case.train
    recipe = write_run(folder, data["TEXT"], case.deepspeed, train, **json.loads(told))
    before = functools.partial(case.first, recipe) if case.first else None
    return forked.Launch(recipe, world_size=case.ranks, before=before)


def first_figures(name: str, data: dict[str, str], folder: Path) -> tuple[list[float], float]:
    """(of the case's first four steps; CPU-seconds of its ranks)."""
    case = CASES.get(name, Case({}))
    launch = launch_case(case, data, folder) if name in CASES else launch_file(name, data, folder)
    codes = launch.wait(_BUILD_S)
    assert not any(codes), (codes, launch.output())
    found = [row[key] for key in case.figures for row in rows(folder / "run") if key in row]
    assert len(found) >= STEPS * len(case.figures), found
    return found, launch.cpu_s()


def folders(text: str, other: str, folder: Path) -> dict[str, str]:
    """By the name in CASES: two prepared folders, one of preferences, a model with weights."""
    import numpy as np
    from safetensors.numpy import save_file

    draw, width, inner = np.random.default_rng(0), TINY["hidden_size"], TINY["intermediate_size"]
    shapes = {"model.embed_tokens": (TINY["vocab_size"], width), "model.norm": (width,)}
    for layer in (f"model.layers.{number}" for number in range(TINY["num_hidden_layers"])):
        shapes |= {f"{layer}.self_attn.{letter}_proj": (width, width) for letter in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (width, inner)}
        shapes |= {f"{layer}.{name}_layernorm": (width,) for name in ("input", "post_attention")}
    base = folder / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(TINY))
    drawn = {f"{name}.weight": draw.normal(int(len(shape) == 1), 0.2, shape) for name, shape in shapes.items()}
    save_file({name: values.astype(np.float32) for name, values in drawn.items()}, base / "model.safetensors")
    return {"TEXT": text, "OTHER": other, "ANSWERS": prepared_preferences(folder, 40), "BASE": str(base)}


@pytest.fixture(scope="module")
def data(small_data: str, other_data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return folders(small_data, other_data, tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize(
    "name",
    [
        *FILES,
        *(
            pytest.param(name, marks=pytest.mark.needs("peft")) if "adapter" in case.sections else name
            for name, case in CASES.items()
        ),
    ],
)
def test_first_figures(name: str, data: dict[str, str], tmp_path: Path) -> None:
    table = json.loads(TABLE.read_text())
    known = {kind: figures[name] for kind, figures in table.items() if name in figures}
    assert known, "of no machine: python -m tests.runs.test_golden"
    got, _ = first_figures(name, data, tmp_path)
    assert got == known.get(machine(), got)
    tolerance = CASES[name].tolerance if name in CASES else 1e-6
    for kind, want in known.items():
        assert all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(got, want, strict=True)), kind


def main() -> int:
    from tests.helpers.training import prepared_data

    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        text = prepared_data(Path(name) / "text")
        data = folders(text, prepared_data(Path(name) / "other", like=text), Path(name))
        figures = table[machine()] = {}
        for case in (*FILES, *CASES):
            folder = Path(name) / "runs" / case
            folder.mkdir(parents=True)
            figures[case], cpu_s = first_figures(case, data, folder)
            print(f"{case:16} {cpu_s:5.1f} CPU-s ", *figures[case], flush=True)
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
