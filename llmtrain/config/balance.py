"""Rules of train.balance: runs in which ranks can take unequal shares of a step."""

from __future__ import annotations

from llmtrain.config.batch import Batch
from llmtrain.config.problems import Places, Problems
from llmtrain.config.run import RunConfig
from llmtrain.config.topology import Degrees

MEASURED = "measured"
MOST = 2
"""Times `train.micro_batch` that a forward pass takes at most: what memory has to hold."""


def check_balance(
    run: RunConfig, batch: Batch, degrees: Degrees, path: str, places: Places, problems: Problems
) -> tuple[str, ...]:
    """Refuses train.balance where it cannot be. Returns notes. `path`: of the DeepSpeed JSON."""
    if run.train.balance != MEASURED:
        return ()
    asked = "train.balance measured: "
    if degrees.pipeline > 1:
        problems.add("pipeline.stages", degrees.pipeline, f"{asked}the stages of a pipeline send each other "
                     "micro-batches of one size", "set train.balance to equal, or use ZeRO in place of the pipeline",
                     path)  # fmt: skip
    if degrees.expert > 1:
        problems.add("expert_parallel.autoep_size", degrees.expert, f"{asked}ranks compute each other's tokens in "
                     "every layer, so other sequences would not change what a rank computes",
                     "set train.balance to equal, or remove expert_parallel", path)  # fmt: skip
    if run.model.compile_layers:
        problems.add("model.compile_layers", True, f"{asked}layers are compiled for one shape of a micro-batch, and "
                     "torch gives up after some others", "set it to false or null, or train.balance to equal",
                     places.get("model.compile_layers"))  # fmt: skip
    if run.train.deterministic:
        problems.add("train.deterministic", True, f"{asked}who sums which sequences depends on the clock, and so do "
                     "the last digits", "set one of the two otherwise", places.get("train.deterministic"))  # fmt: skip
    if batch.data_parallel == 1:
        return ("train.balance measured changes nothing here: all ranks work on the same sequences",)
    if batch.micro_batch == 1:
        problems.add("train.micro_batch", 1, f"{asked}every micro-batch of every rank has a sequence, so a slow rank "
                     "would have none to give away", "set it to 4 or more (train.accumulation lower by as much), or "
                     "train.balance to equal", places.get("train.micro_batch"))  # fmt: skip
    return ()
