"""Replays of 20 steps with a seeded document, in nine forms of training: equal to the bit, and with its row first?

    python tools/bench/spikes_replays.py                     # half an hour on two cores
    python tools/bench/spikes_replays.py --forms zero3 dpo   # a part of it

`llmtrain launch` trains each run on two CPU ranks: 10,000 texts of 20 common words, or 3,200 pairs whose answers have
different words. Two documents of each kind are seeded: a snippet of symbols repeated, Russian in UTF-8 read as Latin-1,
Chinese, and letters moved by one in the alphabet (labels of texts are their next tokens, and `prepare` refuses others).
Of a pair the chosen answer is one of these; for the last kind the two answers are swapped. `llmtrain replay` replays 20
steps for each kind, if there are some without another seeded document. A checkpoint of the run is among them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.helpers.launching import TINY, write_run  # noqa: E402
from tests.helpers.warm import WarmCommands  # noqa: E402

WORDS = "the run reads a line and then it writes another line of plain words about the same plain thing"
OTHERS = "some other walk goes up or down by one big road over few old hills near blue sea"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
KINDS = ("garbage", "encoding", "language", "shift")
STEPS, WINDOW, LEARNED, BORDER = 400, 20, 140, 300
"""Steps of a run, of a replay, before the first one that is replayed, before the second stage of `stages`."""
ROW = 64
"""Tokens of a row of texts."""
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
FORMS: dict[str, dict[str, Any]] = {
    "zero1": {},
    "zero3": {"zero_optimization": {"stage": 3}},
    "pp2": {"pipeline": {"stages": 2}},
    "tp2": {"tensor_parallel": {"autotp_size": 2}},
    "sp2": {"sequence_parallel_size": 2},
    "ep2": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "lora": {},
    "dpo": {},
    "stages": {},
}
"""Keys of the DeepSpeed JSON."""


def document(kind: str | None, draw: random.Random, words: str, count: int) -> str:
    """A text of `count` words, or a bad one of three to five times as many tokens."""
    if kind == "garbage":
        return "".join(draw.choice("~^|@#{}$%&*<>=+;`") for _ in range(8)) * (count // 2)
    if kind == "encoding":
        return "".join(chr(draw.randrange(0x430, 0x450)) for _ in range(count)).encode().decode("latin-1")
    if kind == "language":
        return "".join(chr(draw.randrange(0x4E00, 0x9FA6)) for _ in range(count + count // 3))
    text = " ".join(draw.choice(words.split()) for _ in range(count))
    return text if kind is None else "".join(chr(ord(each) + 1) if each != " " else each for each in text)


def write_source(path: Path, pairs: bool, seed: int) -> dict[str, str]:
    """Returns {FILE:LINE: kind} of the seeded documents."""
    draw, records, total = random.Random(seed), list[dict[str, str]](), 3_200 if pairs else 10_000
    seeded = dict(zip(draw.sample(range(1, total + 1), 2 * len(KINDS)), KINDS * 2, strict=True))
    for line in range(1, total + 1):
        kind = seeded.get(line)
        if not pairs:
            records.append({"text": document(kind, draw, WORDS, 20)})
            continue
        answers = [document(None if kind == "shift" else kind, draw, WORDS, 8), document(None, draw, OTHERS, 8)]
        chosen, rejected = answers[::-1] if kind == "shift" else answers
        records.append({"prompt": document(None, draw, WORDS, 4), "chosen": chosen, "rejected": rejected})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {f"{path.name}:{line}": kind for line, kind in seeded.items()}


def windows(run: Path, seeded: dict[str, str], draw: random.Random) -> Iterator[tuple[str, int]]:
    """(document, first step) for each kind: the only seeded document, and a text's is at least a quarter of a row. Two
    stages are in these steps where they can be."""
    from llmtrain.data.kinds.text import TextReader
    from llmtrain.data.where import spans

    held: list[list[tuple[int, str]]] = [[] for _ in range(STEPS + 1)]
    for span in spans(run):
        data = span.data()
        for index in range(span.next, span.sequence_at(span.until or STEPS)):
            member, place = data.place_of(index)
            rows = data.reader_of(member)
            for each in rows.origins(place, data.origins_of(member)):
                texts = isinstance(rows, TextReader)
                begin, end = (place * ROW, place * ROW + ROW) if texts else (each.begin, each.end)
                if (name := f"{each.file}:{each.record}") in seeded:
                    step = span.after + (index - span.next) // span.batch + 1
                    held[step].append((min(each.end, end) - max(each.begin, begin), name))
    for kind in KINDS:
        found = []
        for first in range(LEARNED, STEPS - WINDOW + 2):
            here = [each for step in range(first, first + WINDOW) for each in held[step]]
            if len({name for _, name in here}) == 1 and seeded[here[0][1]] == kind and max(here)[0] >= ROW // 4:
                found.append((first <= BORDER < first + WINDOW - 1, draw.random(), first, here[0][1]))
        if found:
            yield max(found)[3], max(found)[2]


class Bench:
    def __init__(self, folder: Path, warm: WarmCommands, seed: int) -> None:
        self.folder, self.warm, self.seed, self.base = folder, warm, seed, folder / "zero1/run/export"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("localhost slots=2\n")
        (folder / "chat.jinja").write_text(TEMPLATE)

    def command(self, *words: object) -> str:
        """Its output. A replay ends with 1 where steps differ."""
        command = ["llmtrain", *map(str, words)]
        done = subprocess.run(command, env=self.warm.environment(), capture_output=True, text=True)
        assert done.returncode in ((0, 1) if words[0] == "replay" else (0,)), done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def prepared(self, name: str, seed: int) -> tuple[str, dict[str, str]]:
        source, out = self.folder / f"{name}.jsonl", str(self.folder / name / "set")
        seeded = write_source(source, name == "dpo", seed)
        words = ["--tokenizer", self.base] if self.base.exists() else ["--vocab-size", 320]
        words += ["--format", "preference", "--chat-template", self.folder / "chat.jinja"] if name == "dpo" else []
        self.command("prepare", "--source", source, "--validation-fraction", 0, "--out", out, *words)
        return out, seeded

    def trained(self, form: str) -> tuple[Path, dict[str, str]]:
        """(run, its seeded documents). `lora` and `dpo` begin with the model of `zero1`."""
        seed, pairs = 1000 * self.seed + list(FORMS).index(form), form == "dpo"
        path, seeded = self.prepared(form, seed)
        model: dict[str, Any] = {"config": {**TINY, **EXPERTS} if form == "ep2" else TINY}
        data: dict[str, Any] = {"path": path, "sequence_length": 2 * ROW if pairs else ROW, "isolate_documents": pairs}
        more: dict[str, Any] = {"lora": {"adapter": {"r": 8, "alpha": 16}}, "dpo": {"objective": {"name": "dpo"}}}
        if form == "stages":
            other, theirs = self.prepared("other", 100 + seed)
            data["stages"], seeded = [{"from_step": BORDER, "path": other}], {**seeded, **theirs}
        tree = {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, **FORMS[form]}
        train = {"global_batch": 8, "micro_batch": 2, "max_steps": STEPS, "log_every": 50, "export": form == "zero1"}
        sections = {
            "model": {"pretrained": str(self.base)} if form in more else model,
            "data": data,
            "optim": {"lr": 1e-3},
            "checkpoint": {"every_steps": WINDOW, "keep": 100},
        }
        recipe = write_run(self.folder / form, path, tree, train, **sections, **more.get(form, {}))
        if pairs:
            self.command("reference", recipe)
        self.command("launch", "--hostfile", self.folder / "hosts", "--", recipe)
        return recipe.parent / "run", seeded

    def replayed(self, run: Path, name: str, first: int) -> tuple[bool, bool, bool]:
        """(True if steps and checkpoint are equal to the bit, if the document is in the first row by norm, by loss)."""
        out = run.with_name(f"replay-{first}")
        self.command("replay", run, "--steps", f"{first}:{first + WINDOW - 1}", "--out", out)
        answer = json.loads((out / "answer.json").read_text())
        assert len(answer["steps"]) == WINDOW and answer["checkpoints"]
        rows = [
            (float(row["loss"]), any(line.startswith(f"{name},") for line in row["documents"]))
            for row in answer["rows"]
        ]
        return answer["exact"] and answer["equal"], rows[0][1], max(rows)[1]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--seed", type=int, default=0, help="of the documents")
    parser.add_argument("--folder", type=Path, help="where the runs stay (default: a temporary folder)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each replay, and a row for each form."""
    asked = arguments(argv)
    table = ["| form | replays equal to the bit | row first by norm | by loss |", "|---" * 4 + "|"]
    with tempfile.TemporaryDirectory() as temporary, WarmCommands(Path(temporary), Path(sys.executable)) as warm:
        bench = Bench(asked.folder or Path(temporary) / "runs", warm, asked.seed)
        if "zero1" not in asked.forms and {"lora", "dpo"} & set(asked.forms):
            bench.trained("zero1")
        for form in asked.forms:
            run, seeded = bench.trained(form)
            found = []
            for name, first in windows(run, seeded, random.Random(1)):
                found.append(bench.replayed(run, name, first))
                print(f"{form}, {seeded[name]}, steps from {first} on: {found[-1]}", flush=True)
            counts = [f"{sum(column)} of {len(found)}" for column in zip(*found, strict=True)]
            table.append(f"| {form} | {' | '.join(counts)} |")
    print("\n".join(table))


if __name__ == "__main__":
    main()
