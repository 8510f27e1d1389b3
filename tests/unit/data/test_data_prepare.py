"""`llmtrain prepare` as a user sees it: same bytes for any number of processes, kills, refusals, tokenizers.

More than 20 CPU s: the command is run with its worker processes, and killed.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from llmtrain import cli
from llmtrain.base.errors import DataError
from llmtrain.commands.prepare import main
from llmtrain.data.manifest import SPLITS, Shard, Split
from llmtrain.data.prepare import pools
from llmtrain.data.prepare.sources import Unit
from llmtrain.data.prepare.worker import UnitRecord
from llmtrain.data.shards import PreparedSet
from llmtrain.data.tokenize import Encoder, as_ids, dtype_for
from llmtrain.data.tokenizer_folder import fingerprint

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
SHARD_BYTES = "32000"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 MB of jsonl: 100 shards, two seconds of work for one process."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(3000)]
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with open(path, "w") as stream:
        for index in range(3000):
            text = " ".join(rng.choices(words, k=160)) + f" {index}"
            stream.write(json.dumps({"text": text}) + "\n")
    return path


def arguments(corpus: Path, out: Path, *more: str) -> list[str]:
    return [*("--source", str(corpus), "--out", str(out), "--vocab-size", "300", "--shard-bytes", SHARD_BYTES), *more]


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference") / "set"
    assert main(arguments(corpus, out, "--processes", "1")) == 0
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def start(argv: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tools.prepare_data", *argv]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell ignores SIGINT in what it runs in the background (this test, perhaps), and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_records(out: Path, number: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while len(list((out / "unfinished").glob("unit-*.json"))) < number:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)


def assert_all_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


# --- the same bytes, whatever happens


@pytest.mark.parametrize("processes", ["2", "3"])
def test_any_number_of_processes_writes_the_same_bytes(
    corpus: Path, reference: Path, tmp_path: Path, processes: str
) -> None:
    assert main(arguments(corpus, tmp_path / "set", "--processes", processes)) == 0
    assert contents(tmp_path / "set") == contents(reference)


def test_the_books_of_many_units_cost_little(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 TiB are 20,000 units: each was looked at again for each that came in, ten minutes in all."""
    with (tmp_path / "huge.jsonl").open("wb") as stream:
        stream.write(b'{"text": "x"}\n')
        stream.truncate(20_000 << 20)  # no room is taken, and units are at least 1 MiB

    def run_units(given: list[Unit], *more: Any) -> None:
        for unit in given:
            shards: dict[Split, Shard | None] = {
                split: Shard(file=f"{split}-{unit.index:05d}.bin", tokens=9, documents=2, xxh3="0" * 16)
                for split in SPLITS
            }
            more[-1](unit, UnitRecord(unit=unit.index, shards=shards, lines=1))

    monkeypatch.setattr(pools, "run_units", run_units)
    began = time.process_time()
    argv = ["--source", str(tmp_path / "huge.jsonl"), "--tokenizer", str(reference / "tokenizer")]
    assert main([*argv, "--shard-bytes", str(1 << 20), "--out", str(tmp_path / "set")]) == 0
    assert time.process_time() - began < 20  # 4 s; minutes when it grew with the square
    assert len(json.loads((tmp_path / "set/manifest.json").read_bytes())["shards"]["train"]) == 20_000


def test_every_document_is_there_and_ends_with_the_separator(corpus: Path, reference: Path) -> None:
    prepared = PreparedSet(reference)
    prepared.verify()
    encoder = Encoder(prepared.tokenizer_dir)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    found = []
    for split in ("train", "validation"):
        stream = prepared.split(split)  # type: ignore[arg-type]
        tokens = stream.read(0, stream.tokens)
        assert tokens[-1] == encoder.separator_id
        ends = np.flatnonzero(tokens == encoder.separator_id)
        documents = np.split(tokens, ends + 1)[:-1]
        assert len(documents) == prepared.manifest.documents[split]
        found += [encoder.decode(document[:-1].tolist()) for document in documents]
    assert sorted(found) == sorted(texts)
    assert 0.03 < prepared.manifest.documents["validation"] / len(texts) < 0.07
    assert prepared.manifest.dtype == "uint16" and prepared.manifest.vocab_size == 300


