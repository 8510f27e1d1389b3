from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.features.spikes.steps import StepFile, StepRow, read_steps

ROW = StepRow(step=1, weight=1024, loss=2.5, norm=0.4, lr_factor=0.1, skipped=False, left_out=False, shares=(1.5, 2.5))


def write(path: Path, steps: range) -> None:
    file = StepFile(path, start_step=steps.start - 1)
    file.append([replace(ROW, step=step) for step in steps])
    file.close()


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    file = StepFile(tmp_path / "steps.bin", start_step=0)
    other = replace(ROW, step=2, skipped=True, left_out=True, shares=(1.0,), loss=1e300)
    file.append([ROW])
    file.append([other])
    assert list(read_steps(tmp_path / "steps.bin")) == [ROW, other]
    assert list(read_steps(tmp_path / "steps.bin", first=2)) == [other]


def test_a_figure_that_is_not_finite_is_kept(tmp_path: Path) -> None:
    file = StepFile(tmp_path / "steps.bin", start_step=0)
    file.append([replace(ROW, loss=math.nan, norm=math.inf)])
    (row,) = read_steps(tmp_path / "steps.bin")
    assert math.isnan(row.loss) and row.norm == math.inf


def test_a_launch_drops_the_rows_that_it_trains_again(tmp_path: Path) -> None:
    write(tmp_path / "steps.bin", range(1, 11))
    file = StepFile(tmp_path / "steps.bin", start_step=6)
    assert [row.step for row in read_steps(tmp_path / "steps.bin")] == [1, 2, 3, 4, 5, 6]
    file.append([replace(ROW, step=7, loss=9.0)])
    assert [(row.step, row.loss) for row in read_steps(tmp_path / "steps.bin", first=6)] == [(6, 2.5), (7, 9.0)]


def test_a_torn_row_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "steps.bin"
    write(path, range(1, 4))
    path.write_bytes(path.read_bytes()[:-3])
    assert [row.step for row in read_steps(path)] == [1, 2]
    write(path, range(4, 5))
    assert [row.step for row in read_steps(path)] == [1, 2, 4]


def test_a_removed_file_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "steps.bin"
    file = StepFile(path, start_step=0)
    file.append([ROW])
    path.unlink()
    file.append([replace(ROW, step=2)])
    assert [row.step for row in read_steps(path)] == [1, 2]


@pytest.mark.parametrize(
    "what", ["step", "groups", "no groups", "weight", "zeros", "foreign", "twice", "first", "torn"]
)
def test_a_damaged_record_loses_the_damaged_rows_alone(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A flipped bit of row 5 had cut off all rows behind it, without a word."""
    path, size = tmp_path / "steps.bin", 48 + 4 * 2
    write(path, range(1, 13))
    data, row = path.read_bytes(), 4 * size
    lost = [1] if what == "first" else [5]
    if what == "step":
        data = data[: row + 7] + b"\x40" + data[row + 8 :]
    elif what == "weight":
        data = data[: row + 1] + b"\x01" + data[row + 2 :]  # step 261
    elif what in ("groups", "no groups"):
        data = data[: row + 20] + (b"\xff" if what == "groups" else b"\0") * 4 + data[row + 24 :]
    elif what == "zeros":
        data, lost = data + bytes(4096), []
    elif what == "foreign":
        data, lost = data[:row] + b"odd." + data[row:], []
    elif what == "twice":
        data, lost = data + data[row:], []
    elif what == "torn":
        data, lost = data[:-3], [12]
    else:
        data = b"\x40" + data[1:]
    path.write_bytes(data)
    kept = [step for step in range(1, 13) if step not in lost]
    assert [each.step for each in read_steps(path)] == kept
    file = StepFile(path, start_step=12)
    file.append([replace(ROW, step=13)])
    file.close()
    assert [each.step for each in read_steps(path)] == [*kept, 13]
    said, aside = capsys.readouterr().err, tmp_path / "steps.bin.damaged"
    if what == "torn":  # a kill
        assert not aside.exists() and re.search(r"\bsteps 12\b", said)
    else:
        assert aside.read_bytes() == data and f"{path}: " in said and str(aside) in said
        assert re.findall(r"\bsteps (\d+)", said) == [str(step) for step in lost[:1]], said


def test_a_record_that_is_no_file_holds_nothing_up(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    os.mkfifo(tmp_path / "steps.bin")
    with pytest.raises(OSError, match=r"steps\.bin"):
        list(read_steps(tmp_path / "steps.bin"))
    file = StepFile(tmp_path / "steps.bin", start_step=3)
    file.append([ROW])
    assert "steps.bin" in capsys.readouterr().err


def test_a_record_without_damage_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "steps.bin"
    file = StepFile(path, start_step=100)  # a run that continues another one's checkpoint
    file.append([replace(ROW, step=101), replace(ROW, step=102), replace(ROW, step=104)])
    file.append([replace(ROW, step=105, shares=(1.0,)), replace(ROW, step=106, shares=(1.0,))])
    file.close()
    StepFile(path, start_step=105).close()
    assert [each.step for each in read_steps(path)] == [101, 102, 104, 105]
    StepFile(path, start_step=105).close()
    assert capsys.readouterr().err == "" and list(tmp_path.iterdir()) == [path]
