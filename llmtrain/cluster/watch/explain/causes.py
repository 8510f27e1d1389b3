"""The table of causes: why a job does not go on, read from what its hosts have reported.

Each row looks at the facts and either knows the cause or does not. The first that knows is right, so what is certain
(a dead host) stands before what is likely (an expert without tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from llmtrain.cluster.watch.explain.cause import AGAIN, OTHER_WAY, Cause, is_secondary
from llmtrain.cluster.watch.explain.facts import JobFacts, RankFacts
from llmtrain.cluster.watch.explain.stalls import STALLS, rank_0_only
from llmtrain.cluster.watch.explain.wording import call, first_words, names, place, rank_list, stands, who


def _silent_host(facts: JobFacts) -> Cause | None:
    silent = [h for h in facts.hosts if h.silent_s > 0 or h.closed]
    if not silent:
        return None
    if facts.here in {h.name for h in silent} or 1 < len(silent) == len(facts.hosts) - 1:
        return Cause(
            name="cut_off",
            ranks=[r for r in facts.ranks if r.host == facts.here],
            host=facts.here,
            says=f"{facts.here} reaches no other host of the job any more: most likely its own network is down. Its "
            "ranks were ended, so that none is left behind.",
            remedy=f"Look at the network of {facts.here}. " + AGAIN,
        )
    lost = silent[0]
    ranks = [r for r in facts.ranks if r.host in {h.name for h in silent}]
    how = (
        "its watch has gone and the job makes no step: the host was switched off or all its processes were ended"
        if lost.closed
        else f"nothing was heard of it for {lost.silent_s:.0f} s, so the host, its kernel or its network is down"
    )
    more = "" if len(silent) == 1 else f" So it is with {names(silent[1:])}."
    return Cause(
        name="host_lost",
        ranks=ranks,
        host=lost.name if len(silent) == 1 else "",
        says=f"{lost.name} ({rank_list(r for r in ranks if r.host == lost.name)}) is lost: {how}.{more}",
        remedy=f"Look at {names(silent)} (power, kernel log, network), or leave it out of the hostfile. " + AGAIN,
    )


def _aborted(facts: JobFacts) -> Cause | None:
    """gloo ends a rank whose collective does not fit that of the others, in a thread of its own; NCCL would wait.

    It aborts where the message is too long for the buffer, and may crash where it is not.
    """
    ended = [r for r in facts.ranks if r.state == "dead" and r.signal in ("SIGABRT", "SIGSEGV")]
    aborted = [r for r in ended if r.native or (r.inside and r.signal == "SIGABRT")]
    if not aborted or any(r.state == "dead" and not is_secondary(r) and r not in aborted for r in facts.ranks):
        return None
    alive = tuple(replace(r, state="running", inside=True) if r.state == "dead" else r for r in facts.ranks)
    found = rank_0_only(replace(facts, ranks=alive))
    first = aborted[0]
    if found is not None or first.signal != "SIGABRT":
        return found
    return Cause(
        name="collective_mismatch",
        ranks=aborted,
        detail=call(first),
        says=f"{who(aborted)} <was|were> ended by the communication library {'in' if first.inside else 'after'} "
        f"{call(first)}, in {first.phase}{stands(first)}: other ranks were in another collective.",
        remedy=OTHER_WAY,
    )


def _dead(facts: JobFacts) -> Cause | None:
    """The rank that died first for a reason of its own; the others then die of its absence."""
    dead = [r for r in facts.ranks if r.state == "dead"]
    if not dead:
        return None
    own = [r for r in dead if not is_secondary(r)]
    silent = [r for r in own if not r.error]
    chosen = silent or own or dead
    first = chosen[0]
    oom = next((h.oom_kills for h in facts.hosts if h.name == first.host), 0)
    if first.error:
        return _raised(first, chosen)
    if first.signal == "SIGKILL" and first.stopping:
        return Cause(
            name="killed_while_stopping",
            ranks=chosen,
            says=f"{who(chosen)} <was|were> asked to stop and killed before <its|their> checkpoint was written.",
            remedy="DeepSpeed's launcher kills 30 s after its signal: send SIGTERM to the ranks instead, or allow more "
            "time. " + AGAIN,
        )
    if first.signal == "SIGKILL" and oom:
        return Cause(
            name="out_of_memory",
            ranks=chosen,
            says=f"{who(chosen)} <was|were> killed in {first.phase}, and the kernel of {first.host} has ended {oom} "
            f"process{'es' if oom > 1 else ''} for lack of memory since the job began.",
            remedy="Give the host more memory, run fewer ranks on it, or lower train.micro_batch; `dmesg` on the host "
            "names the process.",
        )
    if first.signal in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"):
        at = f" at {place(first.stack[0])}" if first.stack else ""
        return Cause(
            name="crashed",
            ranks=chosen,
            detail=first.signal,
            says=f"{who(chosen)} crashed with {first.signal} in {first.phase}{at}: a bug or a fault of the machine "
            "below Python.",
            remedy="Look at its output and at the kernel log; `llmtrain doctor` checks the host.",
        )
    how = f"<was|were> ended by {first.signal}" if first.signal else "<has|have> gone without a word"
    return Cause(
        name="killed",
        ranks=chosen,
        detail=first.signal,
        says=f"{who(chosen)} {how} in {first.phase}: someone or something outside the job killed it.",
        remedy=f"Ask who kills processes on {first.host} (a scheduler's limit, a user, the kernel: see `dmesg`). "
        + AGAIN,
    )


def _raised(first: RankFacts, chosen: Sequence[RankFacts]) -> Cause:
    at = f" at {first.error_at}" if first.error_at else ""
    if is_secondary(first):
        return Cause(
            name="communication",
            ranks=chosen,
            detail=first_words(first.error),
            says=f"{who(chosen)} failed in {first.phase}{at}: {first.error}. No rank died of itself, so a connection "
            "broke or a collective took longer than fault.timeout_s (LLMTRAIN_VERBOSE=1 shows the tracebacks).",
            remedy="`llmtrain doctor` checks the network; a slow file server or host is told by the stragglers in "
            "events.jsonl.",
        )
    memory = "out of memory" in first.error or first.error.startswith("MemoryError")
    return Cause(
        name="out_of_memory" if memory else "exception",
        ranks=chosen,
        detail=first_words(first.error),
        says=f"{who(chosen)} raised {first.error}{at}, in {first.phase}.",
        remedy="Lower train.micro_batch, or choose a higher ZeRO stage or offload."
        if memory
        else "Its traceback stands above. If the data or the code is the cause, a restart meets it again.",
    )


CAUSES: tuple[Callable[[JobFacts], Cause | None], ...] = (_silent_host, _aborted, _dead, *STALLS)
