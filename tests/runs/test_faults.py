"""What ends or disturbs a run from outside: a full disk, numbers that explode, a wrong configuration."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from llmtrain.cli import main
from tests.helpers import forked
from tests.helpers.launching import environment, finish, launch, losses, rows, write_recipe, write_run
from tests.helpers.play import write_play
from tests.helpers.processors import set_fp16

HAVE_FP16 = functools.partial(set_fp16, True)


def test_explosion_stops_with_a_message_and_the_samples(small_data, tmp_path):
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    code, output = forked.finish(
        recipe,
        *("--optim.lr", "1", "--optim.weight_decay", "1e30", "--schedule.name", "constant", "--fault.max_skipped", "3"),
    )
    assert code == 3, output
    assert "error: 3 steps " in output and "fault.max_skipped" in output
    assert "Traceback" not in output and output.count("error:") == 1
    skips = [event for event in rows(run, "events.jsonl") if event["kind"] == "skip"]
    assert len(skips) == 3 and all(event["samples"] for event in skips)
    first = skips[0]
    assert set(first["samples"]) <= set(range((first["step"] - 1) * 8, first["step"] * 8))


def test_a_wrong_configuration_ends_every_rank_with_one_message(small_data, tmp_path, warm):
    recipe = write_recipe(tmp_path, small_data)
    code, output = finish(launch(recipe, "--train.global_batch", "9", warm=warm), 30)
    assert code == 2 and "Traceback" not in output
    assert output.count("error:") == 1 and "train.global_batch" in output and "world size 2" in output


LATE = """
import os, time
from llmtrain.base.rank import watch
begin = watch.begin
def late(**words):
    begin(**words)
    time.sleep(20 if os.environ["RANK"] == "1" else 0)
watch.begin = late

from llmtrain import Part
class Late(Part, entry="late"):
    pass
"""


def test_a_mistake_that_one_rank_meets_first_is_no_fault_of_the_others(small_data, tmp_path, warm):
    """DeepSpeed's launcher ends them, and they were said to have disappeared, by someone outside the job."""
    (tmp_path / "late.py").write_text(LATE)
    words = ("--plugin", str(tmp_path / "late.py"), "--model.freeze", '["lm_head.weight"]')
    code, output = finish(launch(write_recipe(tmp_path, small_data), *words, warm=warm), 60)
    assert code == 2 and output.count("error:") == 1, output
    assert "model.freeze" in output and "lm_head.weight" in output, output
    assert "ended by a signal" not in output, output


def test_a_wrong_configuration_costs_less_than_three_cpu_seconds(small_data, tmp_path):
    """The training command itself, before torch is imported."""
    command = [shutil.which("llmtrain", path=environment()["PATH"]) or "llmtrain", "train", "--config"]
    recipe, before = write_recipe(tmp_path, small_data), os.times()
    words = [*command, str(recipe), "--optim.lrr", "1"]
    result = subprocess.run(words, capture_output=True, text=True, env=environment())
    after = os.times()
    assert result.returncode == 2 and "optim.lr" in result.stderr and "Traceback" not in result.stderr
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3
    assert not (Path(tmp_path) / "run").exists()  # nothing was made


def test_a_time_limit_ends_a_run_well(small_data, tmp_path):
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    forked.train(
        recipe,
        *("--train.max_steps", "null", "--train.max_minutes", "0.1", "--schedule.name", "constant"),
        *("--checkpoint.every_minutes", "0.02", "--checkpoint.every_steps", "null", "--train.export", "true"),
    )
    assert any("eval/loss" in row for row in rows(run))
    stop = next(event for event in rows(run, "events.jsonl") if event["kind"] == "stop")
    assert stop["complete"] and stop["step"] == max(losses(run))
    assert (run / "export" / "model.safetensors").is_file()
    assert len([event for event in rows(run, "events.jsonl") if event["kind"] == "save"]) >= 2


def test_fp16_is_refused_where_the_device_lacks_it(small_data, tmp_path):
    recipe = write_recipe(tmp_path, small_data)
    fp16 = str(Path(__file__).parents[2] / "ds_configs" / "fp16.json")
    code, output = forked.finish(recipe, "--deepspeed", fp16, before=functools.partial(set_fp16, False))
    assert code == 2 and "Traceback" not in output
    assert re.search(r"fp16\.enabled .*\(cpu\).*bf16", output, re.S), output
    code, output = forked.finish(recipe, "--deepspeed", fp16, "--train.max_steps", "4", before=HAVE_FP16)
    assert code == 0, output


