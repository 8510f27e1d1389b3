"""Runs, checkpoints and prepared folders of version 0.1.0 (tests/data/saved-0.1.0): each command still reads them.

A run that is resumed from its own config.yaml writes that file and its remaining figures again: a field that is no
longer read, kept or written is a difference here. The file takes 20 CPU-seconds: each form is resumed.

`python -m tests.runs.test_saved_runs` makes prepared folders, runs and expected.json anew; YAMLs, base model, tokenizer
and plugin stay. That is for a new folder of a new version: the files of a version that users have stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
import yaml

from llmtrain import cli
from llmtrain.checkpoint.format import step_folder
from tests.helpers import forked
from tests.helpers.launching import free_port, rows
from tests.helpers.stored import BF16, FP32, differences, machine

SAVED = Path(__file__).parents[1] / "data/saved-0.1.0"
NAMES = ("quickstart", "mixture", "stages", "tensor", "experts", "lora", "dpo", "plugin", "sites")
ONE_RANK = ("quickstart", "dpo", "plugin", "sites")
PLUGIN = ("--plugin", "plugin.py")
WHERE = (
    "data/text --run runs/quickstart --step 3",
    "data/other --run runs/stages --step 3",
    "data/talks --run runs/lora --step 3",
    "data/answers --run runs/dpo --step 3",
)
NEEDS = {"lora": "peft", "plugin": "tensorboard", "sites": "torchft"}
RUNS = [pytest.param(name, marks=pytest.mark.needs(NEEDS[name])) if name in NEEDS else name for name in NAMES]
OF_A_MACHINE = re.compile(r"time|elapsed|per_s|share|stall|memory|seconds|_s$|bytes")
"""Keys of figures that no two launches have alike."""


@functools.cache
def expected() -> dict[str, Any]:
    """What `make` has returned for the folder."""
    return json.loads((SAVED / "expected.json").read_text())  # type: ignore[no-any-return]


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


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, which is the working folder. Paths of runs are relative, except the folder of frozen parameters."""
    shutil.copytree(SAVED, tmp_path / "saved")
    for path in (tmp_path / "saved/runs").glob("*/checkpoints/*/manifest.json"):
        raw = json.loads(path.read_text())["manifest"]
        if "frozen" in raw:
            raw["frozen"]["folder"] = str(tmp_path / "saved/base")
            digest = xxhash.xxh3_64_hexdigest(json.dumps(raw, separators=(",", ":")).encode())
            path.write_text(json.dumps({"manifest": raw, "xxh3": digest}, separators=(",", ":")))
    monkeypatch.chdir(tmp_path / "saved")
    return tmp_path / "saved"


def figures(run: Path) -> list[dict[str, Any]]:
    """Of the steps after the checkpoint; none of sites, which meet as soon as they find each other."""
    found = [row for row in rows(run) if row["step"] > 3 and run.name != "sites"]
    return [{key: value for key, value in row.items() if not OF_A_MACHINE.search(key)} for row in found]


