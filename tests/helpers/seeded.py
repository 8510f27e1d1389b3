"""Does a test of `make test` notice each fault of tests/helpers/faults.py? The table of docs/developers/proofs.md.

    python -m pytest -p tests.helpers.seeded tests/ranks/test_cells.py tests/ranks/test_*.py -m 'not (slow or more)'

Each test runs once for each fault that no test has noticed before and whose form the test has; the ranks of the test
compute with the fault. The last lines are the table. A fault without a test leaves the session red.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tests.helpers import targets
from tests.helpers.covering import Cell
from tests.helpers.faults import FAULTS
from tests.helpers.ranks import RankPool

RED: dict[str, str] = {}
"""Fault -> the first test that has failed with it."""
WORDS = {"pipeline": "pipeline", "tensor": "tensor", "sequence": "sequence", "expert": "experts", "adapter": "adapter"}
"""Field of a Case -> word in the names of the files that have it."""
OBJECTIVES = {"reward": "reward", "distill": "distill"}
"""The other objectives: preference."""


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seeded_fault", FAULTS, indirect=True)


def without_fault(item: Any) -> str:
    """Return the name of a test as tests/targets.txt and the table have it."""
    test, _, case = item.nodeid.partition("[")
    case = case.removesuffix("]").removesuffix(item.callspec.params["seeded_fault"]).removesuffix("-")
    return f"{test}[{case}]" if case else test


targets.name_of = without_fault


@pytest.fixture(autouse=True)
def seeded_fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Seed the fault into all that the ranks of this test call."""
    name: str = request.param
    if name in RED or not has(request.node, FAULTS[name].form):
        pytest.skip("not needed")
    run = RankPool.run

    def faulty(pool: RankPool, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return run(pool, seeded, name, function, *args, **options)

    monkeypatch.setattr(RankPool, "run", faulty)
    with FAULTS[name].seeded() if FAULTS[name].everywhere else nullcontext():
        yield name


def seeded(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function of a test on this rank with the fault."""
    with FAULTS[name].seeded():
        return function(*args)


def has(item: Any, form: dict[str, Any]) -> bool:
    """Whether a test has the fault's form, by its cell or by the name of its file."""
    asked = {key: value for key, value in form.items() if key in WORDS}
    objective = form.get("objective", {}).get("name", "next_token")
    if item.path.name == "test_cells.py":
        return "index" in item.callspec.params and _cell_has(_cell(item), asked, objective, form)
    words = [WORDS[key] for key in asked]
    if objective != "next_token":
        words.append(
            "online"
            if form.get("objective", {}).get("reference") == "online"
            else OBJECTIVES.get(objective, "preference")
        )
    return any(word in item.path.name for word in words or ["parity.py", "forms", "resume"])


def _cell(item: Any) -> Cell:
    from tests.ranks.test_cells import CELLS

    return CELLS[item.callspec.params["index"]]


def _cell_has(cell: Cell, asked: dict[str, Any], objective: str, form: dict[str, Any]) -> bool:
    mine = {"expert": 2 if cell["experts"] == "shared" else 1, "adapter": cell["adapter"] != "none"}
    degrees = all((cell | mine)[key] == (True if key == "adapter" else value) for key, value in asked.items())
    family = form["model"]["model_type"] != "mixtral" or cell["experts"] != "none"
    tied = not form["model"].get("tie_word_embeddings") or cell["tied"]
    return degrees and family and tied and (objective == "next_token" or _kind(objective) == _kind(cell["objective"]))


def _kind(objective: str) -> str:
    """Objectives whose sums are computed by the same code."""
    kinds = {"online": "pairs", "dpo": "pairs", "dpo_norm": "pairs", "orpo": "pairs", "column": "distill"}
    return kinds.get(objective, objective)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.failed:
        RED[item.callspec.params["seeded_fault"]] = without_fault(item)
    if report.failed:
        report.outcome = "passed"  # red is what is wanted
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    print("\n| fault | what is wrong | red in |\n|---|---|---|")
    for name, each in FAULTS.items():
        words = (each.seeded.__doc__ or "").strip().split("\n")[0]
        print(f"| `{name}` | {words} | {RED.get(name, 'NO TEST')} |")
    if len(RED) < len(FAULTS):
        session.exitstatus = 1
