"""Put back values that a loop only reads, where a replacement's script made other ones.

A script may take a value from a rewritten file, a newer checkpoint or the clock, and a replacement then gets another one. So each rank
writes the values that its loops first saw to the run directory, and a replacement compares its own with them. It puts a value back if
all ranks had the same, or if the script made it after a loop, which a replacement passes over. If the file has only the digest of a
large value, the replacement reports it as lost. Values that belong to one rank (a pid, a device, its own time) stay the replacement's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping

from ftrun.core.system import files
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.link.run_link import Context
from ftrun.worker.variables.variables import PREFIX, Variables

_FOLDER = "constants"
_LONGEST = 1 << 14  # bytes of the longest value that the file holds as a copy, not as a digest
_COPY, _DIGEST, _LATE = "=", "#", "!"  # LATE: made after a loop had run


class Constants(StepObserver):
    """The values that one rank's loops only read."""

    def __init__(self, context: Context, variables: Variables) -> None:
        self._context = context
        self._variables = variables
        self._predecessor: dict[str, str] | None = None  # its values; None = this rank replaces nobody
        self._roots: set[str] = set()  # functions and modules whose values were read
        self._found: dict[str, list[str]] = {}  # key -> root, and copy or digest, of values that have not changed since
        self._written: set[str] = set()  # the keys in the file
        self._had_loops = False
        self._given: set[str] = set()  # keys put back here: slots keep them, but not that of this rank's first step

    def loop_started(self, first: int, length: int) -> None:
        self.told_by.listen("handed_out", self)

    def handed_out(self, number: int) -> None:
        """Write, at the first step of a loop, the values that have not changed, for a replacement."""
        self.told_by.ignore("handed_out", self)
        self._look()
        self._had_loops = True
        roots, keys = self._variables.unchanged()
        self._found = {key: told for key, told in self._found.items() if told[0] not in roots or key in keys | self._given}
        if self._written == self._found.keys():
            return
        self._written = {*self._found}
        facts = {"attempt": self._attempt, "values": self._found}
        with contextlib.suppress(OSError):  # without room for the file, a replacement has nothing to compare with
            folder = self._context.run_dir / _FOLDER
            folder.mkdir(mode=0o700, exist_ok=True)
            files.replace(folder / f"{self._context.rank}.json", json.dumps(facts), private=True)

    def _look(self) -> dict[str, str]:
        """Return the values in functions and modules that no loop was in before."""
        new = self._variables.unchanged()[0] - self._roots
        if not new:
            return {}
        self._roots |= new
        late = _LATE if self._had_loops or self._predecessor is not None else ""
        found = {
            place.key: [place.space.root, late + _told(copy)]
            for place, copy, is_kept in self._variables.values()
            if place.space.root in new and copy is not None and not is_kept
        }
        self._found = {**found, **self._found}  # a predecessor's values count first
        return {key: told[1].lstrip(_LATE) for key, told in found.items()}

    @property
    def _attempt(self) -> int:
        return -1 if self._context.world is None else self._context.world.attempt

    def _read(self, rank: int) -> dict[str, list[str]]:
        raw = files.read_json(self._context.run_dir / _FOLDER / f"{rank}.json")
        values = raw.get("values")
        return values if raw.get("attempt") == self._attempt and isinstance(values, dict) else {}

    def replaced(self) -> None:
        self._found = self._read(self._context.rank)
        self._predecessor = {key: told[1] for key, told in self._found.items()}

    def completed(self, saved: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return a slot's `saved` with the values that a replacement must put back; report as lost those that it cannot."""
        if not self._predecessor:
            return saved
        kept = {name for key in saved for name in self._variables.names_of(key)}
        found = {key: text for key, text in self._look().items() if key not in kept}
        theirs = {key: text for key, text in self._predecessor.items() if key in found and text.lstrip(_LATE) != found[key]}
        if not theirs:
            return saved
        world = self._context.world
        ranks = [] if world is None else [place.rank for place in world.places if place.rank != self._context.rank]
        peers = [self._read(rank) for rank in ranks]
        wrong = {}
        for key, text in theirs.items():
            had = text.lstrip(_LATE)
            if text != had or (peers and all(key in peer and peer[key][1].lstrip(_LATE) == had for peer in peers)):
                wrong[key] = had
        given = {PREFIX + key: bytes.fromhex(text[1:]) for key, text in wrong.items() if text[0] == _COPY}
        self._given |= {key for key in wrong if PREFIX + key in given}
        self._variables.lose([self._variables.shown(key) for key in wrong if PREFIX + key not in given])
        return {**saved, **given}


def _told(copy: bytes) -> str:
    return _COPY + copy.hex() if len(copy) <= _LONGEST else _DIGEST + hashlib.blake2b(copy, digest_size=16).hexdigest()
