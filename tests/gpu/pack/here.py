"""What a check is given: where it may write, what device it has, and where its figures go."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


class NotHere(Exception):
    """This machine cannot answer; the sentence says why. No failure."""


@dataclass(frozen=True)
class Here:
    """`folder` is the check's own, `shared` one for all checks of a call; `fake`: the driver is the tests' fake one."""

    folder: Path
    shared: Path
    fake: bool

    def note(self, name: str, value: object) -> None:
        """A figure or a fact for the row. It is in the table even if the check never returns."""
        with (self.folder / "notes.jsonl").open("a") as file:
            file.write(json.dumps([name, value if isinstance(value, (int, float)) else str(value)]) + "\n")

    def size(self, gigabytes: int) -> int:
        """Bytes; the fake driver's device memory is memory of this machine, so there a GB is 16 MiB."""
        return gigabytes << (24 if self.fake else 30)


def notes(folder: Path) -> dict[str, object]:
    """What a check noted so far."""
    path = folder / "notes.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(json.loads(line) for line in lines)
