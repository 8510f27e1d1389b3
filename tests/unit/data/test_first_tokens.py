"""Texts of a tokenizer that puts tokens around each, as those of Llama, Gemma, Mistral (before) and OPT (the same token
before and after) do."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from llmtrain.base.errors import DataError
from llmtrain.cli import main as command
from llmtrain.commands.prepare import main
from llmtrain.config.run import DataConfig, RunConfig
from llmtrain.data.shards import PreparedSet
from llmtrain.data.show import shown_text
from llmtrain.data.stream.train_data import EvalSet, TrainData
from llmtrain.data.tokenize import SEPARATOR, Encoder, train_bpe
from llmtrain.parity.untrained import differences
from tests.helpers.chat import RowMaker
from tests.helpers.config_workplace import write

pytestmark = pytest.mark.long

BEGIN = "<|user|>"
"""Stands for <bos>: a special token of the vocabulary."""
FORMS = {"begin": f"{BEGIN} $A", "both": f"{BEGIN} $A {SEPARATOR}", "separator": f"{SEPARATOR} $A", "none": "$A"}
T = 32


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of short documents, and a tokenizer of each form."""
    root = tmp_path_factory.mktemp("first")
    draw = random.Random(0)
    texts = [
        " ".join(draw.choices(["one", "two", "three", "cat", "7", "42"], k=draw.randint(3, 40))) for _ in range(300)
    ]
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for form, single in FORMS.items():
        train_bpe(texts, 270, root / form)
        tokenizer = Tokenizer.from_file(str(root / form / "tokenizer.json"))
        known = [(token, tokenizer.token_to_id(token)) for token in (BEGIN, SEPARATOR)]
        if form != "none":
            tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=known)
            tokenizer.save(str(root / form / "tokenizer.json"))
    return root


def prepared(root: Path, form: str, out: Path, *more: str) -> Path:
    words = ["--source", str(root / "texts.jsonl"), "--tokenizer", str(root / form), "--out", str(out)]
    assert main([*words, "--validation-fraction", "0.2", "--shard-bytes", "10000", "--processes", "2", *more]) == 0
    return out


