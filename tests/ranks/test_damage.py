"""What is wrong with a checkpoint is found before the first step, by all ranks alike, and named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.base.errors import CheckpointError, UserError
from llmtrain.checkpoint.format import TRAINER, Manifest, step_folder
from llmtrain.checkpoint.output import Contents, build_checkpoint
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.engine.deepspeed.engine import ZeroEngine
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.region import Region
from llmtrain.storage.tensorfile import TensorFile
from tests.helpers.training import (
    LLAMA,
    Case,
    assembled,
    counted,
    make_engine,
    resolved_run,
    resume_from,
    save_checkpoint,
    train_steps,
)

NOW = {
    "optimizer": "adamw",
    "vocab_size": 512,
    "data_fingerprint": "d",
    "run": {},
    "deepspeed": {},
    "versions": {},
    "layout": {},
}


def save_run(case: Case, run: str, steps: list[int]) -> None:
    """A run folder with a checkpoint after each of these steps."""
    engine, ranks = make_engine(case)
    done = 0
    for step in steps:
        train_steps(case, engine, ranks, done, step)
        done = step
        state = {
            **NOW,
            "step": step,
            "tokens": 384 * step,
            "sample_index": 12 * step,
            "run_id": "w",
            **counted(engine),
        }
        save_checkpoint(engine, Path(run) / "checkpoints", step, state, resolved_run(case, ranks.world_size), ranks)
    engine.close()


def try_resume(case: Case, attempts: list[dict[str, Any]], broken: Callable[[Any], None] | None = None) -> list[Any]:
    """For each {"folder", "resume", ...}: what `resume` gives, or its error; one engine is loaded again and again."""
    engine, ranks = make_engine(case)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if broken is not None:
            broken((patch, ranks))
        for attempt in attempts:
            config = replace(
                resolved_run(case, ranks.world_size).config,
                resume=attempt.get("resume", "auto"),
                resume_weights_only=attempt.get("weights_only", False),
            )
            now = {**NOW, **attempt.get("now", {})}
            try:
                resumed = resume_from(engine, config, attempt["folder"], now, ranks)
                assert resumed is not None
                found.append((resumed.folder.name, resumed.lines))
            except UserError as error:
                found.append(f"{type(error).__name__}: {error}")
    engine.close()
    return found


def flip(checkpoint: Path, kind: str, name: str, element: int) -> str:
    """Flip the lowest bit of one element, wherever it lies; the file's name."""
    for file, entry in Manifest.read(checkpoint).files.items():
        for piece in entry.pieces:
            if (piece.kind, piece.name) == (kind, name) and piece.region.first <= element < piece.region.end:
                with TensorFile(checkpoint / file) as tensors:
                    held = tensors.entries[f"{kind}/{name}"]
                size = (held.end - held.begin) // held.numel
                with open(checkpoint / file, "r+b") as out:
                    out.seek(held.begin + size * (element - piece.region.first))
                    byte = out.read(1)[0]
                    out.seek(-1, 1)
                    out.write(bytes([byte ^ 1]))
                return file
    raise AssertionError((kind, name, element))


def same_on_all_ranks(answers: list[list[Any]]) -> list[Any]:
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.fixture(scope="module")
def run(pools, small_data, tmp_path_factory) -> Path:
    """Checkpoints of steps 1 and 2, ZeRO 1 on 2 ranks."""
    folder = tmp_path_factory.mktemp("run") / "run"
    pools(2).run(save_run, Case(data=small_data, stage=1), str(folder), [1, 2])
    return folder


def copy_of(run: Path, tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(run, tmp_path / name))


@pytest.mark.parametrize("form", [(2, 0), (2, 1), (4, 2), (2, 3), (1, 3)], ids=lambda f: f"z{f[1]}x{f[0]}")
def test_one_bit_is_found_under_every_layout_and_named(pools, small_data, run, tmp_path, form):
    world_size, stage = form
    attempts, wanted = [], []
    for index, (kind, name, element) in enumerate(
        [
            (PARAM, "model.embed_tokens.weight", 512 * 64 - 1),
            (PARAM, "model.norm.weight", 0),
            ("exp_avg", "lm_head.weight", 7),
            ("exp_avg_sq", "model.layers.2.mlp.up_proj.weight", 5000),
        ]
    ):
        folder = copy_of(run, tmp_path, str(index))
        file = flip(step_folder(folder / "checkpoints", 2), kind, name, element)
        attempts.append({"folder": str(folder)})
        wanted.append((folder, f"{file} is damaged", f"{kind} of {name} differs"))
    found = same_on_all_ranks(pools(world_size).run(try_resume, Case(data=small_data, stage=stage), attempts))
    for (folder, damage, tensor), (taken, lines) in zip(wanted, found, strict=True):
        assert taken == "step-00000001"
        assert lines[0].startswith("skipped step-00000002: ") and damage in lines[0] and tensor in lines[0]
        assert {p.name for p in (folder / "checkpoints").iterdir()} == {"step-00000001", "step-00000002.damaged"}


