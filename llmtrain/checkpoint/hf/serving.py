"""Proof that a server with an exported folder makes the training rows' tokens, and stops at the end of answers.

The data folder keeps its first conversations (data/chat/encoder.py). For each turn, transformers renders and tokenizes
the earlier messages with the folder's own files, like a server: the ids must equal the row's ids before the answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from llmtrain.base import units, untrusted
from llmtrain.base.errors import DataError
from llmtrain.checkpoint.hf.proofs import ProofError, Report
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.data import manifest as manifests
from llmtrain.data.shards import PreparedSet
from llmtrain.data.tokenizer_folder import named_token
from llmtrain.models.parameters import CONFIG
from llmtrain.storage.addresses import is_url

if TYPE_CHECKING:
    from llmtrain.data.chat.conversation import Conversation
    from llmtrain.data.chat.rendering import Template

_SETTINGS = "generation_config.json"


def special_ids(tokenizer: Path | None, separator: int | list[int] | None) -> dict[str, Any]:
    """bos_token_id, eos_token_id and pad_token_id by the tokenizer's folder, else `separator`, which ended the
    documents of the training data; empty if neither is known."""
    try:
        if tokenizer is None:
            raise DataError("no tokenizer")
        read = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        names = {role: named_token(tokenizer, f"{role}_token") for role in ("bos", "eos", "pad")}
    except Exception:  # the library raises bare Exception; a folder without a usable tokenizer can be exported
        return {} if separator is None else {"eos_token_id": separator}
    return {f"{role}_token_id": read.token_to_id(name) if name else None for role, name in names.items()}


def configure(config: Any, ids: dict[str, int | None], ends: Sequence[int] = ()) -> None:
    """Write `special_ids` and `ends`, the tokens that end trained answers, into a transformers configuration.

    A family's own defaults (Llama: begin 1, end 2) are ordinary words of another vocabulary, and a server that reads
    config.json would stop there. Several ends of a chat model stay, if the tokenizer's is one of them. The padding
    token stays that of the training: some families compute positions from it, and transformers never trains its row, so
    it must not become the end token, whose row is trained.
    """
    now = getattr(config, "eos_token_id", None)  # the configuration around several models has none of its own
    named = now if isinstance(now, list) else []
    eos = ids.get("eos_token_id")
    if eos is not None and eos not in named:
        config.eos_token_id, named = eos, [eos]
    if more := [number for number in ends if number not in named]:
        config.eos_token_id = [*named, *more]
    if "bos_token_id" in ids:
        config.bos_token_id = ids["bos_token_id"]
    if getattr(config, "pad_token_id", None) is None and ids.get("pad_token_id") != eos:
        config.pad_token_id = ids.get("pad_token_id")


def pad_apart(config: Any, report: Report) -> None:
    """Remove from a reward model's configuration a padding token that also ends an answer: transformers reads the score
    before the padding, that is at the position before the end, which no training has seen."""
    text, ends = config.get_text_config(), getattr(config, "eos_token_id", None)
    pad = text.pad_token_id
    if pad is not None and pad in (ends if isinstance(ends, list) else [ends]):
        for part in (config, text):
            part.pad_token_id = None
        report.add(
            "padding",
            f"pad_token_id {pad} left out: it ends answers, and transformers would read the score before it. For "
            "batches set config.pad_token_id to a token that ends none",
        )


def sampling_defaults(folder: Path, tokenizer: Path | None = None) -> dict[str, Any]:
    """The sampling defaults in a model folder's generation_config.json, and of its token ids those of `own_stops`.
    `tokenizer`: the folder of the run's."""
    try:
        fields = untrusted.loads((folder / _SETTINGS).read_bytes())
        plain = {key: value for key, value in fields.items() if isinstance(value, (bool, int, float))}
    except (OSError, ValueError, AttributeError):
        plain = {}
    defaults = {key: value for key, value in plain.items() if not key.startswith("_") and not key.endswith("token_id")}
    stops = [] if tokenizer is None else own_stops(folder, tokenizer)
    return defaults | ({"eos_token_id": stops} if stops else {})


def own_stops(base: Path, tokenizer: Path) -> list[int]:
    """Ids where a base's answers stop, by its generation_config.json, else by its config.json: those that are the same
    added token in its tokenizer and in the run's. In another vocabulary they are ordinary words."""
    try:
        run_tokens, base_tokens = (
            Tokenizer.from_file(str(place / "tokenizer.json")).get_added_tokens_decoder() for place in (tokenizer, base)
        )
        for name in (_SETTINGS, "config.json"):
            file = base / name
            ids = untrusted.loads(file.read_bytes(), infinite=True).get("eos_token_id") if file.is_file() else None
            if named := [number for number in (ids if isinstance(ids, list) else [ids]) if type(number) is int]:
                shared = run_tokens.keys() & base_tokens.keys()
                return [n for n in named if n in shared and run_tokens[n].content == base_tokens[n].content]
    except Exception:  # the library raises bare Exception; a base whose files cannot be read has no stops to keep
        pass
    return []


