"""What a report says about a run's synchronisations."""

from __future__ import annotations

from llmtrain.features.sites.report import facts as facts_of


def test_the_report_says_what_sites_cost() -> None:
    done = [{"step": step, "participants": 2 - (step > 9), "stood_s": 5, "received_bytes": 1000} for step in (4, 8, 12)]
    facts = dict(facts_of(done, [{"step": 16, "stood_s": 1, "reason": "this site is alone"}]))
    assert facts["Without another site"] == "1 of 3, and failed 1; steps 12 to 16"
    assert facts["Synchronisations of sites"] == "3, failed 1" and facts["Waiting for other sites, sum"] == "16.0s"
    assert facts_of([], []) == []
