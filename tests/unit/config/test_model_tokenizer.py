"""Data and model of two tokenizers: refused by what decides the ids, not by the files' bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from tokenizers.processors import TemplateProcessing

from llmtrain.cli import main
from llmtrain.config.load import parse
from llmtrain.data.tokenize import SEPARATOR, train_bpe
from tests.helpers.config_workplace import write
from tests.helpers.prepared import edit_manifest, write_prepared

TEXTS = ["one two three " * 5 + str(number) for number in range(400)]
KEYS: dict[str, list[str]] = {
    "model.pretrained": ["--model.config", "null", "--model.pretrained", "m"],
    "objective.teacher": ["--objective.name", "distill", "--objective.teacher", "m"],
    "adapter.start": ["--adapter.r", "4", "--adapter.start", "m"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """tokenizer.json of two trainings of one size."""
    root = tmp_path_factory.mktemp("tokenizers")
    train_bpe(TEXTS, 290, root / "one")
    train_bpe([text[::-1] for text in TEXTS], 290, root / "two")
    first, second = ((root / name / "tokenizer.json").read_text() for name in ("one", "two"))
    return first, second


def placed(here: Path, data: str, model: str | None, **more: Any) -> None:
    documents = [[list(range(1, 280))] * 9]
    write(here)
    write_prepared(here / "data/t", documents, documents, vocab_size=290, tokenizer=data, **more)
    (here / "m").mkdir()
    (here / "m/config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 512}))
    if model is not None:
        (here / "m/tokenizer.json").write_text(model)


def check(key: str) -> int:
    return main(["config", "show", "run.yaml", "--data.path", "data/t", *KEYS[key]])


def changed(text: str, change: Callable[[Tokenizer], object]) -> str:
    tokenizer = Tokenizer.from_str(text)
    change(tokenizer)
    return str(tokenizer.to_str(pretty=True))


def digits(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


def begin(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = TemplateProcessing(single=f"{SEPARATOR} $A", special_tokens=[(SEPARATOR, 0)])


def harmless(tokenizer: Tokenizer) -> None:
    tokenizer.enable_padding(length=7)
    tokenizer.enable_truncation(5)
    tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.pre_tokenizer = Sequence([ByteLevel(add_prefix_space=False)])
    tokenizer.add_special_tokens([AddedToken("<|new|>", special=True)])
    tokenizer.add_tokens(["frobnicate"])


@pytest.mark.parametrize("key", KEYS)
def test_another_tokenizer_of_the_same_size_is_refused(
    here: Path, trained: tuple[str, str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    placed(here, *trained)
    assert check(key) == 2
    said = capsys.readouterr().err
    assert f'{key} = "m"' in said and "data/t" in said and "ids" in said and "--tokenizer m" in said
    (here / "m/tokenizer.json").unlink()  # nothing is proved then
    assert "its tokenizer" not in (capsys.readouterr().err if check(key) else "")


def test_a_text_that_another_step_would_give_other_ids_is_refused(
    here: Path, trained: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    placed(here, trained[0], changed(trained[0], digits))
    assert check("model.pretrained") == 2 and "normalize" in capsys.readouterr().err


@pytest.mark.parametrize("of_data", [False, True])
def test_a_copy_of_the_tokenizer_that_begins_a_text_otherwise_is_noted(
    here: Path, trained: tuple[str, str], of_data: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ids are the model's: it was refused as another tokenizer."""
    pair = (trained[0], changed(trained[0], begin))
    placed(here, *(pair[::-1] if of_data else pair))
    if of_data:
        edit_manifest(here / "data/t", lambda told: told.update(first_tokens=[0]))
    assert check("model.pretrained") == 0
    how = "begin with other tokens than those of" if of_data else "lack the tokens that begin a text in"
    said = "".join(capsys.readouterr())
    assert f"the texts of data/t {how} its tokenizer; prepare them again with --tokenizer m, unless" in said
    edit_manifest(here / "data/t", lambda told: told.update(chat={"longest": 9}))  # a template writes all tokens
    assert check("model.pretrained") == 0 and "data/t" not in capsys.readouterr().err


def test_other_merges_are_refused(here: Path, trained: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(trained[0])
    told["model"]["merges"] = told["model"]["merges"][::-1]
    placed(here, trained[0], json.dumps(told))
    assert check("model.pretrained") == 2 and " merges " in capsys.readouterr().err


def test_what_changes_no_id_and_added_tokens_pass(here: Path, trained: tuple[str, str]) -> None:
    """Of the model and of the data; merges as text, as earlier versions of the library write them."""
    told = json.loads(changed(trained[0], harmless))
    told["model"]["merges"] = [" ".join(pair) for pair in told["model"]["merges"]]
    for number, pair in enumerate([(trained[0], json.dumps(told)), (json.dumps(told), trained[0])]):
        (here / str(number)).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(here / str(number))
            placed(Path.cwd(), *pair)
            assert check("model.pretrained") == 0


def test_words_without_an_unknown_one_are_compared_by_the_vocabulary(here: Path) -> None:
    words = [
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": None,
                "post_processor": None,
                "decoder": None,
                "truncation": None,
                "padding": None,
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "none"},
            }
        )
        for vocabulary in ({"a": 0, "b": 1}, {"b": 0, "a": 1})
    ]
    placed(here, words[0], words[1])
    assert check("model.pretrained") == 2
    (here / "m/tokenizer.json").write_text(words[0] + "\n")
    assert check("model.pretrained") == 0


def test_texts_without_what_the_models_tokenizer_puts_before_them_are_noted(
    here: Path, trained: tuple[str, str]
) -> None:
    both = changed(trained[0], begin)
    placed(here, both, both)
    words = ["run.yaml", "--data.path", "data/t", *KEYS["model.pretrained"]]
    lack = "model.pretrained: the texts of data/t lack the tokens that begin a text in its tokenizer; prepare"
    assert any(note.startswith(lack) for note in parse(words).notes)
    edit_manifest(here / "data/t", lambda told: told.update(first_tokens=[0]))
    assert not any("lack" in note for note in parse(words).notes)
