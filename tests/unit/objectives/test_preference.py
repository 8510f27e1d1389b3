"""Preference records to pairs of rows, pairs to sequences and micro-batches, and the column they are compared with."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from llmtrain import cli
from llmtrain.base.errors import DataError
from llmtrain.commands.prepare import main
from llmtrain.config.run import DataConfig
from llmtrain.data.batches import AnswerBatch
from llmtrain.data.kinds.judged import Judged, partners
from llmtrain.data.manifest import SPLITS
from llmtrain.data.row import RefusedError
from llmtrain.data.sequences import AnswerSequence
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.loader import Dealt, batches_of, validation_batches
from llmtrain.data.stream.reference_and_teacher import read_reference, write_reference
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.tokenizer_folder import stop_tokens
from llmtrain.models import loss
from llmtrain.models.loss import IGNORE, About, HeadForm, chunked_nll_sums, token_nll
from llmtrain.objectives.objective import Objective
from llmtrain.objectives.preferences import Answers, Pairs
from tests.helpers.chat import KINDS, RowMaker, expected, write_tokenizer
from tests.helpers.config_workplace import write
from tests.helpers.loaders import loader_of
from tests.helpers.preference import DEFINITIONS, prepared_preferences, prepared_unpaired

LENGTH = 192
Pair = Callable[..., list[tuple[list[int], list[bool]]]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """pair(record, kind): the rows that it gives."""
    root, made = tmp_path_factory.mktemp("tokenizers"), {}

    def rows(record: dict[str, Any], kind: str = "chatml", **options: Any) -> list[tuple[list[int], list[bool]]]:
        folder = made.setdefault(kind, write_tokenizer(root / kind, KINDS[kind]))
        rows.folder = folder  # type: ignore[attr-defined]
        given = {"format": "preference", "stop_tokens": stop_tokens(folder, ())} | options
        found = RowMaker(folder, **given).rows(json.dumps(record))
        return [(row.ids.tolist(), row.counted.tolist()) for row in found]

    return rows


def said(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


SHARED = said("hi", "yes?", "what is 2 + 2")
BOTH = {side: [*SHARED, said("", text)[1]] for side, text in (("chosen", "four"), ("rejected", "five"))}
FORMS: list[dict[str, Any]] = [
    {"prompt": SHARED, "chosen": "four", "rejected": "five"},
    {"prompt": SHARED, "chosen": said("", "four")[1], "rejected": [said("", "five")[1]]},
    {"messages": SHARED, "chosen": "four", "rejected": "five"},
    BOTH,
    {"prompt": SHARED[2]["content"], **BOTH},
    {
        "conversations": [{"from": ("human", "gpt")[i % 2], "value": m["content"]} for i, m in enumerate(SHARED)],
        "chosen": {"from": "gpt", "value": "four"},
        "rejected": {"from": "gpt", "value": "five"},
    },
    {"instruction": "what is 2 + 2", "history": [["hi", "yes?"]], "chosen": "four", "rejected": "five"},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("record", FORMS, ids=lambda record: "-".join(record))
def test_every_form_gives_the_two_rows_that_a_hand_writes(pair: Pair, record: dict[str, Any], kind: str) -> None:
    """Of both the last answer alone is counted, though the shared messages have one."""
    found = pair(record, kind)
    for (ids, counted), answer in zip(found, ("four", "five"), strict=True):
        want_ids, want = expected(pair.folder, KINDS[kind], [*SHARED, *said("", answer)[1:]])[-1]  # type: ignore[attr-defined]
        runs = np.flatnonzero(np.diff([0, *want]) == 1)
        assert ids == want_ids and counted == [bit and at >= runs[-1] for at, bit in enumerate(want)]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "x", "chosen": "same", "rejected": "same"}, "are the same: there is nothing to prefer"),
        ({"prompt": "x", "chosen": "yes"}, "rejected is null, neither a text nor messages"),
        ({"messages": said("a", "b")}, "--format chat"),
        ({"chosen": "yes", "rejected": "no"}, "prompt"),
        ({"prompt": 7, "chosen": "yes", "rejected": "no"}, "the prompt is int"),
        ({"chosen": said("a", "b"), "rejected": said("x", "b")}, "of each other"),
        ({"prompt": "z", "chosen": said("a", "b"), "rejected": said("a", "c")}, "messages of the prompt"),
        ({"chosen": said("a", "b", "c", "d"), "rejected": said("a", "b", "x", "d")}, "another prompt"),
        ({"prompt": "x", "chosen": "yes ", "rejected": "yes"}, "writes the same"),
        ({"prompt": "x", "chosen": "", "rejected": "no"}, "message 1 (assistant) is empty"),
        ({"prompt": "x", "chosen": "y" * 90, "rejected": "no"}, "its 2 rows have"),
    ],
)
def test_what_is_no_preference_is_refused(pair: Pair, record: dict[str, Any], reason: str) -> None:
    kind = "llama3" if "same" in reason else "chatml"  # which trims
    with pytest.raises(RefusedError) as error:
        pair(record, kind, max_tokens=120)
    assert reason in str(error.value)


def test_a_template_that_changes_earlier_answers_gives_no_pair_of_several_turns(pair: Pair) -> None:
    record = {"prompt": "x", "chosen": said("", "a", "b", "c")[1:], "rejected": "no"}
    assert len(pair(record)) == 2
    with pytest.raises(RefusedError, match=r"chosen.* 2 rows"):
        pair(record, "qwen3")


# --- sequences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = prepared_preferences(tmp_path_factory.mktemp("pairs"), 150, KINDS["chatml"], "--shard-bytes", "4000")
    return Path(made)


def data_of(folder: Path) -> TrainData:
    return TrainData(DataConfig(path=str(folder), sequence_length=LENGTH, isolate_documents=True))


def columns_of(folder: Path) -> dict[Any, np.ndarray]:
    """A number for each row that tells which it is."""
    rows = PreparedSet(folder).manifest.documents
    return {split: -np.arange(1, rows[split] + 1, dtype=np.float32) for split in SPLITS}


def test_both_answers_of_a_pair_are_in_a_micro_batch_and_every_pair_once(folder: Path) -> None:
    prepared = PreparedSet(folder)
    prepared.verify()
    stream = prepared.split("train")
    ends = [0, *np.cumsum(stream.row_lengths()).tolist()]
    write_reference(prepared, "w", "fp32", columns_of(folder), {})
    data = data_of(folder)
    assert data.take_reference("fp32") == ["w"]
    sequences, seen = data.sequences_per_epoch, Counter[int]()
    batch = sequences // 4 * 4
    for rank in range(2):
        with loader_of(
            data, global_batch=batch, micro_batch=2, accumulation=batch // 4, rank=rank, data_parallel=2
        ) as loader:
            micros = next(loader).micro_batches
        for micro in micros:
            assert isinstance(micro, AnswerBatch) and micro.reference is not None
            assert (micro.rows[::2] % 2 == 0).all() and (micro.rows[1::2] == micro.rows[::2] + 1).all()
            assert micro.reference.tolist() == [-row - 1 for row in micro.rows.tolist()]
            seen.update(micro.rows.tolist())
            for answer, row in enumerate(micro.rows.tolist()):
                mine = micro.answers == answer
                whole = stream.read(ends[row], ends[row + 1] - ends[row])
                assert micro.inputs[mine].tolist() == whole.tolist()
            assert (micro.labels[micro.answers == len(micro.rows)] == IGNORE).all()
    left = [data.sequence_at(index) for index in range(batch, sequences)]
    seen.update(int(row) for sequence in left if isinstance(sequence, AnswerSequence) for row in sequence.rows)
    assert seen == Counter(range(prepared.manifest.documents["train"])) and len(prepared.manifest.shards["train"]) > 2


def test_rows_that_fill_a_validation_batch_are_no_pairs(folder: Path) -> None:
    data = data_of(folder)
    count = data.validation_sequences
    for ranks in (1, count + 1):
        batches = [
            list(validation_batches(data, sequences=99, micro_batch=2, rank=rank, data_parallel=ranks))
            for rank in range(ranks)
        ]
        rows = [int(row) for each in batches for micro in each for row in micro.rows]  # type: ignore[attr-defined]
        assert sorted(rows) == list(range(PreparedSet(folder).manifest.documents["validation"]))


def test_a_column_of_something_else_is_refused(folder: Path) -> None:
    prepared = PreparedSet(folder)
    write_reference(prepared, "w", "fp32", columns_of(folder), {})
    assert read_reference(prepared, "fp32")[1]["train"][:3].tolist() == [-1, -2, -3]
    with pytest.raises(DataError, match=r"fp32.*bf16.*`llmtrain reference"):
        read_reference(prepared, "bf16")
    path = folder / "reference-train.f32"
    good = path.read_bytes()
    for bad in (good[:-4], bytes([good[0] ^ 1]) + good[1:]):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=r"train split.*changed"):
            read_reference(prepared, "fp32")
    path.write_bytes(good)
    told = json.loads((folder / "reference.json").read_text())
    (folder / "reference.json").write_text(json.dumps({**told, "data": "other"}))
    with pytest.raises(DataError, match="other data"):
        read_reference(prepared, "fp32")
    (folder / "reference.json").unlink()
    with pytest.raises(DataError, match=rf"{folder}: .*`llmtrain reference"):
        read_reference(prepared, "fp32")


def test_show_names_the_sides(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "show", str(folder), "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    assert "row 0 of train (chosen): " in shown and "row 1 of train (rejected): " in shown


@pytest.mark.parametrize(
    ("more", "reason"),
    [(("--count", "all"), "--count all: "), (("--max-tokens", "9", "--too-long", "cut"), "--too-long cut: ")],
)
def test_options_that_cannot_be(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], reason: str
) -> None:
    given = ["--source", str(folder.parent / "pairs.jsonl"), "--tokenizer", str(folder.parent / "tokenizer")]
    assert main([*given, "--out", str(tmp_path / "out"), "--format", "preference", *more]) == 2
    assert reason in capsys.readouterr().err


# --- answers judged alone


def test_each_answer_meets_one_prompt_that_is_not_its_own() -> None:
    draw = np.random.default_rng(0)
    for count, kinds in ((2, 2), (9, 4), (200, 60), (201, 3)):
        prompts = draw.permutation(np.arange(count) % kinds).astype(np.uint64)
        found = partners(prompts)
        assert found is not None and sorted(found.tolist()) == list(range(count))
        assert (prompts[found] != prompts).all()
    assert partners(np.array([5, 5, 7], np.uint64)) is None
    assert partners(np.empty(0, np.uint64)) is not None


def test_an_unpaired_record_is_one_row_with_its_label(pair: Pair) -> None:
    options = {"format": "unpaired"}
    given = {"prompt": "what is 2 + 2", "completion": "four"}
    both = pair({"prompt": given["prompt"], "chosen": "four", "rejected": "five"})
    assert pair({**given, "label": True}, **options) == both[:1]
    for wrong in (1, None, "true"):
        with pytest.raises(RefusedError, match="label is "):
            pair({**given, "label": wrong}, **options)
    talk = {"messages": [*SHARED, said("", "four")[1]], "label": False}
    assert pair(talk, **options) == pair(FORMS[0])[:1]  # of several turns the last one alone is judged


def test_the_sequences_of_unpaired_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Path(prepared_unpaired(tmp_path))
    prepared = PreparedSet(made)
    prepared.verify()
    records = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    rows = prepared.manifest.documents
    judged = prepared.split("train").entries(Judged.entry)
    assert sum(rows.values()) == len(records) == 150 and len(judged) == rows["train"]
    assert judged["desirable"].sum() + prepared.split("validation").entries(Judged.entry)["desirable"].sum() == 90
    columns: dict[Any, np.ndarray] = {split: -np.arange(2 * rows[split], dtype=np.float32) for split in SPLITS}
    write_reference(prepared, "w", "fp32", columns, {})
    data = data_of(made)
    data.take_reference("fp32")
    stream, partner, seen = prepared.split("train"), partners(judged["prompt"]), Counter[int]()
    assert partner is not None
    whole = np.split(stream.read(0, stream.tokens), np.cumsum(stream.row_lengths())[:-1])
    for micro in batches_of(data.kind, data.sequence_at, data.sequences_per_epoch, 2, Dealt()):
        assert isinstance(micro, AnswerBatch) and micro.reference is not None
        mine, other = micro.rows.tolist(), micro.mismatched
        assert (
            other is not None
            and other.rows.tolist() == [row + rows["train"] for row in mine]
            and other.reference is not None
        )
        assert micro.reference.tolist() == [-row for row in mine]
        assert other.reference.tolist() == [-row - rows["train"] for row in mine]
        assert micro.facts["desirable"].tolist() == judged["desirable"][mine].astype(bool).tolist()
        for answer, row in enumerate(mine):
            own, theirs = (whole[each].tolist() for each in (row, partner[row]))
            answers = own[judged["begin"][row] :], theirs[judged["begin"][partner[row]] :]
            for batch, wanted in zip((micro, other), answers, strict=True):
                assert batch.inputs[batch.answers == answer].tolist() == own[: judged["begin"][row]] + wanted
                labels = batch.labels[batch.answers == answer]
                assert labels[labels != IGNORE].tolist() == wanted
        seen.update(mine)
    assert seen == Counter(range(rows["train"]))
    assert cli.main(["data", "show", str(made)]) == 0
    assert "desired): " in capsys.readouterr().out
    path = made / "train-00000.rows"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="the manifest says"):
        PreparedSet(made)


# --- losses


@pytest.mark.parametrize("name", DEFINITIONS)
def test_each_loss_and_its_gradient_are_the_definitions(name: str) -> None:
    draw = torch.Generator().manual_seed(1)
    s = -torch.rand(5, 2, generator=draw, dtype=torch.float64) * 20
    r, n = s + torch.randn(5, 2, generator=draw), torch.randint(1, 9, (5, 2), generator=draw).double()
    ours, theirs = (s.clone().requires_grad_() for _ in range(2))
    answers = Answers(log_prob=ours, tokens=n, reference=r, log_sigmoid=nn.functional.logsigmoid)
    losses, margins = Objective.of(name).losses(answers)
    sides = [side for each in (theirs, r, n) for side in each.unbind(1)]
    want = DEFINITIONS[name](*sides)
    losses.sum().backward()
    want.sum().backward()
    assert torch.allclose(losses, want, rtol=1e-12) and margins.shape == (5,)
    assert ours.grad is not None and theirs.grad is not None and torch.allclose(ours.grad, theirs.grad, rtol=1e-9)


def test_every_objective_is_tested() -> None:
    assert {*DEFINITIONS} == {name for name, chosen in Objective.CHOICES.items() if issubclass(chosen, Pairs)}


@pytest.mark.parametrize("way", ["_in_place", "_fused"])
@pytest.mark.parametrize("form", [HeadForm(), HeadForm(scale=0.5, softcap=2.0)], ids=["plain", "capped"])
def test_the_likelihood_of_each_token_and_its_gradient(
    monkeypatch: pytest.MonkeyPatch, form: HeadForm, way: str
) -> None:
    """Any weights on the tokens, known after the forward pass, against logits that are all there at once."""
    monkeypatch.setattr(loss, "_elementwise", lambda device: getattr(loss, way))
    monkeypatch.setattr(loss, "_compiled", lambda function: function)
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 9, 8), nn.Linear(8, 30)
    labels, factors = torch.randint(0, 30, (2, 9)), torch.randn(2, 9)
    labels[0, 3:5] = IGNORE
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, head.weight, head.bias)]
    nll = token_nll(*leaves, labels, About(4, form))
    assert nll.sum().item() == pytest.approx(chunked_nll_sums(*leaves, labels, About(4, form)).item(), rel=1e-6)
    plain = [t.detach().clone().requires_grad_() for t in (hidden, head.weight, head.bias)]
    logits = nn.functional.linear(*plain) * form.scale
    logits = logits if form.softcap is None else form.softcap * torch.tanh(logits / form.softcap)
    want = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    assert torch.allclose(nll, want, atol=1e-6)
    (nll * factors).sum().backward()
    (want * factors).sum().backward()
    for ours, theirs in zip(leaves, plain, strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.allclose(ours.grad, theirs.grad, atol=1e-5)


# --- the configuration of every objective

DISTILL = ["--objective.name", "distill"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (DISTILL, "objective.teacher = null"),
        ([*DISTILL, "--objective.teacher", "nowhere"], 'objective.teacher = "nowhere"'),
        ([*DISTILL, "--objective.teacher", "data/x"], 'objective.teacher = "data/x"'),
        ([*DISTILL, "--objective.beta", "1.5"], "objective.beta = 1.5"),
        ([*DISTILL, "--objective.alpha", "-0.5"], "objective.alpha = -0.5"),
        ([*DISTILL, "--objective.temperature", "0"], "objective.temperature = 0.0"),
        (["--objective.name", "dpo", "--objective.beta", "0"], "objective.beta = 0.0"),
        (["--objective.name", "rpo", "--objective.alpha", "-1"], "objective.alpha = -1.0"),
        ([*DISTILL, "--objective.top_k", "0"], "objective.top_k = 0"),
        ([*DISTILL, "--objective.teacher_revision", "main"], 'objective.teacher_revision = "main"'),
        (["--objective.name", "dpo"], 'objective.name = "dpo"'),
        (["--objective.name", "dpo", "--objective.smoothing", "0.5"], "objective.smoothing = 0.5"),
        (["--objective.name", "simpo"], "--format preference"),
        (["--objective.name", "kto"], 'objective.name = "kto"'),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "check", "run.yaml", *words]) == 2
    assert told in capsys.readouterr().err
