"""`make tune`: conversations, an adapter, preferences on the quickstart's model; what it answers before and after."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from llmtrain.data.manifest import SPLITS
from llmtrain.data.tokenize import train_bpe
from tests.helpers.lessons import lines, made
from tests.helpers.warm import WarmCommands

pytestmark = pytest.mark.needs("peft")

ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
FEW = "--train.max_steps 2 --schedule.warmup_steps 1 --train.eval_every 1 --train.eval_sequences 4 --train.log_every 1"


def of_make() -> list[str]:
    """The lines that `make tune` runs in a clone where nothing has been made, but for the environment."""
    done = subprocess.run(["make", "-nB", "tune"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = (" ".join(line.split()) for line in done.stdout.replace("\\\n", " ").replace(".venv/bin/", "").splitlines())
    return [line for line in dict.fromkeys(lines) if re.match(r"llmtrain|python tools", line)]


def run(folder: Path, command: str, warm: WarmCommands) -> str:
    env = warm.environment(PYTHONPATH=str(ROOT), WANDB_MODE="disabled")
    env["PATH"] = f"{warm.hosts}:{env['PATH']}"  # a `python` that is forked, too
    done = subprocess.run(["bash", "-ec", command], cwd=folder, capture_output=True, text=True, env=env)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as after `make train`, with a smaller model that has seen nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("tune")
    for name in ("launch", "ds_configs", "tools", "examples"):
        (folder / name).symlink_to(ROOT / name)
    texts = (lesson.answer for lesson in made.lessons("chat", "train"))
    train_bpe(texts, MODEL["vocab_size"], folder / "data/stdlib/tokenizer")  # type: ignore[arg-type]
    fields = dict(MODEL)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.save_pretrained(folder / "runs/quickstart/export")
    return folder


def test_the_chain_in_few_steps(place: Path, warm: WarmCommands) -> None:
    """The commands of the Makefile in their order, without the launcher; 200 records of each side."""
    commands = [line for line in of_make() if "--source stdlib " not in line and "quickstart.yaml" not in line]
    kinds = [command.split()[1] for command in commands]
    assert kinds == ["prepare", "prepare", "launch", "launch", "reference", "launch", "tools/right_answers.py"]
    for command in commands:
        if " -- " in command:
            recipe = command.partition(" -- ")[2]
            command = f"llmtrain train --config {recipe} {FEW}"
        elif found := re.search(r"--source lessons:(\w+) --validation-source lessons:\w+/validation", command):
            for split in SPLITS:
                (place / f"{found[1]}-{split}.jsonl").write_text("\n".join(lines(found[1], split)[:200]) + "\n")
            files = f"--source {found[1]}-train.jsonl --validation-source {found[1]}-validation.jsonl"
            command = command.replace(found[0], files).replace(" --plugin examples/lessons.py", "")
        elif "right_answers" in command:
            command = command + " --questions 3"
        printed = run(place, command, warm)
    told = json.loads((place / "runs/answers.json").read_text())
    assert list(told["shares"]) == ["before", "sft", "lora", "dpo"]
    assert told["questions"] == dict.fromkeys(("sums", "calls", "results", "functions"), 3)
    assert "| functions (3) |" in printed
    assert (place / "runs/answers.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (place / "runs/dpo/metrics.jsonl").read_text().splitlines()]
    assert abs(next(row["loss"] for row in rows if "loss" in row) - 0.6931472) < 1e-6


def test_right_answers_counts_what_is_right() -> None:
    """Of a model that answers as it is told: all, or none."""
    from tools import right_answers

    class Told:
        def __init__(self, say: str) -> None:
            self.say = say

        def answers(self, conversations: list[list[dict[str, object]]]) -> list[str | None]:
            known = {lesson.question: lesson for lesson in made.lessons("chat", "validation")}
            found: list[str | None] = []
            for messages in conversations:
                lesson = known[str(messages[0]["content"])]
                call = json.dumps({"arguments": dict(lesson.arguments), "name": lesson.tool})
                whole = f"call {call}" if lesson.tool and len(messages) == 1 else lesson.answer
                found.append({"right": whole, "bare": call, "more": whole + ".", "none": None}[self.say])
            return found

        def likelihood(self, question: str, answer: str) -> float:
            known = {lesson.question: lesson for lesson in made.lessons("chat", "validation")}
            return float((answer == known[question].answer) == (self.say == "right"))

    for family in right_answers.FAMILIES:
        questions = right_answers.asked(family, 40)
        assert len(questions) == 40 and all(lesson.split == "validation" for lesson in questions)
        for say, share in (("right", 1), ("bare", 0), ("more", 0), ("none", 0)):
            got = right_answers.right(Told(say), family, questions)  # type: ignore[arg-type]
            assert sum(got) == 40 * share, (family, say)
