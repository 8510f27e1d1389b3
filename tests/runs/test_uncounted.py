"""Rows of which no token is counted: a set, an evaluation or a step of such rows alone has no loss."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import re
from pathlib import Path

import pytest
import torch

from llmtrain import cli
from llmtrain.checkpoint.format import TRAINER, step_folder
from llmtrain.config.run import DataConfig
from llmtrain.data.stream.order import permute
from llmtrain.data.stream.train_data import TrainData
from tests.helpers import forked
from tests.helpers.launching import TINY, rows, write_run
from tests.helpers.loaders import loader_of
from tests.helpers.plain import PlainTraining, mean_cross_entropy

pytestmark = pytest.mark.needs("peft")

LENGTH, STEPS, LR, BETAS, DECAY, CLIP = 16, 12, 1e-2, (0.9, 0.95), 0.1, 1.0
DATA = ("--data.sequence_length", str(LENGTH), "--data.isolate_documents", "true")
LAST = permute(12, 0, 0, 0, 11)
"""The row of 12 that an evaluation reads last."""


def write(path: Path, counted: list[bool]) -> str:
    draw = random.Random(1)
    ids = [[draw.randint(1, 399) for _ in range(LENGTH)] for _ in counted]
    marked = zip(ids, counted, strict=True)
    records = [{"input_ids": row, "labels": row if each else [-100] * LENGTH} for row, each in marked]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def play(here: str, tokenizer: str, _: int) -> None:
    """Commands, one after another in one process; NAME.txt has the exit code of each, and what it said."""
    os.environ["MASTER_PORT"] = "0"  # as in a process that no launcher has started
    os.chdir(here)

    def run(name: str, *words: str) -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.main([*words])
        Path(f"{name}.txt").write_text(f"{code}\n{said.getvalue()}")

    def train(name: str, *words: str) -> None:
        run(name, "train", "recipe.yaml", *DATA, "--train.run_dir", name, *words)

    base = ("prepare", "--format", "token-rows", "--tokenizer", tokenizer, "--processes", "1", "--source", "t.jsonl")
    write(Path("t.jsonl"), [index % 3 == 0 for index in range(24)])
    write(Path("none.jsonl"), [False] * 5)
    write(Path("one.jsonl"), [index == LAST for index in range(12)])
    run("prepare", *base, "--validation-source", "none.jsonl", "--out", "no")
    run("data", *base, "--validation-source", "one.jsonl", "--out", "data")
    measured = ("--train.eval", "true", "--train.eval_every", "1")
    few = ("--eval.sets.m", "data", "--eval.sequences.m", "3")
    run("check", "config", "check", "recipe.yaml", *DATA, *few)
    train("eval", *measured, "--train.eval_sequences", "3")
    train("all", *measured, "--train.eval_sequences", "12", "--train.max_steps", "1")
    TrainData.check_counted = lambda self, sequences: None  # type: ignore[method-assign]  # as of data in a store
    best = ("--checkpoint.keep_best.metric", "eval/m/loss", "--train.stop_early.metric", "eval/m/loss")
    train("nan", *few, *measured[2:], *best, "--train.stop_early.patience", "2")
    run("report", "report", "nan")
    form = {"path": "data", "sequence_length": LENGTH, "isolate_documents": True}
    firsts = (TrainData(DataConfig(**form, seed=seed)).sequence(0)[1] for seed in range(99))
    seed = next(seed for seed, labels in enumerate(firsts) if (labels == -100).all())
    train("adapter", "--adapter.r", "2", "--train.max_steps", "6", "--data.seed", str(seed))
    train("whole", "--checkpoint.every_steps", "1", "--checkpoint.keep", "99")
    for step in (2, 3, 4):
        train(f"from-{step}", "--resume", f"whole/step-{step}")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, small_data: str) -> Path:
    """The folder of `play`, with a model in hf."""
    from transformers import LlamaConfig, LlamaForCausalLM

    here = tmp_path_factory.mktemp("uncounted")
    torch.manual_seed(0)
    fields = {key: value for key, value in TINY.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**fields, initializer_range=0.2)).save_pretrained(here / "hf")
    optim = {"lr": LR, "betas": list(BETAS), "weight_decay": DECAY, "clip_norm": CLIP}
    train = {"global_batch": 2, "micro_batch": 1, "max_steps": STEPS}
    model = {"pretrained": str(here / "hf")}
    recipe = write_run(here, str(here / "data"), {"zero_optimization": {"stage": 1}}, train, model=model, optim=optim)
    forked.finish(
        recipe, "--help", world_size=1, before=functools.partial(play, str(here), str(Path(small_data) / "tokenizer"))
    )
    return here


def said(played: Path, name: str, code: int = 0) -> str:
    text = (played / f"{name}.txt").read_text()
    assert text.startswith(f"{code}\n") and "Traceback" not in text, text
    return text


def test_what_cannot_be_measured_is_refused_where_that_is_known(played: Path) -> None:
    assert "none.jsonl: no token of its validation" in said(played, "prepare", 2)
    assert not (played / "no/manifest.json").exists()
    for name in ("check", "eval"):
        assert " 3 validation sequences" in said(played, name, 2)
    [row] = [row for row in rows(played / "all") if "eval/loss" in row]
    assert 0 < row["eval/loss"] < 20


def test_a_figure_of_nothing_is_nan_and_never_the_best(played: Path) -> None:
    """Of data whose rows nobody has looked at before, such as those in an object store."""
    text = said(played, "nan")
    assert re.search(r"eval/m/perplexity, eval/m/bits_per_byte: .*\(NaN\)", text)
    measured = [row for row in rows(played / "nan") if "eval/m/loss" in row]
    assert {row[f"eval/m/{name}"] for row in measured for name in ("loss", "perplexity", "bits_per_byte")} == {"NaN"}
    assert " 2 evaluations" in text
    state = (step_folder(played / "nan/checkpoints", 2) / TRAINER).read_text()
    json.loads(state, parse_constant=pytest.fail)
    assert best_of_nothing(played / "nan") == {}
    assert said(played, "report")


def best_of_nothing(run: Path) -> dict[Path, float]:
    from llmtrain.checkpoint.retain import Best, best_of

    return best_of(run / "checkpoints", Best(metric="eval/m/loss", keep=1, mode="min"))


def plain_losses(played: Path) -> dict[int, float]:
    """Of the same training by transformers and torch, without the batches that count nothing."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(played / "hf", dtype=torch.float32, attn_implementation="eager")
    training = PlainTraining(hf, lr=LR, betas=BETAS, decay=DECAY, clip=CLIP)
    data = TrainData(DataConfig(path=str(played / "data"), sequence_length=LENGTH, isolate_documents=True))
    found = {}
    with loader_of(data, global_batch=2, micro_batch=2, accumulation=1, rank=0, data_parallel=1) as loader:
        for step in range(1, STEPS + 1):
            (micro,) = next(loader).micro_batches
            if (micro.labels == -100).all():
                continue
            logits = hf(input_ids=micro.inputs, use_cache=False).logits  # a row is a document
            training.step(mean_cross_entropy(logits, micro.labels))
            found[step] = training.losses[-1]
    return found


