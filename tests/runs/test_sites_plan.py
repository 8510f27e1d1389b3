"""docs/networks.md, "Plan": its commands, as a user with two sites types them; and its table against its formulas."""

from __future__ import annotations

import json
import re

import pytest

from tests.helpers.launching import REPO, finish, free_port, kill_tree
from tests.runs.test_sites import recipe, start_shell

PAGE = (REPO / "docs/networks.md").read_text()
PLAN = PAGE[PAGE.index("\n## Plan\n") : PAGE.index("\n## Checkpoints\n")]


@pytest.mark.slow
def test_the_commands_of_the_page(small_data, tmp_path):
    """The address is the test's; the side that answers ends by Ctrl-C."""
    recipe(tmp_path / "site", small_data).rename(tmp_path / "RUN.yaml")
    port = free_port()
    measure, *others = (
        re.sub(r"10\.8\.0\.1:\d+", f"127.0.0.1:{port}", block)
        for block in re.findall(r"^```bash\n(.*?)\n```", PLAN, flags=re.M | re.S)
    )
    answering = start_shell(measure, tmp_path)
    try:
        assert f"doctor --sites 127.0.0.1:{port}" in answering.stdout.readline()
        for line in "\n".join(others).splitlines():
            code, output = finish(start_shell(line, tmp_path))
            assert code == 0, output
            assert line.startswith("llmtrain doctor") or "recommended: " in output, output
        answering.send_signal(2)
        code, output = finish(answering)
        assert code == 130, output
    finally:
        kill_tree(answering)
    assert json.loads((tmp_path / "line.json").read_text())["lines"][0]["trip_s"] < 0.05


def test_the_pages_table_is_within_its_bound() -> None:
    """Each predicted figure within 15 % of the measured one beside it."""
    rows = re.findall(r"^\| [^|]+\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", PLAN, flags=re.M)
    assert len(rows) >= 4
    for numbers in rows:
        sent, sent_planned, step, step_planned = map(float, numbers)
        assert abs(sent_planned / sent - 1) < 0.15 and abs(step_planned / step - 1) < 0.15, numbers
