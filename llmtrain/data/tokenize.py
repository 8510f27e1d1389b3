"""The encoder that `llmtrain prepare` uses for texts, and the byte-level BPE that it can train."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmtrain.base.errors import DataError
from llmtrain.config.encoding import special_tokens
from llmtrain.data.tokenizer_folder import refuse_unsafe, require, separator_token, write_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_MOST_CHARACTERS = 1 << 20
"""Limit on the cached pieces of text in characters; with their ids about 25 MB."""

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
"""Pattern of the tokenizers library -> pattern of `re` that cuts texts in the same way."""
_BECOMES_ASCII = "\u037e\u1fef\u212a"
"""Characters that NFC turns into ;, ` and K, which may form an added token."""


class Words:
    """Encodes texts faster than the library, for a tokenizer whose pattern `cut_of` knows."""

    def __init__(self, tokenizer: Tokenizer, cut: str, as_ids: Callable[[list[int]], np.ndarray]) -> None:
        """`as_ids`: converts ids to the stored type."""
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._pieces = re.compile(cut).findall
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
        # The library cuts white space next to an added token differently.
        either = "|".join([*map(re.escape, added), f"[{_BECOMES_ASCII}]"])
        self._begins_anew = re.compile(either).search if added else None
        self._dtype = as_ids([]).dtype
        self._known: dict[str, bytes] = {}
        self._characters = 0

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, [tokens], the same as the library's."""
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
    """Return the pattern of `re` that cuts texts as this tokenizer does; None: it is unknown."""
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
    found: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return found


SEPARATOR = "<|endoftext|>"
TURNS = tuple(f"<|{role}|>" for role in ("system", "user", "assistant", "tool"))
"""Tokens with which a chat template may begin a turn."""
_NO_BYTES = ("\u00c0", "\u00c1", "\u00fe", "\u00ff")
"""Characters of byte-level BPE for four bytes that UTF-8 never uses: tokens that no text has."""
LEAST_VOCABULARY = 257
"""Size of the smallest byte-level BPE: a token for every byte, and the separator."""


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE of exactly `vocab_size` tokens (separator included) and save it as a Hugging Face folder.

    Four bytes that no text has become the tokens `TURNS`, so that a model trained on text can be fine-tuned on
    conversations without new tokens. The result depends only on the texts, not on the number of cores: merges are
    chosen by count, then by id. Raises DataError when the texts are too few for the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise DataError(
            f"--vocab-size {vocab_size}: the source gives a BPE of {tokenizer.get_vocab_size()} tokens and no more; "
            "choose at most that, or add text"
        )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SEPARATOR,
        "bos_token": SEPARATOR,
        "pad_token": SEPARATOR,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000_000,
    }

    def write(target: Path) -> None:
        _with_turns(tokenizer).save(str(target / "tokenizer.json"))
        (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

    write_folder(folder, write)


def _with_turns(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer in which `TURNS` replace the four tokens of `_NO_BYTES`."""
    from tokenizers import AddedToken, Tokenizer

    values = json.loads(tokenizer.to_str())
    vocabulary = values["model"]["vocab"]
    for byte, turn in zip(_NO_BYTES, TURNS, strict=True):
        vocabulary[turn] = vocabulary.pop(byte)
    values["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    renamed = Tokenizer.from_str(json.dumps(values, ensure_ascii=False))
    renamed.add_special_tokens([AddedToken(turn, special=True, normalized=False) for turn in TURNS])
    return renamed


class Encoder:
    """A tokenizer for corpora: it neither truncates nor pads, and a special token spelled in a text stays text."""

    def __init__(self, folder: Path, *, bare: bool = False) -> None:
        """`bare`: add no special tokens to documents. Raises DataError when the folder has no usable tokenizer."""
        from tokenizers import Tokenizer

        path = require(folder)
        refuse_unsafe(folder)
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: the tokenizers library cannot read it ({error}); save it again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        token = separator_token(folder)
        separator = self._tokenizer.token_to_id(token)
        if separator is None:
            raise DataError(
                f"{folder}: its eos_token {token!r} is not in its vocabulary; "
                "correct tokenizer_config.json or add the token"
            )
        self.separator_id: int = separator
        # Ids may have gaps, so the largest one counts, not the number of tokens.
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(max(ids) + 1, len(ids))
        self.dtype = dtype_for(self.vocab_size)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = {number for number, token in added.items() if token.special}
        """Ids of the special tokens, which have no text."""
        around = ([], []) if bare else special_tokens(path.read_bytes())
        self.begin, end = (as_ids(ids, self.vocab_size) for ids in around)
        """Ids that the tokenizer puts before a text, such as <bos> of Llama and Gemma."""
        self._end = end[:-1] if end[-1:].tolist() == [separator] else end
        cut = cut_of(self._tokenizer)
        self._words = cut and Words(self._tokenizer, cut, partial(as_ids, vocab_size=self.vocab_size))

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, [tokens] in `self.dtype`, without special tokens."""
        if self._words:
            return self._words.encode(texts)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [as_ids(encoding.ids, self.vocab_size) for encoding in encodings]

    def document(self, ids: np.ndarray) -> np.ndarray:
        """Add the special tokens that the tokenizer puts around a text, except the separator."""
        return np.concatenate((self.begin, ids, self._end)) if len(self.begin) or len(self._end) else ids

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def dtype_for(vocab_size: int) -> np.dtype:
    """Return uint16 if every id fits, else uint32; both little-endian."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def as_ids(ids: list[int], vocab_size: int) -> np.ndarray:
    """Return the ids in the shards' dtype. Raises DataError: an id is outside [0, vocab_size)."""
    array = np.array(ids, dtype=np.int64)
    if len(array) and not (array.min() >= 0 and array.max() < vocab_size):
        wrong = int(array.max() if array.max() >= vocab_size else array.min())
        raise DataError(
            f"the tokenizer gave the id {wrong}, outside its own vocabulary [0, {vocab_size}); it is inconsistent: "
            "save it again with the library that made it"
        )
    return array.astype(dtype_for(vocab_size))
