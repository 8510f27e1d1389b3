from llmtrain.base.imports import without

with without("mlflow"):
    import deepspeed  # noqa: F401
