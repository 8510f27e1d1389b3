"""Bytes of tokens: their sum over a text is the text's length in UTF-8, for each kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from llmtrain.config.run import DataConfig
from llmtrain.data.stream.train_data import TrainData, counted_bytes
from llmtrain.data.tokenize import train_bpe
from llmtrain.data.tokenizer_folder import byte_lengths
from tests.helpers.prepared import write_prepared

TEXTS = ["Größe, naïve façade; 日本語 and 🙂 twice 🙂.\n\n\tx = 1\n", "plain words  with   spaces and é"]


def _byte_level(folder: Path) -> Tokenizer:
    train_bpe(TEXTS * 3, 300, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("façade", normalized=False), AddedToken("   ", normalized=False)])
    return tokenizer


def _metaspace(folder: Path) -> Tokenizer:
    """As Llama 2's: spaces are marked, what the vocabulary lacks is spelt in bytes."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyzé"]
    vocabulary = {word: number for number, word in enumerate([*words, "▁w", "▁wo", "▁s"])}
    model = models.BPE(vocabulary, [("▁", "w"), ("▁w", "o"), ("▁", "s")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


def _unigram(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(
        [text.replace("\n", " ").replace("\t", " ") for text in TEXTS] * 5,
        trainers.UnigramTrainer(vocab_size=80, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False),
    )
    return tokenizer


@pytest.mark.parametrize(("make", "before"), [(_byte_level, 0), (_metaspace, 1), (_unigram, 1)])
def test_the_bytes_of_a_texts_tokens_are_the_texts(tmp_path: Path, make: object, before: int) -> None:
    """`before`: the space that such a tokenizer puts before a text, which its decoder takes away."""
    tokenizer = make(tmp_path / "made")  # type: ignore[operator]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lengths = byte_lengths(tmp_path, tokenizer.get_vocab_size())
    for text in TEXTS:
        text = text.replace("\n", " ").replace("\t", " ") if make is _unigram else text
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert lengths[ids].sum() == len(text.encode()) + before, [(tokenizer.id_to_token(i), lengths[i]) for i in ids]


def test_special_tokens_and_uncounted_labels_have_no_bytes(tmp_path: Path) -> None:
    train_bpe(TEXTS * 3, 300, tmp_path / "bpe")
    spelt = (tmp_path / "bpe" / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_str(spelt)
    documents = [tokenizer.encode(text).ids for text in TEXTS]
    end = tokenizer.token_to_id("<|endoftext|>")
    write_prepared(tmp_path / "d", [documents * 4], [documents], vocab_size=300, separator_id=end, tokenizer=spelt)
    lengths = byte_lengths(tmp_path / "d" / "tokenizer", 300)
    assert lengths[end] == 0
    data = TrainData(DataConfig(path=str(tmp_path / "d"), sequence_length=4))
    # Sequences cover a multiple of 4 labels: what they leave out at the end, and the firsts of documents, are known.
    stream = [token for document in documents for token in (*document, end)]
    labels = stream[1 : 4 * data.validation_sequences + 1]
    counted = [token for before, token in zip(stream, labels, strict=False) if before != end]
    assert counted_bytes(data, 99, lengths) == sum(lengths[token] for token in counted) > 50
