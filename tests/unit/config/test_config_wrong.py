"""Wrong configurations (wrong.yaml): each ends with exit code 2 and a message with key, value and remedy.

More than 20 CPU s: several hundred configurations are each read as `config check` reads them.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
import yaml

from llmtrain.checkpoint.rundir import RunDirectory
from llmtrain.cli import main
from llmtrain.config.problems import assigned
from tests.helpers.config_workplace import nested, write
from tests.helpers.prepared import edit_manifest, write_prepared

pytestmark = pytest.mark.long

REPO = Path(__file__).parents[3]
ALL: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("wrong.yaml").read_text().replace('"REPO"', json.dumps(str(REPO)))
)
BY_TRAIN = [case for case in ALL if "--world-size" not in case.get("argv", ())][::12]
"""About twenty cases from all parts of the list: `train` reads a configuration by the function that check calls."""


def latin_1(folder: Path) -> None:
    (folder / "run.yaml").write_bytes(b"# one\n# gr\xf6\xdfer\n")


def utf_16(folder: Path) -> None:
    (folder / "ds.json").write_bytes((folder / "ds.json").read_text().encode("utf-16"))


def shard_gone(folder: Path) -> None:
    (folder / "data/x/train-00000.bin").unlink()


def short_data(folder: Path) -> None:
    write_prepared(folder / "data/short", [[[1, 2, 3]]], [[[4, 5]]], vocab_size=512)


def other_separator(folder: Path) -> None:
    path = folder / "data/x/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "separator_id": 7}))


def swapped_shards(folder: Path) -> None:
    documents = [[list(range(1, 400))], [list(range(2, 401))]]
    write_prepared(folder / "data/two", documents, documents, vocab_size=512)
    path = folder / "data/two/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"]["train"].reverse()
    path.write_text(json.dumps(manifest))


def other_head(folder: Path, **fields: Any) -> None:
    """As merging an adapter with both matrices leaves it, where the base ties them."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    (folder / "model").mkdir()
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False)
    save_file(LlamaForCausalLM(config).state_dict(), folder / "model/model.safetensors")
    told = {**config.to_dict(), "tie_word_embeddings": True, **fields}
    (folder / "model/config.json").write_text(json.dumps(told))


def other_padding(folder: Path) -> None:
    other_head(folder, pad_token_id=600)


def changes(case: dict[str, Any], file: str) -> dict[str, Any] | str:
    """Of the YAML or the JSON, as `write` takes them."""
    told = case.get(file, {})
    if isinstance(told, str):
        return told
    tree: dict[str, Any] = {}
    for dotted, value in told.items():
        nested(dotted, ... if value == "GONE" else value, tree)
    return tree


def settings_of(tree: Any, prefix: str = "") -> Iterator[str]:
    """`key = value` of each setting and section."""
    for name, value in tree.items() if isinstance(tree, dict) else ():
        yield assigned(f"{prefix}{name}", value)
        yield from settings_of(value, f"{prefix}{name}.")


