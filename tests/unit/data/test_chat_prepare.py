"""`llmtrain prepare --format chat` and what training reads of it: whole rows in sequences, isolated, none lost."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import xxhash

from llmtrain import cli
from llmtrain.base.errors import DataError
from llmtrain.commands.prepare import main
from llmtrain.config.on_disk import _check_length
from llmtrain.config.problems import Problems
from llmtrain.config.run import DataConfig, RunConfig
from llmtrain.data.kinds.packing import best_fit
from llmtrain.data.manifest import SPLITS
from llmtrain.data.sequences import TokenSequence
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.train_data import EvalSet, TrainData, counted_bytes
from llmtrain.data.tokenize import Encoder
from llmtrain.data.tokenizer_folder import byte_lengths
from tests.helpers.chat import KINDS, expected, workers_here, write_tokenizer

pytestmark = pytest.mark.long

LENGTH = 256
KIND = KINDS["qwen3"]
BAD = {7: '{"messages": [{"content": "x"}]}', 11: "{broken"}
"""Line -> what stands there."""


def talks(count: int) -> list[list[dict[str, str]]]:
    draw = random.Random(3)
    made = []
    for index in range(count):
        texts = [f"{index} " + "so " * int(draw.paretovariate(1.2)) for _ in range(2 * draw.randint(1, 3))]
        made.append([{"role": ("user", "assistant")[i % 2], "content": t[:60]} for i, t in enumerate(texts)])
    return made


TALKS = talks(120)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder / "model", KIND)
    lines = [json.dumps({"messages": talk}) for talk in TALKS]
    (folder / "good.jsonl").write_text("".join(line + "\n" for line in lines))
    for number, line in BAD.items():
        lines.insert(number - 1, line)
    (folder / "talks.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def prepare(place: Path, source: str, out: str, *more: str) -> int:
    given = ("--source", str(place / source), "--out", str(place / out), "--tokenizer", str(place / "model"))
    return main([*given, "--format", "chat", "--shard-bytes", "6000", *more])


@pytest.fixture(autouse=True)
def _workers_here() -> Iterator[None]:
    """But those of `prepared`."""
    with workers_here():
        yield


@pytest.fixture(scope="module")
def prepared(place: Path) -> Path:
    assert prepare(place, "talks.jsonl", "set", "--max-rejected", "2", "--validation-fraction", "0.2") == 0
    return place / "set"


def rows_of(data: PreparedSet, split: str) -> list[tuple[list[int], list[bool]]]:
    stream = data.split(split)  # type: ignore[arg-type]
    ends = np.cumsum(stream.row_lengths())
    ids, counted = stream.read(0, stream.tokens), stream.counted(0, stream.tokens)
    assert counted is not None
    parts = zip(np.split(ids, ends)[:-1], np.split(counted, ends)[:-1], strict=True)
    return [(tokens.tolist(), bits.tolist()) for tokens, bits in parts]


def test_every_record_is_there_or_named(place: Path, prepared: Path) -> None:
    data = PreparedSet(prepared)
    data.verify()
    wanted = [row for talk in TALKS for row in expected(place / "model", KIND, talk)]
    found = rows_of(data, "train") + rows_of(data, "validation")
    assert sorted(found) == sorted(wanted) and len(data.manifest.shards["train"]) > 2
    assert data.manifest.chat is not None
    assert sum(data.manifest.chat.counted.values()) == sum(sum(counted) for _, counted in wanted)
    assert data.manifest.chat.longest == max(len(ids) for ids, _ in wanted)
    assert data.manifest.chat.stop_tokens == ["<|im_end|>"]
    lines = (prepared / "rejected.jsonl").read_text().splitlines()
    rejected = sorted(map(json.loads, lines), key=lambda entry: entry["line"])
    assert [(entry["file"], entry["line"]) for entry in rejected] == [("talks.jsonl", 7), ("talks.jsonl", 11)]
    assert "role" in rejected[0]["reason"] and "JSON" in rejected[1]["reason"]
    # Rows of a conversation are on one side: a thought that validation asks for is in no row for training.
    train, validation = ({data_text(prepared, row).split()[0] for row in rows_of(data, s)} for s in SPLITS)
    assert validation and not train & validation


def data_text(folder: Path, row: tuple[list[int], list[bool]]) -> str:
    return Encoder(folder / "tokenizer").decode(row[0]).replace("<|im_start|>user\n", " ", 1)


def test_bytes_are_those_of_the_answers_texts(place: Path) -> None:
    assert prepare(place, "good.jsonl", "measured", "--validation-fraction", "0") == 0
    data = EvalSet(str(place / "measured"), DataConfig(sequence_length=LENGTH, isolate_documents=True))
    answers = [turn["content"] for talk in TALKS for turn in talk if turn["role"] == "assistant"]
    counted = "".join(f"<think>\n\n</think>\n\n{answer}" for answer in answers)  # what ends a turn is no text
    lengths = byte_lengths(data.tokenizer_dir, data.vocab_size)
    assert counted_bytes(data, data.validation_sequences, lengths) == len(counted.encode()) and data.whole


def test_fields_that_nothing_reads_are_told_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"messages": talk, "context": "Bread is 3.10.", "id": 7}) for talk in TALKS]
    (place / "unread.jsonl").write_text("".join(line + "\n" for line in lines))
    assert prepare(place, "unread.jsonl", "unread", "--validation-fraction", "0") == 0
    told = (
        "the fields context of the records are not used: put text that the model should see into messages or documents"
    )
    assert capsys.readouterr().out.count(told) == 1
    assert PreparedSet(place / "unread").manifest.chat.unread == ["context"]  # type: ignore[union-attr]


def test_where_nothing_is_left_the_reasons_are(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = '{"messages": ' + "[" * 990 + "]" * 990 + "}"
    (place / "none.jsonl").write_text(f"{BAD[7]}\n{deep}\n")
    assert prepare(place, "none.jsonl", "none", "--max-rejected", "2") == 2
    assert "2 records" in (told := capsys.readouterr().err) and "rejected.jsonl" in told
    assert [json.loads(line)["line"] for line in (place / "none/rejected.jsonl").read_text().splitlines()] == [1, 2]


def test_a_table_gives_the_same_rows(place: Path, prepared: Path) -> None:
    table = pyarrow.Table.from_pylist([{"messages": talk, "tools": None} for talk in TALKS])
    pyarrow.parquet.write_table(table, place / "talks.parquet")
    assert prepare(place, "talks.parquet", "from-table", "--validation-fraction", "0.2", "--processes", "1") == 0
    ours, theirs = PreparedSet(prepared), PreparedSet(place / "from-table")
    assert rows_of(ours, "train") + rows_of(ours, "validation")
    both = [sorted(rows_of(data, "train") + rows_of(data, "validation")) for data in (ours, theirs)]
    assert both[0] == both[1]


def config(folder: Path, **more: object) -> DataConfig:
    given = {"path": str(folder), "sequence_length": LENGTH, "isolate_documents": True, **more}
    return DataConfig(**given)  # type: ignore[arg-type]


def unpacked(sequence: TokenSequence) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of each document of a sequence: positions alone say where they begin."""
    inputs, labels, positions = sequence.inputs, sequence.labels, sequence.positions
    assert positions is not None and positions[0] == 0
    bounds = [*np.flatnonzero(positions == 0).tolist(), len(inputs)]
    for begin, end in itertools.pairwise(bounds):
        assert positions[begin:end].tolist() == list(range(end - begin))
    return [(inputs[a:b].tolist(), labels[a:b].tolist()) for a, b in itertools.pairwise(bounds)]


