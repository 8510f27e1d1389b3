"""`llmtrain checkpoint average` and the conversions, as a user calls them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint import output
from llmtrain.checkpoint.durable import DurableFile
from llmtrain.checkpoint.format import MANIFEST, Manifest, complete_checkpoints
from llmtrain.checkpoint.hf import exporting
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.storage.tensorfile import TensorFile
from tests.helpers.checkpoints import (
    LLAMA,
    SHAPES,
    WHOLE_LLAMA,
    at,
    close_and_change,
    flip,
    frozen_folder,
    sign,
    tensors,
    write_checkpoint,
)

pytestmark = pytest.mark.long

Say = Callable[..., tuple[int, str, str]]
UP = "model.layers.0.mlp.up_proj.weight"


# average


def test_average_is_the_mean(run: Path, tmp_path: Path, say: Say) -> None:
    code, out, _ = say("average", run / "step-100", run / "step-200", run / "step-300", tmp_path / "mean")
    assert code == 0, out
    made = at(tmp_path / "mean", 300)
    assert f"read     {at(run, 100)}, step 100: checksums agree" in out and str(made) in out
    reader = CheckpointReader(made)
    assert reader.kinds() == {"param"} and reader.order() == list(SHAPES)
    for name, shape in SHAPES.items():
        each = [tensors(seed)["param", name].double() for seed in (100, 200, 300)]
        want = (torch.stack(each).sum(0) / 3).float().reshape(-1)
        assert torch.equal(reader.read(name, 0, want.numel()), want) and reader.shape(name) == shape
    trainer = TrainerState.read(made)
    assert trainer.entries["weights_only"] is True and trainer.step == 300 and len(trainer.entries["averaged"]) == 3
    assert say("verify", tmp_path / "mean")[0] == 0
    assert "average, fp32, weights only" in say("ls", tmp_path / "mean")[1]


def test_the_mean_has_no_figures_of_its_sources(tmp_path: Path, say: Say) -> None:
    keeps = {"checkpoint": {"keep_best": {"metric": "eval/loss"}}}
    for step in (1, 2):
        measured = {"step": step, "figures": {"eval/loss": 2.0}}
        write_checkpoint(tmp_path / "run", step, seed=step, evaluation=measured, run=keeps)
    assert "best: eval/loss 2.0000" in say("ls", tmp_path / "run")[1]
    assert say("average", "--last", 2, tmp_path / "run", tmp_path / "mean")[0] == 0
    assert "best" not in say("ls", tmp_path / "mean")[1]


def test_average_refuses_what_has_no_mean(run: Path, tmp_path: Path, say: Say) -> None:
    other = {**SHAPES, UP: (8, 16)}
    write_checkpoint(tmp_path / "shapes", 1, seed=1, shapes=other)
    write_checkpoint(tmp_path / "words", 1, seed=1, vocab_size=33)
    out = tmp_path / "mean"
    for words, told in (
        ([run / "step-100", tmp_path / "shapes", out], UP),
        ([run / "step-100", tmp_path / "words", out], "vocab_size: 32 -> 33"),
        ([run / "step-100", out], "two or more different checkpoints"),
        ([run / "step-100", run / "checkpoints/step-100", out], "two or more different checkpoints"),
        ([run / "step-100", run / "step-200", run], "holds checkpoints already"),
    ):
        code, _, err = say("average", *words)
        assert code == 2 and told in err and not out.exists(), err


def test_average_notices_damage_as_it_reads(run: Path, tmp_path: Path, say: Say) -> None:
    path = at(run, 200) / "rank-00001.safetensors"
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    flip(path, begin + json.loads(data[8:begin])[f"param/{UP}"]["data_offsets"][0])
    code, _, err = say("average", run / "step-100", run / "step-200", tmp_path / "mean")
    assert code == 2 and f"{at(run, 200)}: param of {UP} is damaged; nothing was written" in err
    assert not (tmp_path / "mean").exists()


def test_a_conversion_continues_where_it_was_interrupted(
    run: Path, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_FILE_BYTES", 1)  # each tensor in a file of its own
    read = CheckpointReader.read_kind
    names: list[str] = []

    def interrupted(self: CheckpointReader, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        names.append(name)
        if name == "model.norm.weight":
            raise KeyboardInterrupt
        return read(self, kind, name, start, stop)

    monkeypatch.setattr(CheckpointReader, "read_kind", interrupted)
    code, _, err = say("average", run / "step-100", run / "step-200", tmp_path / "mean")
    assert (code, err) == (130, "interrupted\n") and not at(tmp_path / "mean", 200).exists()
    monkeypatch.setattr(CheckpointReader, "read_kind", lambda *args: names.append(args[2]) or read(*args))
    names.clear()
    code, out, _ = say("average", run / "step-100", run / "step-200", tmp_path / "mean")
    assert code == 0 and "3 files" in out
    assert set(names) == {"model.norm.weight"}
    assert say("verify", at(tmp_path / "mean", 200))[0] == 0


# conversions: that the command line reaches them with its options; what they do is tested beside them


def test_from_and_to_hugging_face(tmp_path: Path, say: Say) -> None:
    values = {name: value for (kind, name), value in tensors(1, WHOLE_LLAMA).items() if kind == "param"}
    (tmp_path / "hf").mkdir()
    save_file(values, tmp_path / "hf/model.safetensors", {"format": "pt"})
    (tmp_path / "hf/config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    code, out, _ = say("from-hf", tmp_path / "hf", tmp_path / "run", "--check", "logits")
    assert code == 0 and "logits" in out and str(at(tmp_path / "run", 0)) in out
    assert "from-hf, fp32, weights only" in say("ls", tmp_path / "run")[1] and say("verify", tmp_path / "run")[0] == 0
    code, out, _ = say("to-hf", tmp_path / "run", tmp_path / "back", "--check", "none")
    assert code == 0 and "logits" not in out
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()
    words = ["--dtype", "bf16", "--max-shard-size", "1KB", "--check", "auto"]
    code, out, _ = say("to-hf", tmp_path / "run/step-0", tmp_path / "small", *words)
    assert code == 0, out
    files = list((tmp_path / "small").glob("*.safetensors"))
    shards = {name: value for file in files for name, value in load_file(file).items()}
    assert len(files) > 2
    assert all(torch.equal(shards[name], value.bfloat16()) for name, value in values.items())
    code, _, err = say("to-hf", tmp_path / "run", tmp_path / "hf")
    assert code == 2 and "exists" in err
    code, _, err = say("to-hf", tmp_path / "run", tmp_path / "x", "--max-shard-size", "2 potatoes")
    assert code == 2 and "--max-shard-size" in err and "potatoes" in err


def test_a_checkpoint_that_the_run_deletes_meanwhile_gives_way_to_the_next(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_checkpoint(tmp_path / "run", 1, seed=1, shapes=WHOLE_LLAMA)
    export, read = exporting.export_hf, []

    def export_of_a_live_run(checkpoint: Path, *words: Any, **options: Any) -> Any:
        read.append(checkpoint.name)
        if checkpoint == first:
            write_checkpoint(tmp_path / "run", 2, seed=2, shapes=WHOLE_LLAMA)
            shutil.rmtree(first)
        return export(checkpoint, *words, **options)

    monkeypatch.setattr(exporting, "export_hf", export_of_a_live_run)
    code, _, err = say("to-hf", tmp_path / "run", tmp_path / "hf", "--check", "none")
    assert (code, read) == (0, ["step-00000001", "step-00000002"]), err
    made = load_file(tmp_path / "hf/model.safetensors")
    assert torch.equal(made[UP], tensors(2, WHOLE_LLAMA)["param", UP])


def test_pieces_of_tensor_parallel_ranks_are_like_slices(tmp_path: Path, say: Say) -> None:
    """Every tool that reads a checkpoint, with matrices cut by columns and with matrices cut by rows."""
    written = {}
    for name, strided in (("rows", False), ("columns", True)):
        run = written[name] = tmp_path / name
        for step in (1, 2):
            write_checkpoint(run, step, seed=step, ranks=4, shapes=WHOLE_LLAMA, strided=strided)
        assert say("verify", run)[0] == 0
        assert say("to-hf", run, tmp_path / f"hf {name}")[0] == 0
        assert say("average", run / "step-1", run / "step-2", tmp_path / f"mean {name}")[0] == 0
    pieces = [piece for entry in Manifest.read(at(run, 2)).files.values() for piece in entry.pieces]
    assert sum(not piece.region.contiguous for piece in pieces) > 100
    assert "equal: 37 tensors" in say("diff", at(written["rows"], 2), at(written["columns"], 2))[1]
    means = [at(tmp_path / f"mean {name}", 2) for name in written]
    assert "different: 0 of 12 tensors" in say("diff", *means)[1]
    rows, columns = (load_file(tmp_path / f"hf {name}/model.safetensors") for name in written)
    assert rows.keys() == columns.keys() and all(torch.equal(rows[name], columns[name]) for name in rows)
    damaged = at(run, 2) / "rank-00002.safetensors"
    with TensorFile(damaged) as file:
        begin = file.entries[f"param/{UP}#1"].begin
    flip(damaged, begin)
    code, out, _ = say("verify", run)
    assert code == 1 and f"1 of 61 tensors are damaged: param of {UP} [44:126, 22 elements in rows 8 apart]" in out, out


def test_what_a_disk_changes_while_it_is_written_is_found(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every conversion reads back what it wrote before that gets its name."""
    run = write_checkpoint(tmp_path / "run", 7, seed=1, shapes=WHOLE_LLAMA)
    write_checkpoint(tmp_path / "run", 8, seed=2, shapes=WHOLE_LLAMA)
    monkeypatch.setattr(DurableFile, "close", close_and_change)
    code, _, err = say("average", run, tmp_path / "run/step-8", tmp_path / "mean")
    assert code != 0 and str(tmp_path / "mean") in err, err
    assert not at(tmp_path / "mean", 8).exists()