def test_a_step_without_a_counted_token_is_skipped_and_said(played: Path) -> None:
    """The losses of the others are those of a plain loop that leaves it out (fp32, rounded in another order)."""
    text, logged = said(played, "whole"), {row["step"]: row for row in rows(played / "whole") if "loss" in row}
    want = plain_losses(played)
    empty = sorted(set(range(1, STEPS + 1)) - want.keys())
    assert len(empty) > 2 and empty[0] < STEPS - 2
    assert {step: row["loss"] for step, row in logged.items() if row["loss"] != "NaN"} == pytest.approx(want, abs=2e-5)
    for number, step in enumerate(empty, 1):
        assert logged[step]["grad_norm"] == "NaN" and logged[step]["skipped_steps"] == number
        assert re.search(rf"warning: step {step} skipped: .* sequences {2 * step - 2}, {2 * step - 1} ", text)
    events = [event for event in rows(played / "whole", "events.jsonl") if event["kind"] == "skip"]
    assert [(event["step"], event["what"]) for event in events] == [(step, "no counted token") for step in empty]
    state = json.loads((step_folder(played / "whole/checkpoints", STEPS) / TRAINER).read_text())
    assert (state["skipped_steps"], state["optimizer_step"]) == (len(empty), STEPS - len(empty))


def test_what_is_proved_before_the_first_step_is_not_proved_of_nothing(played: Path) -> None:
    """A new adapter changes no loss, of a first sequence without a counted token neither."""
    assert "a gradient has reached every lora_B" in said(played, "adapter")


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_resume_beside_such_a_step_changes_no_digit(played: Path, step: int) -> None:
    said(played, f"from-{step}")
    want = {row["step"]: (row["loss"], row["skipped_steps"]) for row in rows(played / "whole") if row["step"] > step}
    assert {row["step"]: (row["loss"], row["skipped_steps"]) for row in rows(played / f"from-{step}")} == want


FORMS = {"zero3": {"zero_optimization": {"stage": 3}}, "pp2": {"pipeline": {"stages": 2}}}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_all_ranks_skip_it(played: Path, tmp_path: Path, form: dict[str, object]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(form))
    words = ("--deepspeed", str(tmp_path / "ds.json"), "--train.run_dir", str(tmp_path / "run"))
    forked.train(played / "recipe.yaml", *DATA, *words, "--train.max_steps", "6")
    got, want = (
        {row["step"]: row["loss"] for row in rows(run) if row["step"] <= 6}
        for run in (tmp_path / "run", played / "whole")
    )
    assert "NaN" in got.values()
    assert got == {step: loss if loss == "NaN" else pytest.approx(loss, abs=2e-5) for step, loss in want.items()}
