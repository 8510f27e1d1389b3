"""The checks of `recheck.every`: faults named, false alarms, and the processor time of a check next to a step.

    python -m tools.bench.recheck [--faults 40] [--healthy 10000] [--hidden 256] [--layers 4] [--sequences 16]

Three gloo ranks on this machine. Each fault changes a seeded bit in a module's output, or its gradient, on rank 1: in
every call or in each tenth; with --random, in one of ten at random. Healthy checks compare two sequences each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.helpers.ranks import RankPool
from tests.helpers.training import LLAMA, Case, prepared_data
from tests.helpers.wrong_machine import GUILTY, Machine, found

RANKS = 3
SMALL = {**LLAMA, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def healthy(case: Case, checks: int, global_batch: int) -> tuple[int, float]:
    """(checks with a difference, seconds of a check) of ranks that compute right."""
    machine = Machine(case, global_batch)
    part, began_s = machine.part(), time.monotonic()
    wrong = sum(machine.check(part, step)[0] > 0 for step in range(checks)) + len(machine.events)
    machine.close()
    return wrong, (time.monotonic() - began_s) / max(1, checks)


def cost(case: Case, rounds: int, global_batch: int) -> tuple[float, float]:
    """Processor seconds of a rank (a step, a check), medians."""
    machine = Machine(case, global_batch)
    part, steps, checks = machine.part(), [], []
    for step in range(rounds):
        batch = next(machine.loader)
        began_s = time.process_time()
        machine.launch.session.step(batch)
        steps.append(time.process_time() - began_s)
        began_s = time.process_time()
        assert machine.check(part, step)[0] == 0
        checks.append(time.process_time() - began_s)
    machine.close()
    return statistics.median(steps), statistics.median(checks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--healthy", type=int, default=10_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=16, help="of a rank in a step, in micro-batches of 4")
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    pool = RankPool(RANKS)
    with tempfile.TemporaryDirectory() as folder:
        data = prepared_data(Path(folder))
        small = Case(data=data, stage=1, model=SMALL)
        if options.faults:
            answers = pool.run(found, small, list(range(options.faults)), options.random, 12 * RANKS, timeout_s=1e5)[0]
            named = [check for check, text, _ in answers if check and f": twice, rank {GUILTY} on " in text]
            after = ", ".join(f"{count} in check {check}" for check, count in sorted(Counter(named).items()))
            print(f"{len(named)} of {options.faults} faults are named: {after}", flush=True)
            print("\n".join(text for check, text, _ in answers if not check))
        if options.rounds:
            model = {
                **LLAMA,
                "hidden_size": options.hidden,
                "intermediate_size": 3 * options.hidden,
                "num_hidden_layers": options.layers,
                "max_position_embeddings": options.tokens,
            }
            case = Case(
                data=data, stage=1, model=model, length=options.tokens, accumulation=max(1, options.sequences // 4)
            )
            step_s, check_s = pool.run(cost, case, options.rounds, options.sequences * RANKS, timeout_s=1e5)[0]
            share = check_s / step_s / 500
            print(
                f"processor time of a rank: step {step_s * 1e3:.0f} ms, check {check_s * 1e3:.0f} ms: {share:.2%} of "
                "a run at every 500 steps",
                flush=True,
            )
        wrong, check_s = pool.run(healthy, small, options.healthy, 2 * RANKS, timeout_s=1e5)[0]
        print(f"{wrong} of {options.healthy} healthy checks are false alarms; {check_s * 1e3:.0f} ms each")
    pool.close()


if __name__ == "__main__":
    main()
