"""`config check`, and two steps of the quickstart on one rank, beside `import torch` and a first step of Trainer.

    python tools/bench/start.py

Each start is a process of its own, and they take turns. CPU-seconds are those of the process and of what it has
started and waited for; the ratios to `import torch` are taken within a round. JSON, data and model are ready, without a
tracker. Trainer gets random tokens from memory, torch's fused AdamW, and is spared DeepSpeed's shared-memory op, which
would compile for a minute. `imports` is what neither can do without: torch, DeepSpeed, and the model's module.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

RECIPE = ROOT / "launch/recipes/quickstart.yaml"
CONTESTANTS = ("torch", "check", "llmtrain", "trainer", "imports")
LIMIT_S = 300.0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="starts of each (default 7); one more warms up")
    parser.add_argument("--start", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def told(folder: Path) -> None:
    """Write down what it took until here, and end."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ours = [path for m in list(sys.modules.values()) if "/llmtrain/" in (path := getattr(m, "__file__", None) or "")]
    lines = [len(Path(path).read_text().splitlines()) for path in ours]
    found = {
        "wall_s": time.time() - float(os.environ["BENCH_BEGAN"]),
        "cpu_s": sum(each.ru_utime + each.ru_stime for each in used),
        "peak_gib": used[0].ru_maxrss / 2**20,
        "modules": len(sys.modules),
        "our_files": sum(map(bool, lines)),
        "our_lines": sum(lines),
    }
    (folder / "told.json").write_text(json.dumps(found))
    os._exit(0)


def llmtrain(folder: Path) -> None:
    """Two steps of the quickstart as its command runs it."""
    from llmtrain.base.rank.heartbeat import heart
    from llmtrain.cli import main

    plain = heart.end_step
    heart.end_step = lambda step: told(folder) if step == 2 else plain(step)  # type: ignore
    run = ("--data.path", str(folder / "data"), "--train.run_dir", str(folder / "run"))
    main(["train", "--config", str(RECIPE), *run])


def check(folder: Path) -> None:
    """`llmtrain config check` of the quickstart."""
    from llmtrain.cli import main

    if not main(["config", "check", str(RECIPE), "--data.path", str(folder / "data")]):
        told(folder)


def torch(folder: Path) -> None:
    """What everything else is measured in."""
    import torch  # noqa: F401

    told(folder)


def trainer(folder: Path) -> None:
    """As a user of Trainer writes it."""
    import deepspeed
    import torch
    import yaml
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class FirstStep(TrainerCallback):
        """Ends the process after it."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            told(folder)

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    recipe = yaml.safe_load(RECIPE.read_text())
    config = AutoConfig.for_model(**recipe["model"]["config"])
    size = recipe["train"]["micro_batch"]
    tokens = torch.randint(config.vocab_size, (16 * size, recipe["data"]["sequence_length"]))
    Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            deepspeed={**json.loads((ROOT / recipe["deepspeed"]).read_text()), "zero_allow_untested_optimizer": True},
            per_device_train_batch_size=size,
            max_steps=16,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[FirstStep()],
    ).train()


def imports(folder: Path) -> None:
    """Nothing but the imports."""
    import deepspeed  # noqa: F401
    import transformers

    transformers.LlamaForCausalLM  # noqa: B018  # an attribute of a lazy module
    told(folder)


def measure(name: str, folder: Path) -> dict[str, float]:
    """One start."""
    environment = {
        **os.environ,
        "WANDB_MODE": "disabled",
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    subprocess.run(["rm", "-rf", str(folder / "run"), str(folder / "trainer"), str(folder / "told.json")], check=True)
    words = [sys.executable, __file__, "--start", name, str(folder)]
    environment["BENCH_BEGAN"] = str(time.time())
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if not (folder / "told.json").exists():
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads((folder / "told.json").read_text())
    return found


def table(rounds: dict[str, list[dict[str, float]]]) -> str:
    """Medians, and ratios within a round."""
    lines = [f"{'':<10}{'CPU-s':>8}{'wall s':>8}{'peak GiB':>10}{'modules':>9}   CPU over torch: median (quartiles)"]
    for name, found in rounds.items():
        middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
        ratios = [a["cpu_s"] / b["cpu_s"] for a, b in zip(found, rounds["torch"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        lines.append(
            f"{name:<10}{middle['cpu_s']:>8.2f}{middle['wall_s']:>8.2f}{middle['peak_gib']:>10.2f}"
            f"{middle['modules']:>9.0f}   {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"
        )
    ours = rounds["llmtrain"][-1]
    lines.append(f"files of llmtrain that are loaded: {ours['our_files']}, {ours['our_lines']:,} lines")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    options = arguments(argv)
    if options.start:
        name, folder = options.start
        {"torch": torch, "check": check, "llmtrain": llmtrain, "trainer": trainer, "imports": imports}[name](
            Path(folder)
        )
        return 1
    from machine import about

    from tests.helpers.prepared import write_prepared

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(", ".join(f"{key} {value}" for key, value in about().items()), flush=True)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as made:
        folder = Path(made)
        some = [list(range(1, 1000))] * 200
        from tokenizers import Tokenizer, models

        tokenizer = Tokenizer(models.BPE({chr(0x4E00 + token): token for token in range(1024)}, [])).to_str()
        write_prepared(folder / "data", train=[some], validation=[some], vocab_size=1024, tokenizer=tokenizer)
        for turn in range(options.rounds + 1):
            for name in CONTESTANTS:
                found = measure(name, folder)
                if turn:
                    rounds[name].append(found)
    print(table(rounds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
