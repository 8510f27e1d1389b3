"""`llmtrain checkpoint from-deepspeed` and `to-deepspeed-universal`, as a user calls them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.checkpoint.durable import DurableFile
from llmtrain.checkpoint.format import OUTER
from llmtrain.features.deepspeed_checkpoints.from_deepspeed import optimizer_lines
from llmtrain.features.deepspeed_checkpoints.saved_files import Files
from tests.helpers.checkpoints import LLAMA, SHAPES, WHOLE_LLAMA, at, close_and_change, tensors, write_checkpoint

PAGE = Path(__file__).parents[3] / "docs/deepspeed_checkpoints.md"
Say = Callable[..., tuple[int, str, str]]


def adams(run: Path) -> Path:
    """A run with one checkpoint, of step 7, as AdamW leaves it."""
    values = {key: value for key, value in tensors(1, WHOLE_LLAMA).items() if key[0] != "momentum_buffer"}
    return write_checkpoint(run, 7, seed=1, shapes=WHOLE_LLAMA, values=values).parent.parent


def test_to_and_from_deepspeed(tmp_path: Path, say: Say) -> None:
    run = adams(tmp_path / "run")
    code, out, err = say("to-deepspeed-universal", run, tmp_path / "universal")
    assert code == 0, (out, err)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["from-deepspeed", tmp_path / "universal", tmp_path / "back", "--model", tmp_path / "config.json"]
    code, out, err = say(*words)
    assert code == 0 and str(at(tmp_path / "back", 7)) in out, (out, err)
    code, out, _ = say("diff", run, tmp_path / "back")
    assert re.search(r"\b0 of 36 tensors", out) and "config   run: only in A" in out.splitlines()
    code, _, err = say(*words[:2], tmp_path / "other", "--tag", "../x")
    assert code == 2 and "../x" in err
    assert say(*words[:2], tmp_path / "weights", *words[3:], "--weights-only")[0] == 0
    (tmp_path / "universal/config.json").write_text(
        json.dumps({**LLAMA, "rms_norm_eps": 0.1})
    )  # Trainer puts one there
    code, _, err = say(*words[:2], tmp_path / "other", *words[3:])
    assert code == 2 and "rms_norm_eps: 0.1 -> 1e-06" in err and "--model out" in err
    assert "weights only" in say("ls", tmp_path / "weights")[1]


def test_what_sites_keep_is_not_exported(tmp_path: Path, say: Say) -> None:
    values = {key: value for key, value in tensors(1, WHOLE_LLAMA).items() if key[0] != "momentum_buffer"}
    values |= {(f"{OUTER}momentum", name): value for (kind, name), value in values.items() if kind == "param"}
    run = write_checkpoint(tmp_path / "run", 7, seed=1, shapes=WHOLE_LLAMA, values=values)
    assert say("to-deepspeed-universal", run, tmp_path / "universal")[0] == 0
    assert not list((tmp_path / "universal").rglob(f"*{OUTER}*"))


def test_the_commands_of_the_page(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    adams(tmp_path / "runs/llama_1b")
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported/config.json").write_text(json.dumps(LLAMA))
    block = PAGE.read_text().partition("```bash\n")[2].partition("```")[0]
    for line in block.strip().splitlines():
        program, command, *words = shlex.split(line)
        assert (program, command) == ("llmtrain", "checkpoint")
        code, _, err = say(*words)
        assert code == 0, (line, err)


def test_what_a_disk_changes_while_it_is_written_is_found(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = adams(tmp_path / "run")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert say("to-deepspeed-universal", run, tmp_path / "universal")[0] == 0
    monkeypatch.setattr(DurableFile, "close", close_and_change)
    for words in (
        ("from-deepspeed", tmp_path / "universal", tmp_path / "back", "--model", tmp_path / "config.json"),
        ("to-deepspeed-universal", run, tmp_path / "again"),
    ):
        code, _, err = say(*words)
        assert code != 0 and "not written" in err and str(tmp_path) in err, (words, err)
    assert not at(tmp_path / "back", 7).exists() and not (tmp_path / "again").exists()


def test_a_name_that_is_a_path_is_no_folder(tmp_path: Path, say: Say) -> None:
    shapes = {**SHAPES, "../../../canary": (4,), "/tmp/canary": (4,)}
    run = write_checkpoint(tmp_path / "deep/er/run", 5, seed=1, shapes=shapes).parent.parent
    before = set(tmp_path.rglob("*"))
    code, _, err = say("to-deepspeed-universal", run, tmp_path / "deep/er/out")
    assert code in (1, 2) and err.startswith("error: "), err
    assert set(tmp_path.rglob("*")) == before


def test_strange_settings_of_an_optimizer_are_no_traceback():
    """They are read for the report alone; what is no number of Adam's is not shown as one."""
    good = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    strange = [{"betas": None}, {"betas": (0.9,)}, {"eps": "x"}, {"weight_decay": [1]}, {"initial_lr": "1"}]

    def lines(*groups, **state):
        optimizer = {"param_groups": list(groups), "state": {}}
        model = SimpleNamespace(tree={"optimizer": optimizer, **state})
        return "\n".join(optimizer_lines(Files(Path("x"), models=[model])))

    assert "decay: all" in lines(good) and "betas: [0.9, 0.95]" in lines(good)
    for change in strange:
        assert "betas:" not in (told := lines({**good, **change})) and "optimizer" in told
    two = [good, {**good, "weight_decay": 0.0}]
    assert "decay: matrices" in lines(*two, param_shapes=[{"a": (2, 2)}, {"b": (2,)}])
    assert "optim.weight_decay_of" in lines(*two, param_shapes=[{"a": (2,)}, {"b": (2, 2)}])
    assert "optim.weight_decay_of" in lines(*two), "nothing tells which parameters a group has"
