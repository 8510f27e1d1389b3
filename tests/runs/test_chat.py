"""From a jsonl of conversations to a training whose loss is that of its answers, one conversation at a time."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmtrain.config.run import DataConfig
from llmtrain.data.packing import TrainData
from tests.helpers.chat import KINDS, expected, write_tokenizer
from tests.helpers.launching import environment, losses

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "posttraining.md"
RATES = [1.0, 0.55, 0.1]
"""Half a cosine from 1 to 0.1, over 3 steps."""
KIND = KINDS["qwen3"]
LENGTH, BATCH, STEPS, LR = 160, 8, 3, 1e-3
MODEL = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


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


def plain_losses(folder: Path, talks: list[list[dict[str, str]]]) -> list[float]:
    """By transformers and torch: each row alone, and its counted tokens as a hand wrote them. Only which rows a step
    takes is asked of us."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    groups = [{"params": [p for p in hf.parameters() if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in hf.parameters() if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: RATES[min(step, STEPS - 1)])
    by_hand = {tuple(ids): counted for talk in talks for ids, counted in expected(folder / "model", KIND, talk)}
    data = TrainData(DataConfig(path=str(folder / "data/talks"), sequence_length=LENGTH, isolate_documents=True))
    found = []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for index in range(step * BATCH, (step + 1) * BATCH):
            inputs, _, positions = data.window_at(index)
            assert positions is not None
            for row in np.split(inputs, np.flatnonzero(positions == 0)[1:]):
                if (counted := by_hand.get(tuple(row.tolist()))) is None:
                    assert set(row.tolist()) == {data.separator_id}  # padding
                    continue
                logits = hf(input_ids=torch.from_numpy(row)[None]).logits[0, :-1]
                every = F.cross_entropy(logits, torch.from_numpy(row)[1:], reduction="none")
                total, count = total + every[torch.tensor(counted[1:])].sum(), count + sum(counted[1:])
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        found.append(total.item() / count)
    return found


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)


def test_the_commands_of_the_page_train_on_the_answers(tmp_path: Path) -> None:
    """Every command of docs/posttraining.md as it stands there. Packed; 1e-5, as all comparisons in fp32."""
    talks = conversations()
    write_model(tmp_path / "model")
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    (tmp_path / "ds_configs").symlink_to(ROOT / "ds_configs")
    (tmp_path / "sft.yaml").write_text(blocks("yaml")[0])
    printed = ""
    for command in blocks("bash"):
        done = subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)),
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        printed += done.stdout
    for shown in blocks("text"):
        assert shown in printed, printed
    assert (tmp_path / "talks.html").is_file()
    ours = losses(tmp_path / "runs/sft")
    assert [ours[step + 1] for step in range(STEPS)] == pytest.approx(plain_losses(tmp_path, talks), rel=1e-5)
    assert ours[STEPS] < ours[1]
    export = tmp_path / "runs/sft/export"
    assert json.loads((export / "config.json").read_text())["eos_token_id"] is not None
    assert (export / "tokenizer_config.json").is_file()
