"""`llmtrain prepare --format prompt`: what a server feeds, of every form of a question, and nothing of it counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain import cli
from llmtrain.base.errors import DataError
from llmtrain.commands.prepare import main
from llmtrain.config.run import DataConfig
from llmtrain.data.row import RefusedError
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.tokenizer_folder import stop_tokens
from tests.helpers.chat import CHATML, KINDS, Kind, RowMaker, expected, workers_here, write_tokenizer

ASKED = [
    {"role": "user", "content": "a <|im_end|>"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


def row(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    """By hand: a row up to where an answer of one letter and its end begin."""
    return expected(folder, KINDS["chatml"], [*messages, {"role": "assistant", "content": "?"}])[-1][0][:-2]


def encoder(folder: Path, kind: Kind = KINDS["chatml"], **options: Any) -> RowMaker:
    write_tokenizer(folder, kind)
    return RowMaker(folder, "prompt", stop_tokens=stop_tokens(folder, ()), **options)


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"prompt": "what"}, [{"role": "user", "content": "what"}]),
        ({"prompt": ASKED, "chosen": "x", "label": True}, ASKED),
        ({"messages": ASKED}, ASKED),
        (
            {"prompt": "what", "system": "be"},
            [{"role": "system", "content": "be"}, {"role": "user", "content": "what"}],
        ),
        ({"conversations": [{"from": "human", "value": "what"}]}, [{"role": "user", "content": "what"}]),
        ({"instruction": "do", "input": "it"}, [{"role": "user", "content": "do\nit"}]),
    ],
)
def test_every_form_of_a_question(tmp_path: Path, record: dict[str, Any], messages: list[dict[str, str]]) -> None:
    (found,) = encoder(tmp_path / "model").rows(json.dumps(record))
    assert found.ids.tolist() == row(tmp_path / "model", messages) and not found.counted.any()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": ASKED[:2]}, "a prompt must end with the message to answer"),
        ({"text": "what"}, "no prompt in it"),
        ({"messages": [{"role": "system", "content": "be"}]}, "and nothing to answer"),
        ({"prompt": " "}, "is empty"),
        ({"prompt": 3}, "neither a text nor messages"),
        ({"prompt": "what " * 50}, "it has 269 tokens, --max-tokens is 100$"),
    ],
)
def test_what_asks_nothing_is_rejected(tmp_path: Path, record: dict[str, Any], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        encoder(tmp_path / "model", max_tokens=100).rows(json.dumps(record))


def test_a_template_that_leaves_a_question_out_is_seen(tmp_path: Path) -> None:
    template = CHATML.replace("{% for m in messages %}", "{% for m in messages[-1:] %}")
    kind = Kind(template, KINDS["chatml"].special, "<|im_end|>", "<|im_end|>", KINDS["chatml"].rows)
    with pytest.raises(RefusedError, match=r"message 0 \(user\): .*template"):
        encoder(tmp_path / "model", kind).rows(json.dumps({"messages": ASKED}))


def test_a_folder_of_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, source, out = write_tokenizer(tmp_path / "model", KINDS["chatml"]), tmp_path / "p.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"prompt": f"what is {at}"}) + "\n" for at in range(40)))
    words = ["--source", str(source), "--out", str(out), "--tokenizer", str(model), "--format", "prompt"]
    with workers_here():
        assert main([*words, "--count", "last"]) == 2 and "--count" in capsys.readouterr().err
        assert main([*words, "--validation-fraction", "0"]) == 0
    data = PreparedSet(out)
    stream = data.split("train")
    lengths = stream.row_lengths()
    assert stream.read(0, int(lengths[0])).tolist() == row(model, [{"role": "user", "content": "what is 0"}])
    bits = stream.counted(0, stream.tokens)
    assert len(lengths) == 40 and bits is not None and not bits.any()
    capsys.readouterr()
    assert cli.main(["data", "show", str(out)]) == 0
    assert "0 counted" in (shown := capsys.readouterr().out) and "<|im_start|>assistant" in shown
    with pytest.raises(DataError, match=f"{out}.*prompts"):
        TrainData(DataConfig(path=str(out), sequence_length=64, isolate_documents=True))
