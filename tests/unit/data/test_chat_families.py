"""Masks of templates that behave as those of known families, by an oracle that knows neither llmtrain nor transformers.

T1-T9 of the field's pains. Each conversation gives rows whose every bit is right, or a reason that is true.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llmtrain.data.row import RefusedError
from llmtrain.data.tokenizer_folder import stop_tokens
from tests.helpers.chat import RowMaker
from tests.helpers.chat_oracle import (
    CHAT,
    FAMILIES,
    Family,
    Message,
    conversations,
    rows_are_right,
    turns,
    write_family,
)

pytestmark = pytest.mark.long


def is_true(reason: str, family: Family, messages: list[Message], with_tools: bool) -> bool:
    """Of what these families refuse, by what their templates are known to leave out."""
    calls = any("tool_calls" in message for message in messages)
    if "leaves out its thoughts" in reason:
        return not family.thoughts and any("reasoning_content" in message for message in messages)
    if "leaves out its content" in reason:
        thinks = "</think>" in family.template and any("think>" in message["content"] for message in messages)
        return thinks or (family.bare_calls and any("tool_calls" in m and m["content"] for m in messages))
    if "leaves out the tools" in reason:
        return not family.tools and with_tools
    if "leaves out its tool_calls" in reason:
        return not family.tools and calls
    if "does not write the answer where its generation prompt ends" in reason:
        return "<think>" in family.template and not family.usable
    return "generation would not stop at its end" in reason and not family.usable


def judged(folder: Path, name: str, count: int, seed: int) -> tuple[int, int]:
    """(conversations that gave rows, refused ones)"""
    family = FAMILIES[name]
    write_family(folder, family)
    encoder = RowMaker(folder, stop_tokens=stop_tokens(folder, ()))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    right = refused = 0
    for record, messages, tools in conversations(family, count, seed):
        try:
            told = turns(family, messages, tools)
        except Exception:
            told = None
        try:
            rows = encoder.rows(json.dumps(record))
        except RefusedError as error:
            why = str(error)
            failed = told is None and "the chat template fails" in why
            assert failed or is_true(why, family, messages, tools is not None), (why, record)
            refused += 1
            continue
        assert told is not None, record
        found = [(row.ids.tolist(), row.counted.tolist()) for row in rows]
        assert (wrong := rows_are_right(tokenizer, family, told, found)) is None, (wrong, record)
        right += 1
    return right, refused


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_bit_is_right_or_the_reason_true(tmp_path: Path, name: str, count: int) -> None:
    right, refused = judged(tmp_path, name, count, seed=1)
    assert right > refused if FAMILIES[name].usable else not right


# --- by transformers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Behaviour:
    """A template, and the tokens where generation stops; the first is the tokenizer's eos_token."""

    template: str | dict[str, str]
    stops: list[str]
    bos: str | None = None
    ended: dict[str, str] = field(default_factory=dict)
    """The token by which the next message ends an "answer", or a "call"."""


def _behaviour(name: str, named: list[str] | None = None, **fields: Any) -> Behaviour:
    files = {each: (CHAT / f"behaviours/{name}{each and '.'}{each}.jinja").read_text() for each in named or [""]}
    return Behaviour(files if named else files[""], **fields)


BEHAVIOURS = {(row := json.loads(line))["name"]: _behaviour(**row) for line in (CHAT / "behaviours.jsonl").open()}
RECORDS = {(row := json.loads(line)).pop("name"): row for line in (CHAT / "records.jsonl").open()}
_CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<[^|<>\s]{1,40}\|>|<｜[^｜<>]{1,40}｜>|</?(?:think|tool_call|tool_response|start_of_turn"
    r"|end_of_turn|end_of_utterance|seed:\w+)>|\[/?(?:INST|gMASK|SYSTEM_PROMPT)\]|<sop>|</?s>|<[be]os>"
)