# frozen parameters in a folder of their own

FROZEN = [UP, "model.embed_tokens.weight"]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A run with two checkpoints of the model of LLAMA, whose parameters FROZEN are in the folder tmp_path/hf."""
    source = frozen_folder(tmp_path / "hf", FROZEN, WHOLE_LLAMA, torch.bfloat16)
    for step in (1, 2):
        write_checkpoint(tmp_path / "run", step, seed=step, shapes=WHOLE_LLAMA, frozen=source)
    return tmp_path / "run"


def test_what_a_checkpoint_leaves_out_is_read_from_its_folder(outside: Path, tmp_path: Path, say: Say) -> None:
    given = {name: load_file(tmp_path / "hf" / f"model-{i}.safetensors")[name] for i, name in enumerate(FROZEN)}
    assert say("verify", outside)[0] == 0
    assert [row["state"] for row in json.loads(say("ls", outside, "--json")[1])] == ["complete"] * 2
    assert say("diff", at(outside, 1), at(outside, 1))[0] == 0
    code, out, _ = say("diff", at(outside, 1), at(outside, 2))
    assert code == 1 and "model.norm.weight" in out and not any(name in out for name in FROZEN)
    assert say("to-hf", at(outside, 2), tmp_path / "export")[0] == 0
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert written["model.norm.weight"].dtype == torch.float32
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "float32"
    assert all(written[n].dtype == v.dtype and torch.equal(written[n], v) for n, v in given.items())
    assert say("average", at(outside, 1), at(outside, 2), tmp_path / "mean")[0] == 0
    assert say("to-hf", tmp_path / "mean", tmp_path / "mean-export")[0] == 0
    mean = CheckpointReader(at(tmp_path / "mean", 2))
    assert not mean.manifest.frozen.parts
    assert all(torch.equal(mean.read(name, 0, v.numel()), v.float().reshape(-1)) for name, v in given.items())


COMMANDS = ["verify A", "diff A B", "average A B OUT", "to-hf A OUT", "prune RUN --keep 1"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("how", ["changed", "moved", "other"])
def test_a_folder_that_is_not_as_it_was_is_refused(
    outside: Path, tmp_path: Path, say: Say, how: str, command: str
) -> None:
    file = tmp_path / "hf" / "model-0.safetensors"
    if how == "changed":
        flip(file, file.stat().st_size - 3)
    elif how == "moved":
        (tmp_path / "hf").rename(tmp_path / "elsewhere")
    else:
        save_file({UP: torch.zeros(16, 9)}, file)
    places = {"A": at(outside, 1), "B": at(outside, 2), "OUT": tmp_path / "out", "RUN": outside}
    code, out, err = say(*(places.get(word, word) for word in command.split()))
    assert code == {"v": 1, "p": 0}.get(command[0], 2), (out, err)
    assert str(tmp_path / "hf") in out + err and "model.pretrained" in out + err
    assert (UP if how == "changed" else "hf/model-") in out + err or how == "other"
    assert not (tmp_path / "out").exists()
    assert at(outside, 1).exists() == (command[0] != "p") and at(outside, 2).exists()
    assert (f"{at(outside, 1)}  intact, without its frozen parameters\n" in out) == (command[0] == "v"), out
    if how == "moved":
        assert str(tmp_path / "hf") in say("ls", outside)[1]
        (tmp_path / "hf").symlink_to(tmp_path / "elsewhere")
        assert say(*(places.get(word, word) for word in command.split()))[0] == (command[0] == "d")


def test_prune_keeps_the_newest_whose_frozen_parameters_are_there(tmp_path: Path, say: Say) -> None:
    """While those of newer ones are gone; damage is told as damage, whatever the folder is like."""
    for step, name in ((1, "one"), (2, "two"), (3, "two"), (4, "two")):
        source = frozen_folder(tmp_path / f"{name}-{step}", FROZEN, WHOLE_LLAMA, torch.bfloat16)
        source = replace(source, folder=tmp_path / name)
        write_checkpoint(tmp_path / "run", step, seed=step, shapes=WHOLE_LLAMA, frozen=source)
    (tmp_path / "one-1").rename(tmp_path / "one")
    flip(at(tmp_path / "run", 4) / "rank-00000.safetensors", 5000)
    code, out, _ = say("verify", at(tmp_path / "run", 4))
    assert code == 1 and "step-00000004  DAMAGED\n" in out and "rank-00000" in out and str(tmp_path / "two") in out
    code, out, err = say("prune", tmp_path / "run", "--keep", "1")
    assert code == 0, err
    assert [path.name for path in complete_checkpoints(tmp_path / "run/checkpoints")] == [
        f"step-0000000{step}" for step in (4, 3, 1)
    ]


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("frozen", "folder"), "hf", "'hf'"),
        (("frozen", "tensors", UP, 1, 0, 0), "../model-0.safetensors", "a plain name: '../model-0.safetensors'"),
        (("frozen", "tensors", UP, 1), [], f"no part of the frozen parameter '{UP}' is listed"),
        (("frozen", "tensors", UP, 1, 0, 3), 8, f"param of {UP} ends at element 8 of 128"),
        (("tensors",), SHAPES, "its shape is missing"),
        (("format",), 1, "model.embed_tokens.weight (2"),
        (("format",), 3, "format 3 is none of the formats (1, 2)"),
    ],
)
def test_a_manifest_that_names_no_folder(outside: Path, path: tuple, value: object, says: str) -> None:
    file = at(outside, 1) / MANIFEST
    raw = json.loads(file.read_text())["manifest"]
    assert raw["format"] == 2
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file.write_text(sign(raw))
    with pytest.raises(CheckpointError) as caught:
        Manifest.read(at(outside, 1))
    assert says in str(caught.value)
