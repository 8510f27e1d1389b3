"""What TensorBoard's own reader finds over two launches of a run, of which the second repeats steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.test_trackers import two_launches


@pytest.mark.needs("tensorboard")
@pytest.mark.timeout(300)
def test_tensorboard_goes_on_over_a_resume_that_repeats_steps(small_data: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    *_, after = two_launches(tmp_path, small_data, "--trackers.tensorboard.path", "tensorboard")
    reader = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    reader.Reload()
    found = {key: [(each.step, each.value) for each in reader.Scalars(key)] for key in ("loss", "eval/loss")}
    assert found["loss"] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in sorted(after.items())]
    assert [step for step, _ in found["eval/loss"]] == [4, 8, 10]
    for key in ("loss", "eval/loss"):
        assert "[nats/token]" in reader.SummaryMetadata(key).summary_description
    texts = {tag: reader.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in reader.Tags()["tensors"]}
    assert (
        '"complete": true' in texts["events/stop"] and '"lr": 0.002' in texts["config"] and "ended" in texts["status"]
    )
