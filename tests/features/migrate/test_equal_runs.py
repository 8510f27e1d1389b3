"""A run that `llmtrain init --from` makes of TRL's arguments trains as TRL does: the same tokens and masks of each
record, the same batch, the same rate of each step, and the same losses.

Each step has all records, so that the order in which both draw them has no part in a sum. The tolerance of a loss is
that of sums of some hundred fp32 terms in another order, after a few steps of AdamW; theirs is padded or packed by TRL.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from llmtrain import cli
from llmtrain.data.shards import PreparedSet
from tests.helpers import forked
from tests.helpers.chat import KINDS, workers_here, write_tokenizer
from tests.helpers.preference import preferences
from tests.helpers.training import LLAMA

with contextlib.suppress(ImportError):
    import datasets
    import trl
pytestmark = [pytest.mark.long, pytest.mark.needs("trl")]
RECORDS, STEPS, LENGTH = 8, 5, 128
CLOSE = 1e-5

TALKS = [
    {
        "messages": [
            {"role": "user", "content": record["prompt"]},
            {"role": "assistant", "content": record["chosen"]},
            {"role": "user", "content": "and now?"},
            {"role": "assistant", "content": record["rejected"]},
        ]
    }
    for record in preferences(RECORDS)
]
COMPLETIONS = [
    {
        "prompt": [{"role": "user", "content": record["prompt"]}],
        "completion": [{"role": "assistant", "content": record["chosen"]}],
    }
    for record in preferences(RECORDS)
]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": record["prompt"]}],
        "chosen": [{"role": "assistant", "content": record["chosen"]}],
        "rejected": [{"role": "assistant", "content": record["rejected"]}],
    }
    for record in preferences(RECORDS)
]
COMMON = {
    "max_length": LENGTH,
    "per_device_train_batch_size": RECORDS,
    "max_steps": STEPS,
    "learning_rate": 2e-3,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
}
LORA = {
    "use_peft": True,
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "up_proj"],
}
CASES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "answers": ("sft", TALKS, {"assistant_only_loss": True}),
    "every-token": ("sft", TALKS, {"lr_scheduler_type": "cosine", "warmup_ratio": 0.4, "weight_decay": 0.1}),
    "completions": ("sft", COMPLETIONS, {"completion_only_loss": True, "max_grad_norm": 0.1}),
    "packed": ("sft", TALKS, {"assistant_only_loss": True, "packing": True, "max_length": 256,
                               "per_device_train_batch_size": 4}),
    "accumulated": ("sft", TALKS, {"assistant_only_loss": True, "per_device_train_batch_size": 2,
                                   "gradient_accumulation_steps": RECORDS // 2}),
    "restarts": ("sft", TALKS, {"assistant_only_loss": True, "lr_scheduler_type": "cosine_with_restarts",
                                "lr_scheduler_kwargs": {"num_cycles": 2}, "warmup_steps": 2}),
    "min-lr": ("sft", TALKS, {"assistant_only_loss": True, "lr_scheduler_type": "cosine_with_min_lr",
                              "lr_scheduler_kwargs": {"min_lr": 2e-4}, "adam_beta2": 0.95, "adam_epsilon": 1e-6}),
    "polynomial": ("sft", TALKS, {"assistant_only_loss": True, "lr_scheduler_type": "polynomial",
                                  "lr_scheduler_kwargs": {"power": 2.0}}),
    "inverse-sqrt": ("sft", TALKS, {"assistant_only_loss": True, "lr_scheduler_type": "inverse_sqrt",
                                    "warmup_steps": 2}),
    "constant": ("sft", TALKS, {"assistant_only_loss": True, "lr_scheduler_type": "constant_with_warmup",
                                "warmup_steps": 3}),
    "lora": ("sft", TALKS, {"assistant_only_loss": True, **LORA, "lora_modules_to_save": ["lm_head"],
                            "weight_decay": 0.1}),
    "rslora": ("sft", TALKS, {"assistant_only_loss": True, **LORA, "use_rslora": True}),
    "epochs": ("sft", TALKS, {"assistant_only_loss": True, "max_steps": -1, "num_train_epochs": STEPS, "seed": 7,
                              "lr_scheduler_type": "cosine", "warmup_steps": 0.3}),
    "dpo": ("dpo", PAIRS, {"beta": 0.3}),
    "dpo-ipo": ("dpo", PAIRS, {"loss_type": "ipo", "warmup_ratio": 0.3}),
    "reward": ("reward", PAIRS, {"center_rewards_coefficient": 0.1}),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a causal model, of one whose template writes nothing behind an answer, and of one with a score."""
    made = {}
    for name, auto, kind in (
        ("causal", AutoModelForCausalLM, "generation"),
        ("llama3", AutoModelForCausalLM, "llama3"),
        ("score", AutoModelForSequenceClassification, "llama3"),
    ):
        folder = tmp_path_factory.mktemp(name) / "base"
        write_tokenizer(folder, KINDS[kind])
        words = len(AutoTokenizer.from_pretrained(folder))
        fields = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 256, "vocab_size": words}
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        if name == "score":
            config.num_labels, config.pad_token_id = 1, words - 1
        torch.manual_seed(1)
        auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
        write_tokenizer(folder, KINDS[kind])  # its generation_config.json, which the model has written anew
        made[name] = folder
    return made


