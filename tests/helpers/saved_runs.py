"""Makes the folder of saved runs that each later version has to read: python -m tests.helpers.saved_runs

Its YAMLs, base model, tokenizer and plugin stay; prepared folders, runs and expected.json are made anew. That is for a
new folder of a new version: the files of a version that users have stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from llmtrain import cli
from tests.helpers import forked
from tests.helpers.launching import free_port
from tests.helpers.stored import machine

SAVED = Path(__file__).parents[1] / "data" / "saved-0.1.0"
NAMES = ("quickstart", "mixture", "stages", "tensor", "experts", "lora", "dpo", "plugin", "sites")
ONE_RANK = ("quickstart", "dpo", "plugin", "sites")
PLUGIN = ("--plugin", "plugin.py")
WHERE = (
    "data/text --run runs/quickstart --step 3",
    "data/other --run runs/stages --step 3",
    "data/talks --run runs/lora --step 3",
    "data/answers --run runs/dpo --step 3",
)


def exported(folder: Path) -> str:
    """Hash of the names and values of a Hugging Face folder."""
    from safetensors.numpy import load_file

    [path] = folder.glob("*.safetensors")
    found = load_file(path)
    return xxhash.xxh3_64_hexdigest(b"".join(name.encode() + found[name].tobytes() for name in sorted(found)))


def prepare_rank(folder: Path, run: str, port: int, rank: int, *, exports: bool) -> None:
    """Enter the folder; the first rank exports a saved run's checkpoint, if asked, and coordinates the sites."""
    os.chdir(folder)
    if rank == 0 and exports:
        words = ["checkpoint", "to-hf", f"runs/{run}", "--dtype", "fp32"]
        assert cli.main([*words, "export"]) == 0
        if run == "mixture":
            assert cli.main([*words, "export-ema", "--weights", "ema"]) == 0
    if rank == 0 and run == "sites":
        from torchft.coordination import LighthouseServer

        globals()["server"] = LighthouseServer(  # lives as long as the rank
            bind=f"127.0.0.1:{port}", min_replicas=1, join_timeout_ms=300, quorum_tick_ms=20, heartbeat_timeout_ms=3000
        )


def words_of(run: str, port: int) -> tuple[str, ...]:
    """What a run's command says beside its YAML."""
    return {"plugin": PLUGIN, "sites": ("--sites.coordinator", f"127.0.0.1:{port}")}.get(run, ())


def said_by(*words: str) -> list[str]:
    """Lines of a command."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert cli.main([*words]) == 0
    return said.getvalue().splitlines()


def write_sources() -> None:
    """Texts, conversations and pairs of answers with letters from a to j, of which an eighth is long."""
    rng = random.Random(0)

    def text(words: int) -> str:
        return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(words))

    def lines(name: str, records: Iterator[dict[str, Any]]) -> None:
        Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))

    def turns() -> list[dict[str, str]]:
        return [{"role": role, "content": text(3)} for role in ("user", "assistant") * 2]

    os.makedirs("sources")
    for name in ("text", "other"):
        lines(f"sources/{name}.jsonl", ({"text": text(rng.choice([4, 8, 24]))} for _ in range(60)))
    lines("sources/talks.jsonl", ({"messages": turns()} for _ in range(40)))
    lines("sources/answers.jsonl", ({"prompt": text(3), "chosen": text(4), "rejected": text(4)} for _ in range(40)))


def make(folder: Path) -> dict[str, Any]:
    """Prepare, train and export in a folder with the inputs. Returns what expected.json holds."""
    os.chdir(folder)
    write_sources()
    formats = {
        "text": (),
        "other": (),
        "answers": ("--format", "preference"),
        "talks": ("--format", "chat", "--max-tokens", "128"),
    }
    for name, more in formats.items():
        words = ["--source", f"sources/{name}.jsonl", "--tokenizer", "tokenizer", "--out", f"data/{name}", *more]
        assert cli.main(["prepare", *words]) == 0
    assert cli.main(["reference", "dpo.yaml"]) == 0
    found: dict[str, Any] = {"machine": machine(), "exports": {}, "where": {}}
    for name in NAMES:
        port = free_port()
        code, said = forked.finish(
            folder / f"{name}.yaml",
            "--train.run_dir",
            f"runs/{name}",
            *words_of(name, port),
            world_size=1 if name in ONE_RANK else 2,
            before=functools.partial(prepare_rank, folder, name, port, exports=False),
        )
        assert code == 0, said
        assert (
            cli.main(
                ["checkpoint", "to-hf", f"runs/{name}/checkpoints/step-00000003", "--dtype", "fp32", f"exports/{name}"]
            )
            == 0
        )
        found["exports"][name] = exported(Path("exports", name))
        for other in Path("runs", name, "checkpoints").iterdir():
            if other.name != "step-00000003":
                shutil.rmtree(other)
    words = ["checkpoint", "to-hf", "runs/mixture", "--dtype", "fp32", "exports/mixture-ema", "--weights", "ema"]
    assert cli.main(words) == 0
    found["exports"]["mixture --weights ema"] = exported(Path("exports/mixture-ema"))
    found["where"] = {words: said_by("data", "where", *words.split()) for words in WHERE}
    return found


def main() -> int:
    made = ("data", "runs")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "saved"
        shutil.copytree(SAVED, folder, ignore=shutil.ignore_patterns(*made, "expected.json"))
        expected = make(folder)
        for name in made:
            shutil.rmtree(SAVED / name, ignore_errors=True)
            shutil.copytree(folder / name, SAVED / name)
        (SAVED / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
