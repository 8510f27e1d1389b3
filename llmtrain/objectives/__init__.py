"""What is known of objectives without torch: their fields, requirements, units, figures and formulas.

Importing this package defines all objectives. llmtrain/engine/losses computes them from a model's output.
"""

from llmtrain.objectives import by_token, preferences

__all__ = ["by_token", "preferences"]
