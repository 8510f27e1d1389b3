"""Proof that a server of an exported folder makes the tokens of the training rows, and stops where answers ended.

The data folder keeps its first conversations (data/chat/encoder.py). For each turn, transformers renders and tokenizes
the messages before it with the folder's own files, as a server does: these are the ids that the row has before the
answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.base import units, untrusted
from llmtrain.base.errors import DataError
from llmtrain.checkpoint.hf.proofs import ProofError, Report
from llmtrain.data import manifest as manifests
from llmtrain.data.chat import rendering
from llmtrain.data.chat.conversation import Conversation, conversation, preference, strings, unpaired
from llmtrain.data.chat.encoder import NAME, read_sample
from llmtrain.data.chat.rendering import RenderError, Template
from llmtrain.data.shards import PreparedSet
from llmtrain.models.adapter import CONFIG

_SETTINGS = "generation_config.json"


def chat_folders(trainer: Mapping[str, Any]) -> list[Path]:
    """The folders of conversations that the run learnt from, as far as they are there."""
    tokenizer = trainer.get("tokenizer_dir")
    if not tokenizer or "source" in trainer:
        return []
    data = trainer.get("run", {}).get("data", {})
    others = map(Path, data.get("mixture") or {})  # the first one's place is known wherever this runs
    folders = {folder.resolve(): None for folder in (Path(tokenizer).parent, *others)}
    return [
        folder for folder in folders if (folder / manifests.NAME).is_file() and (_chat(folder) or {}).get("stop_tokens")
    ]


def _chat(folder: Path) -> dict[str, Any] | None:
    try:
        return manifests.read_manifest(folder).chat
    except DataError:
        return None


def ends_of(folders: list[Path]) -> list[int]:
    """Ids of the tokens that end the answers of these folders' rows; generation has to stop there."""
    from tokenizers import Tokenizer

    found: dict[int, None] = {}
    for folder in folders:
        read = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        ids = map(read.token_to_id, (_chat(folder) or {}).get("stop_tokens", ()))
        found |= {number: None for number in ids if number is not None}
    return list(found)


@dataclass
class _Compared:
    """Counts of what has been compared, and what not."""

    conversations: int = 0
    turns: int = 0
    spelled: int = 0
    """Conversations that spell a control token, which a row has as text and a server as the token."""
    joined: int = 0
    """Answers whose beginning a tokenizer joins with the prompt: their own ids are not what it makes of the whole."""
    ends: Counter[int] = field(default_factory=Counter)


def prove_serving(folder: Path, trainer: Mapping[str, Any], report: Report) -> None:
    """Compare the sample of each data folder with what transformers makes of it with the files of `folder`.

    Raises:
        ProofError: other ids, or generation that does not stop at an answer's end.
    """
    for data in chat_folders(trainer):
        if not (data / NAME).is_file():
            report.add("serving", f"not compared: {data} keeps no {NAME}; prepared again, it does")
            continue
        found = _compare(folder, data)
        text = f"{units.counted(found.turns, 'turn')} of {units.counted(found.conversations, 'conversation')}: "
        report.add("serving", f"{text}transformers makes the ids of the training rows with the folder's template")
        if found.spelled:
            report.add("serving", f"not compared: {found.spelled} that spell control tokens, which rows hold as text")
        if found.joined:
            report.add("serving", f"{found.joined} answers join their prompt in a token; of these the prompts only")
        chat = _chat(data) or {}
        if (moment := chat.get("moment")) is not None:
            report.add(
                "serving", f"the template writes the date: compared as of {moment[:10]}, when {data} was prepared"
            )
        if variables := chat.get("chat_template_kwargs"):
            report.add("serving", f"a server is to be told chat_template_kwargs {json.dumps(variables)}, as {data} was")
        _check_ends(folder, found.ends, report)


