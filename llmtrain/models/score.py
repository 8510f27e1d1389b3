"""A decoder with a score head instead of a language-model head: transformers' ForSequenceClassification with one label.

As in a folder's config.json, the configuration says what kind of model it is: `architectures` names the class, and
`id2label` has one entry.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from llmtrain.base.errors import ModelError
from llmtrain.models.transformers_private import score_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


SCORE, WEIGHT = "score", "score.weight"
"""The head, and its one parameter: [1, H], no bias."""
_SUFFIX = "ForSequenceClassification"


def gives_scores(config: PreTrainedConfig) -> bool:
    """Return True if a model of this configuration gives one score for a text."""
    names = getattr(config, "architectures", None)
    listed = names if isinstance(names, list) else []  # a file may have anything there
    return any(str(name).endswith(_SUFFIX) for name in listed) and config.num_labels == 1


def with_score(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of the configuration for a decoder with a score head. Raises ModelError if transformers has
    none."""
    kind = score_class(config)
    if kind is None:
        raise ModelError(
            f"objective.name reward: transformers has no {_SUFFIX} for {config.model_type}, but a reward model is "
            "saved as one. Take another family, such as llama or qwen3."
        )
    made = copy.deepcopy(config)
    made.architectures = [kind]
    made.num_labels = 1
    return made


def score_layer(hf: PreTrainedModel) -> nn.Linear:
    """Return the model's score head. Raises ModelError: it has no linear layer `score` with one output and no bias."""
    layer = getattr(hf, "score", None)
    if not isinstance(layer, nn.Linear) or layer.out_features != 1 or layer.bias is not None:
        raise ModelError(
            f"model: a reward needs a linear layer `score` with one output and no bias, which {type(hf).__name__} does "
            f"not have (it is {type(layer).__name__}). Take another family, such as llama or qwen3."
        )
    return layer


@contextlib.contextmanager
def at_the_last_place(config: PreTrainedConfig) -> Iterator[None]:
    """A context in which transformers' classes read the score at a row's last token, even a padding token: a pipeline's
    last stage has no tokens, and could not recognise padding. Models without a score are not changed."""
    if not gives_scores(config):
        yield
        return
    text = config.get_text_config()
    padding, text.pad_token_id = text.pad_token_id, None
    try:
        yield
    finally:
        text.pad_token_id = padding
