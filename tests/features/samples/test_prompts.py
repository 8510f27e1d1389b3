"""The prompts of `samples.prompts`: their tokens, what is refused, and a file of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from llmtrain.base.errors import DataError
from llmtrain.config.load import parse
from llmtrain.config.run import DataConfig
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.tokenize import train_bpe
from llmtrain.features.samples import SamplesConfig
from llmtrain.features.samples.continuing import Prompts
from tests.helpers import config_workplace
from tests.helpers.prepared import write_prepared
from tests.unit.data.test_first_tokens import prepared

LENGTH = 32


@pytest.fixture
def data(tmp_path: Path) -> TrainData:
    train_bpe(["some words, and é\n"] * 3, 265, tmp_path / "bpe")
    spelt = (tmp_path / "bpe/tokenizer.json").read_text()
    end = Tokenizer.from_str(spelt).token_to_id("<|endoftext|>")
    documents = [[[1, 2, 3] * 30]]
    write_prepared(tmp_path / "d", documents, documents, vocab_size=265, separator_id=end, tokenizer=spelt)
    (tmp_path / "d/tokenizer/tokenizer_config.json").write_bytes((tmp_path / "bpe/tokenizer_config.json").read_bytes())
    return TrainData(DataConfig(path=str(tmp_path / "d"), sequence_length=LENGTH))


def test_a_continuation_is_what_comes_after_the_prompt(data: TrainData) -> None:
    prompts = Prompts.of(["some wo", "é"], 8, data)
    assert prompts.ends == {data.separator_id}
    new = prompts.encoder.encode(["rds, and é"])[0].tolist()
    assert prompts.text(0, new) == "rds, and é" and prompts.text(1, []) == ""


@pytest.mark.parametrize(
    ("prompt", "tokens", "says"),
    [
        ("some " * 40, 8, "data.sequence_length 32"),
        ("a", 32, "samples.tokens 32"),
        ("", 8, "has 0 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(data: TrainData, prompt: str, tokens: int, says: str) -> None:
    with pytest.raises(DataError, match=says):
        Prompts.of([prompt], tokens, data)


def test_a_files_lines_are_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config_workplace.write(tmp_path, {"samples": {"prompts": "prompts.txt"}})
    (tmp_path / "prompts.txt").write_text("def f(\n\n  import\n")
    assert parse(["run.yaml"]).config.section(SamplesConfig).prompts == ["def f(", "  import"]
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({**config_workplace.RUN, "samples": {"prompts": ["one: two", "#"]}})
    )
    assert parse(["run.yaml"]).config.section(SamplesConfig).prompts == ["one: two", "#"]


def test_prompts_begin_as_the_texts_of_the_run(root: Path, tmp_path: Path) -> None:
    for form in ("begin", "both"):
        folder, tokenizer = prepared(root, form, tmp_path / form), AutoTokenizer.from_pretrained(root / form)
        prompts = Prompts.of(["one cat", "7"], 4, TrainData(DataConfig(path=str(folder), sequence_length=LENGTH)))
        whole = tokenizer(prompts.texts)["input_ids"]
        assert [each[: len(mine)] for each, mine in zip(whole, prompts.ids, strict=True)] == prompts.ids
        assert {mine[0] for mine in prompts.ids} == {whole[0][0]}
    bare = prepared(root, "begin", tmp_path / "bare", "--no-special-tokens")
    prompts = Prompts.of(["7"], 4, TrainData(DataConfig(path=str(bare), sequence_length=LENGTH)))
    assert prompts.ids[0][0] != 0
