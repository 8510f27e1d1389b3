"""Wrong pairs and judged answers in one `llmtrain prepare`: each is named, and nothing else is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmtrain.commands.prepare import main
from tests.helpers.chat import workers_here
from tests.helpers.chat_oracle import FAMILIES, write_family

pytestmark = pytest.mark.long

ASKED, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
OF_OTHER_FORMATS: dict[str, dict[str, tuple[str, str]]] = {
    "preference": {
        "no rejected answer": ('{"prompt": "q", "chosen": "a"}', "rejected is null, neither a text nor messages"),
        "an answer of another type": ('{"prompt": "q", "chosen": 4, "rejected": "b"}', "chosen is int, neither a text"),
        "no prompt": ('{"chosen": "a", "rejected": "b"}', "chosen and rejected have no prompt"),
        "a prompt of another type": ('{"prompt": 4, "chosen": "a", "rejected": "b"}', "the prompt is int, neither"),
        "the same twice": ('{"prompt": "q", "chosen": "a", "rejected": "a"}', "there is nothing to prefer"),
        "two questions": (
            json.dumps({"chosen": [ASKED, ANSWER], "rejected": [{**ASKED, "content": "z"}, ANSWER]}),
            "do not begin with the messages of each other",
        ),
        "a pair too long": (json.dumps({"prompt": "q", "chosen": "a", "rejected": "b " * 400}), "--max-tokens is 200"),
    },
    "unpaired": {
        "no label": ('{"prompt": "q", "completion": "a"}', "label is null, not true (desired) or false"),
        "a label of another type": ('{"prompt": "q", "completion": "a", "label": 1}', "label is int, not true"),
        "a label as a text": ('{"prompt": "q", "completion": "a", "label": "true"}', "label is str, not true"),
        "half a pair": ('{"prompt": "q", "completion": ["a"], "label": true}', "are not both texts, or both lists"),
    },
}
RIGHT = {
    "preference": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "unpaired": {"prompt": "q", "completion": "a", "label": True},
}


@pytest.mark.parametrize("form", OF_OTHER_FORMATS)
def test_a_wrong_record_of_another_format_is_named(tmp_path: Path, form: str) -> None:
    write_family(tmp_path / "model", FAMILIES["qwen3"])
    lines = [f"{line}\n{json.dumps(RIGHT[form])}\n" for line, _ in OF_OTHER_FORMATS[form].values()]
    (tmp_path / "lines.jsonl").write_text("".join(lines))
    given = ["--source", str(tmp_path / "lines.jsonl"), "--out", str(tmp_path / "out"), "--format", form]
    given += ["--tokenizer", str(tmp_path / "model"), "--validation-fraction", "0", "--max-tokens", "200"]
    with workers_here():
        assert main([*given, "--max-rejected", "100"]) == 0
    entries = [json.loads(line) for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()]
    for at, (entry, (what, (_, reason))) in enumerate(zip(entries, OF_OTHER_FORMATS[form].items(), strict=True)):
        assert (entry["file"], entry["line"]) == ("lines.jsonl", 1 + 2 * at) and reason in entry["reason"], (
            what,
            entry,
        )
    rows = json.loads((tmp_path / "out/manifest.json").read_text())["documents"]["train"]
    assert rows == len(lines) * (2 if form == "preference" else 1)
