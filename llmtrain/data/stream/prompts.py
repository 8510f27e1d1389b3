"""The texts that a run continues at its evaluations: `train.sample_prompts` as tokens."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.base.errors import DataError
from llmtrain.config.run import RunConfig
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.tokenize import Encoder


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a run by its data's tokenizer."""

    encoder: Encoder
    texts: list[str]
    ids: list[list[int]]
    ends: set[int]
    """Tokens at which a continuation ends."""
    tokens: int
    """Longest continuation, in tokens."""

    @classmethod
    def of(cls, run: RunConfig, data: TrainData) -> Prompts | None:
        """Those of a run; None: it has none. Raises DataError: one is too long, or has no token."""
        texts, tokens = run.train.sample_prompts, run.train.sample_tokens
        if not texts:
            return None
        assert isinstance(texts, list), "a file is read with the configuration"
        encoder = Encoder(data.tokenizer_dir)
        ids = [each.tolist() for each in encoder.encode(texts)]
        for text, each in zip(texts, ids, strict=True):
            if not each or len(each) + tokens > data.sequence_length:
                raise DataError(
                    f"train.sample_prompts {text[:40]!r}: has {len(each)} tokens; wanted is 1 or more, and with "
                    f"train.sample_tokens {tokens} at most data.sequence_length {data.sequence_length}"
                )
        stops = [token for manifest in data.manifests for token in (manifest.chat or {}).get("stop_tokens", ())]
        ends = {data.separator_id, *(number for token in stops if (number := encoder.id_of(token)) is not None)}
        return cls(encoder=encoder, texts=list(texts), ids=ids, ends=ends, tokens=tokens)

    def text(self, row: int, new: list[int]) -> str:
        """The continuation of a prompt."""
        before = self.encoder.decode(self.ids[row])
        return self.encoder.decode(self.ids[row] + new)[len(before) :]
