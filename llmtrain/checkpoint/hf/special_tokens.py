"""Tokens that begin and end a text, in the configuration of an exported model: what its tokenizer says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError
from llmtrain.checkpoint.hf.proofs import Report
from llmtrain.data.tokenize import named_token


def special_ids(tokenizer: Path | None, separator: int | None) -> dict[str, int | None]:
    """bos_token_id, eos_token_id and pad_token_id as a tokenizer's folder names them; None for a token it lacks.

    Args:
        separator: the id that ended each document of the training data, for where the folder tells nothing.

    Returns nothing at all when neither tells anything: the model's own configuration is all there is then.
    """
    try:
        if tokenizer is None:
            raise DataError("no tokenizer")
        read = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        names = {role: named_token(tokenizer, f"{role}_token") for role in ("bos", "eos", "pad")}
    except Exception:  # the library raises bare Exception; a folder without a usable tokenizer is exported all the same
        return {} if separator is None else {"eos_token_id": separator}
    return {f"{role}_token_id": read.token_to_id(name) if name else None for role, name in names.items()}


def configure(config: Any, ids: dict[str, int | None], ends: Sequence[int] = ()) -> None:
    """Write `special_ids` into a transformers configuration, and `ends`, at which trained answers end.

    A family's own defaults (Llama: begin 1, end 2) are ordinary words of another vocabulary, and a server that reads
    config.json would stop there. Several ends of a chat model stay, if the tokenizer's is one of them. The padding
    token stays what it was in training: some families compute positions from it, and transformers never trains its
    row, so that it must not become the end token, whose row is trained.
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
    """Let a reward model's configuration name no padding token that also ends an answer.

    transformers reads the score at the last token that is not the padding token: where that ends the answer, too, it
    would read the one before, which no training has seen. Without one it takes rows singly, and refuses to guess.
    """
    text, ends = config.get_text_config(), getattr(config, "eos_token_id", None)
    pad = text.pad_token_id
    if pad is not None and pad in (ends if isinstance(ends, list) else [ends]):
        for each in (config, text):
            each.pad_token_id = None
        report.add(
            "padding",
            f"pad_token_id {pad} left out: it ends answers, and transformers would read the score before it. For "
            "batches set config.pad_token_id to a token that ends none",
        )


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling defaults of a model folder's generation_config.json by its keys, token ids left out."""
    try:
        fields = untrusted.loads((folder / "generation_config.json").read_bytes())
        plain = {key: value for key, value in fields.items() if isinstance(value, (bool, int, float))}
    except (OSError, ValueError, AttributeError):
        return {}
    return {key: value for key, value in plain.items() if not key.startswith("_") and not key.endswith("token_id")}


def pad_within(config: Any, ids: dict[str, int | None], report: Report) -> None:
    """Leave out a padding token that the model has no row for, and say where the model and its tokenizer name two.

    Folders name -1, or the number after their last token. A server that pads with it reads beyond the embedding.
    """
    text = config.get_text_config()
    size, trained, named = text.vocab_size, getattr(text, "pad_token_id", None), ids.get("pad_token_id")
    for number in {trained, named}:
        if number is not None and not 0 <= number < size:
            report.add("padding", f"pad_token_id {number} left out: the model's tokens are 0 to {size - 1}")
    if trained is not None and not 0 <= trained < size:
        for each in {id(part): part for part in (config, text)}.values():
            each.pad_token_id = None
    if named is not None and not 0 <= named < size:
        ids["pad_token_id"] = None
    elif None not in (trained, named) and trained != named:
        report.add("padding", f"the model was trained with pad_token_id {trained}, its tokenizer pads with {named}")


def generation_settings(config: Any, ids: dict[str, int | None]) -> dict[str, Any]:
    """generation_config.json of a configured model: its special tokens; the end token pads where none is named."""
    eos = getattr(config, "eos_token_id", None)
    pad = ids.get("pad_token_id")
    first = eos[0] if isinstance(eos, list) else eos
    bos = getattr(config, "bos_token_id", None)
    settings = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": first if pad is None else pad}
    return {name: value for name, value in settings.items() if value is not None}
