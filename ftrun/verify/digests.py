"""Reads the digests that ranks recorded (`ftrun/worker/step/digest_recorder.py`) and locates the first difference between two runs.

It imports no torch and starts no process. A place is (loop, step, point). At `start` a rank records the state that the step begins with,
at `gate` the step's outputs and gradients, at a loop's `end` the script's own values (see values.py), and at `exit` the state at the
script's end. All attempts at a step must have equal digests.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ftrun.core.amounts import count
from ftrun.core.shared import mesh

_FILE = re.compile(r"rank-(\d+)-(\d+)\.jsonl")
_POINTS = {"start": 0, "gate": 1, "end": 2, "exit": 3}
_LAST = 1 << 60
Part = dict[str, Any]  # the part of a sharded tensor that a rank holds, see ftrun/worker/state/shard_places.py


class DigestPlace(NamedTuple):
    """A moment of a run; places sort by time. `point`: 0 start, 1 gate, 2 end of the loop, 3 exit, which comes after every loop."""

    loop: int
    step: int
    point: int

    @property
    def ends_loop(self) -> bool:
        return self.point == _POINTS["end"]


EXIT = DigestPlace(_LAST, _LAST, _POINTS["exit"])


@dataclass
class DigestRecord:
    """The digests of one attempt at a place: `values` are those of `names`; `parts` holds the rank's part of each sharded tensor."""

    names: tuple[str, ...]
    values: array[int]
    cell: int
    attempt: int
    parts: dict[str, Part] = field(default_factory=dict)


@dataclass
class Digests:
    """All digests of one run: rank -> place -> one record for each attempt."""

    ranks: dict[int, dict[DigestPlace, list[DigestRecord]]] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """Return the step indices of the loop with the most steps."""
        loops: dict[int, set[int]] = {}
        for places in self.ranks.values():
            for place in places:
                if place.point == _POINTS["gate"]:
                    loops.setdefault(place.loop, set()).add(place.step)
        return max(map(sorted, loops.values()), key=len, default=[])

    @property
    def first_step(self) -> int | None:
        """Return the first step of the script's first loop, None without a record of a step."""
        places = [place for records in self.ranks.values() for place in records if place != EXIT]
        return min(places).step if places else None

    def tensors(self) -> int:
        """Count the tensors in rank 0's state at the script's end."""
        return sum(name.partition(":")[0] in ("weight", "buffer", "optimizer") for name in self._names())

    def streams(self) -> int:
        """Count rank 0's random streams at the script's end."""
        return sum(name.startswith("random:") for name in self._names())

    def _names(self) -> tuple[str, ...]:
        records = self.ranks.get(0, {}).get(EXIT)
        return records[-1].names if records else ()


def read(folder: Path) -> Digests:
    """Read the digests of a run from `folder`; a rank's records end before its first damaged line.

    Raises:
        OSError: The folder or a file cannot be read.
    """
    found = Digests()
    files = [(int(m[1]), int(m[2]), p) for p in folder.iterdir() if (m := _FILE.fullmatch(p.name))]
    for rank, cell, path in sorted(files):
        places = found.ranks.setdefault(rank, {})
        for place, record in _records(path, cell):
            places.setdefault(place, []).append(record)
    return found


def _records(path: Path, cell: int) -> Iterator[tuple[DigestPlace, DigestRecord]]:
    names: dict[str, tuple[str, ...]] = {}
    parts: dict[str, dict[str, Part]] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                raw = json.loads(line)
                point = raw["point"]
                if "names" in raw:
                    names[point], parts[point] = tuple(raw["names"]), raw.get("parts", {})
                    continue
                place = EXIT if point == "exit" else DigestPlace(raw["loop"], raw["step"], _POINTS[point])
                record = DigestRecord(names[point], array("Q", raw["values"]), cell, raw["attempt"], parts[point])
            except (ValueError, KeyError, TypeError, OverflowError):
                return  # the rank was killed while it wrote this line
            yield place, record


# ---- comparing ----


@dataclass(frozen=True)
class Difference:
    """The first place where a run differs from the clean one.

    Attributes:
        names: The differing names with their ranks; a name that may be the cause comes before one that may be an effect.
        redone: A rank reached the place again after a fault.
        missing: Ranks of which one of the two runs has no record there.
        at_end: Of `compared` tensors and streams, how many differ at the script's end.
        shard: The first sharded tensor among the names, "" = none.
        parts: The part of `shard` on each rank where it differs.
        unsummed: The first name is a gradient, and no rank recorded its own gradient before the sum over ranks.
    """

    place: DigestPlace
    names: dict[str, list[int]]
    redone: bool
    missing: list[int]
    at_end: int
    compared: int
    shard: str = ""
    parts: dict[int, Part] = field(default_factory=dict)
    unsummed: bool = False

    @property
    def first(self) -> str:
        return next(iter(self.names), "")

    @property
    def lasting(self) -> bool:
        """Does the result differ, too?"""
        return bool(self.at_end or self.missing or self.place == EXIT)


