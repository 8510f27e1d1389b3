"""Every recipe for the machine that it is written for. (That each one parses: test_config_right.py.)"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.deepspeed.read import deep_check
from llmtrain.config.load import parse
from llmtrain.config.resolve import resolve
from llmtrain.config.run import ModelConfig, Run
from llmtrain.models.spec import ModelSpec

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "launch/recipes").glob("*.yaml"))
NAMES = [path.stem for path in RECIPES]
BY_MAKE = ["quickstart", "sft", "lora", "dpo"]
"""What `make train` and `make tune` run, on all GPUs that there are."""


def resolved_for(path: Path, ranks: int) -> Run:
    parsed = parse(["--config", str(path)], check_paths=False)
    return resolve(parsed.config, ranks, places=parsed.places)


def ranks_of(path: Path) -> int:
    """As the recipe's first lines say: "on 8 GPUs", "on two CPU cores"."""
    said = re.search(r"on (\w+) (?:GPUs|CPU cores?)", path.read_text())
    assert said, "the first comment tells the machine"
    return {"one": 1, "two": 2}.get(said[1]) or int(said[1])


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_on_its_machine(path: Path) -> None:
    ranks = ranks_of(path)
    run = resolved_for(path, ranks)
    train, data, schedule = run.config.train, run.config.data, run.config.schedule
    assert run.mix.degrees.world_size == ranks
    assert train.global_batch == train.micro_batch * train.accumulation * run.mix.degrees.data  # type: ignore[operator]
    assert run.max_steps and train.eval_every and train.eval_every < run.max_steps
    assert 0 < schedule.warmup_steps <= run.max_steps / 10
    assert run.config.checkpoint.every_steps, "a run without checkpoints loses everything"
    room = (run.config.model.config or {}).get("max_position_embeddings", data.sequence_length)  # type: ignore[union-attr]
    assert data.sequence_length <= room
    deep_check(run.deepspeed, run.config.deepspeed)


@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem not in BY_MAKE], ids=lambda path: path.stem)
def test_twice_the_ranks_keep_the_global_batch(path: Path) -> None:
    ranks = ranks_of(path)
    once = resolved_for(path, ranks)
    twice = resolved_for(path, 2 * ranks)
    assert once.config.train.global_batch == twice.config.train.global_batch
    assert once.max_steps == twice.max_steps


@pytest.mark.parametrize("name", BY_MAKE)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_recipes_of_make_fit_any_machine(name: str, ranks: int) -> None:
    run = resolved_for(ROOT / f"launch/recipes/{name}.yaml", ranks)
    assert run.config.train.global_batch == 8 * ranks


def test_the_1b_recipe_has_the_size_that_it_says() -> None:
    path = ROOT / "launch/recipes/llama_1b.yaml"
    said = re.search(r"([\d.]+)B parameters", path.read_text())
    run = resolved_for(path, 8)
    parameters = ModelSpec.of(run.config.model).facts.parameters
    assert said and f"{parameters / 1e9:.2f}" == said[1]
    tokens = run.config.train.max_tokens
    assert tokens and round(tokens / parameters) == 20
    assert f"{parameters * 12 / 1e9:.0f} GB each" in path.read_text()


LLAMA_3: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
SHAPES = {
    "sft_8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "lora_70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_memory_that_a_recipe_of_post_training_says(name: str) -> None:
    """Its comment's figures, computed from the shapes of Llama 3: bytes of a parameter as in ds_configs/README.md."""
    path = ROOT / f"launch/recipes/{name}.yaml"
    said = " ".join(path.read_text().replace("\n#", "").split())
    config = resolved_for(path, 8).config
    model, shape = ModelConfig(config={**LLAMA_3, **SHAPES[name]}), SHAPES[name]
    spec = ModelSpec.of(model, config.adapter)
    trained, parameters = spec.facts.trained, ModelSpec.of(model).facts.parameters
    inputs = shape["num_hidden_layers"] * shape["hidden_size"] * config.data.sequence_length * 2 / 1e9
    assert f"{parameters / 1e9:.2f}B parameters" in said and f"{inputs:.1f} GB of layer inputs" in said
    if config.adapter.r is None:
        assert f"{18 * parameters / 8e9:.1f} GB a GPU (18 bytes each" in said
        assert f"zero2.json with more memory is faster: {(2 + 16 / 8) * parameters / 1e9:.0f} GB" in said
    else:
        assert f"{2 * parameters / 8e9:.1f} GB a GPU (2 bytes each" in said
        whole = f"{trained / 1e9:.3f}B: {(2 + 18 / 8) * trained / 1e9:.1f} GB a GPU"
        assert f"{whole} (2 bytes each, whole on every GPU, and 18 each, shared by 8)" in said
        layer = sum(math.prod(shape) for name, shape in spec.shapes.items() if ".layers.0." in name)
        assert f"its gathered weights ({2 * layer / 1e9:.1f} GB)" in said
    saved = 12 * trained / 1e9
    assert f"keep: 2 # {saved:.{1 if saved < 10 else 0}f} GB each" in said
