"""The forms of training that the tests prove: few cells in which any two settings that go together meet.

A covering array of strength 2, made by a greedy search (AETG, Cohen et al. 1997) without random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

from tests.helpers.families import FAMILIES, tied
from tests.helpers.training import Case

Pair = tuple[tuple[str, Any], tuple[str, Any]]
Cell = dict[str, Any]

FACTORS: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "fp32", "fp16", "bf16 moments", "autocast"),
    "offload": ("all", "none", "optimizer"),
    "pipeline": (2, 1),
    "stage": (1, 3, 0, 2),
    "optimizer": ("lion", "adamw", "muon"),
    "tensor": (2, 1),
    "tied": (False, True),
    "adapter": ("saved", "lora", "nf4", "none", "dora"),
    "experts": ("shared", "whole", "none"),
    "objective": ("online", "documents", "orpo", "kto", "reward", "next_token", "column", "dpo", "distill"),
    "sequence": (1, 2),
    "recompute": (False, True),
    "frozen": (False, True),
    "own": (True, False),
}
"""Setting -> its values. `documents`: next_token with a z-loss, NEFTune and data.isolate_documents. `column`: distill
with top_k and NEFTune. `online`: dpo with that reference. `saved`: LoRA with modules_to_save. `whole`: experts that
each rank has all of. `frozen`: one layer of two, by model.freeze. `recompute`: one layer of two, or that of each
pipeline stage, with attention kept. `own`: learning rates and weight decay of single parameters. A cell without
pipeline, tensor and sequence has two data-parallel ranks. The order is one with which the search needs few cells."""


LATER = {("precision", "autocast")}
"""Values that have come after the cells had been proved."""
_PLACE = {name: place for place, name in enumerate(FACTORS)}


def _in_order(pair: Pair) -> Pair:
    one, other = pair
    return (one, other) if _PLACE[one[0]] < _PLACE[other[0]] else (other, one)


_REFUSED: dict[Pair, str] = {
    (("objective", "online"), ("adapter", "none")): "without its adapter as the reference",
    (("objective", "online"), ("frozen", True)): "without its adapter as the reference",
    **{
        (("adapter", kind), ("frozen", True)): "all parameters of the model are frozen"
        for kind in ("saved", "lora", "nf4", "dora")
    },
    **{
        (("objective", objective), ("adapter", "nf4")): "with weights that are not packed"
        for objective in ("dpo", "kto")
    },
    (("adapter", "nf4"), ("stage", 3)): "needs whole maps",
    (("adapter", "nf4"), ("pipeline", 2)): "needs whole maps",
    (("adapter", "nf4"), ("tensor", 2)): "needs whole maps",
    (("adapter", "nf4"), ("offload", "all")): "needs whole maps|only ZeRO 3 partitions parameters",
    (("adapter", "dora"), ("tensor", 2)): "needs whole maps on each rank",
    (("stage", 0), ("offload", "optimizer")): "only ZeRO can offload the optimizer",
    **{(("stage", stage), ("offload", "all")): "only ZeRO 3 partitions parameters" for stage in (0, 1, 2)},
    **{(("stage", stage), ("pipeline", 2)): "a pipeline accumulates whole gradients" for stage in (2, 3)},
    (("offload", "all"), ("pipeline", 2)): "only ZeRO 3 partitions parameters|a pipeline accumulates whole",
    **{(("precision", "bf16 moments"), ("offload", d)): "CPU optimizers keep moments" for d in ("optimizer", "all")},
    (("precision", "bf16 moments"), ("optimizer", "muon")): "Muon's momentum is kept by DeepSpeed",
    **{(("offload", device), ("optimizer", "muon")): "which needs the device" for device in ("optimizer", "all")},
    (("optimizer", "muon"), ("tensor", 2)): "Muon orthogonalises full matrices",
    (("experts", "shared"), ("optimizer", "muon")): "optim.name",
    (("experts", "shared"), ("tensor", 2)): "DeepSpeed 0.19 can share experts only",
    **{
        (("precision", "autocast"), form): "send hidden states of one dtype"
        for form in (("pipeline", 2), ("tensor", 2), ("sequence", 2), ("experts", "shared"))
    },
    (("precision", "autocast"), ("adapter", "nf4")): "packed maps are unpacked",
    (("pipeline", 2), ("sequence", 2)): "DeepSpeed's pipeline numbers its ranks",
}
REFUSED = {_in_order(pair): words for pair, words in _REFUSED.items()}
"""Two settings that the configuration refuses whatever the others are -> words of the reason."""
ELSEWHERE: dict[Pair, str] = {
    (("offload", "optimizer"), ("optimizer", "lion")): "test_resume.py: CPULion takes a compiler's minute",
    (("offload", "all"), ("optimizer", "lion")): "test_resume.py",
    (("pipeline", 2), ("tensor", 2)): "test_parity_matrix.py: four ranks",
    (("pipeline", 2), ("experts", "shared")): "test_experts.py: four ranks",
    (("tensor", 2), ("sequence", 2)): "test_sequence.py: four ranks",
}
"""Two settings that go together and are no cell's -> where they are proved."""
THREE: Cell = {"pipeline": 2, "offload": "optimizer", "own": True}
"""Refused together (config/topology.py)."""
TIE: Cell = {"precision": "autocast", "experts": "whole", "objective": "reward"}
"""At step 3 the last token of a record has two experts so near that rounding decides: 0.042 nats with `own`, 0.002
without it, and 0.003 without experts. Plain PyTorch, its weights moved by half a unit of bf16, is 0.03 nats from
itself in 2 of 42 steps, and within 0.006 in the others."""
APART = REFUSED.keys() | set(map(_in_order, ELSEWHERE))
RANKS = 2