@pytest.mark.parametrize("stages", [1, 2])
def test_a_static_loss_scale_that_overflows_is_a_fault(small_data, tmp_path, stages):
    """Nothing looks for a smaller one: such a run has ended as complete, with the export of untrained weights."""
    scale = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "loss_scale": 2**24}}
    scale |= {"pipeline": {"stages": stages}}
    train = {"global_batch": 8, "micro_batch": 4, "max_steps": 6, "export": True}
    run = write_run(tmp_path, small_data, scale, train)
    code, output = forked.finish(run, "--fault.max_skipped", "3", world_size=stages, before=HAVE_FP16)
    assert code == 3 and "Traceback" not in output and not (tmp_path / "run/export").exists(), output
    assert re.search(r"warning: step 2 skipped: .*\b2 in a row", output), output
    assert re.search(r"error: 3 steps .*fp16\.loss_scale\b.* 16777216", output), output
    code, output = forked.finish(run, "--fault.max_skipped", "99", world_size=stages, before=HAVE_FP16)
    assert code == 3 and not (tmp_path / "run/export").exists(), output
    assert re.search(r"error: .*\b6 steps\b.*skipped", output), output


ZERO = """
from dataclasses import dataclass

from llmtrain import Schedule


@dataclass(frozen=True, kw_only=True)
class Zero(Schedule, choice="zero"):
    def after_warmup(self, step, max_steps):
        return 0.0
"""


def test_a_run_whose_rate_is_0_in_all_steps_is_not_complete(small_data, tmp_path):
    """It exported what it had begun with. A run with one step of another rate has trained."""
    (tmp_path / "zero.py").write_text(ZERO)
    run = write_recipe(tmp_path, small_data)
    words = [run, "--plugin", str(tmp_path / "zero.py"), "--schedule.name", "zero", "--train.export", "true"]
    code, output = forked.finish(*words, "--train.max_steps", "3", world_size=1)
    assert code == 3 and not (tmp_path / "run/export").exists(), output
    assert re.search(r"error: .*\b3 steps\b.*learning rate", output), output
    more = ["--train.run_dir", str(tmp_path / "other"), "--schedule.warmup_steps", "2"]
    code, output = forked.finish(*words, *more, "--train.max_steps", "3", world_size=1)
    assert code == 0 and (tmp_path / "other/export").exists(), output


def test_a_loss_scale_that_grows_into_each_overflow_is_said_once(small_data, tmp_path):
    """Half of the steps are lost; and one that is still sought at the end has trained nothing."""
    scale = {"fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 1, "hysteresis": 1}}
    train = {"global_batch": 8, "micro_batch": 8, "max_steps": 30}
    run = write_run(tmp_path, small_data, {"zero_optimization": {"stage": 1}, **scale}, train)
    code, output = forked.finish(run, "--train.max_steps", "2", world_size=1, before=HAVE_FP16)
    assert code == 3 and re.search(r"error: .*\b2 steps\b.*fp16\.initial_scale_power", output), output
    code, output = forked.finish(run, world_size=1, before=HAVE_FP16)
    assert code == 0 and output.count("the loss scale grows every 1 steps") == 1, output


def test_without_validation_data_check_and_train_agree_and_without_evaluation_it_trains(tmp_path, capsys):
    write_play(tmp_path / "play.txt")
    words = ["--source", str(tmp_path / "play.txt"), "--vocab-size", "300", "--validation-fraction", "0"]
    assert main(["prepare", *words, "--out", str(tmp_path / "data")]) == 0
    recipe, run = write_recipe(tmp_path, str(tmp_path / "data")), tmp_path / "run"
    capsys.readouterr()
    assert main(["config", "check", str(recipe)]) == 2
    code, output = forked.finish(recipe, world_size=1)
    assert code == 2 and "Traceback" not in output and not run.exists(), output
    for told in (capsys.readouterr().err, output):
        assert "(0 tokens)" in told and "data.sequence_length 32" in told
        assert "--validation-source FILE" in told and "train.eval" in told
    off = ("--train.eval", "off", "--train.max_steps", "6")
    assert main(["config", "check", str(recipe), *off]) == 0
    assert "train.eval is off" in forked.train(recipe, *off, world_size=1)
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6] and not any("eval/loss" in row for row in rows(run))
    assert "baselines" not in [event["kind"] for event in rows(run, "events.jsonl")]
    assert main(["report", str(run)]) == 0
    assert "Validation loss" not in (run / "report/index.html").read_text()
