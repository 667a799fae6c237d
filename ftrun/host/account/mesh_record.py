"""Reads in the notes of the workers where each rank is on the mesh of its script, and journals it. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ftrun.core.shared import notes
from ftrun.core.shared.mesh import MeshPlace
from ftrun.core.shared.notes import MeshNote


class MeshRecord:
    """One per run. `note` writes to the journal."""

    def __init__(self, run_dir: Path, note: Callable[..., None]) -> None:
        self._run_dir = run_dir
        self._note = note
        self._known: dict[int, MeshPlace] = {}  # by cell
        self._told: dict[str, Any] = {}

    def protected(self, ranks: Mapping[int, int]) -> None:
        """Journal the places once every rank has called protect(), which notes them. `ranks`: cells by rank, of the whole run."""
        facts = self._facts(ranks)
        if facts and facts != self._told:
            self._told = facts
            self._note("mesh", **facts)

    def placed(self, facts: Mapping[str, Any], holders: Mapping[int, int]) -> dict[str, Any]:
        """Return the facts of an incident with the mesh places of its victims and of the `holders` (cells by rank)."""
        victims = [{**v, "mesh": place.at} if (place := self._of(v["cell"])) else v for v in facts["victims"]]
        found = self._facts(holders)
        return {**facts, "victims": victims, **({"mesh": found} if found else {})}

    def _facts(self, ranks: Mapping[int, int]) -> dict[str, Any]:
        places = {rank: place for rank, cell in ranks.items() if (place := self._of(cell)) is not None}
        sizes: dict[str, int] = {}
        for place in places.values():
            sizes |= {name: size for name, size in place.sizes.items() if name not in sizes}
        return {"dims": sizes, "ranks": {str(rank): place.at for rank, place in places.items()}} if places else {}

    def _of(self, cell: int) -> MeshPlace | None:
        if cell not in self._known and (note := notes.read(MeshNote, self._run_dir, cell)) is not None:
            self._known[cell] = note.place
        return self._known.get(cell)
