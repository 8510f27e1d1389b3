"""Figures of post-training and of the data that it reads.

    python tools/bench/posttraining.py --only prepare  # the whole command against the tokenizers library, one core each

`prepare`: code and prose of the running Python's folders as one jsonl, with byte-level BPEs of several sizes that cut
as Qwen2's does. The library's side reads the same lines and calls encode_batch_fast. They take turns; a second is a
CPU-second of the process and of what it started, starts included, and the ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LIBRARY = """
import json, sys
from tokenizers import Tokenizer
tokenizer, batch, size = Tokenizer.from_file(sys.argv[2]), [], 0
def encode():
    return sum(len(each.ids) for each in tokenizer.encode_batch_fast(batch, add_special_tokens=False))
tokens = 0
for line in open(sys.argv[1]):
    batch.append(json.loads(line)["text"])
    size += len(batch[-1])
    if size > 1 << 19:
        tokens, batch, size = tokens + encode(), [], 0
print(tokens + encode())
"""


def texts(megabytes: float) -> Iterator[str]:
    """Sources and documentation of the running Python and of what is installed in it."""
    left = megabytes * 1e6
    for name in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_paths()[name]).rglob("*")):
            if path.suffix in (".py", ".md", ".rst", ".txt", ".pyi", ".h") and path.is_file():
                try:
                    text = path.read_text(encoding="utf-8")
                except ValueError:
                    continue
                if text.strip():
                    yield text
                    if (left := left - len(text.encode())) < 0:
                        return


def train(corpus: Path, size: int, folder: Path) -> Path:
    """A tokenizer of at most `size` tokens, as a Hugging Face folder."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with open(corpus) as lines:
        tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


def seconds(words: list[str]) -> tuple[float, str]:
    """CPU-seconds of a command, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{words[:4]} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Print a row for each vocabulary."""
    corpus = folder / "corpus.jsonl"
    with open(corpus, "w") as file:
        size = sum(file.write(json.dumps({"text": text}) + "\n") and len(text.encode()) for text in texts(options.mb))
    print(f"{size / 1e6:.1f} MB\n{'tokens':>8}{'library MB/s':>14}{'prepare MB/s':>14}   prepare over library")
    for vocabulary in options.vocabularies:
        tokenizer = train(corpus, vocabulary, folder / f"tokenizer-{vocabulary}")
        rates: list[tuple[float, float]] = []
        for turn in range(options.rounds):
            theirs, said = seconds([sys.executable, "-c", LIBRARY, str(corpus), str(tokenizer / "tokenizer.json")])
            out = folder / f"set-{vocabulary}-{turn}"
            words = ["prepare", "--source", str(corpus), "--tokenizer", str(tokenizer), "--out", str(out)]
            ours, _ = seconds([sys.executable, "-m", "llmtrain", *words, "--processes", "1"])
            manifest = json.loads((out / "manifest.json").read_text())
            tokens = sum(manifest["tokens"].values()) - sum(manifest["documents"].values())  # but the separators
            if tokens != int(said):
                raise SystemExit(f"{tokens} tokens, of the library {said}")
            rates.append((size / 1e6 / theirs, size / 1e6 / ours))
        ratios = [ours / theirs for theirs, ours in rates]
        found = [statistics.median(each) for each in zip(*rates, strict=True)]
        print(
            f"{vocabulary:>8}{found[0]:>14.2f}{found[1]:>14.2f}   "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["prepare"], help="this table alone")
    parser.add_argument("--mb", type=float, default=30, help="megabytes of text (default 30)")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[1024, 32768, 131072])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default 3)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    options = arguments(argv)
    from train_speed import about

    print(", ".join(f"{key} {value}" for key, value in about().items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as made:
        prepare(options, Path(made))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