def test_kill_9_loses_no_finished_shard(corpus: Path, reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    process = start(arguments(corpus, out, "--processes", "2"))
    wait_for_records(out, 5, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert_all_end(workers)  # nobody told them; they saw the end of their input
    assert not (out / "manifest.json").exists()
    with pytest.raises(DataError, match=r"manifest\.json.*`llmtrain prepare"):
        PreparedSet(out)
    records = [json.loads(path.read_text()) for path in (out / "unfinished").glob("unit-*.json")]
    kept = [out / shard["file"] for record in records for shard in record["shards"].values() if shard]
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in kept}
    assert main(arguments(corpus, out, "--processes", "1")) == 0
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in kept} == before
    assert contents(out) == contents(reference)


def test_ctrl_c_leaves_no_process_and_no_temporary_file(
    corpus: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    process = start(arguments(corpus, out, "--processes", "2"))
    wait_for_records(out, 1, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert_all_end(workers)
    assert not list(out.rglob("*.tmp"))
    assert main(arguments(corpus, out)) == 0
    assert re.search(r"\d+ of 99 shards", capsys.readouterr().out)
    assert contents(out) == contents(reference)


def test_a_killed_worker_is_named_and_nothing_hangs(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    process = start(arguments(corpus, out, "--processes", "2"))
    wait_for_records(out, 1, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    workers[0].kill()
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 2
    assert "SIGKILL" in errors and "--processes" in errors and "Traceback" not in errors
    assert_all_end(workers)
    assert not list(out.rglob("*.tmp"))


def test_a_second_prepare_is_refused_and_leaves_the_files_of_the_first_alone(
    corpus: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    process = start(arguments(corpus, out, "--processes", "1"))
    wait_for_records(out, 1, process)
    assert main(arguments(corpus, out, "--processes", "1")) == 2
    assert str(out) in (error := capsys.readouterr().err) and "`llmtrain prepare`" in error
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert contents(out) == contents(reference)


def test_a_full_disk_is_said_and_leaves_no_half_shard(corpus: Path, reference: Path, tmp_path: Path) -> None:
    """A limit on the file size stands for the full disk: the same failing write."""
    out = tmp_path / "set"
    argv = [*arguments(corpus, out, "--processes", "2"), "--shard-bytes", "800000"]
    process = subprocess.run(
        [sys.executable, "-m", "tools.prepare_data", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    assert process.returncode == 2
    assert "File too large" in process.stderr and "Traceback" not in process.stderr
    assert not list(out.rglob("*.tmp")) and not list(out.glob("*.bin"))


# --- a second run


def test_a_complete_folder_is_left_alone(corpus: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in reference.rglob("*")}
    assert main(arguments(corpus, reference)) == 0
    assert " complete" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in reference.rglob("*")} == before


def test_show_prints_the_documents_of_texts(corpus: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    data = PreparedSet(reference)
    capsys.readouterr()
    for index in (0, 1, data.manifest.documents["train"] - 1):
        assert cli.main(["data", "show", str(reference), "--index", str(index)]) == 0
        heading, *shown = capsys.readouterr().out.splitlines()
        number = int(re.fullmatch(rf"document {index} of train: (\d+) tokens", heading)[1])  # type: ignore[index]
        text = "\n".join(shown).removesuffix("<|endoftext|>")
        assert text in texts and number == len(Encoder(data.tokenizer_dir).encode([text])[0]) + 1
    assert cli.main(["data", "show", str(reference), "--index", "100000"]) == 2
    assert str(data.manifest.documents["train"] - 1) in capsys.readouterr().err


def test_other_settings_or_another_source_are_refused(
    corpus: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(corpus, reference), "--validation-fraction", "0.5"]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in ("validation_fraction", "0.05", "0.5", "--out")) and "source" not in error
    source = tmp_path / "a.txt"
    source.write_text("hello " * 100)
    out = tmp_path / "set"
    argv = ["--source", str(source), "--out", str(out), "--vocab-size", "258", "--validation-fraction", "0"]
    assert main(argv) == 0
    source.write_text("other " * 100)
    assert main(argv) == 2
    assert "source" in (error := capsys.readouterr().err) and "--out" in error
    assert main(["--source", *map(str, [source] * 50), *argv[2:]]) == 2
    assert "47 others" in (error := capsys.readouterr().err) and len(error) < 1000
    assert main(["--source", str(corpus), "--out", str(tmp_path), "--vocab-size", "258"]) == 2
    assert f"--out {tmp_path}" in (error := capsys.readouterr().err) and "empty" in error


def test_a_shard_that_too_many_bad_records_cut_off_is_done_again(reference: Path, tmp_path: Path) -> None:
    good = [json.dumps({"text": f"document {i} " + "word " * 9}) for i in range(500)]
    (tmp_path / "a.jsonl").write_text("\n".join(["{"] * 1200 + good))
    argv = ["--source", str(tmp_path / "a.jsonl"), "--tokenizer", str(reference / "tokenizer")]
    argv += ["--out", str(tmp_path / "set"), "--max-rejected"]
    assert main([*argv, "0"]) == 2
    assert main([*argv, "1200"]) == 0
    assert sum(PreparedSet(tmp_path / "set").manifest.documents.values()) == 500


def test_bad_records_stop_the_run_until_they_are_allowed(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.jsonl"
    good = [json.dumps({"text": f"document number {i} " + "word " * 30}) for i in range(400)]
    source.write_text("\n".join([*good[:200], '{"text": ', *good[200:], '{"body": 1}']))
    out = tmp_path / "set"
    argv = ["--source", str(source), "--out", str(out), "--vocab-size", "270", "--shard-bytes", "10000"]
    assert main(argv) == 2
    error = capsys.readouterr().err
    # Met while the tokenizer was trained: all of them are shown.
    assert all(word in error for word in ("a.jsonl, line 201", "a.jsonl, line 402", "--max-rejected"))
    (talks := tmp_path / "talks.jsonl").write_text('{"messages": []}\n' * 300)
    assert main(["--source", str(talks), "--out", str(tmp_path / "talks"), "--vocab-size", "270"]) == 2
    error = capsys.readouterr().err
    assert error.count("'text'") == 1 and "talks.jsonl, line 1 and 299" in error and "--format chat" in error
    assert main([str(talks), "--vocab-size", "270"]) == 2
    words = f"`llmtrain prepare --source {talks} --vocab-size 270 --out FOLDER`"
    assert f"prepare {talks}: write --source before the files to read: {words}" in capsys.readouterr().err
    assert (
        main([str(talks), "--out=x"]) == 2 and f"--source {talks} --out=x --vocab-size 8192`" in capsys.readouterr().err
    )
    assert json.loads((out / "rejected.jsonl").read_text().splitlines()[0])["line"] == 201
    given = [*argv, "--tokenizer", str(made_tokenizer(tmp_path / "tok", reference))]
    del given[given.index("--vocab-size") : given.index("--vocab-size") + 2]
    given[3] = str(tmp_path / "given")
    assert main([*given, "--max-rejected", "1"]) == 2  # with a given tokenizer the workers meet them
    assert "line 201" in (error := capsys.readouterr().err) and "line 402" in error
    assert main([*given, "--max-rejected", "2"]) == 0
    assert main([*argv, "--max-rejected", "1"]) == 2
    assert "--max-rejected is 1" in capsys.readouterr().err
    assert main([*argv, "--max-rejected", "2"]) == 0
    listed = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["line"]) for entry in listed] == [("a.jsonl", 201), ("a.jsonl", 402)]
    assert PreparedSet(out).manifest.rejected == 2


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--tokenizer", "nowhere"], ["--tokenizer", "--vocab-size"]),
        (["--vocab-size", "100"], ["--vocab-size", "100", "257"]),
        (["--vocab-size", "60000"], ["--vocab-size 60000"]),
        (["--validation-fraction", "1"], ["--validation-fraction", "1"]),
        (["--max-rejected", "-1"], ["--max-rejected", "-1"]),
        (["--processes", "0"], ["--processes", "0"]),
        (["--source", "no/such/file"], ["no/such/file"]),
        (["--format", "choices"], ["--format choices", "--tokenizer"]),
    ],
)
def test_mistakes_are_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], named: list[str]
) -> None:
    (tmp_path / "a.txt").write_text("some words here and there")
    argv = ["--source", str(tmp_path / "a.txt"), "--out", str(tmp_path / "set"), "--vocab-size", "257", *more]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in named), error


