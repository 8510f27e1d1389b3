"""Checkpoints by URL: who only looks fetches manifests, who reads has what the manifest lists."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.checkpoint.remote import checkpoints_at
from tests.helpers.checkpoints import WHOLE_LLAMA, at, flip, write_checkpoint
from tests.helpers.stores import contents, fetched_files

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were fetched."""
    return fetched_files(tmp_path, monkeypatch)


@pytest.fixture
def url(run: Path, tmp_path: Path) -> str:
    """The checkpoints of a run with the steps 100, 200 and 300, in a store."""
    shutil.copytree(run / "checkpoints", tmp_path / "bucket/runs/name")
    return f"file://{tmp_path}/bucket/runs/name"


def test_ls_and_verify_of_a_url(run: Path, url: str, got: list[str], say: Say, tmp_path: Path) -> None:
    def table(text: str) -> list[list[str]]:
        return [re.sub(r"\d+(\.\d+)? ?(ms|s)\b", "AGE", line).split()[:-1] for line in text.splitlines()]

    got.clear()
    code, out, err = say("ls", url)
    assert code == 0, err
    assert table(out) == table(say("ls", run)[1])
    assert not [name for name in got if name.endswith(".safetensors")]
    rows = json.loads(say("ls", f"{url}/step-200", "--json")[1])
    assert [(row["step"], row["path"], row["state"]) for row in rows] == [(200, f"{url}/step-00000200", "complete")]
    assert [line.split() for line in say("verify", url)[1].splitlines()] == [
        [f"{url}/step-{step:08d}", "intact"] for step in (300, 200, 100)
    ]
    flip(tmp_path / "bucket/runs/name/step-00000200/rank-00001.safetensors", -5)
    code, out, _ = say("verify", f"{url}/step-200")
    assert code == 1 and f"{url}/step-00000200  DAMAGED" in out and "1 of 13 tensors" in out
    (tmp_path / "bucket/runs/name/step-00000300/rank-00001.safetensors").unlink()
    code, out, _ = say("ls", url)
    assert code == 0 and "damaged: rank-00001.safetensors" in out


def test_who_reads_a_checkpoint_fetches_it_once(run: Path, url: str, got: list[str], say: Say, tmp_path: Path) -> None:
    got.clear()
    [newest] = checkpoints_at(url)
    assert contents(newest) == contents(at(run, 300)) and newest.parent.parent.name == "name"
    fetched = [name for name in got if name.endswith(".safetensors")]
    assert len(fetched) == 2
    assert say("diff", url, f"{url}/step-00000100")[0] == 1
    assert len([name for name in got if name.endswith(".safetensors")]) == 4
    assert say("diff", url, at(run, 300))[0] == 0
    assert say("average", url, tmp_path / "mean", "--last", "2")[0] == 0
    assert say("average", run, tmp_path / "same", "--last", "2")[0] == 0
    means = [at(tmp_path / name, 300) / "rank-00000.safetensors" for name in ("mean", "same")]
    assert means[0].read_bytes() == means[1].read_bytes()
    shutil.rmtree(tmp_path / "bucket/runs/name/step-00000300")  # another course writes this step
    other = write_checkpoint(tmp_path / "other", 300, seed=7)
    shutil.copytree(other, tmp_path / "bucket/runs/name/step-00000300")
    assert contents(checkpoints_at(url)[0]) == contents(other)
    flip(tmp_path / "bucket/runs/name/step-00000200/rank-00000.safetensors", -5)
    shutil.rmtree(tmp_path / "cache")
    code, _, err = say("to-hf", f"{url}/step-200", tmp_path / "hf")
    assert code == 2 and "rank-00000.safetensors" in err
    assert not list((tmp_path / "cache").rglob("rank-*"))


def test_a_run_that_was_copied_whole(run: Path, tmp_path: Path, say: Say) -> None:
    write_checkpoint(run, 400, seed=4, shapes=WHOLE_LLAMA)
    (run / "events.jsonl").write_text("{}\n")
    code, _, err = say("to-hf", f"file://{run}", f"file://{tmp_path}/bucket/model", "--check", "none")
    assert code == 0, err
    assert (tmp_path / "bucket/model/config.json").is_file()


def test_what_a_url_does_not_name(tmp_path: Path, url: str, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in [
        (("ls", f"file://{tmp_path}/nothing"), f"file://{tmp_path}/nothing holds no checkpoint"),
        (("diff", f"{url}/step-7", url), "it holds no complete checkpoint"),
        (("verify", "s4://bucket/run"), "s4://bucket/run: is no URL of a store"),
        (("to-hf", "s3://user:pass@bucket/run", "out"), "has a user or a password in it"),
    ]:
        code, _, err = say(*words)
        assert code == 2 and says in err and "user:pass" not in err, (words, err)
    with pytest.raises(SystemExit):
        say("average", url, "s3://bucket/mean")
    assert "s3://bucket/mean" in capsys.readouterr().err