def pairs_of(cell: Cell) -> set[Pair]:
    """In the order of FACTORS."""
    return set(combinations(((name, cell[name]) for name in FACTORS if name in cell), 2))


def all_pairs() -> Iterator[Pair]:
    """Any two settings, those that are refused as well."""
    for one, other in combinations(FACTORS, 2):
        yield from (((one, a), (other, b)) for a in FACTORS[one] for b in FACTORS[other])


def goes(cell: Cell) -> bool:
    """No two of these settings are apart, nor the three of `THREE` or of `TIE`."""
    return not pairs_of(cell) & APART and not _together(cell)


def _together(cell: Cell) -> bool:
    return any(some.items() <= cell.items() for some in (THREE, TIE))


def covering() -> list[Cell]:
    """Cells with every pair that is not apart; those of LATER behind the others, which stay as they were."""
    pairs = [pair for pair in all_pairs() if pair not in APART]
    cells = list[Cell]()
    for known in ([pair for pair in pairs if LATER.isdisjoint(pair)], pairs):
        met = set[Pair]().union(*map(pairs_of, cells))
        cells += _covering({pair: None for pair in known if pair not in met})
    return cells


def _covering(left: dict[Pair, None]) -> list[Cell]:
    cells = []
    while left:
        cell = dict(next(iter(left)))
        while free := [name for name in FACTORS if name not in cell]:
            # The setting, of all that are free, which makes most new pairs with those that are chosen.
            gains = [
                (sum(pair in left for pair in pairs), -rank, -index, name, value)
                for rank, name in enumerate(free)
                for index, value in enumerate(FACTORS[name])
                if not APART.intersection(pairs := [_in_order((chosen, (name, value))) for chosen in cell.items()])
                and not _together(cell | {name: value})
            ]
            *_, name, value = max(gains, key=lambda gain: gain[:3])
            cell[name] = value
        for pair in pairs_of(cell):
            left.pop(pair, None)
        cells.append({name: cell[name] for name in FACTORS})
    return cells


def each_value(cells: list[Cell], settings: Iterable[str] = FACTORS) -> list[int]:
    """Indices of few cells that never offload and have each value of these settings, but for offload."""
    left = {(name, value) for name in settings if name != "offload" for value in FACTORS[name]}
    free = [
        index for index, cell in enumerate(cells) if cell["offload"] == resumed_as(cells, index)["offload"] == "none"
    ]
    chosen = list[int]()
    while left:
        chosen.append(max(free, key=lambda index: (len(left & cells[index].items()), -index)))
        assert left & cells[chosen[-1]].items(), left
        left -= cells[chosen[-1]].items()
    return sorted(chosen)


_ADAPTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "lora": {"r": 4, "alpha": 8.0},
    "dora": {"r": 4, "alpha": 8.0, "dora": True},
    "saved": {"r": 4, "alpha": 8.0, "modules_to_save": ["model.embed_tokens", "*norm"]},
    "nf4": {"r": 4, "alpha": 8.0, "quantize": "nf4"},
}
_OWN: dict[str, dict[str, Any]] = {
    "none": {
        "layer_decay": 0.5,
        "lr_factor_of": {"*self_attn*": 3.0},
        "weight_decay_of": {"*norm*": 0.3, "*q_proj*": 0.0},
    },
    # With 3.0 a token of the cell in fp16 with experts and a reward meets a tie: a third expert's logit is 4e-4 below
    # the second's in fp32, fp16 moves them by 2e-3, and the first order of summation of plain PyTorch takes the third.
    "an adapter": {"layer_decay": 0.5, "lr_factor_of": {"*lora_B*": 2.0}, "weight_decay_of": {"*lora_A*": 0.3}},
}
_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {},
    "bf16 moments": {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"dtype": "bfloat16"}},
}
_OBJECTIVES: dict[str, dict[str, Any]] = {
    "documents": {"objective": {"name": "next_token", "z_loss": 0.05}, "noise": 5.0, "isolate_documents": True},
    "column": {"objective": {"name": "distill", "top_k": 7}, "noise": 5.0},
    "online": {"objective": {"name": "dpo", "reference": "online"}},
}
STEPS, HALF, ACCUMULATION, GLOBAL_BATCH = 3, 2, 2, 4


def layout(cell: Cell) -> dict[str, Any]:
    """Fields of a Case: the settings that may change at a resume."""
    return {
        "recompute": {"layers": 1, "keep": "attention"} if cell["recompute"] else {},
        "ranks": RANKS,
        "stage": cell["stage"],
        "offload": "" if cell["offload"] == "none" else cell["offload"],
        **{name: cell[name] for name in ("pipeline", "tensor", "sequence")},
        "expert": 2 if cell["experts"] == "shared" else 1,
        "extra": _PRECISIONS[cell["precision"]],
    }


def case_of(cell: Cell) -> Case:
    """The cell as tests/helpers/parity.py trains it."""
    family = FAMILIES["llama" if cell["experts"] == "none" else "mixtral"]
    return Case(
        model=tied({**family, "num_hidden_layers": 2}, cell["tied"]),
        accumulation=ACCUMULATION,
        global_batch=GLOBAL_BATCH,
        precision=cell["precision"].split()[0],
        device_fp16=cell["precision"] == "fp16",
        optimizer=cell["optimizer"],
        own=_OWN["none" if cell["adapter"] == "none" else "an adapter"] if cell["own"] else {},
        adapter=_ADAPTERS[cell["adapter"]],
        freeze=("model.layers.0.*",) if cell["frozen"] else (),
        steps=STEPS,
        ema=True,
        **_OBJECTIVES.get(cell["objective"], {"objective": {"name": cell["objective"]}}),
        **layout(cell),
    )


LAYOUT = ("stage", "offload", "pipeline", "tensor", "sequence", "recompute")


def resumed_as(cells: list[Cell], index: int) -> Cell:
    """The cell in the layout of the next one that is another and goes with what the cell trains."""
    cell = cells[index]
    for other in cells[index + 1 :] + cells[:index]:
        moved = cell | {name: other[name] for name in LAYOUT}
        if cell["experts"] != "none":
            moved["experts"] = "shared" if other["experts"] == "shared" else "whole"
        if goes(moved) and any(moved[name] != cell[name] for name in LAYOUT[:-1]):
            return moved
    raise AssertionError(f"{cell} goes on in no other layout")
