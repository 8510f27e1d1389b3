"""From the facts of a job that does not go on to one paragraph: who differs, where it stands, why, what to do."""

from __future__ import annotations

import re

from llmtrain.cluster.watch.explain.causes import CAUSES
from llmtrain.cluster.watch.explain.facts import Explanation, JobFacts
from llmtrain.cluster.watch.explain.recorded import as_waiting
from llmtrain.cluster.watch.explain.wording import where


def numbered(text: str, count: int) -> str:
    """ "<is|are>" as it stands for so many."""
    return re.sub(r"<([\w ]+)\|([\w ]+)>", r"\1" if count == 1 else r"\2", text)


def explain(facts: JobFacts) -> Explanation:
    """One paragraph. Always finds words, also for what the table does not know."""
    facts = as_waiting(facts)
    cause = next(found for row in CAUSES if (found := row(facts)) is not None)
    host = cause.host or (cause.ranks[0].host if len({r.host for r in cause.ranks}) == 1 else "")
    odd = {r.rank for r in cause.ranks}
    others = [
        r
        for r in facts.ranks
        if r.rank not in odd and r.state not in ("dead", "left", "unknown") and r.host != cause.host
    ]
    parts = [numbered(cause.says, len(cause.ranks))]
    if waiting := where(others):
        parts.append(f"{'The others' if odd else 'The ranks'}: {waiting}.")
    parts.append(numbered(cause.remedy, len(cause.ranks)))
    began = f"no progress for {facts.stalled_s:.0f} s" if facts.trigger == "pause" else "fault"
    return Explanation(
        what=facts.trigger,
        cause=cause.name,
        host=host,
        ranks=sorted(odd),
        step=facts.step,
        signature=f"step {facts.step + 1}: {cause.name}{': ' + cause.detail if cause.detail else ''}",
        text=f"{began} after step {facts.step}: " + " ".join(parts),
        unfit=cause.unfit,
        again=cause.again,
    )
