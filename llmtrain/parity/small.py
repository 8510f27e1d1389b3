"""The user's model with the same structure and small sizes."""

from __future__ import annotations

from typing import Any

from llmtrain.config.run import ModelConfig
from llmtrain.models.build import facts, load_config
from llmtrain.models.structure.shrink import shrunk_config, without_dropout
from llmtrain.topology import Degrees


def small_model(model: ModelConfig, degrees: Degrees) -> tuple[dict[str, Any], float]:
    """(fields of its config.json, its parameters over those of the user's model). Raises ModelError."""
    config = load_config(model)
    small = without_dropout(
        shrunk_config(
            config,
            layers=max(4, 2 * degrees.pipeline),
            kv_heads=max(4, degrees.tensor * degrees.sequence),
            experts=max(4, 2 * degrees.expert),
            positions=64,
        )
    )
    fields = small.to_dict()
    for key in ("architectures", "transformers_version", "dtype", "_name_or_path"):
        fields.pop(key, None)
    fields["model_type"] = config.model_type
    parameters = facts(ModelConfig(config=fields)).parameters
    return fields, parameters / facts(model).parameters