def _compare(folder: Path, data: Path) -> _Compared:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ProofError(f"transformers cannot load the tokenizer of {folder}: {error}. Nothing was kept.") from error
    prepared, found = PreparedSet(data), _Compared()
    chat = prepared.manifest.chat or {}
    template = Template(tokenizer, moment=chat.get("moment"), variables=chat.get("chat_template_kwargs"))
    stops = {tokenizer.convert_tokens_to_ids(token) for token in chat["stop_tokens"]}
    control = [token.content for token in tokenizer.added_tokens_decoder.values()]
    stream = prepared.split("train")
    lengths = stream.row_lengths()
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for number, sample in enumerate(read_sample(data)):
        if not 0 <= sample.row <= sample.row + sample.rows <= len(lengths):
            raise DataError(f"{data / NAME}: line {number + 1} names rows that {data} does not have; prepare it again")
        if any(token in text for text in strings(untrusted.loads(sample.record)) for token in control):
            found.spelled += 1
            continue
        rows = [
            (stream.read(int(starts[at]), int(lengths[at])), stream.counted(int(starts[at]), int(lengths[at])))
            for at in range(sample.row, sample.row + sample.rows)
        ]
        found.conversations += 1
        for talk, turn in _turns(sample.record, prepared):
            found.turns += 1
            wrong = _turn(tokenizer, template, talk, turn, rows, stops, found)
            if wrong is not None:
                raise ProofError(
                    f"{folder} would not be served as it was trained: of message {turn} of line {number + 1} of "
                    f"{data / NAME}, {wrong}. Was the template changed, in {data / 'tokenizer'} or in the folder? "
                    "Nothing was kept; --check none writes the folder without this proof."
                )
    rendering.close()
    return found


def _turns(record: str, prepared: PreparedSet) -> Iterator[tuple[Conversation, int]]:
    """Conversations of a record, each with a message that was learnt."""
    chat, settings = prepared.manifest.chat or {}, prepared.manifest.settings
    name = settings["field"] if settings["field"] != "text" else "messages"
    talks: tuple[Conversation, ...]
    if chat.get("pairs"):
        talks = preference(record, name)
    else:
        talks = (unpaired(record, name)[0],) if chat.get("unpaired") else (conversation(record, name),)
    for talk in talks:
        for turn in talk.turns[-1:] if settings["count"] == "last" else talk.turns:
            yield talk, turn


def _turn(
    tokenizer: Any,
    template: Template,
    talk: Conversation,
    turn: int,
    rows: list[Any],
    stops: set[int],
    found: _Compared,
) -> str | None:
    """The fault of a turn; None: a row has its prompt's ids, then the answer's as far as they can be known."""
    try:
        talk = template.fitted(talk)
        prompt, whole = template.ids(talk, turn, prompt=True), template.ids(talk, turn + 1, prompt=False)
    except RenderError as error:
        raise ProofError(f"the chat template of the exported folder fails: {error}. Nothing was kept.") from error
    at = len(prompt)
    begun = [ids.tolist() for ids, counted in rows if at < len(ids) and counted[at] and ids[:at].tolist() == prompt]
    if not begun:
        return f"the prompt has other ids ({at} of them) than the training rows: {tokenizer.decode(prompt)[-60:]!r}"
    ends = [next((place for place in range(at, len(ids)) if ids[place] in stops), len(ids) - 1) for ids in begun]
    joins = whole[:at] != prompt
    right = [ids[end] for ids, end in zip(begun, ends, strict=True) if joins or whole[:end] == ids[:end]]
    if not right:  # none of those that begin alike, as a chosen and a rejected answer do
        return f"the answer has other ids than its training row: {tokenizer.decode(whole[at:])[:60]!r}"
    found.joined += joins
    found.ends[right[0]] += 1
    return None


def _check_ends(folder: Path, ends: Mapping[int, int], report: Report) -> None:
    """Generation stops at every end that was trained. Raises ProofError: it does not."""
    place = folder
    if (folder / CONFIG).is_file():  # servers take these settings from the model that the adapter lies beside
        place = Path(untrusted.loads((folder / CONFIG).read_bytes()).get("base_model_name_or_path") or folder)
        if not (place / "config.json").is_file():
            report.add("serving", "where generation stops is the base's to say, which is not here")
            return
    lacking = sorted(set(ends) - set(_named_ends(place)))
    if not lacking:
        report.add("serving", f"generation stops at the trained end: {', '.join(map(str, sorted(ends)))}")
    elif place != folder:
        report.add("serving", f"give the server stop_token_ids {lacking}: {place} does not name where answers end")
    else:
        raise ProofError(f"{folder / _SETTINGS} does not name {lacking}, where answers ended. Nothing was kept.")


def _named_ends(folder: Path) -> list[int]:
    from transformers import GenerationConfig

    try:
        settings = GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none: what config.json says
        settings = GenerationConfig.from_model_config(_config(folder))
    ids = settings.eos_token_id
    return ids if isinstance(ids, list) else [ids]


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
