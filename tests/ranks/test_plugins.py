"""A plugin's optimizer, metric and objective over pairs on several ranks, against plain PyTorch in one process, fp32.

Tolerances: those of test_parity.py, for the same reasons.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmtrain.base.choice import Entry
from llmtrain.config import plugin_import
from llmtrain.data.stream.train_data import TrainData
from llmtrain.engine.losses.function import NEXT_TOKEN
from llmtrain.engine.losses.with_metrics import quotients, with_metrics
from llmtrain.engine.ranks.ranks import AgreedError
from llmtrain.objectives.objective import Objective
from llmtrain.training.proofs import prove_alike
from tests.gpu.test_syncs import recorded_waits
from tests.helpers.answers import answers_case, plain_steps, trained_answers
from tests.helpers.launching import REPO
from tests.helpers.preference import Plain, prepared_preferences
from tests.helpers.training import (
    Case,
    batches,
    case_data,
    joined,
    largest_difference,
    make_engine,
    plain_model,
    plain_pytorch,
)
from tests.ranks.test_resume import END, HALF, load_and_go_on, save_in_the_middle

MINE = """
from dataclasses import dataclass
from typing import ClassVar
import torch
import torch.nn.functional as F
from llmtrain import Metric, Optimizer, Pairs, bounded

@dataclass(frozen=True, kw_only=True)
class Momentum(Optimizer, choice="momentum"):
    state: ClassVar = ("momentum_buffer",)
    rate: float = bounded(0.9, at_least=0, below=1)

    def build(self, groups):
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.rate)

@dataclass(frozen=True, kw_only=True)
class Root(Optimizer, choice="root"):
    state: ClassVar = ("square_avg",)

    def build(self, groups):
        return torch.optim.RMSprop(groups, lr=self.lr, alpha=0.9, eps=1e-6)

@dataclass(kw_only=True)
class Rare(Metric, entry="rare"):
    below: float = 0.002

    def values(self, nll, labels):
        return (-nll).exp() < self.below

@dataclass(kw_only=True)
class Weighted(Metric, entry="weighted"):
    def values(self, nll, labels):
        return nll, labels + 1

@dataclass(frozen=True, kw_only=True)
class Hinge(Pairs, choice="hinge"):
    def losses(self, a):
        margin = self.beta * (a.mean[:, 0] - a.mean[:, 1])
        return F.relu(1 - margin), margin
"""
TWO_RATES = str(REPO / "examples/two_rates.py")


class TenTimes(torch.optim.AdamW):
    """The first group at ten times the learning rate."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] *= 10
        return super().step(closure)


def plain_two_rates(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    table, *matrices = groups[0]["params"]  # the embedding is a model's first matrix
    groups = [{**groups[0], "params": [table]}, {**groups[0], "params": matrices}, groups[1]]
    return TenTimes(groups, lr=lr, betas=(0.9, 0.95))


OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "two_rates": plain_two_rates,
    "momentum": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "root": lambda groups, lr: torch.optim.RMSprop(groups, lr=lr, alpha=0.9, eps=1e-6),
}


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plugin") / "mine.py"
    path.write_text(MINE)
    return str(path)