def pad_within(config: Any, ids: dict[str, int | None], report: Report) -> None:
    """Remove a padding token without a row: a server that pads with it reads beyond the embedding."""
    text = config.get_text_config()
    size, trained, named = text.vocab_size, getattr(text, "pad_token_id", None), ids.get("pad_token_id")
    for number in {trained, named}:
        if number is not None and not 0 <= number < size:
            report.add("padding", f"pad_token_id {number} left out: the model's tokens are 0 to {size - 1}")
    if trained is not None and not 0 <= trained < size:
        for part in {id(part): part for part in (config, text)}.values():
            part.pad_token_id = None
    if named is not None and not 0 <= named < size:
        ids["pad_token_id"] = None
    elif None not in (trained, named) and trained != named:
        report.add("padding", f"the model was trained with pad_token_id {trained}, its tokenizer pads with {named}")


def generation_settings(config: Any, ids: dict[str, int | None], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json of a configured model: its special tokens, and the base's `sampling_defaults`, whose stops
    come before the tokenizer's. Without a padding token the end token pads."""
    eos = getattr(config, "eos_token_id", None)
    pad = ids.get("pad_token_id")
    ends = eos if isinstance(eos, list) else [eos]
    bos = getattr(config, "bos_token_id", None)
    every = list(dict.fromkeys([*sampling.get("eos_token_id", ()), *(number for number in ends if number is not None)]))
    settings = {"bos_token_id": bos, "pad_token_id": ends[0] if pad is None else pad, **sampling}
    settings["eos_token_id"] = every if len(every) > 1 else eos
    return {name: value for name, value in settings.items() if value is not None}


def chat_folders(trainer: TrainerState) -> list[Path]:
    tokenizer = tokenizer_here(trainer)
    if tokenizer is None or trainer.source is not None:
        return []
    data = trainer.section("data")
    # The first folder's place is known on every host.
    others = [folder for name in data.get("mixture") or {} if (folder := _here(name, data)) is not None]
    folders = {folder.resolve(): None for folder in (tokenizer.parent, *others)}
    return [
        folder
        for folder in folders
        if (folder / manifests.NAME).is_file() and (chat := _chat(folder)) is not None and chat.stop_tokens
    ]


def tokenizer_here(trainer: TrainerState) -> Path | None:
    """The folder of the run's tokenizer, fetched from its data's store if need be; None: not recorded."""
    if not (named := trainer.tokenizer_dir):
        return None
    data = trainer.section("data")
    url = next(iter(data.get("mixture") or {}), data.get("path")) or ""
    folder = _here(url, data) if not Path(named).is_dir() and is_url(url) else None
    return Path(named) if folder is None else folder / "tokenizer"


def _here(name: str, data: Mapping[str, Any]) -> Path | None:
    """The folder of a set on this host; None: its store cannot provide it. `data`: the run's section."""
    if not is_url(name):
        return Path(name)
    try:
        return PreparedSet(name, data.get("cache")).folder
    except DataError:
        return None


def _chat(folder: Path) -> manifests.ChatFigures | None:
    try:
        return manifests.read_manifest(folder).chat
    except DataError:
        return None


def ends_of(folders: list[Path]) -> list[int]:
    """Ids of the tokens that end the answers in these folders' rows, where generation must stop."""
    from tokenizers import Tokenizer

    ends: dict[int, None] = {}
    for folder in folders:
        read = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        chat = _chat(folder)
        ids = map(read.token_to_id, chat.stop_tokens if chat is not None else ())
        ends |= {number: None for number in ids if number is not None}
    return list(ends)


@dataclass
class _Compared:
    conversations: int = 0
    turns: int = 0
    spelled: int = 0
    """Conversations that spell a control token, which a row has as text and a server as the token."""
    joined: int = 0
    """Answers whose beginning a tokenizer joins with the prompt: alone they have other ids than in the full text."""
    ends: Counter[int] = field(default_factory=Counter)


def prove_serving(folder: Path, trainer: TrainerState, report: Report) -> None:
    """Compare each data folder's sample with transformers' ids by the files of `folder`. Raises ProofError: other ids,
    or generation does not stop at an answer's end."""
    for data in chat_folders(trainer):
        from llmtrain.data.chat.encoder import NAME  # runs on plain texts have none

        if not (data / NAME).is_file():
            report.add("serving", f"not compared: {data} keeps no {NAME}; prepare it again to have it compared")
            continue
        compared = _compare(folder, data)
        text = f"{units.counted(compared.turns, 'turn')} of {units.counted(compared.conversations, 'conversation')}: "
        report.add("serving", f"{text}transformers makes the ids of the training rows with the folder's template")
        if compared.spelled:
            report.add("serving", f"not compared: {compared.spelled} that spell control tokens, text in the rows")
        if compared.joined:
            report.add("serving", f"{compared.joined} answers join their prompt in a token: prompts alone compared")
        chat = _chat(data)
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
            wrong = _turn(tokenizer, template, talk, turn, rows, stops, compared)
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


def _turn(
    tokenizer: Any,
    template: Template,
    talk: Conversation,
    turn: int,
    rows: list[Any],
    stops: set[int],
    compared: _Compared,
) -> str | None:
    """The fault of a turn; None: a row has its prompt's ids, then the answer's as far as they can be known."""
    from llmtrain.data.chat.rendering import RenderError

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
            report.add("serving", "the base, which names the ends of generation, is not here")
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
    except OSError:  # there is none: use config.json
        settings = GenerationConfig.from_model_config(_config(folder))
    ids = settings.eos_token_id
    return ids if isinstance(ids, list) else [ids]


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
