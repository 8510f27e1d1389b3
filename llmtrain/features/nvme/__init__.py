"""ZeRO-Infinity: the optimizer's state, or the weights, on a disk of each host (`device: nvme` in the JSON)."""

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
    from llmtrain.models.spec import ModelSpec

SECTION = "zero_optimization.offload_optimizer"
KEY = f"{SECTION}.nvme_path"
WEIGHTS_SECTION = "zero_optimization.offload_param"
WEIGHTS_KEY = f"{WEIGHTS_SECTION}.nvme_path"


class NvmeFeature(Feature):
    def reads_json(self, tree: dict[str, Any], refuse: Callable[[str, Any, str, str], None]) -> Collection[str]:
        if lookup(tree, "zero_optimization.stage") != 3:
            return ()
        keys: set[str] = set()
        for section, key in ((SECTION, KEY), (WEIGHTS_SECTION, WEIGHTS_KEY)):
            if lookup(tree, f"{section}.device") == "nvme":
                keys |= {f"{section}.device", key}
                if lookup(tree, key) is None:
                    rule, remedy = "the files need a folder on a disk of each host", 'write "nvme_path": "/local/disk"'
                    refuse(key, None, rule, remedy)
        if KEY not in keys:
            return keys
        if lookup(tree, f"{SECTION}.ratio") not in (None, 1, "auto"):
            rule = "a ratio keeps a part of the optimizer on the GPU, and a swap file holds all of a sub-group"
            refuse(f"{SECTION}.ratio", lookup(tree, f"{SECTION}.ratio"), rule, "remove it")
        names = ("buffer_count", "pipeline_read", "pipeline_write")
        of_files = ("block_size", "queue_depth", "intra_op_parallelism")
        return keys | {f"{SECTION}.{name}" for name in names} | {f"aio.{name}" for name in of_files}

    def decided(self, run: Run, ranks: Ranks, *, trains: bool) -> Run:
        if trains and (folders := self.disks(run)):
            from llmtrain.features.nvme.building import check_folder

            with ranks.together():
                for key, folder in folders.items():
                    check_folder(key, folder)
        return run

    def disks(self, run: Run) -> dict[str, str]:
        keys = {KEY: run.mix.swaps, WEIGHTS_KEY: run.mix.weights_on_disk}
        return {key: lookup(run.deepspeed, key) for key, used in keys.items() if used}

    def building(self, run: Run, spec: ModelSpec, ranks: Ranks) -> AbstractContextManager[Run]:
        if "nvme" not in [lookup(run.deepspeed, f"{section}.device") for section in (SECTION, WEIGHTS_SECTION)]:
            return super().building(run, spec, ranks)
        from llmtrain.features.nvme.building import building

        return building(run, spec, ranks)

    def explain(self, error: Exception, run: Run, device: torch.device) -> str:
        if not self.disks(run):
            return ""
        from llmtrain.features.nvme.store import SwapError

        return str(error) if isinstance(error, SwapError) else ""

    def state(self, engine: DeepSpeedEngine) -> State | None:
        if not getattr(engine.optimizer, "swap_optimizer", False):
            return None
        from llmtrain.features.nvme.state import SwappedState

        return SwappedState(engine)


FEATURE = NvmeFeature()