def configurations(run: Path, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the run's folder and of a checkpoint."""
    trainer = json.loads((step_folder(run / "checkpoints", step) / "trainer.json").read_text())
    return yaml.safe_load((run / "config.yaml").read_text()), trainer["run"]


LATER = (("data", "pack", True),)
"""(section, field, its value in a run that was saved before there was the field)"""


@pytest.mark.parametrize("run", RUNS)
def test_a_saved_run_goes_on(run: str, here: Path) -> None:
    """From its config.yaml, without a word about what changed; with the figures that it had; after an export."""
    folder, saved, port = here / "runs" / run, SAVED / "runs" / run, free_port()
    launch = forked.Launch(
        folder / "config.yaml",
        *words_of(run, port),
        world_size=1 if run in ONE_RANK else 2,
        before=functools.partial(prepare_rank, here, run, port, exports=True),
        log_folder=here,
    )
    assert not any(launch.wait(240)), launch.output()
    said = launch.output()
    assert f"resumed from runs/{run}/checkpoints/step-00000003 at step 3" in said and "rate jumps" not in said
    changed = re.findall(r"changed since: (?!versions\.)(.*)", said)
    assert [line.partition(":")[0] for line in changed] == (["run.sites.coordinator"] if run == "sites" else []), said
    for then, now in zip(configurations(saved, 3), configurations(folder, 5), strict=True):
        now["sites"]["coordinator"] = then["sites"]["coordinator"]
        for section, name, default in LATER:
            assert now[section].pop(name) == default
        assert now == then
    assert json.loads((folder / "deepspeed.json").read_text()) == json.loads((saved / "deepspeed.json").read_text())
    got, want = figures(folder), figures(saved)
    if machine() == expected()["machine"]:
        assert got == want
    assert [row.keys() for row in got] == [row.keys() for row in want]
    rounding = BF16 if "bf16" in json.loads((saved / "deepspeed.json").read_text()) else FP32
    for now, then in zip(got, want, strict=True):
        assert differences(now, then, rounding) == {}
    assert exported(here / "export") == expected()["exports"][run]
    if run == "mixture":
        assert exported(here / "export-ema") == expected()["exports"]["mixture --weights ema"]


def test_a_stored_figure_may_round_as_what_it_is_made_of() -> None:
    """A margin is a difference of log-probabilities; a loss is compared as itself."""
    want = {
        "step": 4,
        "loss": 0.6875,
        "pairs/margin": 0.0148,
        "pairs/chosen_log_prob": -75.7,
        "pairs/rejected_log_prob": -66.9,
        "eval/perplexity": 255.0,
    }
    assert differences(want | {"pairs/margin": 0.01485, "eval/perplexity": 255.01}, want, FP32) == {}
    moved = {"pairs/margin": 0.0158, "loss": 0.6876, "eval/perplexity": 255.1, "step": 5}
    assert differences(want | moved, want, FP32).keys() == moved.keys()
    assert differences({"step": 4}, want, BF16).keys() == want.keys() - {"step"}


@pytest.mark.parametrize("run", RUNS)
def test_a_saved_run_is_checked_and_listed(run: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*(PLUGIN if run == "plugin" else ()), "--world-size", "1" if run in ONE_RANK else "2")
    assert cli.main(["config", "check", f"runs/{run}/config.yaml", *words]) == 0, capsys.readouterr().err
    assert cli.main(["checkpoint", "ls", f"runs/{run}"]) == 0
    assert "step-00000003" in capsys.readouterr().out


@pytest.mark.parametrize("words", WHERE)
def test_a_prepared_folder_tells_what_a_saved_run_has_read(
    words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "where", *words.split()]) == 0
    assert capsys.readouterr().out.splitlines() == expected()["where"][words]


def test_the_rate_of_a_saved_stage_is_compared(here: Path) -> None:
    """Step 4 was to be the second of a cosine's three; the second stage is now constant, and has other ranks."""
    tree = yaml.safe_load(Path("runs/stages/config.yaml").read_text())
    tree["data"]["stages"][0]["schedule"] = {"name": "constant"}
    Path("runs/stages/config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    enter = functools.partial(prepare_rank, here, "stages", 0, exports=False)
    folder = here / "runs/stages"
    code, said = forked.finish(folder / "config.yaml", "--deepspeed", "zero1.json", world_size=1, before=enter)
    assert code == 0 and re.search(r"learning rate .*\b0\.005 at step 4,", said), said


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
        words = ["checkpoint", "to-hf", f"runs/{name}/checkpoints/step-00000003", f"exports/{name}", "--dtype", "fp32"]
        assert cli.main(words) == 0
        found["exports"][name] = exported(Path("exports", name))
        for other in Path("runs", name, "checkpoints").iterdir():
            if other.name != "step-00000003":
                shutil.rmtree(other)
    words = ["checkpoint", "to-hf", "runs/mixture", "--dtype", "fp32", "exports/mixture-ema", "--weights", "ema"]
    assert cli.main(words) == 0
    found["exports"]["mixture --weights ema"] = exported(Path("exports/mixture-ema"))
    found["where"] = {words: said_by("data", "where", *words.split()) for words in WHERE}
    return found


def main() -> None:
    made = ("data", "runs")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "saved"
        shutil.copytree(SAVED, folder, ignore=shutil.ignore_patterns(*made, "expected.json"))
        found = make(folder)
        for name in made:
            shutil.rmtree(SAVED / name, ignore_errors=True)
            shutil.copytree(folder / name, SAVED / name)
        (SAVED / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
