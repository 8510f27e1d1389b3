"""The paragraph: who differs, where it stands, where the others wait, why, what to do. Facts as they were recorded."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from llmtrain.base.rank.stacks import Frame, parse_stacks
from llmtrain.cluster.watch.explain.causes import explain
from llmtrain.cluster.watch.explain.facts import HostFacts, JobFacts, RankFacts

IN_BACKWARD = (
    Frame("/x/.venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce"),
    Frame("/x/llmtrain/base/rank/heartbeat.py", 77, "counted"),
    Frame("/x/.venv/lib/python3.11/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", 2384, "allreduce_bucket"),
    Frame("/x/llmtrain/engine/step.py", 97, "forward_backward"),
    Frame("/x/llmtrain/training/loop.py", 180, "loop"),
)
IN_DATA = (Frame("/x/llmtrain/data/loader.py", 88, "__next__"), Frame("/x/llmtrain/training/loop.py", 172, "loop"))
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.77.0.3]:34954."


def waiting(rank: int, **other: object) -> RankFacts:
    """A rank that waits in the backward pass of step 22."""
    host = f"node-{rank + 1}"
    facts = RankFacts(
        rank=rank,
        host=host,
        pid=1000 + rank,
        step=21,
        phase="backward",
        collective="all_reduce",
        collectives=210,
        inside=True,
        idle_s=31.0,
        stack=IN_BACKWARD,
    )
    return replace(facts, **other)


def job(*ranks: RankFacts, trigger: str = "stall", hosts: tuple[HostFacts, ...] = (), **other: object) -> JobFacts:
    named = {h.name: h for h in hosts}
    everyone = tuple(named.get(r.host, HostFacts(name=r.host)) for r in ranks)
    return replace(
        JobFacts(trigger=trigger, ranks=ranks, hosts=everyone, here="node-1", stalled_s=31.0),
        **other,
    )


CASES = {
    "host_lost": (
        job(
            waiting(0), waiting(1), waiting(2), trigger="silent_host", hosts=(HostFacts(name="node-3", silent_s=10.4),)
        ),
        ("node-3", [2]),
        "node-3 (rank 2) is lost: it has not reported for 10 s",
    ),
    "host_lost, its kernel answers": (
        job(waiting(0), waiting(1), waiting(2), trigger="silent_host", hosts=(HostFacts(name="node-2", closed=True),)),
        ("node-2", [1]),
        "its watch has ended and the job completes no step",
    ),
    "host_unheard": (
        job(waiting(0), waiting(1, collectives=209), waiting(2, state="unknown", inside=False)),
        ("node-3", [2]),
        "rank 2 on node-3 has never reported, and all others wait",
    ),
    "cut_off": (
        job(
            waiting(0),
            waiting(1),
            waiting(2),
            trigger="silent_host",
            hosts=(HostFacts(name="node-2", silent_s=10.4), HostFacts(name="node-3", silent_s=10.9)),
        ),
        ("node-1", [0]),
        "node-1 reaches no other host of the job any more",
    ),
    "killed": (
        job(
            waiting(0, state="dead", error=CLOSED, error_at="llmtrain/engine/step.py:97 (forward_backward)"),
            waiting(1),
            waiting(2, state="dead", signal="SIGKILL"),
            trigger="dead_rank",
        ),
        ("node-3", [2]),
        "rank 2 on node-3 was ended by SIGKILL in backward",
    ),
    "out_of_memory": (
        job(
            waiting(0),
            waiting(1, state="dead", signal="SIGKILL"),
            trigger="dead_rank",
            hosts=(HostFacts(name="node-2", oom_kills=1),),
        ),
        ("node-2", [1]),
        "the kernel of node-2 has ended 1 process for lack of memory",
    ),
    "killed_while_stopping": (
        job(waiting(0), waiting(1, state="dead", signal="SIGKILL", stopping=True), trigger="dead_rank"),
        ("node-2", [1]),
        "asked to stop and killed before its checkpoint was written",
    ),
    "crashed": (
        job(waiting(0), waiting(1, state="dead", signal="SIGSEGV", stack=IN_DATA), trigger="dead_rank"),
        ("node-2", [1]),
        "crashed with SIGSEGV in backward at llmtrain/data/loader.py:88 (__next__)",
    ),
    "exception": (
        job(
            waiting(0, state="dead", error=CLOSED),
            waiting(
                1, state="dead", error="ValueError: token 600 of 512", error_at="llmtrain/data/loader.py:88 (take)"
            ),
            trigger="dead_rank",
        ),
        ("node-2", [1]),
        "rank 1 on node-2 raised ValueError: token 600 of 512 at llmtrain/data/loader.py:88 (take), in backward",
    ),
    "communication": (
        job(waiting(0, state="dead", error=CLOSED), waiting(1), trigger="dead_rank"),
        ("node-1", [0]),
        "No rank failed on its own",
    ),
    "refused": (
        job(
            waiting(0, state="dead", error=CLOSED),
            waiting(1, state="left", code=2, refusal="objective.name mine: terms: mine.py line 3: ValueError: no"),
            trigger="dead_rank",
        ),
        ("node-2", [1]),
        "rank 1 on node-2 has ended with an error that the others do not have: objective.name mine: terms: mine.py",
    ),
    "stopped": (
        job(waiting(0), waiting(1, state="stopped", stack=(), inside=False), waiting(2)),
        ("node-2", [1]),
        "`kill -CONT 1001`",
    ),
    "left_early": (
        job(waiting(0), waiting(1, state="left", code=0, inside=False, phase="end"), waiting(2)),
        ("node-2", [1]),
        "rank 1 on node-2 has ended by itself (exit code 0) while others still wait",
    ),
    "input_output": (
        job(waiting(0), waiting(1, state="disk", inside=False, phase="data", stack=IN_DATA, waits_in="nfs_wait")),
        ("node-2", [1]),
        "waits for a disk or a file server that does not answer (kernel: nfs_wait) at llmtrain/data/loader.py:88",
    ),
    "rank_0_only_save": (
        job(
            waiting(0, phase="save", collective="barrier", collectives=211, stack=IN_DATA),
            waiting(1, collectives=211),
            waiting(2, collectives=211),
        ),
        ("node-1", [0]),
        "rank 0 on node-1 is in save at llmtrain/data/loader.py:88 (__next__) and the others are not",
    ),
    "rank_0_only_save, gloo ends the others": (
        job(
            waiting(0, phase="save", collective="broadcast", collectives=211, stack=IN_DATA),
            waiting(1, state="dead", signal="SIGABRT", native=True, inside=False, phase="forward", collectives=212),
            trigger="dead_rank",
        ),
        ("node-1", [0]),
        "rank 0 on node-1 is in save",
    ),
    "collective_mismatch, gloo ends one": (
        job(
            waiting(0),
            waiting(1, state="dead", signal="SIGABRT", native=True, inside=False, phase="forward"),
            trigger="dead_rank",
        ),
        ("node-2", [1]),
        "rank 1 on node-2 was ended by the communication library after all_reduce #210, in forward",
    ),
    "crashed, by itself": (
        job(waiting(0), waiting(1, state="dead", signal="SIGABRT", inside=False), trigger="dead_rank"),
        ("node-2", [1]),
        "crashed with SIGABRT in backward",
    ),
    "slow_data": (
        job(waiting(0), waiting(1, inside=False, phase="data", stack=IN_DATA), waiting(2)),
        ("node-2", [1]),
        "rank 1 on node-2 is in data at llmtrain/data/loader.py:88 (__next__), for 31 s",
    ),
    "uneven_batches": (
        job(waiting(0), waiting(1, phase="evaluate", step=22, collectives=220), waiting(2)),
        ("node-2", [1]),
        "rank 1 on node-2 is at step 23, the others at step 22",
    ),
    "experts_not_leaves": (
        job(
            waiting(0, collective="all_gather_into_tensor"),
            waiting(1, collective="reduce_scatter_tensor", collectives=209),
            waiting(2, collective="all_gather_into_tensor"),
            experts=True,
            zero_stage=3,
        ),
        ("node-2", [1]),
        "an expert got tokens on some ranks only",
    ),
    "collective_mismatch": (
        job(waiting(0), waiting(1, collective="broadcast"), waiting(2)),
        ("node-2", [1]),
        "not in the same collective: rank 1 on node-2 in broadcast #210",
    ),
    "slow_host": (
        job(waiting(0), waiting(1, inside=False, cpu_busy=True, phase="forward"), waiting(2)),
        ("node-2", [1]),
        "rank 1 on node-2 still computes in forward",
    ),
    "one_waits": (
        job(waiting(0), waiting(1, inside=False, phase="forward", waits_in="futex_wait"), waiting(2)),
        ("node-2", [1]),
        "has done nothing for 31 s (kernel: futex_wait)",
    ),
    "communication, all wait": (job(waiting(0), waiting(1)), ("", []), "the network between them"),
    "behind": (
        job(waiting(0, inside=False), waiting(1, inside=False, collectives=207), waiting(2, inside=False)),
        ("node-2", [1]),
        "rank 1 on node-2 has begun 207 collectives, others up to 210",
    ),
    "unknown": (
        job(waiting(0, inside=False, collectives=1), alike=False),
        ("", []),
        "No rank has made progress for 31 s",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_cause_names_who_differs(name):
    facts, (host, ranks), words = CASES[name]
    found = explain(facts)
    if name == "unknown":
        found = explain(replace(facts, ranks=(*facts.ranks, replace(facts.ranks[0], rank=1, collectives=1))))
    assert (found.cause, found.host, found.ranks) == (name.split(",")[0], host, ranks), found.text
    assert words in found.text and found.text.startswith("fault after step 2")
    assert found.text.endswith(".") and "\n" not in found.text


@pytest.mark.parametrize("name", [name for name, (_, (_, odd), _) in CASES.items() if odd])
def test_several_ranks_that_differ_are_told_in_the_plural(name):
    """Each rank of the case has a twin on its host, which does the same."""
    facts = CASES[name][0]
    twins = [replace(rank, rank=rank.rank + 10, pid=rank.pid + 10) for rank in facts.ranks]
    text = explain(replace(facts, ranks=(*facts.ranks, *twins))).text
    assert re.search(r"ranks \d", text), text
    assert not re.search(r"ranks [\d, -]+( on [\w-]+)? (still )?(\w+s|was)\b", text), text
    assert not re.search(r"\bit (is|waits|does|go)\b|\bits (next|checkpoint)|by itself|holds it", text), text


def test_the_others_are_told_by_where_they_wait():
    ranks = [waiting(rank) for rank in range(5)] + [waiting(5, state="stopped")]
    text = explain(job(*ranks)).text
    expected = "The others: ranks 0-4 wait in all_reduce #210, in backward (step 22) at llmtrain/engine/step.py:97"
    assert expected in text and text.count("all_reduce") == 1


def test_a_launcher_that_ends_the_other_ranks_is_not_taken_for_the_cause():
    """DeepSpeed's launcher sends SIGTERM to the ranks of its host when one has died."""
    facts = job(
        waiting(0, state="dead", signal="SIGTERM", host="node-1"),
        waiting(1, state="dead", signal="SIGKILL", host="node-1"),
        trigger="dead_rank",
    )
    assert explain(facts).ranks == [1]


