"""`llmtrain report`: valid pictures and a page that shows what the files say, whatever state they are in."""

from __future__ import annotations

import html.parser
import json
import math
import struct
import zlib
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.tracking.local import JsonLines
from llmtrain.tracking.plots import smooth
from llmtrain.tracking.report import curves_of, facts_of, load, main


def make_run(run_dir: Path, steps: int = 40) -> Path:
    metrics = JsonLines(run_dir / "metrics.jsonl")
    for step in range(1, steps + 1):
        metrics.write(
            {
                "step": step,
                "tokens": step * 100,
                "loss": 2 + 4 / step if step != 7 else math.nan,
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
    events.write({"time_unix_s": 1.7e9, "kind": "baselines", "unigram_loss": 5.5, "bigram_loss": 3.25})
    events.write({"time_unix_s": 1.7e9, "kind": "save", "step": 20, "path": "<script>alert(1)</script> & co"})
    events.write({"time_unix_s": 1.7e9, "kind": "resume", "step": 20})
    events.close()
    (run_dir / "environment.json").write_text(
        json.dumps({"versions": {"torch": "9.9"}, "ranks": [{"rank": 0, "device": "cpu"}]})
    )
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


class Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs) -> None:
        if tag == "img":
            self.images.append(dict(attrs)["src"])
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data + "\n"


def test_report_of_a_run(tmp_path, capsys):
    run_dir = make_run(tmp_path / "my <run>")
    assert main([str(run_dir)]) == 0
    out = run_dir / "report"
    names = ["index.html", "loss.png", "throughput.png", "memory.png", "learning_rate.png"]
    assert capsys.readouterr().out.split("\n")[:5] == [str(out / name) for name in names]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    for name in names[1:]:
        width, height = png_size((out / name).read_bytes())
        assert width >= 1000 and height >= 500
    text = (out / "index.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert len(page.images) == 4
    assert all(source.startswith("data:image/png;base64,") for source in page.images)
    assert "<script" not in text and "http://" not in text and "https://" not in text
    for words in ("my <run>", "2.5000 (perplexity 12.18)", "5.5000", "MFU 40.0%", "torch 9.9", "1 (cpu)", "& co"):
        assert words in page.text


def test_facts_and_curves_say_what_the_files_say(tmp_path):
    run = load(make_run(tmp_path))
    curves = curves_of(run)
    assert 7 not in curves["loss"].steps and 3 not in curves["grad_norm"].steps
    assert curves.resumes == [20]
    assert curves.baselines == {"unigram": 5.5, "bigram": 3.25}
    facts = dict(facts_of(run, curves))
    assert facts["Steps"] == "40"
    assert facts["Training tokens"] == "4,000"
    assert facts["Training loss, first to last"] == "6.0000 → 2.1000"
    assert (facts["Checkpoints saved"], facts["Resumes"], facts["Skipped steps"]) == ("1", "1", "1")
    assert facts["Model FLOP/s, median (non-causal)"] == "1.2 TFLOP/s, MFU 48.0%"


def test_a_step_that_stands_twice_counts_once_and_the_later_row_wins(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 9}\n{"step": 1, "loss": 5}\n{"step": 2, "loss": 4}\n')
    assert curves_of(load(tmp_path))["loss"].values == [5, 4]


def test_torn_and_foreign_lines_are_skipped_and_counted(tmp_path):
    run_dir = make_run(tmp_path)
    with open(run_dir / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe\n[1, 2]\n{"step": "x", "loss": 1}\n{"step": 41, "lo')
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
    with pytest.raises(UserError, match=r"metrics\.jsonl: no metrics .* first log point"):
        main([str(tmp_path)])
    with pytest.raises(UserError, match="no such run folder"):
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
