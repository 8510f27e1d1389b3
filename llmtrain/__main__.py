"""`python -m llmtrain` is `llmtrain`."""

from llmtrain.cli import run

run()