def options_of(folder: Path, method: str, model: Path, options: dict[str, Any]) -> dict[str, Any]:
    given = {**COMMON, **options, "model_name_or_path": str(model), "dataset_name": "./records.jsonl"}
    return {**given, "output_dir": str(folder / "theirs")}


def theirs(given: dict[str, Any], method: str, folder: Path) -> tuple[list[float], list[float], list[Any]]:
    """TRL's (loss, rate) of each step, and its records as it reads them."""
    scripts = {"model_name_or_path", "dataset_name", "use_peft"}
    lora = {key: value for key, value in given.items() if key.startswith("lora_") or key == "use_rslora"}
    arguments = {key: value for key, value in given.items() if key not in scripts | lora.keys()}
    if "warmup_ratio" in arguments:
        arguments["warmup_steps"] = arguments.pop("warmup_ratio")  # transformers 5 has a share there
    kind = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}[method]
    config = getattr(trl, f"{kind}Config")(**arguments, use_cpu=True, dataset_num_proc=None)
    more: dict[str, Any] = {}
    if lora:
        from peft import LoraConfig

        names = {"lora_r": "r", "lora_target_modules": "target_modules", "lora_modules_to_save": "modules_to_save"}
        more["peft_config"] = LoraConfig(**{names.get(key, key): value for key, value in lora.items()})
    auto = AutoModelForSequenceClassification if method == "reward" else AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(given["model_name_or_path"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    losses: list[float] = []
    rates: list[float] = []

    class Noted(getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
        def training_step(self, *args: Any, **named: Any) -> Any:
            loss = super().training_step(*args, **named)
            if not losses or len(losses) <= self.state.global_step:
                losses.append(0.0)
                rates.append(self.optimizer.param_groups[0]["lr"])
            losses[self.state.global_step] += float(loss)
            return loss

    trainer = Noted(
        model=auto.from_pretrained(given["model_name_or_path"], dtype=torch.float32),
        args=config,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_json(str(folder / "records.jsonl")),
        **more,
    )
    if lora:  # A is drawn: ours begins with the same
        trainer.model.save_pretrained(folder / "adapter")
    trainer.train()
    return losses, rates, list(trainer.train_dataset)


def ours(given: dict[str, Any], method: str, folder: Path) -> tuple[list[float], list[float], Path]:
    (folder / "theirs.yaml").write_text(yaml.safe_dump(given))
    assert cli.main(["init", ".", "--from", "theirs.yaml", "--stack", f"trl-{method}", "--gpus", "1"]) == 0
    overrides = ["--train.run_dir", str(folder / "run"), "--train.export", "false"]
    if given.get("use_peft"):
        overrides += ["--adapter.start", str(folder / "adapter")]
    for line in (folder / "commands.sh").read_text().splitlines():
        words = shlex.split(line)
        if words[:2] == ["llmtrain", "prepare"]:
            with workers_here():
                assert cli.main(words[1:]) == 0
        elif words[:2] == ["llmtrain", "reference"]:
            subprocess.run([sys.executable, "-m", *words, *overrides], check=True)
    launch = forked.Launch(folder / "run.yaml", *overrides, world_size=1)
    assert launch.wait(120) == [0], launch.output()
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    return [row["loss"] for row in rows], [row["lr"] for row in rows], folder / "data/theirs"


def masks(prepared: Path) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """(ids, whether each but the first is counted) of each row of ours."""
    stream = PreparedSet(prepared).split("train")
    ends = torch.tensor(stream.row_lengths().tolist()).cumsum(0).tolist()
    counted, ids = stream.counted(0, stream.tokens), stream.read(0, stream.tokens)
    assert counted is not None
    rows = zip([0, *ends], ends, strict=False)
    return sorted(_read(ids[begin:end].tolist(), counted[begin:end].tolist()) for begin, end in rows)


def _read(ids: list[int], counted: list[bool]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Without what stands behind the last counted token, which no loss reads."""
    end = len(counted) - counted[::-1].index(True)
    return tuple(ids[:end]), tuple(counted[1:end])


def theirs_masks(records: list[Any]) -> Iterator[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """The same of TRL's, each row of a packed one by itself."""
    for record in records:
        ids = record["input_ids"]
        counted = [label != -100 for label in record.get("labels", ids)]
        lengths = record.get("seq_lengths") or [len(ids)]
        begin = 0
        for length in lengths:
            rows = slice(begin, begin + length)
            yield _read(ids[rows], counted[rows])
            begin += length


@pytest.mark.parametrize("name", CASES)
def test_a_translated_run_trains_as_trl(
    name: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, records, options = CASES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    model = models["score" if method == "reward" else "causal" if options.get("assistant_only_loss") else "llama3"]
    given = options_of(tmp_path, method, model, options)
    want, rates, read = theirs(given, method, tmp_path)
    got, our_rates, prepared = ours(given, method, tmp_path)
    print(f"{name}: {got} here, {want} in TRL {trl.__version__}")
    if method == "sft":
        assert masks(prepared) == sorted(theirs_masks(read))
    assert our_rates == pytest.approx(rates, rel=1e-9)
    assert got == pytest.approx(want, rel=CLOSE)
