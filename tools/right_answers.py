"""How many held-out questions of `--source lessons:chat` a model answers rightly, as a table and a picture.

    python tools/right_answers.py --data data/stdlib-chat --png runs/answers.png \\
      before=runs/quickstart/export sft=runs/sft/export

Of each family so many questions (`--questions`) that no training has seen:

    sums       the number that the model writes, one token after the other, each the likeliest, is the sum
    calls      the call that it writes is run, and gives the right result
    results    given the right call and its result, it answers with the result
    functions  it finds the answer likelier, per token, than the answer to a question about another function
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llmtrain.config import plugin_import  # noqa: E402

plugin_import.use([str(ROOT / "examples/lessons.py")])
made: Any = sys.modules["llmtrain_plugin_lessons"]

FAMILIES = ("sums", "calls", "results", "functions")
CHANCE = {"functions": 0.5}
_BATCH = 50
_LONGEST = 48
"""Tokens of an answer."""


class Model:
    """A model's folder, or an adapter's, with the tokenizer and the template of the data."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
        self._tokenizer = tokenizer

    def answers(self, conversations: Sequence[list[dict[str, Any]]]) -> list[str | None]:
        """What the model says next, without the token that ends it; None where it does not end."""
        import torch

        end, found = self._tokenizer.eos_token_id, []
        for at in range(0, len(conversations), _BATCH):
            texts = [self._prompt(messages) for messages in conversations[at : at + _BATCH]]
            given = self._tokenizer(
                texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
            )
            width = given["input_ids"].shape[1]
            with torch.no_grad():
                made = self._model.generate(
                    input_ids=given["input_ids"],
                    attention_mask=given["attention_mask"],
                    max_new_tokens=_LONGEST,
                    do_sample=False,
                    eos_token_id=end,
                    pad_token_id=end,
                )
            for row in made[:, width:].tolist():
                found.append(self._tokenizer.decode(row[: row.index(end)]) if end in row else None)
        return found

    def likelihood(self, question: str, answer: str) -> float:
        """The mean log-probability of the answer's tokens, the end included."""
        import torch

        asked = [{"role": "user", "content": question}]
        prompt = self._ids(self._prompt(asked))
        said = [*asked, {"role": "assistant", "content": answer}]
        ids = torch.tensor([self._ids(self._tokenizer.apply_chat_template(said, tokenize=False))])
        with torch.no_grad():
            logs = self._model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        return float(logs[range(len(logs)), ids[0, 1:]][len(prompt) - 1 :].mean())

    def _prompt(self, messages: list[dict[str, Any]]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def asked(family: str, questions: int) -> list[Any]:
    """The held-out questions of a family, the first so many."""
    preferred = family == "functions"
    kind = "preference" if preferred else "chat"
    wanted = "calls" if family == "results" else family
    return [lesson for lesson in made.lessons(kind, "validation") if lesson.family == wanted][:questions]


def right(model: Model, family: str, questions: Sequence[Any]) -> list[bool]:
    """Whether the model answers each of them rightly."""
    if family == "functions":
        return [
            model.likelihood(lesson.question, lesson.answer) > model.likelihood(lesson.question, str(lesson.wrong))
            for lesson in questions
        ]
    known = 3 if family == "results" else 1  # messages that the model is given
    said = model.answers([lesson.messages()[:known] for lesson in questions])
    if family == "calls":
        return [_called(text) == lesson.answer for text, lesson in zip(said, questions, strict=True)]
    return [text == lesson.answer for text, lesson in zip(said, questions, strict=True)]


def _called(text: str | None) -> str | None:
    """The result of the call that a model has written; None when it is no call that a tool takes."""
    if text is None or not text.startswith("call "):
        return None
    try:
        call = json.loads(text.removeprefix("call "))
        return str(made.run_tool(call["name"], call["arguments"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def table(shares: dict[str, dict[str, float]], counts: dict[str, int]) -> str:
    """`shares`: name of a model -> family -> share. As Markdown."""
    lines = [
        "| held-out questions | " + " | ".join(shares) + " |",
        "|---|" + "---|" * len(shares),
    ]
    for family, count in counts.items():
        cells = " | ".join(f"{shares[name][family]:.1%}" for name in shares)
        lines.append(f"| {family} ({count}) | {cells} |")
    return "\n".join(lines)


def picture(shares: dict[str, dict[str, float]], counts: dict[str, int], path: Path) -> None:
    """A bar for each model and family."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(shares)
    colors = ["#a0aec0", "#2563a8", "#2f855a", "#d9622b", "#6b46c1", "#b83280"]
    for number, (name, share) in enumerate(shares.items()):
        places = [at + (number - (len(shares) - 1) / 2) * width for at in range(len(counts))]
        heights = [100 * share[family] for family in counts]
        bars = axes.bar(places, heights, width * 0.92, label=name, color=colors[number % len(colors)])
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
    for at, family in enumerate(counts):
        if family in CHANCE:
            axes.hlines(100 * CHANCE[family], at - 0.45, at + 0.45, colors="#1a202c", linestyles=":", label="chance")
    axes.set_xticks(range(len(counts)), [f"{family}\n{count} questions" for family, count in counts.items()])
    axes.set(ylim=(0, 108), ylabel="right answers, %")
    axes.set_title("Held-out questions", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(shares) + 1, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    """Prints the table; 2 when a folder is no model's."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER", help="folders of models, or of adapters")
    parser.add_argument("--data", type=Path, required=True, help="the prepared folder, for its tokenizer and template")
    parser.add_argument("--questions", type=int, default=200, metavar="N", help="of each family at most")
    parser.add_argument("--png", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the shares")
    given = parser.parse_args(argv)
    folders = {name: Path(folder) for name, _, folder in (model.partition("=") for model in given.models)}
    for folder in (*folders.values(), given.data / "tokenizer"):
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json", "tokenizer.json")):
            print(f"error: {folder}: no model and no tokenizer in it; give NAME=FOLDER of an export", file=sys.stderr)
            return 2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.data / "tokenizer", trust_remote_code=False)
    questions = {family: asked(family, given.questions) for family in FAMILIES}
    counts = {family: len(those) for family, those in questions.items()}
    shares: dict[str, dict[str, float]] = {}
    for name, folder in folders.items():
        model = Model(folder, tokenizer)
        shares[name] = {family: sum(right(model, family, those)) / len(those) for family, those in questions.items()}
    print(table(shares, counts))
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"shares": shares, "questions": counts}, indent=2) + "\n")
    if given.png is not None:
        picture(shares, counts, given.png)
        print(f"picture: {given.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
