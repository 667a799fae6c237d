"""Notes of what ranks moved are taken away, also those that nobody asked for."""

from __future__ import annotations

from pathlib import Path

from ftrun.core.shared import notes
from ftrun.core.shared.notes import Move, MovesNote, ParkedNote
from ftrun.host.account import transfer_times


def leave(run_dir: Path, cell: int, generation: int) -> None:
    notes.write(run_dir, MovesNote(cell, generation, (Move("reload", 1, 2_000_000, 3_000_000),)))


def test_no_file_of_a_repair_outlives_the_next_one(tmp_path: Path) -> None:
    leave(tmp_path, 0, 2)  # of a repair that another failure cut short
    leave(tmp_path, 5, 3)
    leave(tmp_path, 5, 4)  # of one that is still to come
    notes.write(tmp_path, ParkedNote(7, "train.py:3"))
    found = transfer_times.gather(tmp_path, {0: 0, 1: 5}, 3, 1_000_000)
    assert found == [{"rank": 1, "cell": 5, "moves": [["reload", 1, 1.0, 2.0]]}]
    assert sorted(path.name for path in (tmp_path / "notes").iterdir()) == ["moves-5-4.json", "parked-7.json"]
