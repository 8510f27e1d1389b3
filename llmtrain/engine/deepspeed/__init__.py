from llmtrain.base.lean import without

with without("mlflow"):
    import deepspeed  # noqa: F401
