"""Objectives as far as they are known without torch: fields, needs, units, figures and formulas of each.

Importing the package defines all of them. llmtrain/engine/losses computes them from a model's output.
"""

from llmtrain.objectives import by_token, preferences

__all__ = ["by_token", "preferences"]
