"""The timeline of sites: states from the records of a run folder, and a bar for each site."""

from __future__ import annotations

import json
from pathlib import Path

from llmtrain.commands.report import load, page_of
from llmtrain.tracking.charts import AWAY, COMPUTING, WAITING, launches, others_of, site_facts, timeline
from llmtrain.tracking.local import JsonLines

T = 1.7e9


def synchronise(at: float, sites: str, stood_s: float, kind: str = "synchronise") -> dict:
    return {"time_unix_s": T + at, "kind": kind, "sites": list(sites), "stood_s": stood_s, "received_bytes": 1000}


# Meets b at the start and twice, loses it; the fourth round fails; killed after 60 s, goes on at 90 s.
EVENTS = [
    {"time_unix_s": T, "kind": "start"},
    synchronise(4, "ab", 2),
    synchronise(14, "ab", 1),
    synchronise(24, "ab", 1),
    synchronise(40, "a", 6),
    {"time_unix_s": T + 50, "kind": "synchronise_failed", "stood_s": 5},
    {"time_unix_s": T + 88, "kind": "restart"},
    {"time_unix_s": T + 90, "kind": "resume"},
]
ROWS = [{"time_unix_s": T + 60, "step": 9, "loss": 1.0}, {"time_unix_s": T + 100, "step": 12, "loss": 1.0}]


def test_a_site_computes_waits_and_is_away() -> None:
    seen = launches("a", ROWS, EVENTS)
    assert seen is not None
    assert [(low - T, high - T, state) for low, high, state in seen.own] == [
        (0, 2, COMPUTING), (2, 4, WAITING), (4, 13, COMPUTING), (13, 14, WAITING), (14, 23, COMPUTING),
        (23, 24, WAITING), (24, 34, COMPUTING), (34, 40, WAITING), (40, 45, COMPUTING), (45, 50, WAITING),
        (50, 60, COMPUTING), (60, 90, AWAY), (90, 100, COMPUTING),
    ]  # fmt: skip


def test_another_site_is_there_until_the_last_synchronisation_with_it() -> None:
    seen = launches("a", ROWS, EVENTS)
    assert seen is not None and others_of(seen, ["a", "b"]) == {}
    (spans,) = others_of(seen, ["a"]).values()
    assert [(low - T, high - T, state) for low, high, state in spans] == [(4, 24, COMPUTING), (24, 100, AWAY)]


def test_the_report_draws_sites_and_says_what_they_cost(tmp_path: Path) -> None:
    for name, records in (("metrics", ROWS), ("events", EVENTS)):
        lines = JsonLines(tmp_path / f"{name}.jsonl")
        for record in records:
            lines.write(record)
        lines.close()
    assert "<h2>Sites</h2>" not in page_of([load(tmp_path)], [])  # not the folder of a site
    (tmp_path / "config.yaml").write_text(json.dumps({"sites": {"name": "<a>"}}))
    text = page_of([load(tmp_path)], [])
    assert "<h2>Sites</h2>" in text and "<a>" not in text
    for words in ("&lt;a&gt;", ">a<", ">b<", ">computing<", ">waiting<", ">away<"):  # itself, and those that it met
        assert words in text, words
    done = [each for each in EVENTS if each["kind"] == "synchronise"]
    failed = [each for each in EVENTS if each["kind"] == "synchronise_failed"]
    facts = dict(site_facts(done, failed))
    assert facts["Synchronisations of sites"] == "4, failed 1" and facts["Waiting for other sites, sum"] == "15.0s"
    assert site_facts([], []) == [] and timeline([None]) is None


def test_lines_that_make_no_sense_are_drawn_as_far_as_they_do() -> None:
    odd = [{"time_unix_s": "x", "kind": "synchronise"}, {"kind": "start"}, {"time_unix_s": 1e300, "kind": "start"},
           {"time_unix_s": T, "kind": "synchronise", "sites": 5, "stood_s": -3}]  # fmt: skip
    seen = launches("a", [], odd)
    assert seen is not None and seen.met == [] and timeline([seen]) is None