def test_an_epoch_holds_every_row_whole_and_once(place: Path, prepared: Path) -> None:
    data = TrainData(config(prepared))
    found: Counter[str] = Counter()
    for index in range(data.sequences_per_epoch):
        for tokens, labels in unpacked(data.sequence_at(index)):
            if any(label >= 0 for label in labels):
                found[json.dumps([tokens, labels])] += 1
            else:  # the padding, at the end
                assert set(tokens) == {data.separator_id}
    wanted: Counter[str] = Counter()
    for ids, counted in rows_of(PreparedSet(prepared), "train"):
        labels = [token if bit else -100 for token, bit in zip(ids[1:], counted[1:], strict=True)]
        wanted[json.dumps([ids, [*labels, -100]])] += 1
    assert found == wanted


def test_training_refuses_what_would_leak_or_be_cut(prepared: Path) -> None:
    with pytest.raises(DataError, match=r"data\.isolate_documents"):
        TrainData(config(prepared, isolate_documents=False))
    longest = PreparedSet(prepared).manifest.chat.longest  # type: ignore[union-attr]
    with pytest.raises(DataError, match=f"has {longest} tokens, and rows are not cut.*--max-tokens {longest - 1}"):
        TrainData(config(prepared, sequence_length=longest - 1))
    assert TrainData(config(prepared, sequence_length=longest)).sequences_per_epoch > 0


