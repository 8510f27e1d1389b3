"""A run with the page's prompts: continuations at each evaluation, the same after a resume."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.helpers.forked import train
from tests.helpers.launching import REPO, rows, write_recipe


def test_each_evaluation_continues_the_prompts_of_the_page(small_data: str, tmp_path: Path) -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", (REPO / "docs/samples.md").read_text(), re.S)
    recipe = write_recipe(tmp_path, small_data)
    tree, page = yaml.safe_load(recipe.read_text()), yaml.safe_load(block)
    recipe.write_text(yaml.safe_dump({**tree, "samples": {**page["samples"], "tokens": 4}}))
    words = ("--train.eval", "off", "--train.eval_every", "2", "--train.max_steps", "4")
    output = train(recipe, *words)
    train(recipe, *words, "--train.run_dir", str(tmp_path / "other"), "--train.max_steps", "2")
    train(recipe, *words, "--train.run_dir", str(tmp_path / "other"))
    texts = [
        {event["step"]: event["texts"] for event in rows(run, "events.jsonl") if event["kind"] == "samples"}
        for run in (tmp_path / "run", tmp_path / "other")
    ]
    assert texts[0] == texts[1] and list(texts[0]) == [2, 4] and all(texts[0][4])
    assert 'step 4  sample "import": ' in output
