"""From a jsonl of conversations to a training whose loss is that of its answers, one conversation at a time."""

from __future__ import annotations

import functools
import json
import math
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmtrain.config.run import DataConfig
from llmtrain.data.stream.train_data import TrainData
from tests.helpers.chat import KINDS, expected, write_tokenizer
from tests.helpers.launching import losses
from tests.helpers.plain import PlainTraining
from tests.helpers.preference import Plain, preferences, rows_read
from tests.helpers.warm import WarmCommands

pytestmark = pytest.mark.needs("peft")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [(ROOT / page).read_text() for page in ("docs/chat.md", "docs/objectives.md", "docs/adapters.md")]
RATES = [1.0, 0.55, 0.1]
"""Half a cosine from 1 to 0.1, over 3 steps."""
KIND = KINDS["qwen3"]
LENGTH, BATCH, STEPS, LR = 160, 8, 3, 1e-3
MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def conversations() -> list[list[dict[str, str]]]:
    draw = random.Random(5)
    made = []
    for index in range(150):
        texts = [" ".join(draw.choices(["yes", "no", "maybe", "so"], k=draw.randint(1, 5))) for _ in range(4)]
        texts = texts[: 2 * draw.randint(1, 2)]
        talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        talk[1]["reasoning_content"] = f"case {index}"
        made.append(talk)
    return made


def write_model(folder: Path) -> None:
    """What a user has: the folder of a chat model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(MODEL)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).save_pretrained(folder)
    write_tokenizer(folder, KIND)


Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From logits [T, V] and a row's ids [T + 1] to the loss of each token [T]."""


def next_token(logits: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, row[1:], reduction="none")


def plain_losses(folder: Path, talks: list[list[dict[str, str]]], losses_of: Losses = next_token) -> list[float]:
    """By transformers and torch: each row alone, and its counted tokens as a hand wrote them. Only which rows a step
    takes is asked of us."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    by_hand = {tuple(ids): counted for talk in talks for ids, counted in expected(folder / "model", KIND, talk)}
    data = TrainData(DataConfig(path=str(folder / "data/talks"), sequence_length=LENGTH, isolate_documents=True))

    def loss(step: int) -> torch.Tensor:
        total, count = torch.zeros(()), 0
        for index in range(step * BATCH, (step + 1) * BATCH):
            inputs, positions = data.sequence_at(index).inputs, data.sequence_at(index).positions
            assert positions is not None
            for row in np.split(inputs, np.flatnonzero(positions == 0)[1:]):
                if (counted := by_hand.get(tuple(row.tolist()))) is None:
                    assert set(row.tolist()) == {data.separator_id}  # padding
                    continue
                logits = hf(input_ids=torch.from_numpy(row)[None]).logits[0, :-1]
                every = losses_of(logits, torch.from_numpy(row))
                total, count = total + every[torch.tensor(counted[1:])].sum(), count + sum(counted[1:])
        return total / count

    return plain_steps(hf, loss)


def plain_steps(hf: Any, loss_of: Callable[[int], torch.Tensor]) -> list[float]:
    """The losses of a run's steps."""
    training = PlainTraining(hf, lr=LR, rate=RATES.__getitem__)
    for step in range(STEPS):
        training.step(loss_of(step))
    return training.losses


def blocks(language: str) -> list[str]:
    return [block for page in PAGES for block in re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.M | re.S)]


