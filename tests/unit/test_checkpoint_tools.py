"""`llmtrain checkpoint ls|verify|diff|prune|average`, as a user calls them; and which checkpoints retention takes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain import cli
from llmtrain.checkpoint import build, retain
from llmtrain.checkpoint.format import MANIFEST, TRAINER, Manifest, complete_checkpoints, read_trainer
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.retain import keep_newest, outdated
from tests.helpers.checkpoints import LLAMA, SHAPES, WHOLE_LLAMA, resign, tensors, write_checkpoint

Say = Callable[..., tuple[int, str, str]]
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the steps 100, 200 and 300."""
    for step in (100, 200, 300):
        write_checkpoint(tmp_path / "run", step, seed=step)
    return tmp_path / "run"


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """`llmtrain checkpoint ...`: exit code, standard output, standard error."""

    def call(*words: object) -> tuple[int, str, str]:
        code = cli.main(["checkpoint", *map(str, words)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


# ls


def test_ls_shows_all_that_lies_there(run: Path, say: Say) -> None:
    for name in ("step-00000400.tmp", "step-00000050.damaged", "step-00000040", "step-00000030.trash", "notes"):
        (run / "checkpoints" / name).mkdir()
    (at(run, 200) / "rank-00001.safetensors").unlink()
    flip(at(run, 100) / TRAINER, 40)
    code, out, _ = say("ls", run)
    heading, *lines = out.splitlines()
    states = [(line.split()[0], line[heading.index("STATE") : heading.index("FOLDER")].strip()) for line in lines]
    assert code == 0
    assert [step for step, _ in states] == ["400", "300", "200", "100", "50", "40", "30"]
    assert [text.partition(":")[0] for _, text in states] == [
        "tmp", "complete", "damaged", "damaged", "set aside", "incomplete", "trash",
    ]  # fmt: skip
    assert "rank-00001.safetensors is missing" in states[2][1] and "trainer.json" in states[3][1]
    assert "307k" in lines[1] and "ZeRO 1 x 2 ranks, fp32" in lines[1] and str(at(run, 300)) in lines[1]


def test_ls_as_json(run: Path, say: Say) -> None:
    code, out, _ = say("ls", run, "--json")
    rows = json.loads(out)
    assert code == 0 and [row["step"] for row in rows] == [300, 200, 100]
    assert rows[0]["state"] == "complete" and rows[0]["tokens"] == 300 * 1024 and not rows[0]["weights_only"]
    assert rows[0]["bytes"] == sum(file.stat().st_size for file in at(run, 300).iterdir())
    assert rows[0]["layout"] == {"world_size": 2, "zero_stage": 1, "precision": "fp32"} and rows[0]["age_s"] < 600


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_looking_loads_no_torch(run: Path, command: str) -> None:
    words = [command, str(run), *(["--keep", "1"] if command == "prune" else [])]
    code = (
        "import sys; from llmtrain.checkpoint.commands import main; main(sys.argv[1:]); "
        "assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["step-200", "checkpoints/step-200", "step-00000200", "checkpoints/step-00000200"])
def test_a_checkpoint_by_any_of_its_names(run: Path, say: Say, name: str) -> None:
    code, out, _ = say("verify", run / name)
    assert (code, out) == (0, f"{at(run, 200)}  intact\n")


def test_what_holds_no_checkpoint(run: Path, tmp_path: Path, say: Say) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "none", run / "step-7"):
        for command in ("ls", "verify"):
            code, _, err = say(command, path)
            assert code == 2 and str(path) in err and "Give a run folder" in err


# verify


def test_verify_names_file_rank_and_tensor(run: Path, say: Say) -> None:
    path = at(run, 200) / "rank-00001.safetensors"
    before = path.read_bytes()
    begin = 8 + int.from_bytes(before[:8], "little")
    found = json.loads(before[8:begin])[f"exp_avg/{UP}"]["data_offsets"]
    flip(path, begin + found[0] + 9)
    code, out, _ = say("verify", run)
    assert code == 1
    assert out.splitlines() == [
        f"{at(run, 300)}  intact",
        f"{at(run, 200)}  DAMAGED",
        f"  rank-00001.safetensors (rank 1): 1 of 13 tensors are damaged: exp_avg of {UP} [64:128]",
        f"{at(run, 100)}  intact",
    ]


def test_verify_knows_damage_in_a_bf16_moment(run: Path, say: Say) -> None:
    path = at(run, 200) / "rank-00000.safetensors"
    before = path.read_bytes()
    begin = 8 + int.from_bytes(before[:8], "little")
    name = "momentum_buffer/model.embed_tokens.weight"
    flip(path, begin + json.loads(before[8:begin])[name]["data_offsets"][1] - 1)
    code, out, _ = say("verify", at(run, 200))
    assert code == 1
    assert "1 of 13 tensors are damaged: momentum_buffer of model.embed_tokens.weight [0:128]" in out


@pytest.mark.parametrize(
    ("file", "how", "words"),
    [
        ("rank-00001.safetensors", "cut", "rank-00001.safetensors (rank 1): has 1000 bytes instead of"),
        ("rank-00001.safetensors", "gone", "rank-00001.safetensors (rank 1): is missing"),
        ("rank-00000.safetensors", 3, "rank-00000.safetensors (rank 0): its header is damaged: the file: its header"),
        ("rank-00000.safetensors", 30, "rank-00000.safetensors (rank 0): "),
        (TRAINER, 20, "trainer.json: its contents differ from the manifest"),
        (TRAINER, "gone", "trainer.json: is missing"),
        (MANIFEST, 300, "manifest.json"),
        (MANIFEST, "cut", "manifest.json cannot be read as a manifest"),
    ],
)
def test_verify_finds_each_kind_of_damage(run: Path, say: Say, file: str, how: str | int, words: str) -> None:
    path = at(run, 300) / file
    if isinstance(how, int):
        flip(path, how)
    elif how == "cut":
        os.truncate(path, 1000)
    else:
        path.unlink()
    code, out, _ = say("verify", at(run, 300))
    assert code == 1 and f"{at(run, 300)}  DAMAGED" in out and words in out, out


def test_verify_of_a_run_looks_at_what_has_no_manifest(run: Path, say: Say) -> None:
    (at(run, 200) / MANIFEST).unlink()
    code, out, _ = say("verify", run)
    assert code == 1 and f"{at(run, 200)}  DAMAGED" in out and "it has no manifest.json" in out


def test_verify_knows_a_manifest_of_another_checkpoint(run: Path, say: Say) -> None:
    (at(run, 300) / MANIFEST).write_bytes((at(run, 200) / MANIFEST).read_bytes())
    code, out, _ = say("verify", at(run, 300))
    assert code == 1 and "manifest.json belongs to another checkpoint" in out


def test_verify_compares_the_steps(run: Path, say: Say) -> None:
    at(run, 300).rename(at(run, 999))
    code, out, _ = say("verify", at(run, 999))
    assert code == 1 and "manifest.json is of step 300, the folder of step 999" in out
    trainer = read_trainer(at(run, 200))
    (at(run, 200) / TRAINER).write_text(json.dumps({**trainer, "step": 7}))
    resign(at(run, 200))
    code, out, _ = say("verify", at(run, 200))
    assert code == 1 and "trainer.json is of step 7, manifest.json of step 200" in out


# diff


def test_diff_of_equals_and_of_layouts(tmp_path: Path, say: Say) -> None:
    a, b = (write_checkpoint(tmp_path / name, 5, seed=1, ranks=2) for name in "ab")
    assert say("diff", a, b)[:2] == (0, f"A  {a}\nB  {b}\nequal: 13 tensors\n")
    c = write_checkpoint(tmp_path / "c", 5, seed=1, ranks=3)
    code, out, _ = say("diff", a, c)
    assert code == 1
    assert out.splitlines()[2:] == ["layout   world_size: 2 -> 3", "different: 0 of 13 tensors differ in their values"]


def test_diff_says_what_and_where(tmp_path: Path, say: Say) -> None:
    a = write_checkpoint(tmp_path / "a", 5, seed=1)
    changed = {**tensors(1)}
    changed["param", UP][3, 5] += 0.5
    changed["param", UP][2, 1] -= 0.25
    changed["exp_avg", "model.norm.weight"][7] = float("nan")
    changed["exp_avg_sq", "model.norm.weight"][6] = float("-inf")
    run = {"optim": {"name": "adamw", "lr": 0.001}, "train": {"max_steps": 100}}
    b = write_checkpoint(tmp_path / "b", 6, seed=1, values=changed, run=run, versions={"torch": "2.12.0"})
    code, out, _ = say("diff", a, b)
    assert code == 1
    told = out.splitlines()
    for line in (
        "state    step: 5 -> 6",
        "state    tokens: 5120 -> 6144",
        "config   run.optim.lr: 0.003 -> 0.001",
        "config   versions.torch: '2.13.0' -> '2.12.0'",
        f"tensor   param of {UP}: by up to 0.5 at [3, 5], 2 elements",
        "tensor   exp_avg of model.norm.weight: by up to inf at [7], 1 elements",
        "tensor   exp_avg_sq of model.norm.weight: by up to inf at [6], 1 elements",
    ):
        assert line in told, out
    assert told[-1].startswith("different: 3 of 13 tensors differ") and sum("tensor  " in line for line in told) == 3


def test_diff_of_other_tensors(tmp_path: Path, say: Say) -> None:
    a = write_checkpoint(tmp_path / "a", 5, seed=1)
    shapes = {**SHAPES, UP: (8, 16), "lm_head.weight": (2, 2)}
    b = write_checkpoint(tmp_path / "b", 5, seed=1, shapes=shapes)
    code, out, _ = say("diff", a, b)
    assert code == 1
    assert "tensor   param of lm_head.weight: only in B" in out
    assert f"tensor   exp_avg of {UP}: shape (16, 8) -> (8, 16)" in out


# retention


def test_retention_keeps_the_newest_good_one(run: Path) -> None:
    assert outdated(run / "checkpoints", 2) == [at(run, 100)]
    assert outdated(run / "checkpoints", 0) == [at(run, 200), at(run, 100)]
    os.truncate(at(run, 300) / "rank-00000.safetensors", 10)
    (at(run, 200) / TRAINER).unlink()
    assert outdated(run / "checkpoints", 1) == []
    assert keep_newest(run / "checkpoints", 2) == []
    write_checkpoint(run, 400, seed=4)
    assert keep_newest(run / "checkpoints", 1) == [at(run, 300), at(run, 200), at(run, 100)]
    assert complete_checkpoints(run / "checkpoints") == [at(run, 400)]


def test_retention_reports_what_the_system_refuses(run: Path, monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(retain, "remove_tree", refuse)
    told: list[str] = []
    assert keep_newest(run / "checkpoints", 1, told.append) == []
    assert len(told) == 2 and str(at(run, 200)) in told[0] and "Read-only file system" in told[0]
    assert keep_newest(run / "nowhere", 1, told.append) == [] and len(told) == 2
    code, out, _ = say("prune", run, "--keep", 2)
    assert code == 1 and f"could not delete  {at(run, 100)}" in out


# prune


def test_prune(run: Path, say: Say) -> None:
    (run / "checkpoints/step-00000400.tmp").mkdir()
    size = sum(file.stat().st_size for file in at(run, 100).iterdir())
    code, out, _ = say("prune", run, "--keep", 2, "--dry-run")
    assert code == 0 and at(run, 100).is_dir() and (run / "checkpoints/step-00000400.tmp").is_dir()
    assert f"would delete  {at(run, 100)}  {size / 1024:.4g} KiB" in out.splitlines()
    code, out, _ = say("prune", run, "--keep", 2)
    assert code == 0 and out.splitlines()[-1].endswith("freed, 2 checkpoints kept, step-00000300 verified")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000200", "step-00000300"]


def test_prune_never_takes_the_newest_that_verifies(run: Path, say: Say) -> None:
    for step in (300, 200):
        path = at(run, step) / "rank-00000.safetensors"
        flip(path, path.stat().st_size - 1)
    code, out, _ = say("prune", run, "--keep", 1)
    assert code == 0 and complete_checkpoints(run / "checkpoints") == [at(run, 300), at(run, 100)]
    assert f"damaged  {at(run, 300)}" in out and "step-00000100 verified" in out
    (at(run, 100) / TRAINER).unlink()
    code, _, err = say("prune", run, "--keep", 1)
    assert code == 2 and "no checkpoint verifies, so nothing was deleted" in err and at(run, 100).is_dir()
    code, _, err = say("prune", run, "--keep", 0)
    assert code == 2 and "--keep 0: at least one checkpoint stays" in err


@pytest.mark.parametrize("whose", ["run", "tmp"])
def test_prune_leaves_alone_what_is_being_written(run: Path, say: Say, whose: str) -> None:
    partial = run / "checkpoints/step-00000400.tmp"
    partial.mkdir()
    handle = os.open(run if whose == "run" else partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert say("prune", run, "--keep", 1)[0] == 0
        assert partial.is_dir() and not at(run, 200).exists()
    finally:
        os.close(handle)
    assert say("prune", run, "--keep", 1)[0] == 0
    assert not partial.exists()


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
    trainer = read_trainer(made)
    assert trainer["weights_only"] is True and trainer["step"] == 300 and len(trainer["averaged"]) == 3
    assert say("verify", tmp_path / "mean")[0] == 0
    assert "average, fp32, weights only" in say("ls", tmp_path / "mean")[1]


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
    assert not list((tmp_path / "mean/checkpoints").iterdir())


def test_a_conversion_continues_where_it_was_interrupted(
    run: Path, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_FILE_BYTES", 1)  # each tensor in a file of its own
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
    assert code == 0 and "3 files are finished" in out
    assert set(names) == {"model.norm.weight"}
    assert say("verify", at(tmp_path / "mean", 200))[0] == 0


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """A real process with real signals; the tool in the clone is the same door."""
    large = torch.ones(8192, 2048)
    for step in (1, 2):
        shape = {UP: tuple(large.shape)}
        write_checkpoint(tmp_path / "run", step, seed=0, shapes=shape, values={("param", UP): large}, ranks=1)
    tool = Path(cli.__file__).parents[1] / "tools/convert_checkpoint.py"
    command = [sys.executable, tool, "average", "run/step-1", "run/step-2", "mean"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    partial = tmp_path / "mean/checkpoints/step-00000002.tmp/rank-00000.safetensors"
    deadline = time.monotonic() + 60
    while not partial.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert not at(tmp_path / "mean", 2).exists()
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert Manifest.read(at(tmp_path / "mean", 2)).step == 2


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
    assert code == 2 and "--max-shard-size 2 potatoes: give a size such as 2GB" in err


def test_the_mean_goes_to_hugging_face(tmp_path: Path, say: Say) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / "run", step, seed=step, shapes=WHOLE_LLAMA)
    assert say("average", tmp_path / "run/step-1", tmp_path / "run/step-2", tmp_path / "mean")[0] == 0
    assert say("to-hf", tmp_path / "mean", tmp_path / "hf")[0] == 0
    made = load_file(tmp_path / "hf/model.safetensors")
    each = [tensors(seed, WHOLE_LLAMA)["param", UP].double() for seed in (1, 2)]
    assert torch.equal(made[UP], (sum(each) / 2).float())


def test_to_and_from_deepspeed(tmp_path: Path, say: Say) -> None:
    values = {key: value for key, value in tensors(1, WHOLE_LLAMA).items() if key[0] != "momentum_buffer"}
    run = write_checkpoint(tmp_path / "run", 7, seed=1, shapes=WHOLE_LLAMA, values=values).parent.parent
    code, out, err = say("to-deepspeed-universal", run, tmp_path / "universal")
    assert code == 0, (out, err)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["from-deepspeed", tmp_path / "universal", tmp_path / "back", "--model", tmp_path / "config.json"]
    code, out, err = say(*words)
    assert code == 0 and str(at(tmp_path / "back", 7)) in out, (out, err)
    code, out, _ = say("diff", run, tmp_path / "back")
    assert "0 of 36 tensors differ in their values" in out and "config   run: only in A" in out.splitlines()
    code, _, err = say(*words[:2], tmp_path / "other", "--tag", "../x")
    assert code == 2 and "../x" in err
    assert say(*words[:2], tmp_path / "weights", *words[3:], "--weights-only")[0] == 0
    assert "weights only" in say("ls", tmp_path / "weights")[1]
