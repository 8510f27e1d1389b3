"""The first losses of every shipped DeepSpeed file, in fp32: what a change that means to change nothing leaves alone.

The table, tests/runs/golden.json, holds them for each kind of processor and version of torch that wrote one:
`python -m tests.runs.test_golden` adds this machine's. There they are the same to the last bit,
elsewhere within 1e-6 of themselves.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import forked
from tests.helpers.launching import REPO, losses, write_recipe

FILES = sorted((REPO / "ds_configs").glob("*.json"))
TABLE = Path(__file__).with_name("golden.json")
TWO = (("pipeline", "stages"), ("tensor_parallel", "autotp_size"), ("expert_parallel", "autoep_size"))
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
STEPS = 4
_BUILD_S = 900.0
"""The file with offload may have to wait until DeepSpeed's CPUAdam is built."""


def machine() -> str:
    """What decides about the last bit: the processor's type, the instructions that torch takes, torch itself."""
    import torch

    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    cpu = {key.strip(): value.strip() for key, _, value in lines}
    kind = " ".join(cpu.get(key, "?") for key in ("vendor_id", "cpu family", "model"))
    return f"{kind}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def small(path: Path) -> tuple[dict[str, Any], int]:
    """The file in fp32 with each of its degrees at 2, and the ranks for it: at least two."""
    tree = json.loads(path.read_text())
    for key in ("bf16", "fp16"):
        tree.pop(key, None)
    ranks = 1
    for section, key in TWO:
        if section in tree:
            tree[section][key], ranks = 2, 2 * ranks
    if "sequence_parallel_size" in tree:
        tree["sequence_parallel_size"], ranks = 2, 2 * ranks
    return tree, max(2, ranks)


def first_losses(path: Path, data: str, folder: Path) -> list[float]:
    """Of four steps of `llmtrain train`."""
    tree, ranks = small(path)
    (folder / "ds.json").write_text(json.dumps(tree))
    words = ["--deepspeed", str(folder / "ds.json"), "--train.max_steps", str(STEPS), "--schedule.name", "constant"]
    words += ["--model.config.num_hidden_layers", "2", "--checkpoint.every_steps", "null", "--train.eval", "false"]
    words += ["--model.config.attention_dropout", "0.0", "--train.micro_batch", "null", "--train.accumulation", "2"]
    if "expert_parallel" in tree:
        words += [word for key, value in EXPERTS.items() for word in (f"--model.config.{key}", str(value))]
    code, output = forked.finish(write_recipe(folder, data), *words, world_size=ranks, timeout_s=_BUILD_S)
    assert code == 0, output
    found = losses(folder / "run")
    return [found[step] for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_first_losses(path: Path, small_data: str, tmp_path: Path) -> None:
    table = json.loads(TABLE.read_text())
    known = {name: rows[path.stem] for name, rows in table.items() if path.stem in rows}
    assert known, "of no machine: python -m tests.runs.test_golden"
    got = first_losses(path, small_data, tmp_path)
    assert got == known.get(machine(), got)
    for name, row in known.items():
        assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(got, row, strict=True)), name


def main() -> int:
    from tests.helpers.training import prepared_data

    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        data = prepared_data(Path(name))
        rows = table[machine()] = {}
        for path in FILES:
            folder = Path(name) / path.stem
            folder.mkdir()
            rows[path.stem] = first_losses(path, data, folder)
            print(path.stem, *rows[path.stem])
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
