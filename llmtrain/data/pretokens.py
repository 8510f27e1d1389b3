r"""Remembered words: of most tokenizers the ids of a text are those of its words one after the other, and words recur.

The tokenizers library cuts a text into words by the pattern in tokenizer.json, and encodes each by itself. Here `re`,
which knows no \p{L}, makes the cut: exact between ASCII characters, while anything else goes in one piece from one
white space to the next, where each of these patterns cuts. A piece that is new is encoded by the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST_CHARACTERS = 1 << 20
"""Limit on remembered pieces; with their ids about 25 MB."""

_W = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # \s of the library: White_Space
_SIGN = r"[\x00-\x08\x0e-\x1f!-/:-@\[-`{-\x7f]"  # ASCII that is neither letter, digit nor white space
_ASCII_NEXT = r"(?![^\x00-\x7f])"
_TO_SPACE = f"[^{_W}]*"
_TO_LINE = f"[^{_W}]*(?:[{_W}]*[\r\n]+)?"  # of patterns where an end of line may belong to the sign before it
_BEFORE_LAST_SPACE = f"[{_W}]+(?![^{_W}])"


def _gpt2() -> str:
    cuts = (
        f"(?:'(?:[stmd]|re|ve|ll)| ?(?:[A-Za-z]+|[0-9]+|{_SIGN}+))(?:{_ASCII_NEXT}|{_TO_SPACE})",
        _BEFORE_LAST_SPACE,
        r"[\t-\r](?=[!-~])",
        f"[{_W}]?[^{_W}]+",
        f"[{_W}]",
    )
    return "|".join(cuts)


def _llama3(digits: str) -> str:
    cuts = (
        rf"(?:'(?:[stmdSTMD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\nA-Za-z0-9\x80-\U0010ffff]?[A-Za-z]+|{digits})"
        f"(?:{_ASCII_NEXT}|{_TO_LINE})",
        f" ?{_SIGN}+(?:{_ASCII_NEXT}[\r\n]*|{_TO_LINE})",
        f"[{_W}]*[\r\n]+",
        _BEFORE_LAST_SPACE,
        f"(?:(?![\r\n])[{_W}])?[^{_W}]+(?:[{_W}]*[\r\n]+)?",
        f"[{_W}]",
    )
    return "|".join(cuts)


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_CUTS = {
    "gpt2": _gpt2(),  # ByteLevel's own
    _LLAMA3.replace("DIGITS", "{1,3}"): _llama3("[0-9]{1,3}"),
    _LLAMA3.replace("DIGITS", ""): _llama3("[0-9]"),  # Qwen2, Qwen3
}
"""Our cut for each pattern of the library."""
_BECOMES_ASCII = "\u037e\u1fef\u212a"
"""Characters that NFC turns into ;, ` and K: an added token may arise from them."""


class Words:
    """The ids of texts, by a tokenizer of which `cut_of` knows how it cuts."""

    def __init__(self, tokenizer: Tokenizer, cut: str, as_ids: Callable[[list[int]], np.ndarray]) -> None:
        """`as_ids`: ids in the type in which they are kept."""
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._pieces = re.compile(cut).findall
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
        # Beside an added token the library begins anew, and cuts white space otherwise.
        either = "|".join([*map(re.escape, added), f"[{_BECOMES_ASCII}]"])
        self._begins_anew = re.compile(either).search if added else None
        self._dtype = as_ids([]).dtype
        self._known: dict[str, bytes] = {}
        self._characters = 0

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each text, [tokens]: the library's, digit for digit."""
        anew = self._begins_anew
        cuts = [[text] if anew is not None and anew(text) else self._pieces(text) for text in texts]
        if self._characters > _MOST_CHARACTERS:
            self._known.clear()
            self._characters = 0
        if new := list(set().union(*cuts) - self._known.keys()):
            for piece, encoding in zip(
                new, self._tokenizer.encode_batch_fast(new, add_special_tokens=False), strict=True
            ):
                self._known[piece] = self._as_ids(encoding.ids).tobytes()
            self._characters += sum(map(len, new))
        known = self._known.__getitem__
        return [np.frombuffer(b"".join(map(known, pieces)), self._dtype) for pieces in cuts]


def cut_of(tokenizer: Tokenizer) -> str | None:
    """The pattern of `re` that cuts as this tokenizer does; None where that is not known."""
    if not all(token.content.isascii() for token in tokenizer.get_added_tokens_decoder().values() if not token.special):
        return None
    if _settings(tokenizer.normalizer) not in ({}, {"type": "NFC"}):
        return None
    cutter = _settings(tokenizer.pre_tokenizer)
    steps = cutter.get("pretokenizers", [cutter])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        return None
    if len(steps) == 1:
        return _CUTS["gpt2"] if steps[0].get("use_regex", True) else None
    *_, split, last = steps
    known = {"type": "Split", "behavior": "Isolated", "invert": False}
    if len(steps) > 2 or last.get("use_regex", True) or not known.items() <= split.items():
        return None
    return _CUTS.get(split["pattern"].get("Regex"))


def _settings(part: Any) -> dict[str, Any]:
    """Fields of a part of a tokenizer, as they stand in tokenizer.json."""
    found: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return found