def compare(clean: Digests, other: Digests, unstable: Collection[str] = ()) -> Difference | None:
    """Return the first difference, None if every tensor and stream of every rank is equal at every step and at the end.

    The script's own values at the ends of loops are not compared here, and values named in `unstable` nowhere.
    """
    at_end, compared = end_differences(clean, other)
    passed_over = {f"live:{name}" for name in unstable}
    for place in places(clean, other):
        if place.ends_loop:
            continue
        names: dict[str, list[int]] = {}
        missing: list[int] = []
        redone = False
        records: dict[int, DigestRecord] = {}
        for rank in sorted({*clean.ranks, *other.ranks}):
            ours, theirs = clean.ranks.get(rank, {}).get(place), other.ranks.get(rank, {}).get(place)
            if not ours or not theirs:
                # a replacement begins with the next step when its predecessor died after the gate
                if place.point != _POINTS["gate"]:
                    missing.append(rank)
                continue
            records[rank] = ours[0]
            for name in differing(ours, theirs):
                if name in passed_over:
                    continue
                names.setdefault(name, []).append(rank)
            redone = redone or len(theirs) > len(ours) or theirs[-1].cell != ours[-1].cell
        if names or missing:
            ordered = dict(sorted(names.items(), key=lambda item: _telling(item[0], place)))
            shard = next((name for name, on in ordered.items() if name in records[on[0]].parts), "")
            parts = {rank: p for rank in ordered.get(shard, ()) if (p := records[rank].parts.get(shard)) is not None}
            unsummed = _is_unsummed(next(iter(ordered), ""), records)
            return Difference(place, ordered, redone, missing, at_end, compared, shard, parts, unsummed)
    return None


def places(*runs: Digests) -> list[DigestPlace]:
    """Return all places of the runs, sorted by time."""
    return sorted({place for digests in runs for found in digests.ranks.values() for place in found})


def _is_unsummed(name: str, records: dict[int, DigestRecord]) -> bool:
    """Is that a gradient that no rank recorded before the sum over ranks?"""
    kind, _, what = name.partition(":")
    return kind == "gradient" and not any(f"local:{what}" in record.names for record in records.values())


def end_differences(clean: Digests, other: Digests) -> tuple[int, int]:
    """Count the tensors and streams that differ at the script's end, and those compared."""
    found = compared = 0
    for rank, places in clean.ranks.items():
        ours, theirs = places.get(EXIT), other.ranks.get(rank, {}).get(EXIT)
        if ours and theirs:
            compared += len(ours[-1].names)
            found += len(differing(ours[-1:], theirs[-1:]))
    return found, compared


def differing(ours: list[DigestRecord], theirs: list[DigestRecord]) -> list[str]:
    """Return the names whose digests are not equal in all records."""
    expected = dict(zip(ours[0].names, ours[0].values, strict=True))
    found: dict[str, None] = {}
    for record in (*ours[1:], *theirs):
        if record.names == ours[0].names and record.values == ours[0].values:
            continue
        seen = dict(zip(record.names, record.values, strict=True))
        for name in (*ours[0].names, *record.names):
            if expected.get(name) != seen.get(name):
                found[name] = None
    return list(found)


# causes come before their effects
_ORDER = {
    # a loader draws from the streams when it opens an epoch or fetches a batch
    "start": ("position", "batch", "random", "python", "buffer", "weight", "optimizer", "live"),
    "gate": ("output", "local", "gradient"),
}


def _telling(name: str, place: DigestPlace) -> int:
    order = _ORDER["gate" if place.point == _POINTS["gate"] else "start"]
    kind = name.partition(":")[0]
    return order.index(kind) if kind in order else len(order)


# ---- likely causes ----

RNG, SEED, LOADER, BUCKETS, SHARDED, OP, UPDATE, STATE, BUFFERS, INPUT, FORGOTTEN, MISSING = (
    "rng", "unseeded", "loader-position", "bucket-order", "sharded-gradient", "non-deterministic-op", "update", "python-state",
    "buffers", "input", "not-kept", "missing",
)  # fmt: skip

