"""Wrong parts of a plugin: whatever a method raises or returns, the run is told the part, the method and the line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from llmtrain.config import plugin_import
from llmtrain.data.stream.loader import StepBatch
from llmtrain.engine.api import Update
from llmtrain.engine.ranks.ranks import AgreedError, Ranks
from llmtrain.training.parts import Done
from llmtrain.training.plugin_parts import Guarded, Surroundings
from llmtrain.training.step import Agreement, Position, Request

WRONG = """
import sys
from llmtrain import Part

class Wrong(Part, entry="wrong"):
    what = None

    def _act(self):
        return eval(self.what)

    request = before_update = to_json = state = lambda self: self._act()
    after_step = figures = open = close = begin = lambda self, given: self._act()
"""
RAISES = ("1 / 0", "sys.exit(0)", "self.missing", "(_ for _ in ()).throw(KeyboardInterrupt)")
DONE = Done(
    number=6,
    batch=StepBatch(micro_batches=[], first_index=0, sequences=0),
    agreed=Agreement(weight=1, stop=False, save=False, sums={}),
    sums=[],
    lr_factor=1.0,
    update=Update(skipped=False, grad_norm=1.0),
    position=Position(step=7),
)
CALLS: dict[str, Any] = {
    "request": lambda part: part.request(),
    "before_update": lambda part: part.before_update(),
    "after_step": lambda part: part.after_step(DONE),
    "figures": lambda part: part.figures(SimpleNamespace(position=Position(step=7))),
    "to_json": lambda part: part.to_json(),
    "state": lambda part: part.state(),
    "close": lambda part: part.close(None),
}


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "mine.py").write_text(WRONG)
    plugin_import.use([str(tmp_path / "mine.py")])

    from llmtrain.base.choice import Entry

    yield Entry.SECTIONS["parts"]["wrong"]()
    plugin_import.use([])


@pytest.mark.parametrize("what", RAISES)
@pytest.mark.parametrize("method", CALLS)
def test_whatever_a_method_raises_is_named_and_asks_all_ranks_to_stop(method: str, what: str, part: Any) -> None:
    part.what = what
    guarded = Guarded("wrong", part, Ranks(), Surroundings(nn.Linear(1, 1), 1))
    CALLS[method](guarded)
    assert guarded.failure is not None and guarded.failure.startswith(f"parts.wrong: {method} at step ")
    assert "mine.py line 9: " in guarded.failure
    assert guarded.request() == Request(stop=True)
    part.what = "1 / 0"
    CALLS[method](guarded)  # it is called no more
    assert ("ZeroDivisionError" in guarded.failure) == (what == "1 / 0")


@pytest.mark.parametrize(
    ("method", "what", "told"),
    [
        ("request", "3", "it returns 3, but must return None or Request()"),
        ("after_step", "3", "it returns int, but must return None"),
        ("figures", "3", "AttributeError: 'int' object has no attribute 'items'"),
    ],
)
def test_a_method_that_returns_the_wrong_type_is_named(method: str, what: str, told: str, part: Any) -> None:
    part.what = what
    guarded = Guarded("wrong", part, Ranks(), Surroundings(nn.Linear(1, 1), 1))
    CALLS[method](guarded)
    assert guarded.failure is not None and f"parts.wrong: {method} at step" in guarded.failure
    assert told in guarded.failure


@pytest.mark.parametrize("method", ["open", "begin"])
def test_a_method_before_the_first_step_ends_the_run_at_once(method: str, part: Any) -> None:
    part.what = "sys.exit(0)"
    guarded = Guarded("wrong", part, Ranks(), Surroundings(nn.Linear(1, 1), 1))
    with pytest.raises(AgreedError, match=f"parts.wrong: {method} at step 0: .* line 9: SystemExit: 0"):
        getattr(guarded, method)(Position())
