"""Values that a loop only reads: a replacement's script makes them anew, and may make others.

A file that was rewritten meanwhile, a newer checkpoint, the time: what comes from there is another value in a replacement. So each rank
leaves in the run directory what its values were when a loop found them first. A replacement compares: what all ranks of the node had
alike is put back as it was, and so is what was made after a loop had run, since a replacement passes over loops. What differs and is too
large to be left there is named. What each rank has for itself (a pid, a device, a time of its own) stays the replacement's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping

from ftrun.core.system import files
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.link.run_link import Context
from ftrun.worker.state.variables import PREFIX, Variables

_FOLDER = "constants"
_LONGEST = 1 << 14  # bytes of a copy that is left there, and not what stands for it
_COPY, _DIGEST, _LATE = "=", "#", "!"  # a late one was made after a loop had run


class Constants(StepObserver):
    """Of one rank."""

    def __init__(self, context: Context, variables: Variables) -> None:
        self._context = context
        self._variables = variables
        self._predecessor: dict[str, str] | None = None  # what it found; None = there was none
        self._roots: set[str] = set()  # functions and modules whose values were found
        self._found: dict[str, list[str]] = {}  # root and what is told of those that did not change since
        self._written: set[str] = set()  # which of these are in the file
        self._had_loops = False
        self._given: set[str] = set()  # they are kept from here on, but not in the slot of the step that this rank begins with

    def loop_started(self, first: int, length: int) -> None:
        self.told_by.listen("handed_out", self)

    def handed_out(self, number: int) -> None:
        """The first step of a loop: leave what it found first, and did not see change, to a replacement."""
        self.told_by.ignore("handed_out", self)
        self._look()
        self._had_loops = True
        roots, keys = self._variables.unchanged()
        self._found = {key: told for key, told in self._found.items() if told[0] not in roots or key in keys | self._given}
        if self._written == self._found.keys():
            return
        self._written = {*self._found}
        facts = {"attempt": self._attempt, "values": self._found}
        with contextlib.suppress(OSError):  # without room for it a replacement has nothing to compare with
            folder = self._context.run_dir / _FOLDER
            folder.mkdir(mode=0o700, exist_ok=True)
            files.replace(folder / f"{self._context.rank}.json", json.dumps(facts), private=True)

    def _look(self) -> dict[str, str]:
        """What is found now, in functions and modules that no loop was in before."""
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
        self._found = {**found, **self._found}  # what a predecessor found first is what counts
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
        """`saved`, of a slot, and what a replacement is to have as well. What differs and cannot be given is lost."""
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
