"""`llmtrain init --from FILE`: lines of the run, of the JSON and of the commands. Nothing that trains another function
is dropped in silence, and nothing is written of a file that is not understood."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain import cli
from llmtrain.base.trees import leaves, lookup
from llmtrain.config.strict_yaml import parse
from tests.helpers.launching import REPO

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
SETS = {
    "identity": {"file_name": "identity.jsonl"},
    "talks": {"hf_hub_url": "me/talks"},
    "books": {"file_name": "books.txt"},
    "pairs": {"file_name": "pairs.json", "ranking": True},
}
"""dataset_info.json of LLaMA-Factory."""
PACKED = ("sample_packing", "packing", "neat_packing", "padding_free")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(SETS))
    for name in ("identity.jsonl", "books.txt"):
        (tmp_path / "data" / name).write_text("")
    return tmp_path


def run(given: dict[str, Any], *words: str) -> int:
    Path("theirs.yaml").write_text(yaml.safe_dump(given))
    return cli.main(["init", "--from", "theirs.yaml", "new", *words])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['stack']}-{case['name']}")
def test_a_configuration_becomes_a_run(case: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(case["given"], "--stack", case["stack"])
    said = capsys.readouterr().out
    to_decide = {line.removeprefix("to decide: ").split(":")[0] for line in said.splitlines() if "to decide: " in line}
    assert to_decide == set(case.get("decide", ())), said
    assert code == (1 if to_decide else 0)
    text = Path("new/run.yaml").read_text()
    tree = parse(text, "run.yaml").tree
    for key, value in case["ours"].items():
        assert lookup(tree, key) == value, key
    for option in to_decide:
        assert f"#   {option}: " in text
    ds = json.loads(Path("new/deepspeed.json").read_text())
    assert {key: lookup(ds, key) for key in case.get("json", {})} == case.get("json", {})
    words = shlex.split(next(line for line in Path("new/commands.sh").read_text().splitlines() if " prepare " in line))
    expected = case.get("prepare", [])
    assert all(word in words for word in expected), words
    assert words[:2] == ["llmtrain", "prepare"] and words[-2:] == ["--out", "data/theirs"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['stack']}-{case['name']}")
def test_every_line_has_its_origin_and_no_option_is_lost(case: dict[str, Any], folder: Path) -> None:
    run(case["given"], "--stack", case["stack"])
    for line in Path("new/run.yaml").read_text().splitlines():
        if ": " in line and not line.startswith("#"):
            assert "  # " in line, line
    text = Path("new/run.yaml").read_text() + Path("new/commands.sh").read_text()
    on = {key for key, value in case["given"].items() if value not in (None, False, [], {})}
    assert [option for option in sorted(on) if not re.search(rf"\b{option}\b", text)] == []


@pytest.mark.parametrize(
    ("words", "stack", "line"),
    [
        ("trl sft --model_name_or_path org/base --dataset_name t.jsonl --learning_rate 1e-5", "trl sft", "optim.lr"),
        ("trl dpo --model_name_or_path org/base --dataset_name p.jsonl --beta=0.2", "trl dpo", "objective.beta"),
        ("swift sft --model org/base --dataset a.jsonl b.jsonl --packing true", "ms-swift", "adapter.r"),
        (
            "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path org/gpt2 --train_file a.txt --output_dir o",
            "transformers' run_clm.py",
            "data.sequence_length",
        ),
        (
            "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
            "--max-position-embeddings 64 --seq-length 64 --train-iters 9 --lr 1e-4 --micro-batch-size 2 --bf16 "
            "--vocab-size 512 --data-path a",
            "Megatron-LM",
            "model.config.n_embd",
        ),
    ],
)
def test_a_command_line_becomes_a_run(
    words: str, stack: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "new", "--from", "--", *words.split()]) == 0, capsys.readouterr()
    assert stack in capsys.readouterr().out
    assert lookup(parse(Path("new/run.yaml").read_text(), "run.yaml").tree, line) is not None


def test_the_page_shows_what_the_command_writes(folder: Path) -> None:
    page = (REPO / "docs/migrate.md").read_text().partition("## From your file")[2].partition("\n## ")[0]
    theirs, command, run_yaml, commands = re.findall(r"```(?:yaml|bash)\n(.*?)```", page, re.S)
    Path("theirs.yaml").write_text(theirs)
    assert cli.main(command.split()[1:]) == 0
    assert Path("run.yaml").read_text() == run_yaml
    assert Path("commands.sh").read_text().partition("set -e\n")[2] == commands


def test_a_toml_is_of_torchtitan(folder: Path) -> None:
    Path("theirs.toml").write_text(
        '[model]\nflavor = "8B"\n[training]\nsteps = 700\ndataset = "c4"\n[quantize.linear.float8]\nfilter_fqns = []\n'
    )
    assert cli.main(["init", "new", "--from", "theirs.toml"]) == 0
    assert lookup(parse(Path("new/run.yaml").read_text(), "run.yaml").tree, "train.max_steps") == 700
    Path("theirs.toml").write_text("[model\n")
    assert cli.main(["init", "again", "--from", "theirs.toml"]) == 2 and not Path("again").exists()


def test_gpus_write_the_whole_batch(folder: Path) -> None:
    given = {**CASES[0]["given"]}
    assert run(given, "--gpus", "8") == 0
    tree = parse(Path("new/run.yaml").read_text(), "run.yaml").tree
    assert lookup(tree, "train.global_batch") == 2 * 4 * 8 and lookup(tree, "train.micro_batch") == 2


@pytest.mark.parametrize(
    ("given", "words", "key"),
    [
        ({"hello": 1}, (), "--from"),
        ({"base_model": "a", "stage": "sft"}, (), "--from"),
        ({"model_name_or_path": "a", "dataset_name": "b"}, (), "--from"),
        ({"base_model": "a", "sequence_length": 3}, (), "sequence_length"),
        ({}, (), "--from"),
    ],
)
def test_nothing_is_written_of_a_file_that_is_not_understood(
    given: dict[str, Any], words: tuple[str, ...], key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(given, *words) == 2
    said = capsys.readouterr().err
    assert key in said and "remedy" in said and not Path("new").exists()


@pytest.mark.parametrize("stack", ["axolotl", "llamafactory", "trl-sft", "trl-dpo", "swift", "run_clm", "megatron"])
def test_a_value_of_another_type_is_an_error_or_a_run(
    stack: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No value of any option ends in a traceback, and after an error nothing is there."""
    given = next(case["given"] for case in CASES if case["stack"] == stack)
    for number, option in enumerate(given):
        for value in ([1, "a"], {"a": {"b": 1}}, "word", True, 0, -1):
            Path("theirs.yaml").write_text(yaml.safe_dump({**given, option: value}))
            out = f"new{number}{type(value).__name__}{value == 0}"
            code = cli.main(["init", "--from", "theirs.yaml", out, "--stack", stack])
            said = capsys.readouterr().err
            assert code in (0, 1) or not Path(out).exists(), (option, value)
            assert code in (0, 1) or f"{option} = " in said or f"{option}: {value}" in said, (option, value, said)


