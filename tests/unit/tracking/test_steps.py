from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from llmtrain.tracking.steps import StepFile, StepRow, read_steps

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