def resumed_state(case: Case, attempt: dict[str, Any]) -> tuple[dict[str, dict[str, torch.Tensor]], int]:
    """All tensors by kind, and the optimizer's step, after a resume."""
    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, 1)  # its own state is not the one that a new engine has
    config = replace(
        resolved_run(case, ranks.world_size).config,
        resume=attempt.get("resume", "auto"),
        resume_weights_only=attempt.get("weights_only", False),
    )
    resume_from(engine, config, attempt["folder"], NOW, ranks)
    state = {kind: assembled(engine, ranks, kind) for kind in (PARAM, "exp_avg", "exp_avg_sq")}
    step = counted(engine)["optimizer_step"]
    engine.close()
    return state, step


def test_after_a_walk_back_nothing_of_the_damaged_checkpoint_is_left(pools, small_data, run, tmp_path):
    folder, clean = copy_of(run, tmp_path, "run"), copy_of(run, tmp_path, "clean")
    flip(step_folder(folder / "checkpoints", 2), "exp_avg_sq", "lm_head.weight", 7)
    shutil.rmtree(step_folder(clean / "checkpoints", 2))
    case = Case(data=small_data, stage=3)
    (got, got_step), (want, want_step) = (
        pools(2).run(resumed_state, case, {"folder": str(each)})[0] for each in (folder, clean)
    )
    assert got_step == want_step == 1
    for kind, tensors in want.items():
        assert all(torch.equal(got[kind][name], values) for name, values in tensors.items()), kind


def test_muons_momentum_is_proven_too(pools, small_data, tmp_path):
    """ZeRO 1 in bf16 keeps it in bf16, and two ranks hold what a partition cuts."""
    case = Case(data=small_data, stage=1, optimizer="muon", precision="bf16")
    pools(2).run(save_run, case, str(tmp_path / "run"), [1, 2])
    intact = copy_of(tmp_path / "run", tmp_path, "intact")
    name = "model.layers.1.self_attn.o_proj.weight"
    file = flip(step_folder(tmp_path / "run" / "checkpoints", 2), "momentum_buffer", name, 64 * 64 - 1)
    attempts = [{"folder": str(intact)}, {"folder": str(tmp_path / "run")}]
    for other in (case, replace(case, stage=0), replace(case, stage=3, precision="fp32")):
        damaged = copy_of(tmp_path / "run", tmp_path, f"{other.stage}")
        attempts[1] = {"folder": str(damaged)}
        (first, _), (second, lines) = same_on_all_ranks(pools(2).run(try_resume, other, attempts))
        assert (first, second) == ("step-00000002", "step-00000001")
        assert f"{file} is damaged" in lines[0] and f"momentum_buffer of {name} differs" in lines[0]


def unreadable_on_rank_1(world: Any) -> None:
    def unreadable(*_: object) -> torch.Tensor:
        raise CheckpointError("rank-00000.safetensors cannot be read at byte 4096: Input/output error")

    patch, ranks = world
    if ranks.rank == 1:
        patch.setattr(CheckpointReader, "read_kind_region", unreadable)


def other_bytes_on_rank_1(world: Any) -> None:
    """In the half of a moment that rank 0 answers for, where both ranks hold all of it."""
    read = CheckpointReader.read_kind_region

    def read_wrongly(self: CheckpointReader, kind: str, name: str, region: Region) -> torch.Tensor:
        values = read(self, kind, name, region)
        if (kind, name) == ("exp_avg", "lm_head.weight"):
            values[0] += 1
        return values

    patch, ranks = world
    if ranks.rank == 1:
        patch.setattr(CheckpointReader, "read_kind_region", read_wrongly)


def stale_copies(world: Any) -> None:
    """The forward pass would go on with what was there before the resume."""
    world[0].setattr(ZeroEngine, "refresh", lambda engine: None)


@pytest.mark.parametrize(
    ("broken", "stage", "message"),
    [
        (unreadable_on_rank_1, 2, r"step-00000002: rank-00000\.safetensors"),
        (other_bytes_on_rank_1, 0, r"exp_avg of lm_head\.weight .*manifest"),
        (stale_copies, 1, r"optimizer .* lm_head\.weight"),
        (stale_copies, 3, r"optimizer .* lm_head\.weight"),
    ],
)
def test_what_one_rank_meets_ends_all_with_one_message(pools, small_data, run, broken, stage, message):
    (error,) = same_on_all_ranks(
        pools(2).run(try_resume, Case(data=small_data, stage=stage), [{"folder": str(run)}], broken)
    )
    kind = "ModelError: " if broken is stale_copies else "CheckpointError: "
    assert re.search(message, error) and error.startswith(kind)
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step-00000001", "step-00000002"}


