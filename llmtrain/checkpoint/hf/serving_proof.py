"""Proves that a server with an exported folder makes the ids of the training rows, and stops at the end of answers.

The data folder keeps its first conversations (data/chat/encoder.py). For each turn, transformers renders and tokenizes
the earlier messages with the exported folder's files, as a server would: the ids must equal the row's ids before the
answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmtrain.base import units, untrusted
from llmtrain.base.errors import DataError
from llmtrain.checkpoint.hf.proofs import ProofError, Report
from llmtrain.checkpoint.hf.serving import SETTINGS, chat_of
from llmtrain.data.chat.encoder import NAME
from llmtrain.data.kinds import class_of
from llmtrain.data.manifest import read_manifest
from llmtrain.data.shards import PreparedSet
from llmtrain.models.parameters import CONFIG

if TYPE_CHECKING:
    from llmtrain.data.chat.conversation import Conversation
    from llmtrain.data.chat.rendering import Template


@dataclass
class _Compared:
    conversations: int = 0
    turns: int = 0
    spelled: int = 0
    """Conversations that contain a control token's text: a row has it as plain text, a server as the token."""
    joined: int = 0
    """Answers whose first characters the tokenizer joins with the prompt into one token, so that prompt and answer
    alone have other ids than the full text."""
    ends: Counter[int] = field(default_factory=Counter)


def prove_serving(folder: Path, chats: Iterable[Path], report: Report) -> None:
    """Compare the kept conversations of each data folder with the ids that transformers makes with the files of
    `folder`.

    Raises ProofError: when ids differ, or generation would not stop at an answer's end.
    """
    for data in chats:
        if not (data / NAME).is_file():
            report.add("serving", f"not compared: {data} keeps no {NAME}; prepare it again to have it compared")
            continue
        if class_of(read_manifest(data)) is None:
            report.add("serving", f"not compared: a plugin brings the format of {data}")
            continue
        compared = _compare(folder, data)
        text = f"{units.counted(compared.turns, 'turn')} of {units.counted(compared.conversations, 'conversation')}: "
        report.add("serving", f"{text}transformers makes the ids of the training rows with the folder's template")
        if compared.spelled:
            report.add("serving", f"not compared: {compared.spelled} that spell control tokens as plain text")
        if compared.joined:
            report.add(
                "serving",
                f"{compared.joined} answers share a token with their prompt: of these only the prompts were compared",
            )
        chat = chat_of(data)
        if chat is not None and chat.moment is not None:
            report.add(
                "serving", f"the template writes the date: compared as of {chat.moment[:10]}, when {data} was prepared"
            )
        if chat is not None and (variables := chat.chat_template_kwargs):
            report.add("serving", f"give a server chat_template_kwargs {json.dumps(variables)}, as {data} was")
        _check_ends(folder, compared.ends, report)


def _compare(folder: Path, data: Path) -> _Compared:
    from transformers import AutoTokenizer

    from llmtrain.data.chat import rendering
    from llmtrain.data.chat.conversation import strings
    from llmtrain.data.chat.encoder import NAME, read_sample

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ProofError(f"transformers cannot load the tokenizer of {folder}: {error}. Nothing was kept.") from error
    prepared, compared = PreparedSet(data), _Compared()
    chat = prepared.manifest.chat
    assert chat is not None
    template = rendering.Template(tokenizer, moment=chat.moment, variables=chat.chat_template_kwargs)
    stops = {tokenizer.convert_tokens_to_ids(token) for token in chat.stop_tokens}
    control = [token.content for token in tokenizer.added_tokens_decoder.values()]
    stream = prepared.split("train")
    lengths = stream.row_lengths()
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for number, sample in enumerate(read_sample(data)):
        if not 0 <= sample.row <= sample.row + sample.rows <= len(lengths):
            raise DataError(f"{data / NAME}: line {number + 1} names rows that {data} does not have; prepare it again")
        if any(token in text for text in strings(untrusted.loads(sample.record)) for token in control):
            compared.spelled += 1
            continue
        rows = [
            (stream.read(int(starts[at]), int(lengths[at])), stream.counted(int(starts[at]), int(lengths[at])))
            for at in range(sample.row, sample.row + sample.rows)
        ]
        compared.conversations += 1
        for talk, turn in _turns(sample.record, prepared):
            compared.turns += 1
            wrong = _fault_of_turn(tokenizer, template, (talk, turn), rows, stops, compared)
            if wrong is not None:
                raise ProofError(
                    f"{folder} would be served other tokens than in training: in message {turn}, line {number + 1} of "
                    f"{data / NAME}, {wrong}. Was the template changed, in {data / 'tokenizer'} or in the folder? "
                    "Nothing was kept; --check none writes the folder without this proof."
                )
    rendering.close()
    return compared