@pytest.fixture
def wrong(request: pytest.FixtureRequest, here: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of `config check` for a case whose files are written."""
    find = importlib.util.find_spec  # which some machines have, with a GPU
    absent = ("flash_attn", "flash_attn_interface", "kernels")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in absent else find(name, *more))
    case: dict[str, Any] = request.param
    write(here, changes(case, "run") if "run" in case else None, changes(case, "ds"))
    for name, text in case.get("files", {}).items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    if "before" in case:
        globals()[case["before"]](here)
    return ["run.yaml", f"--world-size={case.get('ranks', 2)}", *case.get("argv", ())]


@pytest.mark.parametrize("case, wrong", [(case, case) for case in ALL], ids=range(len(ALL)), indirect=["wrong"])
def test_check_names_key_and_value(case: dict[str, Any], wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["config", "check", *wrong])
    told = capsys.readouterr()
    assert (code, told.out) == (2, ""), told
    assert told.err.startswith("error: ") and "Traceback" not in told.err
    quoted = [words for file in ("run", "ds") for words in settings_of(changes(case, file)) if words in told.err]
    assert quoted or case.get("says"), told.err
    assert all(words in told.err for words in case.get("says", ())), told.err


@pytest.mark.parametrize("wrong", BY_TRAIN, ids=range(len(BY_TRAIN)), indirect=True)
def test_train_says_the_same(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check", *wrong]) == 2
    told, [recipe, size, *words] = capsys.readouterr().err, wrong
    monkeypatch.setenv("WORLD_SIZE", size.partition("=")[2])
    monkeypatch.setattr(
        "llmtrain.training.run.run_rank", lambda checked: pytest.fail("train begins what check refuses")
    )
    assert main(["train", "--config", recipe, *words]) == 2
    assert capsys.readouterr().err.replace("WORLD_SIZE, set by the launcher", "--world-size") == told


def test_a_run_folder_in_use_is_told_before_anything_slow(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, {"train": {"run_dir": "held"}}, {})
    with RunDirectory("held"):
        with monkeypatch.context() as patch:
            patch.setattr("llmtrain.training.examine.examine", lambda _: pytest.fail("this takes seconds"))
            assert main(["train", "--config", "run.yaml"]) == 2
            (here / "hosts").write_text("localhost slots=2\n")
            assert main(["launch", "--hostfile", "hosts", "--", "run.yaml"]) == 2
            assert len(re.findall(r"held .*another launch", capsys.readouterr().err)) == 2
        assert main(["config", "check", "run.yaml"]) == 0, "which disturbs nobody"


def test_check_without_a_world_size_tells_which_to_give(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    write(here)
    assert main(["config", "show", "run.yaml"]) == 0
    assert "--world-size 2 or 4" in capsys.readouterr().out
    assert main(["config", "show", "run.yaml", "--world-size", "1"]) == 0
    assert "--world-size" not in capsys.readouterr().out
    write(here, {"train": {"accumulation": 1}}, {"sequence_parallel_size": 2})
    assert main(["config", "check", "run.yaml"]) == 2
    assert "--world-size 8" in capsys.readouterr().err
    write(here, {"train": {"accumulation": 1, "global_batch": 7}})
    assert main(["config", "check", "run.yaml"]) == 2
    assert "the check was for" not in capsys.readouterr().err


def test_check_reads_the_data_when_asked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, {"data": {"stages": [{"from_step": 50, "path": "data/y"}]}, "eval": {"sets": {"named": "data/z"}}})
    for place, folder in enumerate("yz", 1):
        texts = [[list(range(1 + place, 490))] * 4]
        write_prepared(here / "data" / folder, texts, texts, vocab_size=512)
    (here / "data/x/train-00000.origins.parquet").write_bytes(b"origins")
    origins = {"origins": xxhash.xxh3_64_hexdigest(b"origins")}
    edit_manifest(here / "data/x", lambda told: told["shards"]["train"][0].update(origins))
    check = ["config", "check", "run.yaml", "--world-size=2"]
    assert main([*check, "--data"]) == 0
    assert "10 files, " in (said := capsys.readouterr().out) and "checksums" in said and "except" not in said
    first = ("x/train-00000.bin", "x/tokenizer/tokenizer.json", "x/train-00000.origins.parquet")
    for name in (*first, "y/train-00000.bin", "z/validation-00000.bin"):  # of a stage, and of an evaluation set
        file = here / "data" / name
        good = file.read_bytes()
        file.write_bytes(good[:-2] + bytes(byte ^ 1 for byte in good[-2:]))
        assert main(check) == 0
        assert main([*check, "--data"]) == 2
        assert f"{name}: its checksum is not that of data/{name[0]}/manifest.json" in capsys.readouterr().err
        file.write_bytes(good)
    edit_manifest(here / "data/x", lambda told: [shard.update(xxh3="") for shard in told["shards"]["train"]])
    assert main([*check, "--data"]) == 0, "a folder without checksums goes on working"
    assert "except 1 file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokens", {}), ("tokens", None), ("tokens", {"train": 10**9, "validation": 10**9}), ("source", "x")],
)
def test_a_manifest_that_was_changed_is_no_traceback(
    key: str, value: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here)
    edit_manifest(here / "data/x", lambda told: told.update({key: value}))
    assert main(["config", "check", "run.yaml", "--world-size=2"]) == 2
    assert re.search(rf"data/x/manifest\.json: .*its {key}", capsys.readouterr().err)


def test_a_file_in_the_wrong_place_is_named_for_what_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here)
    for given, words in (("ds.json", "DeepSpeed JSON"), ("data/x", "folder")):
        assert main(["config", "check", given]) == 2
        told = capsys.readouterr().err
        assert words in told and "mistakes" not in told
    assert main(["config", "show", "--", "run.yaml", "--world-size=2"]) == 0
