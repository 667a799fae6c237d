"""Files in which ranks tell what they moved are taken away, also those that nobody asked for."""

from __future__ import annotations

from pathlib import Path

from ftrun.core.shared.moves import file_name
from ftrun.core.system import files
from ftrun.host.account import transfer_times


def leave(run_dir: Path, cell: int, generation: int) -> None:
    files.replace(run_dir / "errors" / f"{file_name(cell, generation)}.json", '{"moves": [["reload", 1, 2000000, 3000000]]}')


def test_no_file_of_a_repair_outlives_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    leave(tmp_path, 0, 2)  # of a repair that another failure cut short
    leave(tmp_path, 5, 3)
    leave(tmp_path, 5, 4)  # of one that is still to come
    (tmp_path / "errors" / "parked-7.json").write_text("{}")
    found = transfer_times.gather(tmp_path, {0: 0, 1: 5}, 3, 1_000_000)
    assert found == [{"rank": 1, "cell": 5, "moves": [["reload", 1, 1.0, 2.0]]}]
    assert sorted(path.name for path in (tmp_path / "errors").iterdir()) == [f"{file_name(5, 4)}.json", "parked-7.json"]
