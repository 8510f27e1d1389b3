"""The paragraph: who differs, where it stands, where the others wait, why, what to do. Facts as they were recorded."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from llmtrain.base.rank.stacks import Frame
from llmtrain.features.watch.causes import explain
from llmtrain.features.watch.facts import HostFacts, JobFacts, RankFacts
from llmtrain.features.watch.observe import parse_stacks

IN_BACKWARD = (
    Frame("/x/.venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce"),
    Frame("/x/llmtrain/base/rank/heartbeat.py", 77, "counted"),
    Frame("/x/.venv/lib/python3.11/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", 2384, "allreduce_bucket"),
    Frame("/x/llmtrain/engine/step.py", 97, "forward_backward"),
    Frame("/x/llmtrain/training/run.py", 180, "train_steps"),
)
IN_DATA = (
    Frame("/x/llmtrain/data/loader.py", 88, "__next__"),
    Frame("/x/llmtrain/training/run.py", 172, "train_steps"),
)
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


def among(count: int, odd: dict[int, dict[str, object]], **other: object) -> JobFacts:
    """Ranks that wait, but for what is said of the odd ones."""
    return job(*(waiting(rank, **odd.get(rank, {})) for rank in range(count)), **other)


def silent(*hosts: HostFacts, ranks: int = 3) -> JobFacts:
    return among(ranks, {}, trigger="silent_host", hosts=hosts)


def died(count: int, odd: dict[int, dict[str, object]], **other: object) -> JobFacts:
    return among(count, odd, trigger="dead_rank", **other)


KILLED = {"state": "dead", "signal": "SIGKILL"}
CUT_OFF = {"state": "dead", "error": CLOSED}
ABORTED = {"state": "dead", "signal": "SIGABRT", "native": True, "inside": False, "phase": "forward"}
READS = {"inside": False, "phase": "data", "stack": IN_DATA}
SAVES = {"phase": "save", "collectives": 211, "stack": IN_DATA}
SILENT = {"inside": False, "collectives": 1, "host": "node-1"}
TWO_SILENT = silent(HostFacts(name="node-2", silent_s=10.4), HostFacts(name="node-3", silent_s=10.9))
CASES: dict[str, tuple[JobFacts, int | None, str]] = {
    "host_lost": (silent(HostFacts(name="node-3", silent_s=10.4)), 2,
                  "node-3 (rank 2) is lost: it has not reported for 10 s"),
    "host_lost, its kernel answers": (silent(HostFacts(name="node-2", closed=True)), 1,
                                      "its watch has ended and the job completes no step"),
    "host_unheard": (among(3, {1: {"collectives": 209}, 2: {"state": "unknown", "inside": False}}), 2,
                     "rank 2 on node-3 has never reported, and all others wait"),
    "cut_off": (replace(TWO_SILENT, interface="eth0", interface_down=True), 0,
                "no other host of the job answers node-1 any more: its interface eth0 is down"),
    "killed": (died(3, {0: {**CUT_OFF, "error_at": "llmtrain/engine/step.py:97 (forward_backward)"}, 2: KILLED}), 2,
               "rank 2 on node-3 was ended by SIGKILL in backward"),
    "out_of_memory": (died(2, {1: {**KILLED, "resident": 3 << 30}}, hosts=(HostFacts(name="node-2", oom_kills=1),)), 1,
                      "the kernel of node-2 has ended 1 process for lack of memory since the job began. rank 1 on "
                      "node-2 held 3 GiB when"),
    "killed_while_stopping": (died(2, {1: {**KILLED, "stopping": True}}), 1,
                              "asked to stop and killed before its checkpoint was written"),
    "crashed": (died(2, {1: {"state": "dead", "signal": "SIGSEGV", "stack": IN_DATA}}), 1,
                "crashed with SIGSEGV in backward at llmtrain/data/loader.py:88 (__next__)"),
    "shared_memory": (died(2, {0: {"state": "dead", "code": 1, "phase": "end"},
                               1: {"state": "dead", "signal": "SIGBUS", "stack": IN_DATA}},
                           hosts=(HostFacts(name="node-2", shm_free=4096),)), 1,
                      "rank 1 on node-2 was ended by SIGBUS in backward at llmtrain/data/loader.py:88 (__next__): "
                      "/dev/shm of node-2 is full (4 KiB free)"),
    "crashed, with room": (died(2, {1: {"state": "dead", "signal": "SIGBUS"}},
                                hosts=(HostFacts(name="node-2", shm_free=1 << 30),)), 1, "crashed with SIGBUS"),
    "exception": (died(2, {0: CUT_OFF, 1: {"state": "dead", "error": "ValueError: token 600 of 512",
                                           "error_at": "llmtrain/data/loader.py:88 (take)"}}), 1,
                  "rank 1 on node-2 raised ValueError: token 600 of 512 at llmtrain/data/loader.py:88 (take), in back"),
    "communication": (died(2, {0: CUT_OFF}), 0, "No rank failed on its own"),
    "refused": (died(2, {0: CUT_OFF, 1: {"state": "left", "code": 2, "refusal": "objective.name mine: mine.py"}}), 1,
                "rank 1 on node-2 has ended with an error that the others do not have: objective.name mine: mine.py"),
    "stopped": (among(3, {1: {"state": "stopped", "stack": (), "inside": False}}), 1, "`kill -CONT 1001`"),
    "left_early": (among(3, {1: {"state": "left", "code": 0, "inside": False, "phase": "end"}}), 1,
                   "rank 1 on node-2 has ended by itself (exit code 0) while others still wait"),
    "input_output": (among(2, {1: {**READS, "state": "disk", "waits_in": "nfs_wait"}}), 1,
                     "waits for a disk or a file server that does not answer (kernel: nfs_wait) at llmtrain/data/loa"),
    "rank_0_only_save": (among(3, {0: {**SAVES, "collective": "barrier"}, 1: {"collectives": 211},
                                   2: {"collectives": 211}}), 0,
                         "rank 0 on node-1 is in save at llmtrain/data/loader.py:88 (__next__) and the others are not"),
    "rank_0_only_save, gloo ends the others": (
        died(2, {0: {**SAVES, "collective": "broadcast"}, 1: {**ABORTED, "collectives": 212}}), 0,
        "rank 0 on node-1 is in save"),
    "collective_mismatch, gloo ends one": (
        died(2, {1: ABORTED}), 1,
        "rank 1 on node-2 was ended by the communication library after all_reduce #210, in forward"),
    "crashed, by itself": (died(2, {1: {"state": "dead", "signal": "SIGABRT", "inside": False}}), 1,
                           "crashed with SIGABRT in backward"),
    "child_waits": (
        among(3, {1: {**SAVES, "inside": False, "awaits": 77, "awaited": {
            "program": "llmtrain.checkpoint.writer", "state": "D", "waits_in": "nfs_wait", "file": "/runs/a/rank-1"}},
            **{rank: {**SAVES, "awaits": -1} for rank in (0, 2)}}), 1,
        "in save at llmtrain/data/loader.py:88 (__next__) for process 77 (llmtrain.checkpoint.writer), which moves no "
        "bytes and does not compute (kernel: nfs_wait), with /runs/a/rank-1 open. The others: "),
    "slow_data": (among(3, {1: READS}), 1,
                  "rank 1 on node-2 is in data at llmtrain/data/loader.py:88 (__next__), for 31 s"),
    "uneven_batches": (among(3, {1: {"phase": "evaluate", "step": 22, "collectives": 220}}), 1,
                       "rank 1 on node-2 is at step 23, the others at step 22"),
    "experts_not_leaves": (
        among(3, {0: {"collective": "all_gather_into_tensor"}, 2: {"collective": "all_gather_into_tensor"},
                  1: {"collective": "reduce_scatter_tensor", "collectives": 209}}, experts=True, zero_stage=3), 1,
        "an expert got tokens on some ranks only"),
    "collective_mismatch": (among(3, {1: {"collective": "broadcast"}}), 1,
                            "not in the same collective: rank 1 on node-2 in broadcast #210"),
    "slow_host": (among(3, {1: {"inside": False, "cpu_busy": True, "phase": "forward"}}), 1,
                  "rank 1 on node-2 still computes in forward"),
    "one_waits": (among(3, {1: {"inside": False, "phase": "forward", "waits_in": "futex_wait"}}), 1,
                  "has done nothing for 31 s (kernel: futex_wait)"),
    "communication, all wait": (among(2, {}), None, "the network between them"),
    "behind": (among(3, {0: {"inside": False}, 1: {"inside": False, "collectives": 207}, 2: {"inside": False}}), 1,
               "rank 1 on node-2 has begun 207 collectives, others up to 210"),
    "unknown": (among(2, {0: SILENT, 1: SILENT}, alike=False), None, "No rank has made progress for 31 s"),
}  # fmt: skip


def test_two_of_three_silent_hosts_are_named_and_not_the_third_whose_network_is_up():
    said = explain(replace(TWO_SILENT, interface="eth0"))
    assert (said.cause, said.ranks) == ("host_lost", [1, 2]) and "node-2, node-3" in said.text
    assert "node-1" in said.text and "eth0" in said.text
    text = explain(replace(TWO_SILENT, again="The same command with --resume auto")).text  # of a run with resume: none
    assert "--resume auto" in text and "--resume" not in said.text


@pytest.mark.parametrize("name", CASES)
def test_each_cause_names_who_differs(name):
    facts, odd, words = CASES[name]
    found = explain(facts)
    who = ("", []) if odd is None else (f"node-{odd + 1}", [odd])
    assert (found.cause, (found.host, found.ranks)) == (name.split(",")[0], who), found.text
    assert words in found.text and found.text.startswith("fault after step 2")
    assert found.text.endswith(".") and "\n" not in found.text


@pytest.mark.parametrize("name", [name for name, (_, odd, _) in CASES.items() if odd is not None])
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
    assert "`kill -CONT 1001`" in said.text


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
    assert len(text) < 1500 and "node-100" in text and "20 more" in text


DUMP = """Thread 0x00007f1d4a7fc6c0 [Thread-1] (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f1e0a2b5740 [python] (most recent call first):
  File "/x/llmtrain/data/loader.py", line 88 in __next__
  File "/x/llmtrain/training/run.py", line 172 in train_steps
"""


def test_the_main_threads_stack_is_read():
    assert parse_stacks(DUMP) == IN_DATA
    assert parse_stacks(DUMP.replace("Current thread", "Thread")) == IN_DATA
    assert parse_stacks("") == () == parse_stacks("Fatal Python error: Segmentation fault\n")


@pytest.mark.parametrize(
    ("trigger", "values", "told"),
    [
        (
            "stall",
            {"idle_s": 300.0, "stack": (Frame("/home/me/mine.py", 12, "wait"),)},
            "rank 1 on a is in parts.wrong: after_step at me/mine.py:12 (wait), for 300 s: the plugin's method does",
        ),
        ("dead_rank", {"state": "dead", "code": 0}, "rank 1 on a has ended in parts.wrong: after_step (exit code 0)"),
        ("dead_rank", {"state": "dead", "signal": "SIGSEGV"}, "crashed with SIGSEGV in parts.wrong: after_step"),
    ],
)
def test_a_rank_that_hangs_or_ends_in_a_plugins_method_is_told_with_it(trigger, values, told):
    of_a = {"host": "a", "phase": "step"}
    ranks = (
        RankFacts(rank=0, inside=True, collective="all_reduce", **of_a),
        RankFacts(rank=1, plugin="parts.wrong: after_step", **of_a, **values),
    )
    found = explain(JobFacts(trigger=trigger, ranks=ranks, hosts=()))
    assert told in found.text and (found.cause in ("plugin", "crashed")) and found.ranks == [1]