def test_damage_is_found(place: Path, prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(prepared, folder)
    path = sorted(folder.glob("train-*.rows"))[0]
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] + 1]) + good[1:])
    with pytest.raises(DataError, match=f"{path.stem}.*rows"):
        TrainData(config(folder))
    with pytest.raises(DataError, match=f"{path}: its checksum"):
        PreparedSet(folder).verify()
    path.write_bytes(good[:-1])
    with pytest.raises(DataError, match=f"{path}: .*{len(good) - 1:,} .*{len(good):,}"):
        PreparedSet(folder)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--chat-template", "nowhere.jinja"), "nowhere.jinja: no chat template can be read"),
        (("--stop-token", "<|gone|>"), "'<|gone|>': is no token of"),
        (("--too-long", "cut"), "say with --max-tokens N"),
        (("--max-tokens", "1"), "--max-tokens 1: must be at least 2; a row has a token to read and one to predict"),
        (("--format", "jsonl", "--count", "all"), "--count: is for conversations; add --format chat"),
        (("--format", "choices", "--max-tokens", "10"), "--max-tokens: is for conversations"),
        (
            ("--format", "choices", "--validation-fraction", "0.1"),
            "--validation-fraction: all multiple-choice questions",
        ),
        (("--format", "choices", "--validation-source", "x"), "--validation-source: all multiple-choice questions"),
    ],
)
def test_options_that_cannot_be(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], reason: str
) -> None:
    assert prepare(place, "good.jsonl", str(tmp_path / "out"), *more) == 2
    assert reason in capsys.readouterr().err


