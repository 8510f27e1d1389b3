"""What a tokenizer.json makes of a text: the tokens around it, and how the ids of two tokenizers differ."""

from __future__ import annotations

import json

from llmtrain.base import untrusted

_ONE_WORD = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "x"}


def special_tokens(content: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that a tokenizer's own encoding puts before and after a text. `content`: of its tokenizer.json.

    Raises ValueError: it does more than that, or cannot be read.
    """
    from tokenizers import Tokenizer

    told = untrusted.loads(content)
    steps = told.get("post_processor") if isinstance(told, dict) else None
    if steps is None:
        return (), ()
    try:  # without the vocabulary, which takes a second to read
        found = Tokenizer.from_str(json.dumps({"model": _ONE_WORD, "post_processor": steps})).encode("x")
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"its post_processor cannot be read ({error})") from error
    if (marks := found.special_tokens_mask).count(0) != 1:
        raise ValueError("its post_processor does not keep the text as it is")
    at = marks.index(0)
    return tuple(found.ids[:at]), tuple(found.ids[at + 1 :])


_PROBE = (
    "It's 1 of 12 or 345,678 days; DON'T  stop!\n\n\tdef f(x_1):\r\n        return [x**2]  # e\u0301 \u00e9"
    " \ufb01 \u2460 \u2019s \u00a0 \u4f60\u597d\u4e16\u754c \u0939\u093f\u0928\u094d\u0926\u0940 \U0001f600"
    " camelCase \u0130I\u00df \u0661\u0662 "
)
"""Text in which the usual ways to normalize and to cut differ."""


def difference(data: bytes, model: bytes, *, grown: bool = True) -> str:
    """How the tokenizers of two tokenizer.json differ in their ids of a text; empty: they do not. Tokens that were
    added to the model's are no difference, nor with `grown` those added to the data's. Raises ValueError: one cannot be
    read."""
    from tokenizers import Tokenizer

    if data == model:
        return ""
    try:
        both = [Tokenizer.from_buffer(content) for content in (data, model)]
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"the tokenizers library cannot read it ({error})") from error
    ours, theirs = (each.get_vocab(with_added_tokens=True) for each in both)
    added = {token.content for each in both[not grown :] for token in each.get_added_tokens_decoder().values()}
    other = sorted(token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token])
    if other := other or sorted((ours.keys() ^ theirs.keys()) - added):
        ids = " and ".join(str(vocabulary.get(other[0], "none")) for vocabulary in (ours, theirs))
        return f"{len(other):,} tokens have other ids, such as {untrusted.shown(other[0])!r} ({ids})"
    models = [json.loads(each.to_str())["model"] for each in both]  # in one spelling, whatever version wrote them
    scores = [model["vocab"] if isinstance(model["vocab"], list) else None for model in models]  # of a Unigram model
    if scores[0] != scores[1] or models[0].get("merges") != models[1].get("merges"):
        return "they have the same tokens, and choose among them by other merges or scores"
    for each in both:
        each.no_truncation()
        each.no_padding()
    first, second = (each.encode(_PROBE, add_special_tokens=False).ids for each in both)
    return "" if first == second else "they cut or normalize a text differently"
