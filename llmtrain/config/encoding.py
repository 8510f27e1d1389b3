"""What a tokenizer.json makes of a text: the tokens around it, and how the ids of two tokenizers differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def special_tokens(content: bytes) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer adds before and after a text. `content`: the bytes of its tokenizer.json.

    Raises DataError: the file cannot be read, or the tokenizer changes more of an encoding than its two ends.
    """
    from tokenizers import Tokenizer

    try:  # without the vocabulary, which takes a second to read
        one_word = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "x"}
        steps = untrusted.loads(content).get("post_processor")
        found = Tokenizer.from_str(json.dumps({"model": one_word, "post_processor": steps})).encode("x")
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"tokenizer.json: its post_processor cannot be read ({error}); save it again") from error
    if (marks := found.special_tokens_mask).count(0) != 1:
        raise DataError("tokenizer.json: its post_processor does not keep a text as it is; take another tokenizer")
    return found.ids[: marks.index(0)], found.ids[marks.index(0) + 1 :]


_PROBE = (
    "It's 1 of 12 or 345,678 days; DON'T  stop!\n\n\tdef f(x_1):\r\n    return [x**2]  # e\u0301 \u00e9 \ufb01 \u2460 "
    "\u2019s \u00a0 \u4f60\u597d \u0939\u093f\u0928\u094d\u0926\u0940 \U0001f600 camelCase \u0130I\u00df \u0661\u0662 "
)
"""A text that tokenizers with different normalizers or pre-tokenizers encode differently."""


def difference(data: bytes, model: bytes, *, grown: bool) -> str:
    """Return how two tokenizers differ in the ids that they give a text; "" if they do not, or `data` cannot be read.

    Tokens around a text are not compared, nor are tokens added to the model's tokenizer or, with `grown`, to the
    data's. Raises DataError: `model` cannot be read.
    """
    from tokenizers import Tokenizer

    if data == model:
        return ""
    both: list[Tokenizer] = []
    for content in (data, model):
        try:
            both.append(Tokenizer.from_buffer(content))
        except Exception as error:  # the library raises bare Exception
            if content is data:
                return ""  # who opens the data reports it
            raise DataError(f"tokenizer.json: cannot be read ({error}); copy it again") from error
    ours, theirs = (each.get_vocab(with_added_tokens=True) for each in both)
    added = {token.content for each in both[not grown :] for token in each.get_added_tokens_decoder().values()}
    other = sorted(token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token])
    if other := other or sorted((ours.keys() ^ theirs.keys()) - added):
        ids = " and ".join(str(vocabulary.get(other[0], "none")) for vocabulary in (ours, theirs))
        return f"{len(other):,} tokens have other ids, such as {untrusted.shown(other[0])!r} ({ids})"
    models = [json.loads(each.to_str())["model"] for each in both]  # in one spelling, whatever version wrote them
    chosen = [model.get("merges", model["vocab"] if model["type"] == "Unigram" else None) for model in models]
    if chosen[0] != chosen[1]:
        return "they have the same tokens, and choose among them by other merges or scores"
    probe = _PROBE
    for token in ours.keys() ^ theirs.keys():  # tokens that only one of the two has
        probe = probe.replace(token, "")
    first, second = (_ids_of_probe(each, probe) for each in both)
    return "" if first == second else "they cut or normalize a text differently"


def _ids_of_probe(tokenizer: Tokenizer, probe: str) -> list[int]:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        found: list[int] = tokenizer.encode(probe, add_special_tokens=False).ids
    except Exception:  # the library raises bare Exception where a vocabulary lacks a word
        return []
    return found