def test_the_commands_of_the_page_train_on_the_answers(tmp_path: Path, warm: WarmCommands) -> None:
    """Every command of the three pages as it is there. Packed; 1e-5, as all comparisons in fp32."""
    talks = conversations()
    write_model(tmp_path / "model")
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    (tmp_path / "ds_configs").symlink_to(ROOT / "ds_configs")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in preferences(150)))
    for name, text in zip(("sft", "dpo", "reward", "distill", "lora"), blocks("yaml"), strict=True):
        (tmp_path / f"{name}.yaml").write_text(text)
    printed, env = "", warm.environment(PYTHONPATH=str(ROOT), WANDB_MODE="disabled")
    for command in blocks("bash"):
        done = subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        printed += done.stdout
    for shown in blocks("text"):
        assert shown in printed, printed
    ours = losses(tmp_path / "runs/sft")
    assert [ours[step + 1] for step in range(STEPS)] == pytest.approx(plain_losses(tmp_path, talks), rel=1e-5)
    assert ours[STEPS] < ours[1]
    export = tmp_path / "runs/sft/export"
    assert json.loads((export / "config.json").read_text())["eos_token_id"] is not None
    assert (export / "tokenizer_config.json").is_file()
    adapted = losses(tmp_path / "runs/lora")
    assert adapted[1] == pytest.approx(ours[1], rel=1e-6) and adapted[STEPS] < adapted[1]
    lora, merged = tmp_path / "runs/lora/export", tmp_path / "merged"
    assert (lora / "adapter_config.json").is_file() and not (lora / "config.json").exists()
    assert (merged / "model.safetensors").is_file() and (merged / "config.json").is_file()
    for folder in (lora, merged):
        assert (folder / "tokenizer_config.json").read_bytes() == (export / "tokenizer_config.json").read_bytes()
    check_preferences(tmp_path, env)
    check_reward(tmp_path, env)
    check_distillation(tmp_path, talks, env)


def check_reward(folder: Path, env: dict[str, str]) -> None:
    """What reward.yaml has left: transformers loads it, and finds the run's own validation figures, each row alone."""
    from transformers import AutoModelForSequenceClassification

    export, found = folder / "runs/reward/export", losses(folder / "runs/reward")
    # Three steps over other pairs each tell no trend: scores begin near 0, so the loss is near ln 2, and it trains.
    assert found[1] == pytest.approx(math.log(2), abs=0.05) and found[STEPS] != found[1]
    hf = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32)
    assert hf.config.num_labels == 1 and not (export / "generation_config.json").exists()
    w, x = Plain(hf, folder / "data/pairs", "validation").scores().T
    last = [json.loads(line) for line in (folder / "runs/reward/metrics.jsonl").read_text().splitlines()][-1]
    loss = (-F.logsigmoid(w - x) + 0.01 * (w + x) ** 2).mean()
    want = {
        "loss": loss,
        "pairs/margin": (w - x).mean(),
        "pairs/accuracy": (w > x).float().mean(),
        "pairs/chosen_reward": w.mean(),
        "pairs/rejected_reward": x.mean(),
    }
    for key, value in want.items():
        assert last[f"eval/{key}"] == pytest.approx(float(value), rel=1e-5, abs=1e-6), key
    done = subprocess.run(
        ["llmtrain", "generate", "runs/reward", "--prompt", "yes"], cwd=folder, capture_output=True, text=True, env=env
    )
    assert done.returncode == 2 and "reward model" in done.stderr, done.stderr