def test_a_tokenizer_needs_a_template(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = write_tokenizer(tmp_path / "bare", KIND)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    given = ["--source", str(place / "good.jsonl"), "--format", "chat", "--validation-fraction", "0"]
    assert main([*given, "--out", str(tmp_path / "a"), "--tokenizer", str(bare)]) == 2
    assert str(bare) in (error := capsys.readouterr().err) and "--chat-template" in error
    assert main([*given, "--out", str(tmp_path / "a"), "--vocab-size", "300"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    (tmp_path / "own.jinja").write_text(template)
    own = ("--chat-template", str(tmp_path / "own.jinja"))
    assert main([*given, "--out", str(tmp_path / "a"), "--tokenizer", str(bare), *own]) == 0
    assert (tmp_path / "a" / "tokenizer" / "chat_template.jinja").read_text() == template  # for the exported model


def test_show_tells_what_is_counted(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "show", str(prepared), "--index", "3", "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    rows = rows_of(PreparedSet(prepared), "train")
    assert f"row 3 of train: {len(rows[3][0])} tokens, {sum(rows[3][1])} counted" in shown and "row 4 of train" in shown
    counted = "".join(line.partition("| ")[2] + "\n" for line in shown.splitlines() if line.startswith("counted"))
    assert counted.count("<think>") == counted.count("<|im_end|>") == 2 and "user" not in counted
    assert cli.main(["data", "show", str(prepared), "--index", "100000"]) == 2
    assert str(len(rows) - 1) in capsys.readouterr().err


def told(place: Path, records: list[dict[str, object]], out: str, model: Path, *more: str) -> int:
    """`prepare` of records with a tokenizer's folder."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    source = place / f"{xxhash.xxh3_64_hexdigest(text.encode())}.jsonl"
    if not source.exists():
        source.write_text(text)
    given = ["--source", str(source), "--out", str(place / out), "--tokenizer", str(model)]
    return main([*given, "--processes", "1", *more])


def question(text: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("form", ["chat", "preference", "unpaired"])
def test_what_is_trained_decides_the_side_and_not_the_id(tmp_path: Path, form: str) -> None:
    model = write_tokenizer(tmp_path / "model", KINDS["chatml"])
    records: list[dict[str, object]] = []
    for number in range(400):
        asked, said = ("the capital?", "Paris") if number % 2 else (f"q{number % 100}", "a")
        more: dict[str, object] = {"messages": question(asked, said)}
        if form == "preference":
            more = {"prompt": asked, "chosen": said, "rejected": "no"}
        elif form == "unpaired":
            more["label"] = number % 3 == 0
        records.append({"id": number, **more})
    assert told(tmp_path, records, "out", model, "--format", form, "--validation-fraction", "0.2") == 0
    data = PreparedSet(tmp_path / "out")
    train, validation = ({tuple(ids) for ids, _ in rows_of(data, split)} for split in SPLITS)
    assert train and validation and not train & validation
    # --validation-source, too: what it holds under another id is left out of training.
    (tmp_path / "held.jsonl").write_text(json.dumps({**records[1], "id": "other"}) + "\n")
    held = ("--format", form, "--validation-source", str(tmp_path / "held.jsonl"))
    assert told(tmp_path, records, "apart", model, *held) == 0
    data = PreparedSet(tmp_path / "apart")
    train, validation = ({tuple(ids) for ids, _ in rows_of(data, split)} for split in SPLITS)
    assert validation and not train & validation


DATED = "<|im_start|>system\nToday: {{ strftime_now('%Y-%m-%d') }}<|im_end|>\n" + KINDS["chatml"].template


def test_a_date_in_the_template_is_kept_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The templates of Llama 3.2, gpt-oss, Mistral Small 3 and Granite write it into every prompt."""
    model = write_tokenizer(tmp_path / "model", replace(KINDS["chatml"], template=DATED))
    records: list[dict[str, object]] = [{"messages": question("q", f"a{number}")} for number in range(3)]
    chat = ("--format", "chat", "--validation-fraction", "0")
    assert told(tmp_path, records, "out", model, *chat) == 0
    manifest = PreparedSet(tmp_path / "out").manifest.chat
    assert manifest is not None
    moment = str(manifest.moment)
    said = f"the template writes the date: {moment.replace('T', ' ')}, when the data was prepared, is in every prompt"
    assert said in capsys.readouterr().out
    assert f"Today: {moment[:10]}" in data_text(tmp_path / "out", rows_of(PreparedSet(tmp_path / "out"), "train")[0])
    assert cli.main(["data", "show", str(tmp_path / "out")]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    plain = write_tokenizer(tmp_path / "plain", KINDS["chatml"])
    assert told(tmp_path, records, "plain-out", plain, *chat) == 0
    assert (
        json.loads((tmp_path / "plain-out/manifest.json").read_text())["chat"].keys().isdisjoint({"moment", "choices"})
    )


def test_a_continued_preparation_keeps_the_date_of_its_beginning(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model", replace(KINDS["chatml"], template=DATED))
    records: list[dict[str, object]] = [{"messages": question("q", "a")}, {"messages": []}]
    chat = ("--format", "chat", "--validation-fraction", "0")
    assert told(tmp_path, records, "out", model, *chat) == 2  # a bad record; what is finished is kept
    path = tmp_path / "out" / "unfinished" / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "moment": "2024-02-29T12:00:00"}))
    for record in path.parent.glob("unit-*.json"):
        record.unlink()
    assert told(tmp_path, records, "out", model, *chat, "--max-rejected", "1") == 0
    assert "Today: 2024-02-29" in data_text(tmp_path / "out", rows_of(PreparedSet(tmp_path / "out"), "train")[0])


def test_an_option_tells_the_template_of_all_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = "<|im_start|>system\nthink {{ think | default('yes') }}<|im_end|>\n" + KINDS["chatml"].template
    model = write_tokenizer(tmp_path / "model", replace(KINDS["chatml"], template=template))
    records: list[dict[str, object]] = [{"messages": question("q", "a")}]
    records.append({**records[0], "chat_template_kwargs": {"think": "maybe"}})
    chat = ("--format", "chat", "--validation-fraction", "0")
    assert told(tmp_path, records, "out", model, *chat, "--chat-template-kwargs", '{"think": "no"}') == 0
    rows = [data_text(tmp_path / "out", row) for row in rows_of(PreparedSet(tmp_path / "out"), "train")]
    assert ["think no" in rows[0], "think maybe" in rows[1]] == [True, True]
    assert '{"think": "no"}' in capsys.readouterr().out
    assert told(tmp_path, records, "out", model, *chat) == 2  # it is a setting of the folder
    assert "chat_template_kwargs" in (error := capsys.readouterr().err) and "{'think': 'no'}" in error
    for wrong, reason in (
        ('{"thnk": 1}', "reads no such name; it reads think"),
        ("{think}", "write a JSON object"),
        ('{"tools": []}', "it has 'tools', a name that is reserved"),
    ):
        assert told(tmp_path, records, "no", model, *chat, "--chat-template-kwargs", wrong) == 2
        assert reason in capsys.readouterr().err


def test_named_templates_in_their_folder_come_along(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model", KINDS["generation"])  # this one writes no tools
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text(KINDS["chatml"].template)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "chat_template.jinja").write_text(settings.pop("chat_template"))
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    records: list[dict[str, object]] = [{"messages": question("q", "a"), "tools": tools}]
    chat = ("--format", "chat", "--validation-fraction", "0")
    assert told(tmp_path, records, "out", model, *chat) == 0
    assert '"look"' in data_text(tmp_path / "out", rows_of(PreparedSet(tmp_path / "out"), "train")[0])
    copy = tmp_path / "out/tokenizer/additional_chat_templates/tool_use.jinja"
    assert copy.read_text() == KINDS["chatml"].template
    # A file on the command line stands for all of them.
    (tmp_path / "own.jinja").write_text(KINDS["chatml"].template)
    assert told(tmp_path, records, "own", model, *chat, "--chat-template", str(tmp_path / "own.jinja")) == 0
    assert not (tmp_path / "own/tokenizer/additional_chat_templates").exists()


def test_a_preparation_that_ended_with_bad_records_does_not_block_the_next_one(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own message names --max-tokens, --stop-token, --source: with any of these it was refused as unfinished."""
    out = tmp_path / "out"
    assert prepare(place, "talks.jsonl", str(out)) == 2
    assert list((out / "unfinished").glob("unit-*.json"))
    capsys.readouterr()
    assert prepare(place, "good.jsonl", str(out), "--max-tokens", "4096") == 0
    assert "unfinished" in capsys.readouterr().out


# --- best fit


def naive(lengths: list[int], capacity: int) -> int:
    """How many sequences best-fit decreasing makes, one record after another."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [(room, at) for at, room in enumerate(rooms) if room >= length]
        if fits:
            rooms[min(fits)[1]] -= length
        else:
            rooms.append(capacity - length)
    return len(rooms)


def test_best_fit_loses_none_and_is_the_textbooks() -> None:
    draw = np.random.default_rng(0)
    for capacity in (1, 7, 64):
        for count in (0, 1, 5, 300):
            lengths = draw.integers(1, capacity + 1, count)
            order, first = best_fit(lengths, capacity)
            assert sorted(order.tolist()) == list(range(count)) and first[0] == 0 and first[-1] == count
            filled = [lengths[order[a:b]].sum() for a, b in itertools.pairwise(first)]
            assert all(0 < sum_ <= capacity for sum_ in filled)
            assert len(filled) == naive(lengths.tolist(), capacity)


def test_padding_of_a_skewed_mix_is_below_a_hundredth() -> None:
    """Log-normal lengths, as in chat data: a median of 200 tokens, some of thousands. A million of them in seconds."""
    draw = np.random.default_rng(1)
    lengths = np.clip(draw.lognormal(5.3, 1.1, 1_000_000).astype(np.int64), 2, 4096)
    began = time.process_time()
    order, first = best_fit(lengths, 4096)
    assert time.process_time() - began < 20
    padding = 1 - lengths.sum() / (4096 * (len(first) - 1))
    assert padding < 0.01 and np.array_equal(order, best_fit(lengths, 4096)[0]), padding


def test_one_row_fills_a_sequence_whatever_its_length() -> None:
    """A text does not: its sequence is full. So a newcomer's ten conversations train with a long sequence_length."""
    config = RunConfig(deepspeed="ds.json", data=DataConfig(path="x", sequence_length=4096))

    def short(chat: dict[str, object] | None, validation: int) -> list[str]:
        manifest = {"tokens": {"train": 369, "validation": validation}, "chat": chat}
        _check_length("data.path", "x", manifest, config, problems := Problems())
        return re.findall(r"(\w+) split \((\d+) tokens", str(problems.error())) if problems else []

    assert short({"longest": 41}, 41) == [] and short({"longest": 41}, 0) == [("validation", "0")]
    assert short(None, 41) == [("train", "369"), ("validation", "41")]