def test_a_pause_may_pass():
    said = explain(job(waiting(0), waiting(1, state="stopped", inside=False), trigger="pause"))
    assert said.what == "pause" and said.ranks == [1]
    assert said.text.startswith("no progress for 31 s after step 21: rank 1 on node-2 is stopped")
    assert "`kill -CONT 1001` lets it go on" in said.text


def test_signatures_are_equal_for_the_same_error_at_the_same_step():
    def fault(error: str, step: int = 21) -> str:
        return explain(job(waiting(0, state="dead", error=error, step=step), trigger="dead_rank")).signature

    assert fault("ValueError: bad row 7") == fault("ValueError: bad row 7")
    assert fault("ValueError: bad row 7") != fault("ValueError: bad row 8")
    assert fault("ValueError: bad row 7") != fault("ValueError: bad row 7", step=22)
    assert fault(CLOSED) == fault(CLOSED.replace("34954", "41022").replace("10.77.0.3", "10.77.0.2"))


def test_many_hosts_make_one_paragraph():
    ranks = [waiting(rank, host=f"node-{rank // 8}", step=21 + rank % 7) for rank in range(1024)]
    hosts = tuple(HostFacts(name=f"node-{n}", silent_s=11.0 if n > 99 else 0.0) for n in range(128))
    text = explain(JobFacts(trigger="silent_host", ranks=tuple(ranks), hosts=hosts, here="node-0")).text
    assert len(text) < 1500 and "node-100" in text and "and 20 more" in text


DUMP = """Thread 0x00007f1d4a7fc6c0 [Thread-1] (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f1e0a2b5740 [python] (most recent call first):
  File "/x/llmtrain/data/loader.py", line 88 in __next__
  File "/x/llmtrain/training/loop.py", line 172 in loop
"""


def test_the_main_threads_stack_is_read():
    assert parse_stacks(DUMP) == IN_DATA
    assert parse_stacks(DUMP.replace("Current thread", "Thread")) == IN_DATA
    assert parse_stacks("") == () == parse_stacks("Fatal Python error: Segmentation fault\n")