def check_distillation(folder: Path, talks: list[list[dict[str, str]]], env: dict[str, str]) -> None:
    """What distill.yaml has left, against one process and the definition; and that another teacher is no resume."""
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(folder / "runs/sft/export", dtype=torch.float32)

    def distilled(logits: torch.Tensor, row: torch.Tensor, k: int | None = None) -> torch.Tensor:
        with torch.no_grad():
            p = (teacher(input_ids=row[None]).logits[0, :-1] / 2).softmax(-1)
        q = (logits / 2).softmax(-1)
        if k is not None:
            likeliest = p.topk(k).indices
            p, q = (each.gather(-1, likeliest) for each in (p, q))
            p, q = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in (p, q))
        return 0.8 * 4 * (p * (p / q).log()).sum(-1) + 0.2 * next_token(logits, row)

    for run, k in (("runs/distill", None), ("runs/distill-column", 16)):
        ours = losses(folder / run)
        want = plain_losses(folder, talks, functools.partial(distilled, k=k))
        assert [ours[step + 1] for step in range(STEPS)] == pytest.approx(want, rel=1e-5) and ours[STEPS] < ours[1]
    column = ["--objective.top_k", "16", "--train.run_dir", "runs/other"]
    for words, told in (
        (["--objective.teacher", "model"], "other weights than objective.teacher = 'model' has"),
        (["--objective.temperature", "1"], "objective.temperature: 2.0 there, and 1.0 in this run"),
        (["--objective.top_k", "8"], "objective.top_k: 16 there, and 8 in this run"),
    ):
        assert told in refused(folder, env, "train", "--config", *column, *words, recipe="distill.yaml"), told
    rows = [json.loads(line) for line in (folder / "runs/distill/metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if row["step"] == 1)
    assert first["distill/next_token_loss"] == pytest.approx(losses(folder / "runs/sft")[1], rel=1e-6)
    assert first["loss"] == pytest.approx(3.2 * first["distill/divergence"] + 0.2 * first["distill/next_token_loss"])
    assert 0 < rows[-1]["eval/distill/divergence"] < first["distill/divergence"] and "eval/perplexity" not in rows[-1]
    other = ["--objective.teacher", "model", "--train.max_steps", "4"]
    assert "teacher" in refused(folder, env, "train", "--config", *other, recipe="distill.yaml")


def check_preferences(folder: Path, env: dict[str, str]) -> None:
    """What dpo.yaml has left, against one process and the definition; and that another model's column is refused."""
    rows = [json.loads(line) for line in (folder / "runs/dpo/metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if row["step"] == 1)
    assert first["pairs/margin"] == 0.0 and first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    ours = losses(folder / "runs/dpo")
    assert [ours[step + 1] for step in range(STEPS)] == pytest.approx(plain_dpo(folder), rel=1e-5)
    assert 0 <= rows[-1]["eval/pairs/accuracy"] <= 1 and "eval/perplexity" not in rows[-1]
    other = ["--model.pretrained", "model", "--train.run_dir", "runs/other"]
    assert "model.pretrained = 'model'" in refused(folder, env, "train", "--config", *other)
    column = folder / "data/pairs/reference.json"
    told = json.loads(column.read_text())
    column.write_text(json.dumps({**told, "weights": "0" * 32}))  # as of another model, written since
    assert f"['{told['weights']}']" in refused(folder, env, "train", "--config", "--train.max_steps", "4")
    column.unlink()
    assert "`llmtrain reference RUN.yaml`" in refused(folder, env, "config", "check")
    check_reference_of_a_pipeline(folder, env)


def check_reference_of_a_pipeline(folder: Path, env: dict[str, str]) -> None:
    """`llmtrain reference` starts the ranks that the JSON needs, and they write the column that one process wrote."""
    numbers = {split: folder / f"data/pairs/reference-{split}.f32" for split in ("train", "validation")}
    alone = {split: np.fromfile(path, "<f4") for split, path in numbers.items()}
    json_file = {**json.loads((ROOT / "ds_configs/zero1_fp32.json").read_text()), "pipeline": {"stages": 2}}
    (folder / "stages.json").write_text(json.dumps(json_file))
    words = ["llmtrain", "reference", "--config", "dpo.yaml", "--deepspeed", "stages.json"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert re.search("runs/sft/export .*2 ranks", done.stdout), done.stdout
    for split, path in numbers.items():
        found = np.fromfile(path, "<f4")
        assert len(found) == len(alone[split]) > 0 and np.allclose(found, alone[split], rtol=1e-5, atol=1e-5)


def refused(folder: Path, env: dict[str, str], *words: str, recipe: str = "dpo.yaml") -> str:
    """What a command that refuses the recipe says; its first two words, the file, more words."""
    done = subprocess.run(
        ["llmtrain", *words[:2], recipe, *words[2:]], cwd=folder, capture_output=True, text=True, env=env
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def plain_dpo(folder: Path) -> list[float]:
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder / "runs/sft/export", dtype=torch.float32)
    plain = Plain(hf, folder / "data/pairs")
    with torch.no_grad():
        reference = dict(enumerate(plain.answers(list(range(len(plain.rows))))[0].tolist()))
    data = TrainData(DataConfig(path=str(folder / "data/pairs"), sequence_length=LENGTH, isolate_documents=True))

    def loss(step: int) -> torch.Tensor:
        sequences = [data.sequence_at(index) for index in range(step * BATCH, (step + 1) * BATCH)]
        return plain.loss("dpo", rows_read(sequences), reference)

    return plain_steps(hf, loss)