@pytest.mark.parametrize("option", ["learning_rate", "num_epochs", "warmup_steps", "datasets", "val_set_size"])
def test_the_error_names_the_option_whose_value_is_wrong(
    option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run({**CASES[0]["given"], option: {"a": 1}}) == 2
    said = capsys.readouterr().err
    assert f"{option} = " in said and "remedy" in said and not Path("new").exists()


def test_a_number_in_quotes_is_a_number(folder: Path) -> None:
    assert run({**CASES[0]["given"], "learning_rate": "1e-4", "micro_batch_size": "4"}) == 0
    text = Path("new/run.yaml").read_text()
    assert "lr: 0.0001 " in text and "micro_batch: 4 " in text


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("swift sft --model org/base", "dataset"),
        ("swift sft --dataset a.jsonl", "model"),
        ("trl sft --model_name_or_path org/base --packing", "dataset_name"),
        ("pretrain_gpt.py --num-layers 2 --hidden-size 64", "num_attention_heads"),
    ],
)
def test_without_a_model_or_data_there_is_no_run(
    words: str, key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "new", "--from", "--", *words.split()]) == 2
    assert f"{key} = null" in capsys.readouterr().err and not Path("new").exists()


@pytest.mark.parametrize("words", [["--from"], ["--from", "--"], ["--from", "theirs.yaml", "--gpus", "0"]])
def test_words_without_a_run(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs.yaml").write_text(yaml.safe_dump(CASES[0]["given"]))
    assert cli.main(["init", "new", *words]) == 2
    assert "give" in capsys.readouterr().err and not Path("new").exists()


def test_ranks_that_share_a_sequence_make_no_larger_batch(folder: Path) -> None:
    Path("theirs.toml").write_text(
        '[training]\nlocal_batch_size = 2\ndataset = "c4"\n[parallelism]\ntensor_parallel_degree = 4\n'
    )
    assert cli.main(["init", "new", "--from", "theirs.toml", "--gpus", "8"]) == 0
    assert lookup(parse(Path("new/run.yaml").read_text(), "run.yaml").tree, "train.global_batch") == 2 * 8 // 4


@pytest.mark.parametrize(
    ("command", "code", "lines"),
    [
        ("sft", 0, {"optim.lr": 1e-4, "train.global_batch": 16}),
        ("sft --tuner_type full", 0, {"optim.lr": 1e-5}),
        ("sft --gradient_accumulation_steps 2", 0, {"train.accumulation": 2}),
        ("rlhf", 0, {"objective.name": "dpo", "objective.reference": "online"}),
        ("pt", 1, {}),
    ],
)
def test_commands_of_swift_have_defaults_of_their_own(
    command: str, code: int, lines: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["init", "new", "--from", "--", "swift", *command.split(), "--model", "org/base", "--dataset", "a.jsonl"]
    assert cli.main(words) == code
    tree = parse(Path("new/run.yaml").read_text(), "run.yaml").tree
    assert {key: lookup(tree, key) for key in lines} == lines
    assert ("to decide: use_chat_template" in capsys.readouterr().out) == (command == "pt")


def test_a_warm_up_of_zero_is_none(folder: Path) -> None:
    assert run({**CASES[0]["given"], "warmup_ratio": 0.0}) == 0
    assert "warmup_ratio:" not in re.sub("#.*", "", Path("new/run.yaml").read_text())


@pytest.mark.parametrize("text", ["a: &x 1\nb: *x\n", "base_model: a\nbase_model: b\n", "base_model: [\n", "- a\n"])
def test_a_yaml_that_is_no_plain_map_is_refused(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs.yaml").write_text(text)
    assert cli.main(["init", "--from=theirs.yaml", "new"]) == 2
    assert "theirs.yaml" in capsys.readouterr().err and not Path("new").exists()


def test_no_file_is_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("new").mkdir()
    Path("new/commands.sh").write_text("mine")
    assert run(CASES[0]["given"]) == 2
    assert "new/commands.sh" in capsys.readouterr().err
    assert Path("new/commands.sh").read_text() == "mine" and not Path("new/run.yaml").exists()


def test_a_json_of_theirs_stays_and_its_optimizer_has_the_word(folder: Path) -> None:
    theirs = {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear", "warmup_num_steps": "auto"}},
    }
    Path("ds.json").write_text(json.dumps(theirs))
    given = {
        **CASES[0]["given"],
        "deepspeed": "ds.json",
        "load_in_4bit": False,
        "adapter": "lora",
        "weight_decay": None,
    }
    assert run(given) == 0
    tree = parse(Path("new/run.yaml").read_text(), "run.yaml").tree
    assert lookup(tree, "optim.betas") == [0.9, 0.95] and lookup(tree, "optim.weight_decay") == 0.01
    assert lookup(tree, "schedule.shape") == "linear"
    ours = dict(leaves(json.loads(Path("new/deepspeed.json").read_text())))
    assert ours["zero_optimization.reduce_bucket_size"] == "auto" and ours["bf16.enabled"] is True


@pytest.mark.parametrize(
    ("given", "theirs", "key"),
    [
        ({"bf16": True}, {"fp16": {"enabled": True}}, "fp16.enabled = true"),
        ({"bf16": True, "fp16": False}, {"bf16": {"enabled": False}}, "bf16.enabled = false"),
        ({"bf16": False}, {"bf16": {"enabled": True}}, "bf16.enabled = true"),
        ({"bf16": None, "float16": True}, {"bf16": {"enabled": True}}, "bf16.enabled = true"),
        ({"max_grad_norm": 1.0}, {"gradient_clipping": 0.5}, "gradient_clipping = 0.5"),
        ({"micro_batch_size": 2}, {"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu = 4"),
        (
            {"weight_decay": 0.0},
            {"optimizer": {"params": {"weight_decay": 0.1}}},
            "optimizer.params.weight_decay = 0.1",
        ),
        (
            {"warmup_ratio": 0.1},
            {"scheduler": {"params": {"warmup_num_steps": 9}}},
            "scheduler.params.warmup_num_steps",
        ),
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 4}, {"train_batch_size": 24}, "train_batch_size = 24"),
    ],
)
def test_a_json_that_contradicts_the_options_is_refused(
    given: dict[str, Any], theirs: dict[str, Any], key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers refuses the two as well (trainer_config_process in integrations/deepspeed.py)."""
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **theirs}))
    assert run({**CASES[0]["given"], **given, "deepspeed": "ds.json"}, "--gpus", "2") == 2
    said = capsys.readouterr().err
    assert f"{key}" in said and "(ds.json)" in said and '"auto"' in said and not Path("new").exists()
    assert any(f"{option} " in said.partition("rule:")[2] for option in given), said


@pytest.mark.parametrize(
    ("given", "theirs", "ours"),
    [
        ({"bf16": "auto"}, {"fp16": {"enabled": True}}, {"fp16.enabled": True, "bf16.enabled": False}),
        ({"bf16": None}, {"fp16": {"enabled": "auto"}}, {"fp16.enabled": False, "bf16.enabled": True}),
        ({"bf16": "auto"}, {"bf16": {"enabled": False}}, {"fp16.enabled": False, "bf16.enabled": False}),
        ({"bf16": False, "fp16": True}, {}, {"fp16.enabled": True, "bf16.enabled": False}),
    ],
)
def test_a_json_decides_what_the_options_leave_open(
    given: dict[str, Any], theirs: dict[str, Any], ours: dict[str, Any], folder: Path
) -> None:
    given = {**CASES[0]["given"], **given, "deepspeed": {"zero_optimization": {"stage": 2}, **theirs}}
    assert run({**given, "weight_decay": None, "gradient_accumulation_steps": None}) == 0
    ds = json.loads(Path("new/deepspeed.json").read_text())
    assert {key: lookup(ds, key) for key in ours} == ours
    more = {"gradient_clipping": 0.5, "train_batch_size": 24}
    given["deepspeed"] = {**given["deepspeed"], **more}
    Path("theirs.yaml").write_text(yaml.safe_dump({**given, "gradient_accumulation_steps": None}))
    assert cli.main(["init", "--from", "theirs.yaml", "second"]) == 0
    tree = parse(Path("second/run.yaml").read_text(), "run.yaml").tree
    assert lookup(tree, "optim.clip_norm") == 0.5 and lookup(tree, "train.global_batch") == 24


@pytest.mark.parametrize("text", ['{"min_lr_rate": 0.1}', "{'min_lr_rate': 1e-1}", '{ "min_lr_rate" : 0.1 }'])
def test_arguments_of_the_rates_may_be_a_text(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As transformers takes them from a command line."""
    words = ["trl", "sft", "--model_name_or_path", "org/base", "--dataset_name", "t.jsonl"]
    words += ["--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs", text]
    assert cli.main(["init", "new", "--from", "--", *words]) == 0
    assert lookup(parse(Path("new/run.yaml").read_text(), "run.yaml").tree, "schedule.min_ratio") == 0.1
    assert cli.main(["init", "again", "--from", "--", *words[:-1], text[:-1]]) == 2
    assert "lr_scheduler_kwargs = " in capsys.readouterr().err and not Path("again").exists()


@pytest.mark.parametrize(
    ("words", "batch", "source"),
    [
        ("torchrun --nproc_per_node 4 --nnodes=2 run_clm.py", 48, "nproc_per_node x nnodes"),
        ("torchrun --nproc-per-node=4 run_clm.py", 24, "nproc_per_node"),
        ("accelerate launch --num_processes 3 --num_machines 3 run_clm.py", 18, "num_processes"),
        ("deepspeed --num_gpus 2 --num_nodes 2 run_clm.py", 24, "num_gpus x num_nodes"),
        ("NPROC_PER_NODE=2 torchrun run_clm.py", 12, "nproc_per_node"),
        ("torchrun --nproc_per_node gpu run_clm.py", None, ""),
        ("deepspeed --hostfile hosts --num_gpus 2 run_clm.py", None, ""),
        ("torchrun --nnodes 1:4 --nproc_per_node 2 run_clm.py", None, ""),
    ],
)
def test_a_launcher_tells_the_number_of_ranks(
    words: str, batch: int | None, source: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--model_name_or_path org/base --train_file a.txt --per_device_train_batch_size 2"
    given = ["--from", "--", *words.split(), *options.split(), "--gradient_accumulation_steps", "3"]
    assert cli.main(["init", "new", *given]) == 0
    text = Path("new/run.yaml").read_text()
    assert lookup(parse(text, "run.yaml").tree, "train.global_batch") == batch
    assert (f"gradient_accumulation_steps x {source}\n" in text) if batch else ("--gpus N" in text)
    assert cli.main(["init", "again", "--gpus", "7", *given]) == (2 if batch else 0)
    assert (f"({source})" in capsys.readouterr().err) == bool(batch)


@pytest.mark.parametrize(
    "words",
    [
        "axolotl train theirs.yaml",
        "torchrun --nproc_per_node 2 -m axolotl.cli.train theirs.yaml",
        "accelerate launch --num_processes 2 train.py theirs.yaml",
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_command_line_may_name_the_file(words: str, named: bool, folder: Path) -> None:
    """Its options stand over those of the file."""
    Path("theirs.yaml").write_text(yaml.safe_dump(CASES[0]["given"]))
    file = ["theirs.yaml"] if named else []
    assert cli.main(["init", "new", "--from", *file, "--", *words.split(), "--learning-rate", "0.5"]) == 0
    tree = parse(Path("new/run.yaml").read_text(), "run.yaml").tree
    assert lookup(tree, "optim.lr") == 0.5 and lookup(tree, "adapter.r") == 32
    assert lookup(tree, "train.global_batch") == (16 if "2" in words else None)


def test_words_of_a_command_with_a_file_of_its_own(folder: Path) -> None:
    given = {"model_name_or_path": "org/base", "dataset": "identity", "cutoff_len": 512}
    Path("theirs.yaml").write_text(yaml.safe_dump(given))
    assert (
        cli.main(["init", "new", "--from", "--", "llamafactory-cli", "train", "theirs.yaml", "learning_rate=0.5"]) == 0
    )
    assert lookup(parse(Path("new/run.yaml").read_text(), "run.yaml").tree, "optim.lr") == 0.5
    Path("theirs.yaml").write_text(yaml.safe_dump({"model_name_or_path": "org/base", "dataset_name": "t.jsonl"}))
    words = ["trl", "sft", "--config", "theirs.yaml", "--num_processes", "2", "--packing"]
    assert cli.main(["init", "second", "--from", "--", *words]) == 0
    assert lookup(parse(Path("second/run.yaml").read_text(), "run.yaml").tree, "train.global_batch") == 16


@pytest.mark.parametrize("split", ["train[:1000]", "train[5%:10%]", "train+test", "train[:50%]+train[90%:]"])
@pytest.mark.parametrize(
    "data",
    [{"path": "me/talks"}, {"path": "talks.jsonl", "ds_type": "json"}, {"path": "json", "data_files": "talks.jsonl"}],
)
def test_a_part_of_the_records_is_to_decide(
    split: str, data: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """prepare reads whole files: more records would train another function in silence."""
    assert run({**CASES[0]["given"], "datasets": [{**data, "type": "chat_template", "split": split}]}) == 1
    assert f"to decide: datasets.split: {split}" in capsys.readouterr().out
    words = [
        "trl",
        "sft",
        "--model_name_or_path",
        "org/base",
        "--dataset_name",
        "me/talks",
        "--dataset_train_split",
        split,
    ]
    assert cli.main(["init", "second", "--from", "--", *words]) == 1
    assert f"to decide: dataset_train_split: {split}" in capsys.readouterr().out
    assert "[" not in Path("second/commands.sh").read_text()


@pytest.mark.parametrize(
    ("stack", "given", "option"),
    [
        ("llamafactory", {"max_samples": 1000}, "max_samples"),
        ("llamafactory", {"dataset": "few"}, "dataset"),
        ("llamafactory", {"dataset": "english"}, "dataset"),
        ("run_clm", {"max_train_samples": 10}, "max_train_samples"),
        ("swift", {"dataset": ["a.jsonl#500"]}, "dataset"),
    ],
)
def test_fewer_records_are_to_decide(
    stack: str, given: dict[str, Any], option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("data/dataset_info.json").write_text(
        json.dumps(
            {
                **SETS,
                "few": {"file_name": "identity.jsonl", "num_samples": 100},
                "english": {"hf_hub_url": "me/talks", "subset": "en"},
            }
        )
    )
    theirs = next(case["given"] for case in CASES if case["stack"] == stack and not case.get("decide"))
    assert run({**theirs, **given}, "--stack", stack) == 1
    assert f"to decide: {option}: " in capsys.readouterr().out


def test_records_that_pretraining_skips_are_to_decide(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"path": "me/books", "type": "pretrain", "skip": 500, "split": "train[:9]"}
    theirs = next(case["given"] for case in CASES if case["name"] == "pretraining")
    assert run({**theirs, "pretraining_dataset": [texts]}) == 1
    said = capsys.readouterr().out
    assert "to decide: datasets.skip: 500" in said and "to decide: datasets.split: train[:9]" in said


def test_a_rate_at_which_the_warm_up_of_their_json_begins_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_min_lr": 1e-6}}
    given = {**CASES[0]["given"], "deepspeed": {"zero_optimization": {"stage": 2}, "scheduler": section}}
    assert run(given) == 1
    assert "to decide: scheduler.params.warmup_min_lr" in capsys.readouterr().out


def test_that_there_are_no_records_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run({**CASES[0]["given"], "datasets": []}) == 1
    assert "to decide: datasets: []" in capsys.readouterr().out


def test_maps_of_4_bits_are_not_shared_by_zero_3(folder: Path) -> None:
    assert run({**CASES[0]["given"], "deepspeed": "zero3.json"}) == 0
    assert lookup(json.loads(Path("new/deepspeed.json").read_text()), "zero_optimization.stage") == 2


def test_a_disk_that_is_full_leaves_no_half_of_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Path.write_text

    def full(path: Path, *args: Any, **named: Any) -> int:
        if path.name == "commands.sh":
            write(path, "#!")
            raise OSError(28, "No space left on device", str(path))
        return write(path, *args, **named)

    monkeypatch.setattr(Path, "write_text", full)
    assert run(CASES[0]["given"]) == 2
    assert f"commands.sh: {os.strerror(28)}" in capsys.readouterr().err
    assert [file for file in Path("new").rglob("*") if file.is_file()] == []


def test_two_lengths_of_a_warm_up_are_refused(refused: Any) -> None:
    said = refused({"schedule": {"name": "transformers", "warmup_ratio": 0.1, "warmup_steps": 5}})
    assert "schedule.warmup_ratio" in said and "schedule.warmup_steps" in said
