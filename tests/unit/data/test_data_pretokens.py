"""Remembered words: ids are the library's for any text; a tokenizer that cuts in another way is left to it."""

from __future__ import annotations

import random
import sys
from functools import partial

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from llmtrain.data import tokenize as words
from llmtrain.data.tokenize import Words, as_ids, cut_of

_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
PATTERNS = {"gpt2": None, "llama3": _LETTERS + r"\p{N}{1,3}" + _ENDS, "qwen2": _LETTERS + r"\p{N}" + _ENDS}
TEXT = (words.__doc__ or "") * 3 + "def f(x):\n    return x['s'] + 1234  # it's\r\n\r\n\tThe end.\n"


def made(name: str, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    pattern = PATTERNS[name]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_]) if split else bytes_
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=500, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.encode_special_tokens = True
    return tokenizer


def same(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Of each text; the words are those of earlier texts, too."""
    cut = cut_of(tokenizer)
    assert cut is not None
    ours = Words(tokenizer, cut, partial(as_ids, vocab_size=1000))
    for some in (texts[: len(texts) // 2], texts[len(texts) // 2 :], texts[:1]):
        found = ours.encode(some)
        for text, ids, theirs in zip(
            some, found, tokenizer.encode_batch_fast(some, add_special_tokens=False), strict=True
        ):
            assert ids.tolist() == theirs.ids, repr(text)


def texts(number: int, seed: int) -> list[str]:
    """Short ones of the characters by which cuts are decided, with some of all others."""
    draw = random.Random(seed)
    near = [
        *"  \n\r\t'sSrevmdtlLkK019_-./(\x00\x1c\x1f\x7f\x0b\x85\xa0\u2003\u2028\u3000\u200b\ufeff",
        *"éſK;`́Å٣½中😀ʼ",
    ]
    near += ["'s", "'LL", "<end>", "\r\n", "  ", "\n\n", "ab", "e\u0301"]
    some = []
    for _ in range(number):
        far = [chr(c) for c in (draw.randrange(0x110000) for _ in range(3)) if not 0xD800 <= c < 0xE000]
        some.append("".join(draw.choices([*near, *far], k=draw.randrange(1, 12))))
    return some


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
@pytest.mark.parametrize("name", PATTERNS)
def test_ids_are_those_of_the_library(name: str, normalizer: normalizers.Normalizer | None) -> None:
    same(made(name, normalizer), [TEXT, *texts(8000, 1)])


@pytest.mark.parametrize("name", PATTERNS)
def test_every_character_is_cut_as_the_library_cuts_it(name: str) -> None:
    """Between ASCII letters, digits, signs, spaces and ends of lines: 64 characters to a text."""
    every = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    every = every[:0x3100] + every[0x3100::997]
    around = ("a{}b ", "1{}1 ", "-{}-\n", " {}  ", "\n{}\n", "'{}s ", "'s{}")
    same(
        made(name),
        ["".join(one.format(c) for one in around for c in every[k : k + 32]) for k in range(0, len(every), 32)],
    )


def test_texts_with_added_tokens_are_the_librarys() -> None:
    tokenizer = made("qwen2", normalizers.NFC())
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("K;", special=False)])
    hard = ["foo   <tool> bar", "<tool>\n\nx", "a  \u212a; b", "  K\u037e  ", "plain text   here"]
    same(tokenizer, [*hard, *(f"{one} <tool>{one}" for one in texts(300, 2))])


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_MOST_CHARACTERS", 100)
    tokenizer = made("gpt2")
    ours = Words(tokenizer, cut_of(tokenizer) or "", partial(as_ids, vocab_size=1000))
    for text in texts(500, 3):
        assert len(ours.encode([text, ""])[1]) == 0
        assert ours._characters < 300 and sum(map(len, ours._known)) == ours._characters


def test_other_tokenizers_are_left_to_the_library() -> None:
    assert cut_of(made("gpt2")) and cut_of(made("llama3"))
    assert cut_of(made("gpt2", normalizers.NFKC())) is None
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for other in (
        None,
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d"), "isolated"), by_bytes]),
    ):
        tokenizer = made("gpt2")
        if other is None:
            tokenizer.add_tokens([AddedToken("é", special=False)])
        else:
            tokenizer.pre_tokenizer = other
        assert cut_of(tokenizer) is None, other
