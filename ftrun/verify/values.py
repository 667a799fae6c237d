"""Compares the script's own values of two runs at the ends of loops, and reports which are equal, different, or not comparable.

It compares the values that a run keeps with each step. If only one of the two runs keeps a value (it changed there, or ftrun saw it
change), the other run's value of that name is compared with it. A time, an address or a process number differs between any two runs, so
a value that differs between two runs without faults is neither called equal nor different.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ftrun.core.text import ranks as ranks_in_words
from ftrun.verify import digests
from ftrun.verify.digests import Difference, DigestPlace, DigestRecord, Digests

_NO_COPY = "its copy cannot be compared"
_ABSENT = "not there in both runs"
UNSTABLE = "differs between two runs without faults, too"


@dataclass
class ComparedValues:
    """The script's own values by name. `different`: the first place, and the ranks that differ there. `uncompared`: the reason."""

    equal: set[str] = field(default_factory=set)
    different: dict[str, tuple[DigestPlace, list[int]]] = field(default_factory=dict)
    uncompared: dict[str, str] = field(default_factory=dict)


def compare(clean: Digests, other: Digests, unstable: Collection[str] = ()) -> ComparedValues:
    """Compare the values of two runs, except those named in `unstable`."""
    found = ComparedValues()
    seen: set[str] = set()
    for place in digests.places(clean, other):
        for rank in sorted({*clean.ranks, *other.ranks}) if place.ends_loop else ():
            records = [run.ranks.get(rank, {}).get(place, []) for run in (clean, other)]
            for name in _kept([*records[0], *records[1]]):
                seen.add(name)
                marks = [{_marks(record).get(name) for record in each} for each in records]
                every = marks[0] | marks[1]
                if name in unstable:
                    found.uncompared[name] = UNSTABLE
                elif None in every or not all(marks):
                    found.uncompared.setdefault(name, _ABSENT)
                elif _UNKNOWN in every:
                    found.uncompared.setdefault(name, _NO_COPY)
                elif len(every) > 1:
                    first, ranks = found.different.setdefault(name, (place, []))
                    ranks += [rank] if first == place else []
    for name in found.different:
        found.uncompared.pop(name, None)
    found.equal = seen - {*found.different, *found.uncompared}
    return found


_UNKNOWN = -1


def _marks(record: DigestRecord) -> dict[str, int]:
    """Return each value's digest by name, _UNKNOWN for a value without one."""
    pairs = [(*name.partition(":")[::2], value) for name, value in zip(record.names, record.values, strict=True)]
    return {name: _UNKNOWN if kind == "uncompared" else value for kind, name, value in pairs}


def _kept(records: list[DigestRecord]) -> list[str]:
    """Return the names of the values that at least one of the records keeps."""
    names = [name.partition(":") for record in records for name in record.names]
    return list(dict.fromkeys(name for kind, _, name in names if kind != "other"))


def unstable(clean: Digests, again: Digests) -> set[str]:
    """Return the names of the script's values that differ between two runs without faults."""
    found = {*compare(clean, again).different}
    for place in digests.places(clean, again):
        for rank in clean.ranks.keys() & again.ranks.keys() if not place.ends_loop else ():
            ours, theirs = clean.ranks[rank].get(place), again.ranks[rank].get(place)
            if ours and theirs:
                names = [name.partition(":") for name in digests.differing(ours, theirs)]
                found |= {name for kind, _, name in names if kind == "live"}
    return found


def difference(found: ComparedValues, clean: Digests, other: Digests) -> Difference | None:
    """Return the first difference among the script's values, None if there is none."""
    if not found.different:
        return None
    first = min(place for place, _ in found.different.values())
    names = {f"value:{name}": ranks for name, (place, ranks) in found.different.items() if place == first}
    return Difference(first, names, False, [], *digests.end_differences(clean, other))


def in_words(found: ComparedValues) -> list[str]:
    """Return a line for each value that differs, and one for those that were not compared."""
    lines = [
        f"value {name} differs on {ranks_in_words(ranks)} at the end of loop {place.loop}"
        for name, (place, ranks) in found.different.items()
    ]
    if found.uncompared:
        lines.append(f"not compared: {', '.join(f'{name} ({why})' for name, why in found.uncompared.items())}")
    return lines


def as_json(found: ComparedValues) -> dict[str, Any]:
    return {
        "equal": sorted(found.equal),
        "different": {name: {"loop": place.loop, "ranks": ranks} for name, (place, ranks) in found.different.items()},
        "not_compared": found.uncompared,
    }