def write_behaviour(folder: Path, one: Behaviour) -> Path:
    """A tokenizer folder in which a byte is a token, as is each control token that the template names."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    named = json.dumps(one.template, ensure_ascii=False)
    found = dict.fromkeys([*one.stops, *([one.bos] if one.bos else []), *_CONTROL.findall(named)])
    text = [token for token in found if re.fullmatch(r"</?(think|tool_call|tool_response)>", token)]
    special = [token for token in found if token not in text]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in text])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = one.template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]  # type: ignore[assignment]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": one.stops[0], "chat_template": template}
    settings |= {"bos_token": one.bos} if one.bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


_WORD = re.compile(r"w\d\w+")
"""Words of the records, of which no template has one, and each record has each once; in any spelling they are there."""


def words(value: Any) -> set[str]:
    return set(_WORD.findall(json.dumps(value)))


@dataclass(frozen=True)
class Told:
    """The prompt that a server feeds for an answer, and the text that the model must generate."""

    prompt: str
    answer: str


def by_transformers(tokenizer: Any, one: Behaviour, record: dict[str, Any]) -> list[Told] | str:
    """The answers of a record; or why there are none: fails, prompt (not the answer's beginning), stop, lost."""
    why = "fails"
    for parts in (False, True):
        for texts in (False, True):
            found = _told(tokenizer, one, record, parts=parts, texts=texts)
            if not isinstance(found, str):
                return found
            why = found if found != "fails" else why
            if found not in ("fails", "lost"):
                return found
    return why


def _told(tokenizer: Any, one: Behaviour, record: dict[str, Any], *, parts: bool, texts: bool) -> list[Told] | str:
    messages = [_as_taken(message, parts, texts) for message in record["messages"]]
    more = {"tools": record.get("tools"), **record.get("chat_template_kwargs", {})}
    told = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            header, prompt, whole = (
                tokenizer.apply_chat_template(messages[:until], tokenize=False, add_generation_prompt=asks, **more)
                for until, asks in ((at, False), (at, True), (at + 1, False))
            )
        except Exception:
            return "fails"
        if not whole.startswith(prompt):
            return "prompt"
        rest = whole[len(prompt) :]
        rest += (
            ""
            if any(stop in rest for stop in one.stops)
            else one.ended.get("call" if "tool_calls" in message else "answer", "")
        )
        ends = [rest.index(stop) + len(stop) for stop in one.stops if stop in rest]
        if not ends:
            return "stop"
        others = [each for each in messages[:at] if each["role"] != "assistant"]
        own = {key: value for key, value in message.items() if key != "id"}
        if not words([others, record.get("tools")]) <= words(prompt) or not words(own) <= words(whole[len(header) :]):
            return "lost"
        told.append(Told(prompt, rest[: min(ends)]))
    return told


def _as_taken(message: Message, parts: bool, texts: bool) -> Message:
    taken = dict(message)
    if parts:
        taken["content"] = [{"type": "text", "text": message["content"]}]
    if "tool_calls" in message:
        taken["tool_calls"] = []
        for call in message["tool_calls"]:
            given = call["function"]["arguments"]
            value = given if isinstance(given, dict) else json.loads(given)
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            taken["tool_calls"].append(
                {**call, "function": {**call["function"], "arguments": text if texts else value}}
            )
    return taken


GLM = {"answer": "<|user|>", "call": "<|observation|>"}
OF_FAMILIES = {
    name: Behaviour(family.template, family.stops, family.bos, GLM if name == "glm4" else {})
    for name, family in FAMILIES.items()
}
TRUE = {
    "fails": ("the chat template fails",),
    "prompt": ("does not write the answer where its generation prompt ends",),
    "stop": ("generation would not stop at its end",),
    "lost": ("the template leaves out", "the template leaves it out"),
}
"""Error texts of llmtrain where the oracle has no answer. A record may have several faults: any of them is true."""


def runs(row: Any) -> list[tuple[int, int]]:
    """Return the (begin, end) of each counted run of tokens in a row."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], row.counted, [False]]).astype(int)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def compared(folder: Path, one: Behaviour) -> dict[str, list[Any] | None]:
    """The rows of each record, which are as transformers renders them; None: refused, with a true reason."""
    from transformers import AutoTokenizer

    write_behaviour(folder, one)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = RowMaker(folder, stop_tokens=one.stops)
    found: dict[str, list[Any] | None] = {}
    for name, record in RECORDS.items():
        told = by_transformers(tokenizer, one, record)
        try:
            rows = encoder.rows(json.dumps(record))
        except RefusedError as error:
            assert isinstance(told, str), (name, str(error), told)
            assert any(said in str(error) for said in sum(TRUE.values(), ())), (name, told, str(error))
            found[name] = None
            continue
        assert not isinstance(told, str), (name, told)
        places = [(row, begin, end) for row in rows for begin, end in runs(row)]
        for (row, begin, end), turn in zip(places, told, strict=True):
            assert tokenizer.decode(row.ids[begin:end]) == turn.answer, name
            assert row.ids[:begin].tolist() == tokenizer(turn.prompt, add_special_tokens=False)["input_ids"], name
        found[name] = rows
    return found


@pytest.mark.parametrize("name", [*BEHAVIOURS, *OF_FAMILIES])
def test_what_transformers_renders_is_taken_and_nothing_is_lost(tmp_path: Path, name: str) -> None:
    """Taken are exactly the records that transformers renders with the prompt as a prefix, without losing a word."""
    found = compared(tmp_path, (BEHAVIOURS | OF_FAMILIES)[name])
    unusable = name in OF_FAMILIES and not FAMILIES[name].usable
    assert unusable or sum(rows is not None for rows in found.values()) >= 2, found
    assert len(BEHAVIOURS | OF_FAMILIES) >= 40


STOPS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "gemma4": "<turn|> <|tool_response>",
    "diffusion": "<turn|> <|tool_response>",
    "gemma": "<end_of_turn>",
    "glm": "<|endoftext|> <|user|> <|observation|>",
    "gptoss": "<|return|> <|call|>",
    "idefics": "<end_of_utterance>",
    "smolvlm": "<end_of_utterance>",
    "llama3": "<|eot_id|> <|eom_id|>",
    "llava": "</s>",
    "muse": "<|end|> <|return|> <|call|>",
    "phi": "<|end|>",
    "": "<|im_end|>",
}
"""Stop tokens, by the beginning of a template's name in TRL."""
BEGINS = {
    "deepseek": "<｜begin▁of▁sentence｜>",
    "gemma": "<bos>",
    "diffusion": "<bos>",
    "cohere": "<BOS_TOKEN>",
    "llama3": "<|begin_of_text|>",
    "llava": "<s>",
    "lfm": "<|startoftext|>",
}


@pytest.mark.needs("trl")
def test_masks_are_those_of_trls_training_templates(tmp_path: Path) -> None:
    """For TRL's templates of 25 families, if TRL is installed: records are as transformers renders them, and masks are
    those of the training variant, but for what is no answer: a header within its tags, and what follows the end."""
    import trl
    from transformers import AutoTokenizer

    folder = Path(trl.__file__).parent / "chat_templates"
    same = 0
    for file in sorted(folder.glob("*.jinja")):
        if file.stem.endswith("_training") or file.stem[:-1].endswith("_v"):  # nor what only revises another
            continue
        begins = [begin for begin in STOPS if file.stem.startswith(begin)]
        stops = STOPS[begins[0]].split()
        bos = next((token for begin, token in BEGINS.items() if file.stem.startswith(begin)), None)
        glm = GLM if "glm" in file.stem else {}
        found = compared(tmp_path / file.stem, Behaviour(file.read_text(), stops, bos, glm))
        training = folder / f"{file.stem}_training.jinja"
        # DiffusionGemma is no causal model; its training variant leaves out the token where generation stops.
        if training.is_file() and "diffusion" not in file.stem:
            tokenizer = AutoTokenizer.from_pretrained(tmp_path / file.stem)
            same += sum(
                _same_mask(tokenizer, training.read_text(), RECORDS[name], rows) for name, rows in found.items() if rows
            )
    assert same > 80, same


def _same_mask(tokenizer: Any, template: str, record: dict[str, Any], rows: list[Any]) -> bool:
    """Asserts that the last row has TRL's mask; False: the training variant writes another text."""
    try:
        theirs = tokenizer.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except Exception:  # contents as parts
        return False
    row = rows[-1]
    if theirs["input_ids"][: len(row.ids)] != row.ids.tolist():
        return False
    mask = np.array(theirs["assistant_masks"][: len(row.ids)], bool)
    assert mask[row.counted].all(), (record, tokenizer.decode(row.ids))
    begins = [begin for begin, _ in runs(row)]
    for begin, end in runs(type(row)(row.ids, mask & ~row.counted)):
        said = tokenizer.decode(row.ids[begin:end])
        # Earlier answers of a row that begins anew; a header that ends where the answer begins; a line's end.
        assert end <= begins[0] or end in begins or not said.strip(), (record, said)
    return True