def manifest_of(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return told


def tokens(folder: Path, split: str) -> np.ndarray:
    return np.concatenate([np.fromfile(path, "<u2") for path in sorted(folder.glob(f"{split}-*.bin"))])


@pytest.mark.parametrize("form", ["begin", "both", "separator"])
def test_a_document_is_what_the_tokenizers_own_encoding_makes_of_it(root: Path, tmp_path: Path, form: str) -> None:
    """Against transformers: packing, validation, several workers, sequences and questions."""
    folder = prepared(root, form, tmp_path / "set")
    tokenizer = AutoTokenizer.from_pretrained(root / form)
    end = tokenizer.eos_token_id
    texts = [json.loads(line)["text"] for line in (root / "texts.jsonl").read_text().splitlines()]
    wanted = [[*ids, *([end] if ids[-1] != end else [])] for ids in tokenizer(texts)["input_ids"]]
    first = wanted[0][0]
    assert manifest_of(folder)["first_tokens"] == [first] and manifest_of(folder)["settings"]["special_tokens"]
    data, found = PreparedSet(folder), []
    for split in ("train", "validation"):
        ids, own = tokens(folder, split), data.origins(split)  # type: ignore[arg-type]
        found += [ids[each.begin : each.end].tolist() for each in own.within(0, len(ids))]
    assert Counter(map(tuple, found)) == Counter(map(tuple, wanted))

    heading = shown_text(data, Encoder(data.tokenizer_dir), "train", 3).heading
    third = list(data.origins("train").within(0, data.manifest.tokens["train"]))[3]
    assert heading == f"document 3 of train: {third.end - third.begin} tokens"

    train = TrainData(DataConfig(path=str(folder), sequence_length=T, isolate_documents=True))
    labels_at, positions_at = {}, {}
    for index in range(train.sequences_per_epoch):
        start = train.place_of(index)[1] * T
        sequence = train.sequence_at(index)
        assert sequence.positions is not None
        labels_at |= {start + 1 + place: int(label) for place, label in enumerate(sequence.labels)}
        positions_at |= {start + place: int(each) for place, each in enumerate(sequence.positions) if place}
    begins = {each.begin for each in data.origins("train").within(0, data.manifest.tokens["train"])}
    ids = tokens(folder, "train")
    assert {at for at, label in labels_at.items() if label == -100} == begins & labels_at.keys()
    assert all(label in (-100, ids[at]) for at, label in labels_at.items())
    assert {at for at, position in positions_at.items() if position == 0} == begins & positions_at.keys()

    asked = {"question": "one", "choices": ["cat", "two"], "answer": 0}
    row = RowMaker(folder / "tokenizer", "choices").rows(json.dumps(asked))
    assert row[0].ids[0] == first
    assert (
        differences(
            RunConfig(deepspeed="x.json", data=DataConfig(path=str(folder), sequence_length=T, isolate_documents=True)),
            "fp32",
        )[1]
        == []
    )


def test_without_special_tokens_the_folder_is_that_of_a_tokenizer_that_has_none(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = prepared(root, "begin", tmp_path / "bare", "--no-special-tokens")
    none, with_them = (prepared(root, form, tmp_path / form) for form in ("none", "begin"))
    assert BEGIN in capsys.readouterr().out
    assert sorted(path.name for path in bare.iterdir()) == sorted(path.name for path in none.iterdir())
    for path in bare.glob("*.bin"):
        assert path.read_bytes() == (none / path.name).read_bytes()
    for folder in (bare, none):
        assert not {"first_tokens", "special_tokens"} & (
            manifest_of(folder).keys() | manifest_of(folder)["settings"].keys()
        )

    words = ["--source", str(root / "texts.jsonl"), "--tokenizer", str(root / "begin"), "--validation-fraction", "0.2"]
    words += ["--shard-bytes", "10000"]
    assert main([*words, "--out", str(bare)]) == 2
    for more in ((str(bare),), (str(with_them), "--no-special-tokens")):
        assert main([*words, "--out", *more]) == 2
        assert " special_tokens " in (said := capsys.readouterr().err) and "--no-special-tokens" in said
    assert main([*words, "--out", str(with_them)]) == 0

    one, other = (TrainData(DataConfig(path=str(each), sequence_length=T)) for each in (bare, with_them))
    assert one.fingerprint != other.fingerprint, "a resume compares it"
    with pytest.raises(DataError, match=r"(?s)data.mixture.*--no-special-tokens"):
        TrainData(DataConfig(mixture={str(bare): 1.0, str(with_them): 1.0}, sequence_length=T))

    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    for more, key in (
        (["--eval.sets", json.dumps({"m": str(bare)})], "eval.sets.m"),
        (["--data.stages", json.dumps([{"from_step": 1, "path": str(bare)}])], "data.stages, from step 1"),
    ):
        words = ["run.yaml", "--data.path", str(with_them), "--data.sequence_length", str(T), *more]
        assert command(["config", "check", *words]) == 2
        assert f"{key}: the texts of {with_them} begin with" in (said := capsys.readouterr().err), said


def test_the_option_is_for_text(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--source", str(root / "texts.jsonl"), "--tokenizer", str(root / "begin"), "--out", str(tmp_path / "set")]
    assert main([*words, "--format", "chat", "--no-special-tokens"]) == 2
    assert "--no-special-tokens" in capsys.readouterr().err


def test_ids_of_others_are_kept_and_their_first_token_is_looked_at(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(root / "begin")
    texts = [json.loads(line)["text"] for line in (root / "texts.jsonl").read_text().splitlines()]
    for name, special in (("with", True), ("without", False)):
        ids = [[*tokenizer(text, add_special_tokens=special)["input_ids"], 0] for text in texts]
        np.array([each for row in ids for each in row], "<u2").tofile(tmp_path / f"{name}.npy")
        words = ["--format", "tokens", "--source", str(tmp_path / f"{name}.npy"), "--tokenizer", str(root / "begin")]
        assert main([*words, "--out", str(tmp_path / name)]) == 0
        told, said = manifest_of(tmp_path / name), capsys.readouterr()
        assert ("first_tokens" in told) is special
        assert ("begin with <|user|>" in said.out + said.err) is not special
    with pytest.raises(DataError, match=r"data\.mixture"):
        TrainData(DataConfig(mixture={str(tmp_path / each): 1.0 for each in ("with", "without")}, sequence_length=T))
    assert EvalSet(str(tmp_path / "with"), DataConfig(path="x", sequence_length=T)).first_tokens
