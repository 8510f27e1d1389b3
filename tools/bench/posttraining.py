"""Figures of post-training and of the data that it reads.

    python tools/bench/posttraining.py --only prepare  # the whole command against the tokenizers library, one core each
    python tools/bench/posttraining.py --only lora     # a step of LoRA, of all weights, of peft in a plain loop
    python tools/bench/posttraining.py --only dpo      # a prepared reference, one in the loop, TRL's DPOTrainer
    python tools/bench/posttraining.py --only sft      # against TRL's SFTTrainer
    python tools/bench/posttraining.py --only packing  # conversations of skewed lengths: packed, and TRL's padded ones
    python tools/bench/posttraining.py --only packing-dpo  # the same of preferences

`prepare`: code and prose of the running Python's folders as one jsonl, with byte-level BPEs of several sizes that cut
as Qwen2's does. The library's side reads the same lines and calls encode_batch_fast. They take turns; a second is a
CPU-second of the process and of what it started, starts included, and the ratio is taken within a round.

The others train one model in processes of their own that take turns, round by round, as in train_speed.py; the losses
of every step are compared. But for `packing` rows are equally long, so that nothing is padded. TRL takes part where it
is installed.

`packing` and `packing-dpo`: lengths are log-normal, most rows short, some as long as a sequence. Each step has the same
rows for all, so losses are compared here, too; peers cut them into micro-batches of --at-once rows (pairs) and pad
those to the longest. At the end plain transformers takes the loss of each contestant's weights on held-out rows.

On a GPU they train in bf16, and a second is one of the clock:

    python tools/bench/posttraining.py --only sft --preset 1.2b --contestants llmtrain-full,trainer-full,trl-sft
    python tools/bench/posttraining.py --only lora --preset 8b --batch 2 --contestants llmtrain-lora
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contestants import Need, Round
    from tuners import Tuning

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from llmtrain.base.child import child_environment  # noqa: E402

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
    environment = child_environment(TOKENIZERS_PARALLELISM="false")
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


@dataclass(frozen=True, kw_only=True)
class Race:
    """A table of trainings."""

    contestants: tuple[str, ...]
    """The first is ours, and the ratios are of its seconds."""
    pairs: bool = False
    skewed: bool = False
    targets: dict[str, float] = field(default_factory=dict)
    """Contestant -> the largest share of its seconds that ours is to take."""
    other_loss: tuple[str, ...] = ()
    """Contestants that train something else: their losses are not compared."""
    others: tuple[str, ...] = ()
    """Contestants that take part when they are named."""

    @property
    def group(self) -> int:
        """Rows of an example."""
        return 2 if self.pairs else 1


RACES = {
    "lora": Race(
        contestants=("llmtrain lora", "llmtrain full", "peft lora"),
        targets={"llmtrain full": 0.72, "peft lora": 1.03},
        other_loss=("llmtrain full",),
        others=("trainer lora", "trl lora"),
    ),
    "dpo": Race(
        contestants=("llmtrain dpo", "plain online", "trl online", "trl prepared"),
        pairs=True,
        targets={"plain online": 0.76, "trl online": 0.9},
    ),
    "sft": Race(
        contestants=("llmtrain full", "plain full", "trl sft"), targets={"trl sft": 0.9}, others=("trainer full",)
    ),
    "packing": Race(
        contestants=("llmtrain full", "trl sft", "trl grouped", "trl flat"),
        skewed=True,
        targets={"trl sft": 1 / 3},
        others=("trainer full", "plain full"),
    ),
    "packing-dpo": Race(
        contestants=("llmtrain dpo", "trl online", "trl prepared"),
        pairs=True,
        skewed=True,
        targets={"trl online": 1 / 2},
        others=("plain online",),
    ),
}
VOCABULARY = 4096


def records(race: Race, count: int, sequence: int) -> Iterator[dict[str, object]]:
    """Conversations of one question; a byte is a token. Two rows fill a sequence."""
    draw = random.Random(0)

    def text(length: int) -> str:
        return "".join(draw.choices("abcdefgh ijkl", k=length - 1)) + "."

    # Of a row: 8 control tokens and line ends of ChatML around a question, 12 bytes of its roles' names.
    room = sequence // 2 - 20
    for _ in range(count):
        question, answer = text(room // 4), room - room // 4
        if race.pairs:
            yield {"prompt": question, "chosen": text(answer), "rejected": text(answer)}
        else:
            yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": text(answer)}]}


def skewed_records(race: Race, count: int, sequence: int) -> Iterator[dict[str, object]]:
    """Questions whose right answer is how the text goes on: sources and documentation of the running Python, in pieces
    whose row has a log-normal length, in the median a 16th of the longest: the sequence, or half of it for a pair's."""
    draw, longest = random.Random(0), sequence // race.group
    corpus = re.sub(r"[^A-Za-z0-9.,:=()'-]+", " ", "".join(texts(2)))

    def piece(length: int) -> str:
        at = draw.randrange(len(corpus) - length)
        return corpus[at : at + length]

    for _ in range(count):
        length = min(longest - 20, max(8, int(draw.lognormvariate(math.log(longest / 16), 1.2)) - 20))
        text, cut = piece(length), length // 4
        question, answer = text[: cut - 1] + "?", text[cut:-1] + "."
        if race.pairs:
            yield {"prompt": question, "chosen": answer, "rejected": piece(len(answer) - 1) + "."}
        else:
            yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_workplace(race: Race, options: argparse.Namespace, folder: Path, steps: int) -> None:
    """model/, data/ and deepspeed.json for the contestants."""
    import torch
    from train_speed import PRESETS
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.helpers.chat import KINDS, write_tokenizer

    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    fields = (
        dict(PRESETS[options.preset].model)
        if options.preset
        else {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": options.hidden,
            "intermediate_size": options.hidden * 11 // 4,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.hidden // 64 or 1,
            "num_key_value_heads": options.hidden // 64 or 1,
            "max_position_embeddings": options.sequence,
            "tie_word_embeddings": True,
        }
    )
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("cuda" if on_gpu else "cpu"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    made.save_pretrained(folder / "model")
    del made
    if on_gpu:
        torch.cuda.empty_cache()  # the contestants need the room
    write_tokenizer(folder / "model", KINDS["chatml"])
    config_of_deepspeed = {
        "train_batch_size": options.batch,
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        **({"bf16": {"enabled": True}} if on_gpu else {}),
        **({"activation_checkpointing": {}} if options.recompute else {}),
    }
    (folder / "deepspeed.json").write_text(json.dumps(config_of_deepspeed))
    source = folder / "records.jsonl"
    count = steps * options.batch * (8 if race.skewed else 1 if race.pairs else 2) + 40
    made_records = (skewed_records if race.skewed else records)(race, count, options.sequence)
    with open(source, "w") as file:
        file.writelines(json.dumps(each) + "\n" for each in made_records)
    kind = "preference" if race.pairs else "chat"
    words = ["prepare", "--format", kind, "--source", str(source), "--tokenizer", str(folder / "model")]
    if not race.pairs and not race.skewed:
        words += ["--validation-fraction", "0"]  # an even number of rows: two fill each sequence
    seconds([sys.executable, "-m", "llmtrain", *words, "--out", str(folder / "data"), "--processes", "1"])


def run_race(name: str, options: argparse.Namespace, folder: Path) -> bool:
    """Write the workplace, let the contestants take turns, print the table. Returns True if each has ended well."""
    import importlib.util

    import torch
    import yaml
    from machine import Card, about, gpu_gib, write
    from train_speed import race as take_turns
    from tuners import Tuning, held_out, padding_share, serve_tuning, write_adapter

    race, on_gpu = RACES[name], torch.cuda.is_available()
    asked = tuple(options.contestants or race.contestants)
    there = importlib.util.find_spec("trl") is not None
    contestants = tuple(each for each in asked if there or not each.startswith("trl"))
    if contestants != asked:
        print("TRL is not installed: it does not take part")
    together, total_gib = True, gpu_gib()
    if options.preset and race.skewed:
        together = False  # not counted: what is padded is as long as chance has it
    elif options.preset and total_gib is not None:
        options.batch, _, together = what_fits(options, contestants, total_gib)
        if not together:
            print(f"{name}: {total_gib:.0f} GiB do not hold {', '.join(contestants)} at a time: each alone", flush=True)
    task = Tuning(
        folder=str(folder),
        sequence=options.sequence,
        global_batch=options.batch,
        contestants=contestants,
        threads=1,
        steps_per_round=options.steps,
        rounds=options.rounds + 1,
        bf16=on_gpu,
        at_once=options.at_once if race.skewed else 0,
        recompute=options.recompute,
    )
    write_workplace(race, options, folder, task.total_steps)
    if any(each.endswith("lora") for each in contestants):
        write_adapter(folder)
    if race.pairs:
        run = {
            "deepspeed": str(folder / "deepspeed.json"),
            "model": {"pretrained": str(folder / "model")},
            "data": {"path": str(folder / "data"), "sequence_length": task.sequence, "isolate_documents": True},
            "objective": {"name": "dpo"},
            "train": {"max_steps": 1, "run_dir": str(folder / "column")},
        }
        (folder / "column.yaml").write_text(yaml.safe_dump(run))
        spent_s, _ = seconds([sys.executable, "-m", "llmtrain", "reference", str(folder / "column.yaml")])
        if race.skewed:
            print(f"llmtrain reference: {spent_s:.1f} CPU-s for all rows, its start included", flush=True)
    shape = options.preset or f"hidden size {options.hidden}, {options.layers} layers"
    shape += f", {'bf16' if on_gpu else 'fp32'}, ZeRO 1"
    batch = f"{options.batch} sequences of {options.sequence} tokens a step"
    print(f"{name}: {batch}, {shape}, {options.rounds} rounds of {options.steps} steps", flush=True)

    head = {"machine": about(), "table": name, "shape": f"{batch}, {shape}"}

    def keep(rounds: dict[str, list[Round]], held: dict[str, float] | None = None) -> None:
        found = figures(task, rounds, on_gpu)
        for each, loss in (held or {}).items():
            found[each]["held_out"] = loss
        write(options.json, {**head, **card.figures(), "contestants": found})

    with Card() as card:
        rounds = take_turns(task, keep, serve_tuning, together=together)
    print(race_table(race, task, rounds, on_gpu))
    if race.skewed:
        held = {each: held_out(str(folder), each, pairs=race.pairs) for each in rounds}
        keep(rounds, held)
        print(
            f"{padding_share(task, race.group):.3f} of the padded micro-batches are padding; "
            f"held-out loss: {', '.join(f'{each} {loss:.5f}' for each, loss in held.items())}"
        )
    return len(rounds) == len(contestants)


def need_of(options: argparse.Namespace, contestant: str) -> Need:
    """Return a contestant's GPU memory. Peers make whole logits, TRL one fp32 copy more for its own figures."""
    from contestants import Need
    from train_speed import PRESETS

    preset = PRESETS[options.preset]
    share = options.batch * options.sequence / (preset.micro_batch * preset.sequence)
    if contestant in preset.needs:
        return preset.needs[contestant].of(share)
    plain = preset.needs["plain"]
    logits = preset.micro_batch * preset.sequence * preset.model["vocab_size"] * 4 / 2**30
    made = preset.needs["llmtrain"].made if contestant.startswith("llmtrain") else plain.made + logits
    held = plain.held / 8 if contestant.endswith("lora") else plain.held  # the base in bf16
    return Need(held=held, made=made).of(share)


def what_fits(
    options: argparse.Namespace, contestants: tuple[str, ...], total_gib: float
) -> tuple[int, list[Need], bool]:
    """(sequences of a step, halved for all alike until each fits alone; what they need; whether all fit at a time)."""
    from contestants import fit_together

    asked = argparse.Namespace(**vars(options))
    while True:
        needs = [need_of(asked, each) for each in contestants]
        if asked.batch == 1 or all(need.alone <= total_gib for need in needs):
            return asked.batch, needs, fit_together(needs, total_gib)
        asked.batch //= 2


def figures(task: Tuning, rounds: dict[str, list[Round]], on_gpu: bool) -> dict[str, dict[str, Any]]:
    """Medians over the rounds; the ratio, of ours over it, is taken within a round, losses are compared in every step.
    On a CPU a second is one of the processor, which others on the machine cannot take."""

    from machine import use
    from tuners import ADAPTER, steps_of

    from llmtrain.config.run import AdapterConfig, ModelConfig

    def seconds_of(one: Round) -> float:
        return one.wall_s if on_gpu else one.cpu_s

    ours, found = rounds[task.contestants[0]], {}
    counted = [sum(sum(mask[1:]) for _, mask in rows) for rows in steps_of(task)] if task.at_once else []
    a_round = task.steps_per_round + 1  # the first is not timed, and the first round warms up
    for name in rounds:
        ratios = sorted(seconds_of(a) / seconds_of(b) for a, b in zip(ours, rounds[name], strict=False))
        both = [
            (x, y) for a, b in zip(ours, rounds[name], strict=False) for x, y in zip(a.losses, b.losses, strict=True)
        ]
        step_s = statistics.median(seconds_of(one) for one in rounds[name]) / task.steps_per_round
        found[name] = {
            "ms_per_step": 1000 * step_s,
            "tokens_per_s": task.global_batch * task.sequence / step_s,
            "peak_gib": max(one.peak_bytes for one in rounds[name]) / 2**30,
            "held_mb": int(Path(task.folder, f"{name}.bytes").read_text()) / 1e6,
            "ours_over_it": statistics.median(ratios),
            "low": ratios[len(ratios) // 4],
            "high": ratios[-1 - len(ratios) // 4],
            "loss_difference": max(abs(x - y) for x, y in both),
            "attention": rounds[name][-1].attention,
            "compiled": rounds[name][-1].compiled,
        }
        if on_gpu and not counted:  # a row has two conversations, each of which sees itself
            model, adapter = ModelConfig(config=str(Path(task.folder) / "model")), AdapterConfig(**ADAPTER)
            more = use(found[name]["tokens_per_s"], model, task.sequence // 2, adapter if "lora" in name else None)
            found[name] |= more
        if counted:
            found[name]["counted_per_s"] = statistics.median(
                sum(counted[at * a_round + 1 : (at + 1) * a_round]) / seconds_of(one)
                for at, one in enumerate(rounds[name], 1)
            )
    return found


def race_table(race: Race, task: Tuning, rounds: dict[str, list[Round]], on_gpu: bool) -> str:
    """The figures for a reader."""
    ms = "ms/step" if on_gpu else "CPU-ms/step"
    lines = [f"{'':<15}{ms:>12}{'peak GiB':>10}{'held MB':>9}   ours over it (quartiles), target; loss difference"]
    lines[0] += "; tokens that count a second" if race.skewed else ""
    for name, one in figures(task, rounds, on_gpu).items():
        line = f"{name:<15}{one['ms_per_step']:>12.1f}{one['peak_gib']:>10.2f}{one['held_mb']:>9.1f}"
        if name != task.contestants[0]:
            target = f", {race.targets[name]:.2g}" if name in race.targets else ""
            line += f"   {one['ours_over_it']:.3f} ({one['low']:.3f} to {one['high']:.3f}){target}"
            line += "" if name in race.other_loss else f"; {one['loss_difference']:.1e}"
        line += f"; {one['counted_per_s']:,.0f}" if race.skewed else ""
        lines.append(line)
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["prepare", *RACES], help="this table alone")
    parser.add_argument("--mb", type=float, default=30, help="megabytes of text (default 30)")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[1024, 32768, 131072])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default 3)")
    parser.add_argument("--steps", type=int, default=3, help="timed optimizer steps of a turn (default 3)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step (default 4)")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence (default 256, of a preset 4096)")
    parser.add_argument("--at-once", type=int, default=8, help="of packing: rows (pairs) of a peer's micro-batch (8)")
    parser.add_argument("--recompute", action="store_true", help="recompute layers: the JSON's, and TRL's own default")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model that trains (default 512)")
    parser.add_argument("--layers", type=int, default=4, help="its layers (default 4)")
    parser.add_argument(
        "--preset", choices=["0.5b", "1.2b", "8b"], help="a model of train_speed.py, of 4096 tokens a sequence"
    )
    parser.add_argument("--contestants", help="of --only: ours first, and whom it is held to, with commas between")
    parser.add_argument("--json", type=Path, help="of --only: write the figures to this file, after each round")
    found = parser.parse_args(argv)
    found.sequence = found.sequence or (4096 if found.preset else 256)
    if (found.contestants or found.json) and found.only in (None, "prepare"):
        parser.error("--contestants and --json are of one table: name it with --only")
    if found.contestants:
        there = {each.replace(" ", "-"): each for each in (*RACES[found.only].contestants, *RACES[found.only].others)}
        if wrong := [each for each in found.contestants.split(",") if each not in there]:
            parser.error(f"--contestants: --only {found.only} has no {wrong[0]}; there are {', '.join(there)}")
        found.contestants = [there[each] for each in found.contestants.split(",")]
    if found.preset == "8b" and found.contestants != ["llmtrain lora"]:
        parser.error(
            "--preset 8b: no GPU holds what trains all of its weights; --only lora --contestants llmtrain-lora"
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the tables; 1 if a contestant was left out."""
    options = arguments(argv)
    from machine import about

    whole = True
    print(", ".join(f"{key} {value}" for key, value in about().items()), flush=True)
    for name in [options.only] if options.only else ["prepare", *RACES]:
        with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as made:
            if name == "prepare":
                prepare(options, Path(made))
            else:
                whole &= run_race(name, options, Path(made))
    return int(not whole)


if __name__ == "__main__":
    raise SystemExit(main())