def test_the_output_may_lie_inside_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("some words here and there")
    argv = ["--source", str(tmp_path), "--out", str(tmp_path / "data" / "set"), "--vocab-size", "257"]
    assert main([*argv, "--validation-fraction", "0"]) == 0
    assert main([*argv, "--validation-fraction", "0"]) == 0
    assert " complete" in capsys.readouterr().out


def test_code_in_the_current_folder_is_read_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("queue.py", "json.py", "numpy.py"):
        (tmp_path / name).write_text(f"raise SystemExit('{name} was imported')")
    monkeypatch.chdir(tmp_path)
    assert main(["--source", "*.py", "--out", "set", "--vocab-size", "257", "--validation-fraction", "0"]) == 0
    assert PreparedSet(tmp_path / "set").manifest.documents["train"] == 3


# --- tokenizers


def test_the_tokenizer_folder_loads_in_transformers(reference: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(reference / "tokenizer")
    ours = Encoder(reference / "tokenizer")
    text = "abc def\n  ünï 𝄞 klm"
    assert theirs.encode(text) == ours.encode([text])[0].tolist()
    assert theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token_id == ours.separator_id and len(theirs) == ours.vocab_size == 300


def made_tokenizer(folder: Path, reference: Path, eos: object = "<|endoftext|>", added: int = 0) -> Path:
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(reference / "tokenizer" / "tokenizer.json"))
    tokenizer.enable_truncation(8)  # as many folders of the hub have it: it must not cut documents
    tokenizer.enable_padding(length=16)
    tokenizer.add_tokens([AddedToken(f"<extra{i}>", special=True) for i in range(added)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({} if eos is None else {"eos_token": eos}))
    return folder


def test_a_given_tokenizer_is_used_without_its_truncation_and_padding(reference: Path, tmp_path: Path) -> None:
    folder = made_tokenizer(tmp_path / "tok", reference, {"content": "<|endoftext|>"}, added=3)
    # A document that holds the separator's text must not be able to end itself.
    (tmp_path / "a.txt").write_text("words " * 50 + "<|endoftext|>" + "<extra1>")
    argv = ["--source", str(tmp_path / "a.txt"), "--out", str(tmp_path / "set"), "--tokenizer", str(folder)]
    assert main([*argv, "--validation-fraction", "0"]) == 0
    prepared = PreparedSet(tmp_path / "set")
    assert prepared.manifest.vocab_size == 303
    assert prepared.manifest.tokenizer_fingerprint == fingerprint(folder)
    tokens = prepared.split("train").read(0, prepared.split("train").tokens).tolist()
    assert tokens.count(prepared.manifest.separator_id) == 1 and max(tokens) < 300 and len(tokens) > 100
    assert Encoder(folder).decode(tokens[:-1]) == (tmp_path / "a.txt").read_text()


def test_unusable_tokenizers_are_refused(reference: Path, tmp_path: Path) -> None:
    for make, named in (
        (lambda: tmp_path, "tokenizer.json"),
        (lambda: made_tokenizer(tmp_path / "a", reference, None), "eos_token"),
        (lambda: made_tokenizer(tmp_path / "b", reference, "</s>"), "'</s>'"),
    ):
        with pytest.raises(DataError, match=named):
            Encoder(make())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=f"{tmp_path}/tokenizer.json"):
        Encoder(tmp_path)


