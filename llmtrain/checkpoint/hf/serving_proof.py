"""Proof that a server with an exported folder makes the training rows' tokens, and stops at the end of answers.

The data folder keeps its first conversations (data/chat/encoder.py). For each turn, transformers renders and tokenizes
the earlier messages with the folder's own files, like a server: the ids must equal the row's ids before the answer.
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
    """Conversations that spell a control token, which a row has as text and a server as the token."""
    joined: int = 0
    """Answers whose beginning a tokenizer joins with the prompt: alone they have other ids than in the full text."""
    ends: Counter[int] = field(default_factory=Counter)


def prove_serving(folder: Path, chats: Iterable[Path], report: Report) -> None:
    """Compare the sample of each data folder with transformers' ids by the files of `folder`.

    Raises ProofError: other ids, or generation does not stop at an answer's end."""
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
                f"{compared.joined} answers share a token with their prompt: only these prompts were compared",
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
                    f"{folder} would not be served as it was trained: of message {turn} of line {number + 1} of "
                    f"{data / NAME}, {wrong}. Was the template changed, in {data / 'tokenizer'} or in the folder? "
                    "Nothing was kept; --check none writes the folder without this proof."
                )
    rendering.close()
    return compared


def _turns(record: str, prepared: PreparedSet) -> Iterator[tuple[Conversation, int]]:
    """Conversations of a record, each with a learnt message."""
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
    """Return why the server would see other ids for this message of a conversation than training did.

    None: a row has the ids of the prompt, then those of the answer as far as they can be known.
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
    if not right:  # no row with this prompt, for example a chosen and a rejected answer
        return f"the answer has other ids than its training row: {tokenizer.decode(with_answer[at:])[:60]!r}"
    compared.joined += joins
    compared.ends[right[0]] += 1
    return None


def _check_ends(folder: Path, ends: Mapping[int, int], report: Report) -> None:
    """Check that generation stops at every trained end. Raises ProofError."""
    place = folder
    if (folder / CONFIG).is_file():  # servers read these settings from the adapter's base
        place = Path(untrusted.loads((folder / CONFIG).read_bytes()).get("base_model_name_or_path") or folder)
        if not (place / "config.json").is_file():
            report.add(
                "serving", "not compared where answers end: the base model, which names these tokens, is not here"
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
    except OSError:  # there is none: use config.json
        settings = GenerationConfig.from_model_config(_config(folder))
    ids = settings.eos_token_id
    return ids if isinstance(ids, list) else [ids]


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
