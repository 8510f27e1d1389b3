"""llmtrain: train large language models with DeepSpeed."""

__version__ = "0.1.0"