def rebuilt(source: Path, out: Path, moments: dict[str, set[str]], **trainer: Any) -> str:
    """The checkpoint with these moments only, as another tool would write it."""
    reader = CheckpointReader(source)
    shapes = {name: reader.shape(name) for name in reader.order()}
    state = {**json.loads((source / TRAINER).read_text()), **trainer}
    layout = {"world_size": 1, "zero_stage": 0, "precision": "fp32"}
    out.parent.mkdir(parents=True)
    contents = Contents(step=1, shapes=shapes, moments=moments, read=reader.read_kind, trainer=state, layout=layout)
    build_checkpoint(out, contents, plan={})
    return str(out)


@pytest.fixture(scope="module")
def imported(run, tmp_path_factory) -> dict[str, str]:
    """Checkpoints that other tools made."""
    source, out = step_folder(run / "checkpoints", 1), tmp_path_factory.mktemp("imported")
    names = set(Manifest.read(source).tensors)
    both = {"exp_avg": names, "exp_avg_sq": names}
    trained = names - {"lm_head.weight", "model.norm.weight"}
    return {
        "weights": rebuilt(source, out / "weights" / "step-00000001", {}, weights_only=True),
        "frozen": rebuilt(
            source, out / "frozen" / "step-00000001", {"exp_avg": names, "exp_avg_sq": trained}, optimizer="adamw"
        ),
        "unrecorded": rebuilt(
            source,
            out / "unrecorded" / "step-00000001",
            both,
            data_fingerprint=None,
            run_id=None,
            run=None,
            optimizer=None,
            vocab_size=None,
        ),
    }


def test_what_cannot_travel_is_refused_by_name(pools, small_data, run, imported, tmp_path):
    path = str(step_folder(run / "checkpoints", 2))
    attempts = [
        {"resume": imported["weights"]},
        {"resume": imported["frozen"]},
        {"resume": path, "now": {"data_fingerprint": "e"}},
        {"resume": path, "now": {"optimizer": "muon"}},
        {"resume": path, "now": {"vocab_size": 640}},
        {"resume": imported["unrecorded"]},
    ]
    attempts = [{**attempt, "folder": str(tmp_path / str(index))} for index, attempt in enumerate(attempts)]
    found = same_on_all_ranks(pools(2).run(try_resume, Case(data=small_data, stage=2), attempts))
    assert f"--resume {imported['weights']} --resume-weights-only" in found[0]
    assert "exp_avg_sq of lm_head.weight, exp_avg_sq of model.norm.weight" in found[1]
    assert re.search("data_fingerprint .*'d' .*'e'", found[2]) and "resume_weights_only" in found[2]
    assert re.search("optimizer .*'adamw' .*'muon'", found[3]) and "resume_weights_only" in found[3]
    assert re.search(r"vocab_size .*\b512 .*\b640\b", found[4])
    name, lines = found[5]
    assert name == "step-00000001" and " data" in lines[-1] and "sequence 12 " in lines[-1]

    muon = [{"folder": str(tmp_path / "m"), "resume": imported["unrecorded"]}]
    (error,) = same_on_all_ranks(pools(2).run(try_resume, Case(data=small_data, optimizer="muon"), muon))
    assert re.search("exp_avg, exp_avg_sq, param.*exp_avg, exp_avg_sq, momentum", error)


def test_weights_alone_begin_a_new_run(pools, small_data, run, imported, tmp_path):
    """Of a full checkpoint or of one without moments; with another optimizer as well; never of other shapes."""
    path = str(step_folder(run / "checkpoints", 2))
    case = Case(data=small_data, stage=2)
    for index, source in enumerate((path, imported["weights"])):
        attempt = {"folder": str(tmp_path / str(index)), "resume": source, "weights_only": True}
        state, step = pools(2).run(resumed_state, case, attempt)[0]
        reader = CheckpointReader(Path(source))
        for name, values in state[PARAM].items():
            assert torch.equal(values.reshape(-1), reader.read(name, 0, values.numel())), name
        assert step == 1 and float(state["exp_avg"]["lm_head.weight"].abs().max()) > 0  # those of `resumed_state`

    attempts = [{"folder": str(tmp_path / "a"), "resume": path, "weights_only": True, "now": {"optimizer": "muon"}}]
    muon = replace(case, optimizer="muon")
    ((name, lines),) = same_on_all_ranks(pools(2).run(try_resume, muon, attempts))
    assert name == "step-00000002" and lines[0].startswith(f"took the parameters of {path} (step 2)")
    larger = replace(case, model={**LLAMA, "vocab_size": 640})
    (error,) = same_on_all_ranks(pools(2).run(try_resume, larger, attempts))
    assert re.search(r"\[512, 64\] .*\[640, 64\]", error)
