"""The launcher's word on the mesh: told once, told again when it is another, and told with each incident."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ftrun.core.shared import mesh
from ftrun.core.shared.mesh import MeshPlace
from ftrun.host.account.mesh_record import MeshRecord

SIZES = {"replicate": 2, "shard": 2}


def leave(run_dir: Path, cell: int, rank: int) -> dict[str, int]:
    """The file that a worker leaves."""
    place = MeshPlace(SIZES, {"replicate": rank // 2, "shard": rank % 2})
    (run_dir / "errors").mkdir(exist_ok=True)
    (run_dir / "errors" / f"{mesh.file_name(cell)}.json").write_text(json.dumps(mesh.to_file(place)))
    return place.at


class Notes(list[dict[str, Any]]):
    def __call__(self, what: str, **facts: Any) -> None:
        self.append({"note": what, **facts})


def test_told_once(tmp_path: Path) -> None:
    notes = Notes()
    record = MeshRecord(tmp_path, notes)
    places = [leave(tmp_path, rank, rank) for rank in range(4)]
    record.protected({rank: rank for rank in range(4)})
    record.protected({rank: rank for rank in range(4)})
    assert notes == [{"note": "mesh", "dims": SIZES, "ranks": {str(rank): at for rank, at in enumerate(places)}}]
    leave(tmp_path, 5, 2)
    record.protected({0: 0, 1: 5, 2: 2, 3: 3})
    assert len(notes) == 2 and notes[1]["ranks"]["1"] == {"replicate": 1, "shard": 0}


def test_an_incident_has_the_places_of_its_victims_and_of_the_ranks(tmp_path: Path) -> None:
    record = MeshRecord(tmp_path, Notes())
    for rank in range(4):
        leave(tmp_path, rank, rank)
    leave(tmp_path, 4, 1)
    victim = {"rank": 1, "cell": 1, "cause": "SIGKILL"}
    facts = record.placed({"victims": [victim], "total_ms": 3.0}, {0: 0, 1: 4, 2: 2, 3: 3})
    assert facts["victims"] == [{**victim, "mesh": {"replicate": 0, "shard": 1}}] and "mesh" not in victim
    assert facts["mesh"]["dims"] == SIZES and facts["mesh"]["ranks"]["3"] == {"replicate": 1, "shard": 1}
    assert facts["total_ms"] == 3.0


def test_nothing_is_said_without_a_mesh(tmp_path: Path) -> None:
    notes = Notes()
    record = MeshRecord(tmp_path, notes)
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "mesh-1.json").write_text('{"mesh": [["shard", "1", 2]]}')
    record.protected({0: 0, 1: 1})
    facts = {"victims": [{"rank": 1, "cell": 1}]}
    assert not notes and record.placed(facts, {0: 0, 1: 1}) == facts