def test_ids_take_as_many_bytes_as_the_vocabulary_asks_for_and_others_are_refused() -> None:
    assert [dtype_for(size).itemsize for size in (65_536, 65_537)] == [2, 4]
    assert as_ids([0, 299], 300).tolist() == [0, 299]
    for ids in ([5, 300], [-1, 5], [70_000]):
        with pytest.raises(DataError, match=r"\[0, 300\)"):
            as_ids(ids, 300)


# --- what it costs


def test_start_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, llmtrain.commands.prepare\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_memory_stays_flat(tmp_path: Path) -> None:
    """60 MB of jsonl in one unit: parent and worker stay under 140 MiB each, 70 of which Python and numpy take."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    quick = Tokenizer(models.WordLevel({"<eos>": 0, "?": 1}, unk_token="?"))  # so that the test is quick
    quick.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    quick.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    source = tmp_path / "big.jsonl"
    with open(source, "w") as stream:
        record = json.dumps({"text": ("word" * 500 + " ") * 20, "other": "x" * 40_000}) + "\n"
        for _ in range(60_000_000 // len(record)):
            stream.write(record)
    argv = ["--source", str(source), "--out", str(tmp_path / "set"), "--tokenizer", str(tmp_path)]
    # All documents are the same one, so all are on one side.
    argv += ["--shard-bytes", str(1 << 30), "--processes", "1", "--validation-fraction", "0"]
    # VmHWM, not ru_maxrss, for the process itself: the latter counts what pytest held when it forked.
    code = (
        "import re, resource, sys\nfrom llmtrain.commands.prepare import main\ncode = main(sys.argv[1:])\n"
        "print('KiB', re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "print('KiB', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, check=True)
    peaks = [int(line.split()[1]) // 1024 for line in done.stdout.splitlines() if line.startswith("KiB")]
    assert len(peaks) == 2 and max(peaks) < 140, peaks
    shutil.rmtree(tmp_path / "set")
    os.unlink(source)
