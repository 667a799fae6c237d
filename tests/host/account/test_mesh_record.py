"""The launcher's word on the mesh: told once, told again when it is another, and told with each incident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftrun.core.shared import notes
from ftrun.core.shared.mesh import MeshPlace
from ftrun.core.shared.notes import MeshNote
from ftrun.host.account.mesh_record import MeshRecord

SIZES = {"replicate": 2, "shard": 2}


def leave(run_dir: Path, cell: int, rank: int) -> dict[str, int]:
    """The note of a worker."""
    place = MeshPlace(SIZES, {"replicate": rank // 2, "shard": rank % 2})
    notes.write(run_dir, MeshNote(cell, place))
    return place.at


class Noted(list[dict[str, Any]]):
    def __call__(self, what: str, **facts: Any) -> None:
        self.append({"note": what, **facts})


def test_told_once(tmp_path: Path) -> None:
    noted = Noted()
    record = MeshRecord(tmp_path, noted)
    places = [leave(tmp_path, rank, rank) for rank in range(4)]
    record.protected({rank: rank for rank in range(4)})
    record.protected({rank: rank for rank in range(4)})
    assert noted == [{"note": "mesh", "dims": SIZES, "ranks": {str(rank): at for rank, at in enumerate(places)}}]
    leave(tmp_path, 5, 2)
    record.protected({0: 0, 1: 5, 2: 2, 3: 3})
    assert len(noted) == 2 and noted[1]["ranks"]["1"] == {"replicate": 1, "shard": 0}


def test_an_incident_has_the_places_of_its_victims_and_of_the_ranks(tmp_path: Path) -> None:
    record = MeshRecord(tmp_path, Noted())
    for rank in range(4):
        leave(tmp_path, rank, rank)
    leave(tmp_path, 4, 1)
    victim = {"rank": 1, "cell": 1, "cause": "SIGKILL"}
    facts = record.placed({"victims": [victim], "total_ms": 3.0}, {0: 0, 1: 4, 2: 2, 3: 3})
    assert facts["victims"] == [{**victim, "mesh": {"replicate": 0, "shard": 1}}] and "mesh" not in victim
    assert facts["mesh"]["dims"] == SIZES and facts["mesh"]["ranks"]["3"] == {"replicate": 1, "shard": 1}
    assert facts["total_ms"] == 3.0


def test_nothing_is_said_without_a_mesh(tmp_path: Path) -> None:
    noted = Noted()
    record = MeshRecord(tmp_path, noted)
    leave(tmp_path, 1, 1)
    path = tmp_path / "notes" / "mesh-1.json"
    path.write_text(path.read_text().replace("2", '"2"'))
    record.protected({0: 0, 1: 1})
    facts = {"victims": [{"rank": 1, "cell": 1}]}
    assert not noted and record.placed(facts, {0: 0, 1: 1}) == facts