_EXPLAINED = {
    SEED: "random numbers: the script draws from a stream that begins elsewhere in every run; seed it before protect()",
    RNG: "random numbers: the stream was not where the clean run had it",
    LOADER: "loader position: another batch than in the clean run",
    BUCKETS: "bucket order: the ranks' own gradients were equal and their sum was not, so they were added in another order",
    SHARDED: "the gradient of a shard: the ranks' own gradients cannot be seen where FSDP2 sums them, so they may have differed (a "
    "non-deterministic operation, or what a step that was cut off left there), or were added in another order",
    OP: "a non-deterministic operation: equal weights, buffers, random streams and inputs gave other values "
    "(torch.use_deterministic_algorithms(True) names many of them)",
    UPDATE: "the update, or something that wrote into memory beside it (a flipped bit): gradients were equal, what they led to is not",
    STATE: "state of a Python object (scheduler, hyperparameters, an object given to protect) was not put back",
    BUFFERS: "buffers (running statistics) that the forward pass changed were not put back",
    INPUT: "input that ftrun does not keep in place: a loader outside job.batches, the time, a file or a counter of the script",
    FORGOTTEN: "a value of the script's own that is not kept, or that a rank lost, as one that it changed behind optimizer.step() is when "
    "it dies in its update: the closing line of that run names it",
    MISSING: "the ranks did not do the same steps",
}


def cause(difference: Difference, deterministic: bool, has_loader: bool) -> str:
    """Return the most likely cause. `deterministic`: two clean runs were equal; `has_loader`: the script uses job.batches."""
    if not difference.names:
        return MISSING
    kind = difference.first.partition(":")[0]
    if difference.place.point == _POINTS["gate"]:
        if kind == "gradient":
            return SHARDED if difference.unsummed else BUCKETS
        if kind == "output" and deterministic and not has_loader:
            return INPUT
        return OP
    return {
        "position": LOADER,
        "batch": LOADER,
        "random": RNG if deterministic else SEED,
        "python": STATE,
        "buffer": BUFFERS,
        "live": FORGOTTEN,
        "value": FORGOTTEN,
    }.get(kind, UPDATE)


def explain(what: str) -> str:
    return _EXPLAINED[what]


_WORDS = {
    "position": "position of the {}",
    "random": "random stream {}",
    "batch": "batch of the {}",
    "python": "state of {}",
    "buffer": "buffer {}",
    "weight": "weight {}",
    "optimizer": "optimizer's {}",
    "live": "value {}",
    "value": "value {}",
    "output": "output of {}",
    "local": "gradient of {} before the sum over ranks",
    "gradient": "gradient of {}",
}


def in_words(name: str) -> str:
    """Return a name such as `weight:first.bias` in words for people."""
    kind, _, what = name.partition(":")
    return _WORDS.get(kind, "{}").format(what)


def part_in_words(part: Part) -> str:
    """Return a part in words: `replicate 1, shard 0: rows 0 to 23 of 47`."""
    held = ", ".join(map(_cut_in_words, part["cuts"])) or "all of it"
    return f"{mesh.words(part['at'])}: {held}" + (", not summed yet" if part["sums"] else "")


def _cut_in_words(cut: dict[str, Any]) -> str:
    dim, first, end, size = cut["dim"], cut["first"], cut["end"], cut["size"]
    where = "" if dim < 2 else f" on dimension {dim}"
    what = ("row", "column")[dim] if dim < 2 else "slice"
    if first is None:
        return f"shard {cut['shard']} of {cut['shards']} of its {count(size, what)}{where}"
    if first == end:
        return f"none of its {count(size, what)}{where}"
    return f"{what} {first} of {size}{where}" if end - first == 1 else f"{what}s {first} to {end - 1} of {size}{where}"


def has_loader(digests: Digests) -> bool:
    """Did the script take its batches from job.batches?"""
    return any(
        "position:loader" in r.names for p in digests.ranks.values() for records in p.values() for r in records[:1]
    )


def as_json(difference: Difference) -> dict[str, Any]:
    place = difference.place
    at_exit = place == EXIT
    return {
        "step": None if at_exit else place.step,
        "loop": None if at_exit else place.loop,
        "point": next(name for name, number in _POINTS.items() if number == place.point),
        "first": difference.first,
        "names": difference.names,
        "shard": difference.shard or None,
        "shards": {str(rank): part for rank, part in difference.parts.items()},
        "missing_ranks": difference.missing,
        "after_fault": difference.redone,
        "differ_at_end": difference.at_end,
        "compared_at_end": difference.compared,
    }
