"""Any two settings of a run that go together, in one table of cells (tests/helpers/covering.py).

A cell trains, saves, becomes a Hugging Face folder, and goes on in the layout of another cell. Losses, gradient norms,
all parameters and their average (ema) after each step and the exported tensors are those of plain PyTorch in one
process: the reference and the tolerances are those of `llmtrain parity`.

More than 20 CPU s: each cell trains on two ranks, is exported and resumed.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from llmtrain.base.errors import ConfigError
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.load import load_checkpoint
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.run import Run
from llmtrain.models.adapter import plain_name
from llmtrain.models.parameters import PREFIX, WEIGHTS
from llmtrain.parity.compare import VARIANT, Trace, compare
from llmtrain.parity.plain import orders, train_plainly
from llmtrain.parity.worlds import report
from tests.helpers import covering
from tests.helpers.covering import APART, FACTORS, HALF, REFUSED, STEPS, all_pairs, case_of, pairs_of, resumed_as
from tests.helpers.parity import known_noise, resolved
from tests.helpers.processors import fp16, on_device
from tests.helpers.training import Case

pytestmark = pytest.mark.needs("peft")
CELLS = covering.covering()
KINDS = covering.each_value(CELLS, ("precision", "optimizer", "adapter", "experts"))
"""One for each kind of arithmetic: `make test-processors` trains these."""
FIRST = sorted({*covering.each_value(CELLS)} - {*KINDS})
"""With these each value of each setting is there; offload, which compiles an optimizer, is left to the other cells."""
PLAIN: covering.Cell = {
    "precision": "fp32", "offload": "none", "pipeline": 1, "optimizer": "adamw", "tensor": 1, "tied": False,
    "adapter": "none", "experts": "none", "objective": "next_token", "sequence": 1, "recompute": False,
    "frozen": False, "own": False,
}  # fmt: skip


def part(run: Run, first: int, last: int, folder: str, checkpoint: str | None) -> Any:
    """Steps [first, last) on a rank: from first values, with a save at the end; or from a checkpoint. Returns rank 0's
    trace, and the checkpoint."""
    from llmtrain.features import parts_of
    from llmtrain.parity.trainer import set_up, train_steps
    from tests.helpers.training import counted, joined, save_checkpoint

    ranks = joined()
    setup = set_up(run, ranks)
    engine = setup.engine
    if checkpoint is None:
        setup.write()
    else:
        trainer = TrainerState.read(Path(checkpoint))
        load_checkpoint(engine, CheckpointReader(Path(checkpoint)), trainer, ranks)
    setup.prove()
    (ema,) = parts_of(setup)
    if checkpoint is not None:
        ema.restore(None, Path(checkpoint))
    trace = train_steps(setup, first, last, [ema])
    if checkpoint is None:
        state = {
            "step": last,
            "tokens": 0,
            **counted(engine),
            "model_config": setup.spec.config.to_dict(),
            "run": asdict(run.config),
        }
        checkpoint = str(save_checkpoint(engine, Path(folder), last, state, run, ranks, more=ema.state))
    engine.close()
    return vars(trace) if ranks.rank == 0 else None, checkpoint


def noisy_part(run: Run, *args: Any) -> Any:
    with known_noise(run.config.model.neftune_noise_alpha):
        return part(run, *args)


def content(form: Case) -> Case:
    """What the cell trains: the same in every layout."""
    tree = {"bf16": form.extra.get("bf16", {"enabled": True})} if form.precision == "bf16" else {}
    return replace(
        form, ranks=2, stage=0, offload="", pipeline=1, tensor=1, sequence=1, expert=1, recompute={}, extra=tree
    )


def plainly(form: Case) -> list[Trace]:
    """In the precision of the form. fp32: two orders of summation, for what rounding can do."""
    run = resolved(form)
    with fp16(form.device_fp16), known_noise(form.noise):
        ways = orders(run.config.model, run.batch)[: 2 if form.precision == "fp32" else 1]
        return [train_plainly(run, STEPS, order, torch.device("cpu")) for order in ways]


TOLERANCES = {"bf16": (0.03, 0.1, 0.8), "autocast": (0.03, 0.1, 0.8), "fp16": (4e-3, 0.02, 0.4)}
"""Below fp32, where few steps do not show what rounding can do: of the loss in nats, of the gradient norm, and of each
tensor's movement as a share. An update of a gradient that is all rounding is anyone's, and a sign's more so. Twice what
is seen; a tensor that does not train is off by 1."""
BY_SIGN = 0.95


def compared(got: Trace, form: Case, *, split: bool) -> list[str]:
    """Lines of a report; none: it is what plain PyTorch does."""
    want = plainly(content(form))
    if form.precision == "fp32":
        verdict = compare(got, want, fp32=True, split=split)
        return [] if verdict.passed else report(form.name, verdict, "")
    (plain,) = want
    start, end, mine = plain.parameters[0], plain.parameters[-1], got.parameters[-1]
    loss = max(abs(a - b) for a, b in zip(got.losses, plain.losses, strict=True))
    norm = max((abs(a / b - 1) for a, b in zip(got.norms, plain.norms, strict=bool(plain.norms))), default=0.0)
    moved = {name: float((end[name] - start[name]).norm()) for name in end}
    shares = {name: float((mine[name] - end[name]).norm()) / (moved[name] or 1e-6) for name in end}
    worst = max(shares, key=lambda name: shares[name])
    found = {"loss": loss, "gradient norm": norm, worst: shares[worst]}
    most = TOLERANCES[form.precision]
    allowed = (*most[:2], BY_SIGN if plain.by_sign else most[2])
    return [
        f"{form.name}: {what} off by {a:.2g} of {b}"
        for (what, a), b in zip(found.items(), allowed, strict=True)
        if not a < b
    ]


def prove(pools: Any, index: int, place: Path) -> None:
    """A cell, then the layout of another one, against plain PyTorch; and the folder exported in between."""
    form, then = case_of(CELLS[index]), case_of(resumed_as(CELLS, index))
    first, checkpoint = pools(form.ranks).run(
        on_device, form.device_fp16, noisy_part, resolved(form), 0, HALF, str(place / "run"), None
    )[0]
    rest, _ = pools(then.ranks).run(
        on_device, form.device_fp16, noisy_part, resolved(then), HALF, STEPS, "", checkpoint
    )[0]
    trace = Trace(
        losses=first["losses"] + rest["losses"],
        norms=first["norms"] + rest["norms"],
        parameters=first["parameters"] + rest["parameters"][1:],
        gradients=first["gradients"],
    )
    split = max(form.tensor, form.sequence, then.tensor, then.sequence) > 1
    wrong = compared(trace, form, split=split)
    assert not wrong, "\n".join([*wrong, f"then in the form {then.name}"])
    for name, value in first["parameters"][HALF].items():
        assert torch.equal(rest["parameters"][0][name], value), f"{name} is another after the resume"
    of_ema = VARIANT.format("ema", "")
    own = {name: value for name, value in first["parameters"][HALF].items() if not name.startswith(of_ema)}
    is_exported(Path(checkpoint), place / "hf", own)


def is_exported(checkpoint: Path, out: Path, values: dict[str, Tensor]) -> None:
    """What transformers or peft will read is in `values`; for a model without an adapter that is all of them."""
    export_hf(checkpoint, out, "fp32", check="none")
    if (out / WEIGHTS).exists():
        found = {plain_name(name.removeprefix(PREFIX)): value for name, value in load_file(out / WEIGHTS).items()}
        assert {name for name in values if ".lora_" in name} <= found.keys()
    else:
        kind = AutoModelForSequenceClassification if "score.weight" in values else AutoModelForCausalLM
        found = dict(kind.from_pretrained(out, dtype=torch.float32).named_parameters())
        assert found.keys() == values.keys()
    for name, value in found.items():
        tied = "model.embed_tokens.weight" if name == "lm_head.weight" and name not in values else name
        assert torch.equal(value, values[tied]), name


def named(index: int) -> str:
    return "-".join(map(str, CELLS[index].values()))


@pytest.mark.parametrize("index", KINDS, ids=named)
def test_a_cell_of_each_arithmetic_is_plain_pytorch(pools: Any, tmp_path: Path, index: int) -> None:
    prove(pools, index, tmp_path)


@pytest.mark.parametrize("index", FIRST, ids=named)
def test_a_cell_is_plain_pytorch(pools: Any, tmp_path: Path, index: int) -> None:
    prove(pools, index, tmp_path)


@pytest.mark.parametrize("index", sorted({*range(len(CELLS))} - {*FIRST} - {*KINDS}), ids=named)
def test_every_other_cell_is_plain_pytorch(pools: Any, tmp_path: Path, index: int) -> None:
    prove(pools, index, tmp_path)


def test_any_two_settings_that_go_together_meet_in_a_cell() -> None:
    met = set[covering.Pair]().union(*map(pairs_of, CELLS))
    assert met == set(all_pairs()) - APART


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: "-".join(f"{name} {value}" for name, value in pair))
def test_two_settings_that_are_no_cells_are_refused(pair: covering.Pair) -> None:
    """At each ZeRO stage that goes with both; where there is none, at every stage."""
    asked = dict(pair)
    cells = [PLAIN | {"stage": stage} | asked for stage in FACTORS["stage"]]
    for cell in [cell for cell in cells if pairs_of(cell) & APART == {pair}] or cells:
        with pytest.raises(ConfigError, match=REFUSED[pair]):
            resolved(case_of(cell))