def with_plugin(path: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """On a rank: call the function in a process that knows the plugin."""
    plugin_import.use([path, TWO_RATES])
    try:
        return function(*arguments)
    finally:
        plugin_import.use([])


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        ("momentum", (2, {"stage": 3}), (2, {"stage": 1, "tensor": 2})),
        ("root", (2, {"stage": 2}), (1, {"stage": 0})),
        ("two_rates", (2, {"stage": 3}), (2, {"stage": 1})),
        pytest.param("root", (1, {"stage": 0}), (4, {"stage": 1, "pipeline": 2}), marks=pytest.mark.slow),
        pytest.param("momentum", (2, {"stage": 1, "offload": "optimizer"}), (4, {"stage": 3}), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_optimizer_trains_and_goes_on_in_another_form(pools, small_data, tmp_path, mine, name, saved, loaded):
    """The checkpoint holds its moments by the elements of Hugging Face's tensors, as those of adamw."""
    lr = {"momentum": 0.03}.get(name, 3e-4)
    first, second = (Case(data=small_data, steps=END, optimizer=name, lr=lr, **form) for _, form in (saved, loaded))
    want = plain_pytorch(Case(data=small_data, steps=END, lr=lr), build=OPTIMIZERS[name])
    got, path = pools(saved[0]).run(with_plugin, mine, save_in_the_middle, first, str(tmp_path))[0]
    again = pools(loaded[0]).run(with_plugin, mine, load_and_go_on, second, path)[0]
    for each in (got, again):
        assert max(abs(a - b) for a, b in zip(each.losses, want.losses[HALF:], strict=True)) < 1e-5
        assert largest_difference(each.parameters, want.parameters) < 1e-5
    began = dict(plain_model(first).named_parameters())
    assert largest_difference(want.parameters, began) > 1e-3  # a hundred times what is tolerated


def measured(case: Case) -> tuple[dict[str, float], dict[str, int]]:
    """The metrics of a global batch, and the lines that would wait for a device."""
    engine, _ = make_engine(case)
    metrics = {name: Entry.SECTIONS["metrics"][name]() for name in ("rare", "weighted")}
    source = batches(case, (engine.mesh.place.data, engine.mesh.degrees.data), case.accumulation)
    waits: Counter[str] = Counter()
    with recorded_waits(waits):
        figures, _ = engine.evaluate(next(source).micro_batches, with_metrics(NEXT_TOKEN, metrics))
    source.close()  # type: ignore[attr-defined]
    engine.close()
    return quotients(figures), dict(waits)


@pytest.mark.parametrize(
    "form",
    [
        {"stage": 3, "accumulation": 3},
        {"stage": 1, "pipeline": 2, "accumulation": 3},
        {"stage": 3, "sequence": 2},
        {"stage": 1, "tensor": 2},
    ],
    ids=str,
)
def test_a_metric_is_a_mean_over_all_tokens_whoever_has_them(pools, small_data, mine, form):
    case = Case(data=small_data, **form)
    got, waits = pools(2).run(with_plugin, mine, measured, case)[-1]
    assert not [where for where in waits if "with_metrics.py" in where], waits
    (micro,) = next(batches(Case(data=small_data), (0, 1), 1)).micro_batches
    with torch.no_grad():
        logits = plain_model(case)(input_ids=micro.inputs, position_ids=micro.positions, use_cache=False).logits
    nll = F.cross_entropy(logits.flatten(0, 1), micro.labels.flatten(), reduction="none", ignore_index=-100)
    counts = micro.labels.flatten() >= 0
    nll, weights = nll[counts], micro.labels.flatten()[counts] + 1
    rare = float(((-nll).exp() < 0.002).float().mean())
    assert got["rare"] == pytest.approx(rare, abs=1e-6) and 0.1 < rare < 0.9
    assert got["weighted"] == pytest.approx(float((nll * weights).sum() / weights.sum()), abs=1e-5)
    assert got["loss"] == pytest.approx(float(nll.mean()), abs=1e-5) and got["loss"] != got["weighted"]
    assert got.keys() == {"loss", "rare", "weighted"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared_preferences(tmp_path_factory.mktemp("pairs"))


def on_pairs(case: Case) -> list[dict[str, float]]:
    return trained_answers(case, Objective.of("hinge", beta=2.0), TrainData(case_data(case)))[1]


@pytest.mark.needs("peft")
def test_an_objective_over_pairs_trains_as_by_its_definition(pools, mine, pairs):
    case = answers_case(pairs, stage=3, accumulation=2)
    got = pools(2).run(with_plugin, mine, on_pairs, case)[0]
    plain = Plain(plain_model(case), pairs)

    def loss(rows: list[int]) -> torch.Tensor:
        s, n = plain.answers(rows)
        return F.relu(1 - 2.0 * (s[::2] / n[::2] - s[1::2] / n[1::2])).mean()

    want = plain_steps(case, plain.hf, loss)
    assert [each["loss"] for each in got] == pytest.approx(want, abs=1e-5)
    assert want[-1] < want[0] and all(0 < each["pairs/accuracy"] < 1 for each in got)


SEVERAL = """
import os, random
from dataclasses import dataclass
from llmtrain import ByToken, Pairs

@dataclass(frozen=True, kw_only=True)
class Odd(ByToken, choice="odd"):
    how: str = "right"

    def terms(self, nll):
        factor = {"rank": 1 + int(os.environ["RANK"]), "random": random.random()}.get(self.how, 1)
        return nll * factor

@dataclass(frozen=True, kw_only=True)
class Bent(Pairs, choice="bent"):
    def losses(self, a):
        margins = a.log_prob[:, 0] - a.log_prob[:, 1] + 0.1 * int(os.environ["RANK"])
        return -margins, margins
"""


def proved_alike(name: str, how: dict[str, str]) -> str:
    try:
        prove_alike(Objective.of(name, **how), joined())
    except AgreedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "how", "told"),
    [
        ("odd", {}, ""),
        ("odd", {"how": "rank"}, r"\bterms .* 0\.25 and 0\.5 .*ranks 0 and 1"),
        ("odd", {"how": "random"}, "two calls"),
        ("bent", {}, r"\blosses .* -0\.535714 and -0\.635714 .*ranks 0 and 1"),
    ],
)
def test_an_objective_is_a_function_of_its_argument(pools, tmp_path, name, how, told):
    """Before the first step, without the model."""
    (tmp_path / "several.py").write_text(SEVERAL)
    for said in pools(2).run(with_plugin, str(tmp_path / "several.py"), proved_alike, name, how):
        assert re.search(told, said) and bool(told) == bool(said), said
        assert not said or said.startswith(f"objective.name {name}: ")
