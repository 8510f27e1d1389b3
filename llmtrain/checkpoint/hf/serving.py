"""What a server reads beside the weights: special tokens, sampling defaults, tokens at which generation stops; and the
data folders from which they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError
from llmtrain.checkpoint.hf.proofs import Report
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.data import manifest as manifests
from llmtrain.data.shards import PreparedSet
from llmtrain.data.tokenizer_folder import named_token
from llmtrain.storage.addresses import is_url

SETTINGS = "generation_config.json"


def special_ids(tokenizer: Path | None, separator: int | list[int] | None) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id and pad_token_id of the folder's tokenizer. Without a usable tokenizer returns
    only eos_token_id, from `separator`, which ended the documents of the training data; empty without either."""
    try:
        if tokenizer is None:
            raise DataError("no tokenizer")
        read = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        names = {role: named_token(tokenizer, f"{role}_token") for role in ("bos", "eos", "pad")}
    except Exception:  # the library raises bare Exception; a folder without a usable tokenizer can be exported
        return {} if separator is None else {"eos_token_id": separator}
    return {f"{role}_token_id": read.token_to_id(name) if name else None for role, name in names.items()}


def configure(config: Any, ids: dict[str, int | None], ends: Sequence[int] = ()) -> None:
    """Write `special_ids` and `ends` (ids that end trained answers) into a transformers configuration.

    A family's defaults (Llama: begin 1, end 2) are ordinary tokens of another vocabulary, and a server that reads
    config.json would stop at them. The several ends of a chat model stay if the tokenizer's end is among them. The
    padding token of the training stays: some families compute positions from it, and transformers never trains its row,
    so it must not become the end token, whose row is trained.
    """
    now = getattr(config, "eos_token_id", None)  # a configuration around several models lacks it
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
    """Remove a padding token that also ends answers from a reward model's configuration: transformers reads the score
    before the padding, which would then be one token before the end, where no score was trained."""
    text, ends = config.get_text_config(), getattr(config, "eos_token_id", None)
    pad = text.pad_token_id
    if pad is not None and pad in (ends if isinstance(ends, list) else [ends]):
        for part in (config, text):
            part.pad_token_id = None
        report.add(
            "padding",
            f"pad_token_id {pad} left out: it also ends answers, and transformers would read the score one token too "
            "early. To score batches, set config.pad_token_id to a token that ends no answer",
        )


def sampling_defaults(folder: Path, tokenizer: Path | None = None) -> dict[str, Any]:
    """Return the sampling defaults in a model folder's generation_config.json. Token ids are left out, except those of
    `own_stops`. `tokenizer`: folder of the run's tokenizer."""
    try:
        fields = untrusted.loads((folder / SETTINGS).read_bytes())
        plain = {key: value for key, value in fields.items() if isinstance(value, (bool, int, float))}
    except (OSError, ValueError, AttributeError):
        plain = {}
    defaults = {key: value for key, value in plain.items() if not key.startswith("_") and not key.endswith("token_id")}
    stops = [] if tokenizer is None else own_stops(folder, tokenizer)
    return defaults | ({"eos_token_id": stops} if stops else {})


def own_stops(base: Path, tokenizer: Path) -> list[int]:
    """Return the ids at which the base model's answers stop, from its generation_config.json, else its config.json:
    only ids that are the same added token in both tokenizers, since in another vocabulary they are ordinary tokens."""
    try:
        run_tokens, base_tokens = (
            Tokenizer.from_file(str(place / "tokenizer.json")).get_added_tokens_decoder() for place in (tokenizer, base)
        )
        for name in (SETTINGS, "config.json"):
            file = base / name
            ids = untrusted.loads(file.read_bytes(), infinite=True).get("eos_token_id") if file.is_file() else None
            if named := [number for number in (ids if isinstance(ids, list) else [ids]) if type(number) is int]:
                shared = run_tokens.keys() & base_tokens.keys()
                return [n for n in named if n in shared and run_tokens[n].content == base_tokens[n].content]
    except Exception:  # the library raises bare Exception; a base whose files cannot be read has no stops to keep
        pass
    return []


def pad_within(config: Any, ids: dict[str, int | None], report: Report) -> None:
    """Remove a padding token that is beyond the embedding, from which a server would read past its end."""
    text = config.get_text_config()
    size = text.vocab_size
    trained, named = getattr(text, "pad_token_id", None), ids.get("pad_token_id")
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
    """Return the generation_config.json of a configured model: its special tokens and the base's `sampling_defaults`,
    whose stops come before the tokenizer's. Without a padding token the end token pads."""
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
    # The first folder is known on every host, by its tokenizer.
    others = [folder for name in data.get("mixture") or {} if (folder := _here(name, data)) is not None]
    folders = {folder.resolve(): None for folder in (tokenizer.parent, *others)}
    return [
        folder
        for folder in folders
        if (folder / manifests.NAME).is_file() and (chat := chat_of(folder)) is not None and chat.stop_tokens
    ]


def tokenizer_here(trainer: TrainerState) -> Path | None:
    """Return the folder of the run's tokenizer, downloaded from the data's store if need be; None: not recorded."""
    if not (named := trainer.tokenizer_dir):
        return None
    data = trainer.section("data")
    url = next(iter(data.get("mixture") or {}), data.get("path")) or ""
    folder = _here(url, data) if not Path(named).is_dir() and is_url(url) else None
    return Path(named) if folder is None else folder / "tokenizer"


def _here(name: str, data: Mapping[str, Any]) -> Path | None:
    """Return a data set's folder on this host; None: its store cannot provide it. `data`: the run's section."""
    if not is_url(name):
        return Path(name)
    try:
        return PreparedSet(name, data.get("cache")).folder
    except DataError:
        return None


def chat_of(folder: Path) -> manifests.ChatFigures | None:
    try:
        return manifests.read_manifest(folder).chat
    except DataError:
        return None


def ends_of(folders: list[Path]) -> list[int]:
    """Return the ids of the tokens that end the answers in these data folders, at which generation must stop."""
    from tokenizers import Tokenizer

    ends: dict[int, None] = {}
    for folder in folders:
        read = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        chat = chat_of(folder)
        ids = map(read.token_to_id, chat.stop_tokens if chat is not None else ())
        ends |= {number: None for number in ids if number is not None}
    return list(ends)
