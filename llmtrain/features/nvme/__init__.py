"""ZeRO-Infinity: the optimizer's state on a disk of each host (`offload_optimizer.device: nvme` in the JSON)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from llmtrain.base.trees import lookup
from llmtrain.features import Feature

if TYPE_CHECKING:
    import torch
    from deepspeed import DeepSpeedEngine

    from llmtrain.config.run import Run
    from llmtrain.engine.deepspeed.state import State
    from llmtrain.engine.ranks.ranks import Ranks
    from llmtrain.models.language import LanguageModel

SECTION = "zero_optimization.offload_optimizer"
KEY = f"{SECTION}.nvme_path"


class NvmeFeature(Feature):
    def reads_json(self, tree: dict[str, Any], refuse: Callable[[str, Any, str, str], None]) -> Collection[str]:
        if lookup(tree, "zero_optimization.stage") != 3 or lookup(tree, f"{SECTION}.device") != "nvme":
            return ()
        path = lookup(tree, KEY)
        if path is None:
            refuse(KEY, None, "the swap files need a folder on a disk of each host", 'write "nvme_path": "/local/disk"')
        if lookup(tree, f"{SECTION}.ratio") not in (None, 1, "auto"):
            rule = "a ratio keeps a part of the optimizer on the GPU, and a swap file holds all of a sub-group"
            refuse(f"{SECTION}.ratio", lookup(tree, f"{SECTION}.ratio"), rule, "remove it")
        names = ("device", "nvme_path", "buffer_count", "pipeline_read", "pipeline_write")
        of_files = ("block_size", "queue_depth", "intra_op_parallelism")
        return {*(f"{SECTION}.{name}" for name in names), *(f"aio.{name}" for name in of_files)}

    def decided(self, run: Run, ranks: Ranks, *, trains: bool) -> Run:
        if trains and run.mix.swaps:
            from llmtrain.features.nvme.building import check_folder

            with ranks.together():
                check_folder(KEY, lookup(run.deepspeed, KEY))
        return run

    def disks(self, run: Run) -> dict[str, str]:
        return {KEY: lookup(run.deepspeed, KEY)} if run.mix.swaps else {}

    def building(
        self, model: LanguageModel, run: Run, ranks: Ranks, tree: dict[str, Any]
    ) -> AbstractContextManager[dict[str, Any]]:
        if lookup(tree, f"{SECTION}.device") != "nvme":
            return super().building(model, run, ranks, tree)
        from llmtrain.features.nvme.building import building

        return building(model, run, ranks, tree)

    def explain(self, error: Exception, run: Run, device: torch.device) -> str:
        if not run.mix.swaps:
            return ""
        from llmtrain.features.nvme.store import SwapError

        return str(error) if isinstance(error, SwapError) else ""

    def state(self, engine: DeepSpeedEngine) -> State | None:
        if not getattr(engine.optimizer, "swap_optimizer", False):
            return None
        from llmtrain.features.nvme.state import SwappedState

        return SwappedState(engine)


FEATURE = NvmeFeature()
