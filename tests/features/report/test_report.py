"""`llmtrain report`: valid pictures and a page that shows what the files say, whatever state they are in."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.base.errors import UserError
from llmtrain.features.report.command import main
from llmtrain.features.report.page import charts_of, curves_of, facts_of, load, smooth, why_slow
from llmtrain.tracking.local import JsonLines
from tests.helpers.pages import Page


def test_a_run_over_pairs_is_shown_with_its_own_units(tmp_path: Path) -> None:
    metrics = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        metrics.write(
            {
                "step": step,
                "loss": 0.69,
                "pairs/accuracy": 0.5,
                "pairs/margin": 0.1 * step,
                "pairs/chosen_log_prob": -4.0,
                "pairs/rejected_log_prob": -5.0,
            }
        )
    metrics.write({"step": 2, "eval/loss": 0.625, "eval/pairs/accuracy": 0.75})
    metrics.close()
    run = load(tmp_path)
    facts = dict(facts_of(run, curves_of(run)))
    assert facts["Validation loss, last"] == "0.6250 nats/pair"
    assert facts["Validation answers preferred rightly, last"] == "75.0%"
    charts = {chart["title"]: chart["unit"] for chart in charts_of([run])}
    assert charts == {
        "Loss": "nats/pair",
        "Pairs preferred rightly": "share",
        "Margin": "1",
        "Log-probability of answers": "nats/answer",
    }


def test_sets_and_samples_are_in_the_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    metrics = JsonLines(run_dir / "metrics.jsonl")
    for step, loss in ((20, 3.0), (40, 2.75)):
        metrics.write(
            {"step": step, "eval/code/loss": loss, "eval/code/bits_per_byte": loss / 2, "eval/mean/loss": 1.5}
        )
    metrics.close()
    events = JsonLines(run_dir / "events.jsonl")
    for step in (20, 40):
        events.write({"kind": "samples", "step": step, "prompts": ["def <f>("], "texts": [f"after {step}"]})
    events.close()
    run = load(run_dir)
    facts = dict(facts_of(run, curves_of(run)))
    assert facts["Loss of code, last"] == "2.7500 nats/token (1.3750 bits/byte)"
    charts = {chart["title"]: [series["name"] for series in chart["series"]] for chart in charts_of([run])}
    assert charts["Loss"][-3:] == ["validation", "code", "mean"]
    assert charts["Validation loss in bits per byte"] == ["code"]
    assert main([str(run_dir)]) == 0
    text = Page(run_dir / "report/index.html").text
    samples = text.partition("Samples of run")[2].partition("Events of run")[0]
    assert samples.index("def <f>(\nafter 40") < samples.index("def <f>(\nafter 20")
    assert "after 40" not in text.partition("Events of run")[2]


def test_a_step_is_held_against_its_plan(tmp_path: Path) -> None:
    """Messages take half of a step, and a tenth of it was planned for them."""
    run_dir = tmp_path / "run"
    metrics, events = JsonLines(run_dir / "metrics.jsonl"), JsonLines(run_dir / "events.jsonl")
    for step in range(1, 4):
        metrics.write(
            {"step": step, "tokens": 100 * step, "tokens_per_s": 1000.0, "comm_share": 0.5, "data_wait_share": 0.1}
        )
    metrics.close()
    run = load(run_dir)
    assert why_slow(run, curves_of(run)).startswith("A step takes 0.1 s, of which 0.05 s are messages between ranks.")
    events.write({"kind": "planned", "step_s": {"computing": 0.035, "messages": 0.01, "saves": 9.0, "update": "?"}})
    events.close()
    assert main([str(run_dir)]) == 0
    said = Page(run_dir / "report/index.html").text.partition("Why is run slow?")[2]
    assert re.search(r"planned .*\b0\.045 s.* messages between ranks 0\.05 s \(planned 0\.01\), ", said), said
    assert "`llmtrain doctor`" in said


def make_run(run_dir: Path, steps: int = 40, loss: float = 2) -> Path:
    metrics = JsonLines(run_dir / "metrics.jsonl")
    for step in range(1, steps + 1):
        metrics.write(
            {
                "step": step,
                "tokens": step * 100,
                "loss": loss + 4 / step if step != 7 else math.nan,
                "lr": 1e-3 / step,
                "grad_norm": math.inf if step == 3 else 1.0,
                "tokens_per_s": 1000.0 + step,
                "model_tflops_per_s_causal": 1.0,
                "model_tflops_per_s_noncausal": 1.2,
                "mfu_causal": 0.4,
                "mfu_noncausal": 0.48,
                "max_memory_gib": 1.5,
                "skipped_steps": 1,
                "time_unix_s": 1.7e9 + step,
            }
        )
    metrics.write({"step": steps, "eval/loss": 2.5, "eval/perplexity": math.exp(2.5)})
    metrics.close()
    events = JsonLines(run_dir / "events.jsonl")
    events.write(
        {"time_unix_s": 1.7e9, "kind": "baselines", "unigram_loss": 5.5, "bigram_loss": 3.25, "validation_tokens": 999}
    )
    events.write({"time_unix_s": 1.7e9, "kind": "save", "step": 20, "path": "<script>alert(1)</script> & co"})
    events.write({"time_unix_s": 1.7e9, "kind": "resume", "step": 20})
    events.close()
    (run_dir / "environment.json").write_text(
        json.dumps(
            {
                "versions": {"torch": "9.9"},
                "ranks": [{"rank": 0, "device": "cpu"}],
                "argv": ["launch/train.py", "--config", "a b.yaml"],
                "parameters": 984320,
            }
        )
    )
    (run_dir / "config.yaml").write_text("optim: {name: muon, lr: 0.001}\ntrain: {global_batch: null}\n")
    (run_dir / "deepspeed.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    return run_dir


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG whose every chunk has the right checksum and whose pixels inflate."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, pixels, kinds = 8, b"", []
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        kinds.append(kind)
        pixels += body if kind == b"IDAT" else b""
        at += 12 + length
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    assert zlib.decompress(pixels)
    return struct.unpack(">II", data[16:24])


def test_report_of_a_run(tmp_path, capsys):
    run_dir = make_run(tmp_path / "my <run>")
    assert main([str(run_dir)]) == 0
    out = run_dir / "report"
    charts = ("loss", "throughput", "utilization", "memory", "learning_rate", "update_norm")
    names = ["index.html", *(f"{chart}.png" for chart in charts)]
    assert capsys.readouterr().out.split("\n")[:-1] == [str(out / name) for name in names]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    for name in names[1:]:
        width, height = png_size((out / name).read_bytes())
        assert width >= 1000 and height >= 500
    text = (out / "index.html").read_text()
    assert "<script>alert" not in text and "https://" not in text and "prefers-color-scheme: dark" in text
    page = Page(out / "index.html")
    for words in (
        "my <run>",
        "2.5000 nats/token (perplexity 12.18)",
        "MFU 40.0%",
        "torch 9.9",
        "1 (cpu)",
        "& co",
        "5.5000 nats/token (first 999 validation tokens)",
        "984,320",
        "launch/train.py --config 'a b.yaml'",
        "optim.name\nmuon",
        "ZeRO stage\n2",
        "precision\nbf16",
    ):
        assert words in page.text, words
    for words in (
        "training, smoothed",
        "validation",
        "unigram model 5.500",
        "bigram model 3.250",
        "optimizer step",
        "Norm of the update (Muon) [1]",
    ):
        assert words in page.text, words
    loss = by_title([run_dir])["Loss"]
    assert [series["name"] for series in loss["series"]] == ["training, smoothed", "training", "validation"]
    smoothed, raw, validation = loss["series"]
    assert raw["x"][-1] == 40 and raw["y"][-1] == 2.1 and smoothed["y"][-1] != raw["y"][-1]
    assert (validation["x"], validation["y"], loss["marks"]) == ([40], [2.5], [20])
    assert loss["levels"] == [{"name": "unigram model", "y": 5.5}, {"name": "bigram model", "y": 3.25}]


def by_title(run_dirs: list[Path]) -> dict[str, dict]:
    """The charts of runs, as they are drawn."""
    runs = [replace(load(folder), name=str(folder)) for folder in run_dirs]
    return {chart["title"]: chart for chart in charts_of(runs)}


def test_several_runs_stand_side_by_side(tmp_path, capsys):
    first, second = make_run(tmp_path / "a/run", loss=2.0), make_run(tmp_path / "b/run", loss=1.0)
    (second / "config.yaml").write_text("optim: {name: adamw, lr: 0.001}\ntrain: {global_batch: null}\n")
    assert main([str(first), str(second), "--out", str(tmp_path / "both")]) == 0
    assert [path.name for path in (tmp_path / "both").iterdir()] == ["index.html"]
    page = Page(tmp_path / "both/index.html")
    charts = by_title([first, second])
    names = [series["name"] for series in charts["Loss"]["series"]]
    assert f"{second}: validation" in page.text
    assert names[0] == f"{first}: training, smoothed" and len(names) == 6 and str(second) in names[3]
    assert "optim.name\nmuon\nadamw" in page.text and "global_batch" not in page.text
    assert '<tr class="differs"><td>optim.name' in (tmp_path / "both/index.html").read_text()
    assert not (first / "report").exists()
    for chart, run in (("Norm of the update (Muon)", first), ("Gradient norm", second)):  # never in one picture
        assert {series["name"].partition(": ")[0] for series in charts[chart]["series"]} == {str(run)}


def test_runs_on_several_data_have_no_common_baselines(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    with open(runs[1] / "events.jsonl", "a") as file:
        file.write(json.dumps({"kind": "baselines", "unigram_loss": 7.0, "bigram_loss": 3.25}) + "\n")
    assert by_title(runs)["Loss"]["levels"] == [{"name": "bigram model", "y": 3.25}]


def test_a_name_that_is_no_unicode_has_a_report(tmp_path):
    run_dir = make_run(tmp_path / os.fsdecode(b"run-\xff"))
    assert main([str(run_dir)]) == 0 and (run_dir / "report/index.html").exists()


def test_facts_and_curves_say_what_the_files_say(tmp_path):
    run = load(make_run(tmp_path))
    curves = curves_of(run)
    assert 7 not in curves["loss"].steps and 3 not in curves["grad_norm"].steps
    assert curves.resumes == [20]
    assert curves.baselines == {"unigram": 5.5, "bigram": 3.25}
    facts = dict(facts_of(run, curves))
    assert facts["Steps"] == "40"
    assert facts["Training tokens"] == "4,000"
    assert facts["Training loss, first to last"] == "6.0000 → 2.1000 nats/token"
    assert (facts["Checkpoints saved"], facts["Resumes"], facts["Skipped steps"]) == ("1", "1", "1")
    assert facts["Model FLOP/s, median (non-causal)"] == "1.2 TFLOP/s, MFU 48.0%"


def test_multiple_choice_and_later_scores_are_told(tmp_path: Path) -> None:
    figures = {"eval/pydoc/accuracy": 0.25, "eval/pydoc/accuracy_norm": 0.5, "eval/pydoc/bits_per_byte": 2.0}
    scores = {"tasks/arc/acc": 0.3, "tasks/arc/acc_stderr": 0.01}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": 8, **row}) + "\n" for row in (figures, scores)))
    facts = dict(facts_of(run := load(tmp_path), curves_of(run)))
    assert facts["Multiple choice of pydoc, last: accuracy, normalised"] == "25.0%, 50.0%"
    assert facts["Task arc/acc, at step 8"] == "0.3000" and not [name for name in facts if "stderr" in name]


def test_what_runs_name_has_charts(tmp_path: Path) -> None:
    figures = {
        "eval/arc/accuracy": 0.25,
        "eval/arc/accuracy_norm": 0.5,
        "eval/arc/bits_per_byte": 2.0,
        "loss": 3.0,
        "rare": 0.1,
        "eval/rare": 0.2,
        "eval/code/rare": 0.3,
        "norms/layer_0": 1.0,
        "norms/layer_1": 2.0,
        "eval/pairs/accuracy": 0.75,
        "../../up/x": 1.0,
    }
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **figures}) + "\n" for step in (4, 8)))
    found = charts_of([load(tmp_path)])
    assert {"named_rare", "named_norms", "named_Multiple_choice_accuracy"} <= {chart["file"] for chart in found}
    assert all(re.fullmatch(r"\w+", chart["file"]) for chart in found)  # it is a file's name
    charts = {chart["title"]: [series["name"] for series in chart["series"]] for chart in found}
    assert charts["Multiple choice, accuracy"] == ["arc", "arc, normalised"]
    assert charts["rare"] == ["training", "validation", "code"] and charts["norms"] == ["layer_0", "layer_1"]


def test_a_step_that_stands_twice_counts_once_and_the_later_row_wins(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 9}\n{"step": 1, "loss": 5}\n{"step": 2, "loss": 4}\n')
    assert curves_of(load(tmp_path))["loss"].values == [5, 4]


def test_torn_and_foreign_lines_are_skipped_and_counted(tmp_path):
    run_dir = make_run(tmp_path)
    with open(run_dir / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe\n[1, 2]\n{"step": "x", "loss": 1}\n')
        file.write(b'{"step": 41, "loss": %s}\n' % (b"9" * 400))  # one value is left out of a good line
        file.writelines(b'{"step": %d, "loss": 1.7e308, "lr": 1.5}\n' % step for step in range(42, 80))
        file.write(b'{"step": 80, "lo')
    (run_dir / "events.jsonl").write_bytes(b'{"kind": "resume", "step": null}\n{"time_unix_s": 1e99}\n{"ki')
    (run_dir / "environment.json").write_text("[")
    assert main([str(run_dir), "--out", str(tmp_path / "elsewhere")]) == 0
    assert dict(facts_of(run := load(run_dir), curves_of(run)))["Unreadable lines skipped"] == "4"
    assert (tmp_path / "elsewhere" / "index.html").exists()
    assert not (run_dir / "report").exists()


@pytest.mark.parametrize(
    "row", ['{"step": 1, "loss": 3.0}', '{"step": 0, "eval/loss": 3.0}', '{"step": 1, "loss": "NaN"}']
)
def test_a_run_with_one_row_has_a_report(tmp_path, row):
    (tmp_path / "metrics.jsonl").write_text(row + "\n")
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "report" / "index.html").stat().st_size > 1000


@pytest.mark.parametrize("content", [None, b"", b'{"step": 1, "lo', b"\x00" * 100])
def test_a_run_without_metrics_is_the_users_mistake_with_a_remedy(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        main([str(tmp_path)])
    with pytest.raises(UserError, match=str(tmp_path / "missing")):
        main([str(tmp_path / "missing")])


def test_a_folder_that_cannot_be_written_is_the_users_mistake(tmp_path):
    run_dir = make_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out"):
        main([str(run_dir), "--out", str(tmp_path / "file")])


def test_smoothing_keeps_length_and_ends_and_does_not_lag():
    line = [float(n) for n in range(300)]
    assert smooth(line) == pytest.approx(line)
    assert smooth([3.0]) == [3.0]
    noisy = [1.0, -1.0] * 200
    assert max(abs(value) for value in smooth(noisy)[10:-10]) < 0.3


@pytest.mark.parametrize("count", [5, 40, 1000])
def test_the_smoothed_curve_does_not_end_on_the_raw_last_value(count):
    flat = [1.0] * count
    assert smooth([*flat[:-1], 5.0])[-1] < 4 and smooth([5.0, *flat[1:]])[0] < 4
    assert len(smooth(flat)) == count and smooth(flat) == pytest.approx(flat)