def _turns(record: str, prepared: PreparedSet) -> Iterator[tuple[Conversation, int]]:
    """Yield (conversation, index of a trained message) for the trained messages of a record."""
    from llmtrain.data.chat.conversation import record_of

    settings = prepared.manifest.settings
    name = settings["field"] if settings["field"] != "text" else "messages"
    for talk in replace(prepared.kind, field=name).conversations(record_of(record)):
        for turn in talk.turns[-1:] if settings["count"] == "last" else talk.turns:
            yield talk, turn


def _fault_of_turn(
    tokenizer: Any,
    template: Template,
    message: tuple[Conversation, int],
    rows: list[Any],
    stops: set[int],
    compared: _Compared,
) -> str | None:
    """Return how a server's ids for this message differ from the ids of training.

    None: a row has the ids of the prompt, and then those of the answer as far as they can be compared.
    """
    from llmtrain.data.chat.rendering import RenderError

    talk, turn = message
    try:
        talk = template.fitted(talk)
        prompt, with_answer = template.ids(talk, turn, prompt=True), template.ids(talk, turn + 1, prompt=False)
    except RenderError as error:
        raise ProofError(f"the chat template of the exported folder fails: {error}. Nothing was kept.") from error
    at = len(prompt)
    begun = [ids.tolist() for ids, counted in rows if at < len(ids) and counted[at] and ids[:at].tolist() == prompt]
    if not begun:
        return f"the prompt has other ids ({at} of them) than the training rows: {tokenizer.decode(prompt)[-60:]!r}"
    ends = [next((place for place in range(at, len(ids)) if ids[place] in stops), len(ids) - 1) for ids in begun]
    joins = with_answer[:at] != prompt
    right = [ids[end] for ids, end in zip(begun, ends, strict=True) if joins or with_answer[:end] == ids[:end]]
    if not right:  # in no row with this prompt; a pair has two
        return f"the answer has other ids than its training row: {tokenizer.decode(with_answer[at:])[:60]!r}"
    compared.joined += joins
    compared.ends[right[0]] += 1
    return None


def _check_ends(folder: Path, ends: Mapping[int, int], report: Report) -> None:
    """Check that generation stops at every token that ended answers in training. Raises ProofError."""
    place = folder
    if (folder / CONFIG).is_file():  # servers read these settings from the adapter's base
        place = Path(untrusted.loads((folder / CONFIG).read_bytes()).get("base_model_name_or_path") or folder)
        if not (place / "config.json").is_file():
            report.add(
                "serving", "not compared where answers end: the base model, which names them, is not on this host"
            )
            return
    lacking = sorted(set(ends) - set(_named_ends(place)))
    if not lacking:
        report.add("serving", f"generation stops at the trained end: {', '.join(map(str, sorted(ends)))}")
    elif place != folder:
        report.add("serving", f"give the server stop_token_ids {lacking}: {place} does not name where answers end")
    else:
        raise ProofError(
            f"answers ended with the tokens {lacking} in training, and {folder / SETTINGS} does not "
            "name them. Nothing was kept."
        )


def _named_ends(folder: Path) -> list[int]:
    from transformers import GenerationConfig

    try:
        settings = GenerationConfig.from_pretrained(folder)
    except OSError:  # without the file the ends are in config.json
        settings = GenerationConfig.from_model_config(_config(folder))
    ids = settings.eos_token_id
    return ids if isinstance(ids, list) else [ids]


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
