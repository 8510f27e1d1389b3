"""A decoder with a score instead of likelihoods: transformers' ForSequenceClassification with one label.

The configuration itself names the kind of model, as in a folder's config.json: `architectures` names the class, and
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
    """True if a model of this configuration gives one score for a text."""
    names = getattr(config, "architectures", None)
    listed = names if isinstance(names, list) else []  # a file may have anything there
    return any(str(name).endswith(_SUFFIX) for name in listed) and config.num_labels == 1


def with_score(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the configuration for a decoder with a score. Raises ModelError: transformers has no such class."""
    kind = score_class(config)
    if kind is None:
        raise ModelError(
            f"objective.name reward: transformers has no {_SUFFIX} for {config.model_type}, and a reward model is "
            "saved as one. Take another family, such as llama or qwen3."
        )
    made = copy.deepcopy(config)
    made.architectures = [kind]
    made.num_labels = 1
    return made


def score_layer(hf: PreTrainedModel) -> nn.Linear:
    """Raises ModelError: no linear layer called `score`."""
    layer = getattr(hf, "score", None)
    if not isinstance(layer, nn.Linear) or layer.out_features != 1 or layer.bias is not None:
        raise ModelError(
            f"model: {type(hf).__name__} has no linear layer `score` without a bias and with one output "
            f"({type(layer).__name__}), which a reward is read from. Take another family, such as llama or qwen3."
        )
    return layer


@contextlib.contextmanager
def at_the_last_place(config: PreTrainedConfig) -> Iterator[None]:
    """Context in which transformers' classes read a score at the last token, even a padding token, which a pipeline's
    last stage, without tokens, could not recognise. Other models are unchanged."""
    if not gives_scores(config):
        yield
        return
    text = config.get_text_config()
    padding, text.pad_token_id = text.pad_token_id, None
    try:
        yield
    finally:
        text.pad_token_id = padding
