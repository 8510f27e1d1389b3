"""`llmtrain init --from FILE`: lines of the run, of the JSON and of the commands. Nothing that trains another function
is dropped in silence, and nothing is written of a file that is not understood."""

from __future__ import annotations

import json
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
            assert code in (0, 1) or f"{option} = " in said or "there is no such file" in said, (option, value, said)


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
    assert run({**CASES[0]["given"], "deepspeed": "ds.json", "load_in_4bit": False, "adapter": "lora"}) == 0
    tree = parse(Path("new/run.yaml").read_text(), "run.yaml").tree
    assert lookup(tree, "optim.betas") == [0.9, 0.95] and lookup(tree, "optim.weight_decay") == 0.01
    assert lookup(tree, "schedule.shape") == "linear"
    ours = dict(leaves(json.loads(Path("new/deepspeed.json").read_text())))
    assert ours["zero_optimization.reduce_bucket_size"] == "auto" and ours["bf16.enabled"] is True


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
    assert "commands.sh: No space left on device" in capsys.readouterr().err
    assert [file for file in Path("new").rglob("*") if file.is_file()] == []


def test_two_lengths_of_a_warm_up_are_refused(refused: Any) -> None:
    said = refused({"schedule": {"name": "transformers", "warmup_ratio": 0.1, "warmup_steps": 5}})
    assert "schedule.warmup_ratio" in said and "schedule.warmup_steps" in said
