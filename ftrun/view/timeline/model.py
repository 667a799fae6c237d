"""One incident as lanes, bars and marks, from its journal line. Pure: no drawing, no clock, no files.

Times are ms from the fault (negative: before it). Every bar is a measured one; what the journal does not hold is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ftrun.core.account import PARTS, Account
from ftrun.core.shared import mesh
from ftrun.core.shared.moment import AFTER_LOOP, CALL_AFTER, Moment
from ftrun.view.timeline.transfer import Transfer, transfer

# kinds of bars, in the words of the figures
FORWARD, BACKWARD, SYNC, OPTIMIZER = "Forward", "Backward", "Gradient Synchronization", "Optimizer Step"
STOP, CLEAN, RESET = "Stop", "Clean", "Reset"
RESTORATION, ROLLBACK = "Restoration", "Rollback"
RELOAD = "Reload weights"  # while bytes moved, from a replica or from the host to every rank (figure 004)
TRAINING = (FORWARD, BACKWARD, SYNC, OPTIMIZER)
REPAIR = (STOP, CLEAN, RESET, RESTORATION, RELOAD, ROLLBACK)
HEALTHY, FAILED, SPARE, NEW = "healthy", "failed", "spare", "new worker"
SQUARES = 10  # that stand for the parameters of a rank
LANES_MOST = 8  # beyond, healthy lanes that look like the others are folded
_SAME = 0.002  # seconds between a planned fault's firing and the beginning of the incident that it caused


@dataclass(frozen=True)
class Bar:
    """Something a worker did. `broken`: it did not come to its end. `again`: this step was begun before. `new`: in the
    world that the repair made."""

    kind: str
    begin: float
    end: float
    step: int
    broken: bool = False
    again: bool = False
    new: bool = False


@dataclass(frozen=True)
class Lane:
    """One process. `fails`: when it failed, None for one that did not. `updates`: when the parameters were being updated.
    `place`: where it is on the script's mesh, in words, "" without one; `short`: the same without names."""

    label: str
    role: str
    rank: int
    cell: int
    bars: tuple[Bar, ...]
    fails: float | None = None
    place: str = ""
    short: str = ""

    @property
    def named(self) -> str:
        """rank 3 (replicate 1, shard 1)."""
        return f"{self.label} ({self.place})" if self.place else self.label

    def updates(self) -> list[Bar]:
        return [bar for bar in self.bars if bar.kind == OPTIMIZER]


@dataclass(frozen=True)
class Story:
    """An incident. `step` is the one in flight when it began, `resume` the one that all went on with, and `going_on` says what
    that was where it was in no step; `last` is the last whose update counts. `barriers`: step and time at which its gradient
    synchronization was complete on every rank."""

    run: str
    number: int
    total: int
    wall: float
    victims: tuple[dict[str, Any], ...]
    stuck: str
    restart: bool
    step: int | None
    resume: int
    last: int
    redone: int
    survivors: int
    detected: float
    resumed: float
    done: float
    parts: dict[str, float]
    sources: dict[int, dict[str, Any]]
    lanes: tuple[Lane, ...]
    folded: int
    barriers: tuple[tuple[int, float], ...]
    going_on: Moment
    injected: tuple[dict[str, Any], ...] = ()
    rollback: bool = False
    evidence: str = ""
    transfer: Transfer | None = None
    mesh: str = ""  # its dimensions, "" without one

    @property
    def committed(self) -> bool:
        """Was the update of the step in flight kept?"""
        return self.step is not None and self.last >= self.step and not self.rollback

    @property
    def in_tail(self) -> bool:
        """Did it come after the last loop, where nobody is stopped? Then there is nothing to draw."""
        return self.going_on.phase == AFTER_LOOP and not any(bar.kind == STOP for lane in self.lanes for bar in lane.bars)

    @property
    def until(self) -> str:
        """What every rank had done when the incident was over."""
        return "had done a new step" if self.going_on.in_step else f"was past {self.going_on.what()}"

    @property
    def moments(self) -> list[tuple[float, str]]:
        """Times of the axis, with their names but for the last one."""
        then, flight = self.going_on, self.step if self.step is not None else self.resume
        again = " again" if then.phase == CALL_AFTER or (self.redone and not self.committed) else ""
        named = f"step {self.resume}" if then.in_step else then.what()
        begun = f"step {flight}" if then.in_step or flight != self.resume else then.what()
        return [(self.begins, begun), (0.0, "failure"), (self.resumed, f"{named}{again}")]

    @property
    def begins(self) -> float:
        """Where a drawing starts: with the step in flight."""
        starts = [bar.begin for lane in self.lanes for bar in lane.bars if bar.kind in TRAINING and bar.begin < 0]
        return min([*starts, -0.2 * max(self.done, 1.0)]) if not starts else min(starts)


def story(account: Account, number: int, run: str = "") -> Story:
    """Incident `number` (from 1). IndexError when there is none."""
    if not 1 <= number <= len(account.incidents):
        raise IndexError(number)
    raw = account.incidents[number - 1]
    began = float(raw.get("began_ns", 0)) / 1e9
    victims = tuple(raw.get("victims", ()))
    parts = {name: float(raw["ms"][name]) for name in PARTS if name in raw.get("ms", {})}
    detected = parts.get("detect", 0.0)
    resumed = sum(parts.get(name, 0.0) for name in PARTS[:-1])
    steps = [v["step"] for v in victims if v.get("step") is not None]
    lanes = _lanes(raw, detected)
    shown = _folded(lanes)
    return Story(
        run=run,
        number=number,
        total=len(account.incidents),
        wall=account.wall + began - account.began,
        victims=victims,
        stuck=str(raw.get("stuck", "")),
        restart=bool(raw.get("restart")),
        step=max(steps) if steps else _in_flight(lanes),
        resume=int(raw.get("resume", 0)),
        last=int(raw.get("last", int(raw.get("resume", 0)) - 1)),
        redone=int(raw.get("redone", 0)),
        survivors=int(raw.get("survivors", 0)),
        detected=detected,
        resumed=resumed,
        done=float(raw.get("total_ms", 0.0)),
        parts=parts,
        sources=_sources(raw, victims),
        lanes=tuple(shown),
        folded=len(lanes) - len(shown),
        barriers=tuple(_barriers(lanes)),
        going_on=Moment.told({"step": raw.get("resume", 0), **raw.get("going_on", {})}),
        injected=tuple(f for f in account.faults if abs(float(f.get("t", 0.0)) - began) < _SAME),
        rollback=bool(raw.get("rollback")),
        evidence=str(raw.get("evidence", "")),
        transfer=transfer(raw),
        mesh=mesh.shape(raw.get("mesh", {}).get("dims", {})),
    )


def _in_flight(lanes: list[Lane]) -> int | None:
    return max((bar.step for lane in lanes for bar in lane.bars if bar.begin < 0), default=None)


def _sources(raw: dict[str, Any], victims: tuple[dict[str, Any], ...]) -> dict[int, dict[str, Any]]:
    """Where the replaced ranks' states came from (a rank of an earlier incident is not told of again)."""
    failed = {str(v["rank"]) for v in victims}
    return {int(rank): source for rank, source in raw.get("sources", {}).items() if rank in failed}


# -- lanes ---------------------------------------------------------------------------------------------------------------


def _lanes(raw: dict[str, Any], detected: float) -> list[Lane]:
    failed = {int(v["cell"]): v for v in raw.get("victims", ())}
    spares = set(raw.get("spares", ()))
    ranks = {int(rank): times for rank, times in raw.get("ranks", {}).items()}
    kept = {(int(p["rank"]), int(p["cell"])): p["steps"] for p in raw.get("phases", ())}
    replaced = {int(v["rank"]) for v in failed.values()}
    places = raw.get("mesh", {}).get("ranks", {})
    lanes = []
    for cell, victim in failed.items():
        rank = int(victim["rank"])
        alive_again = (rank, cell) in kept and not _was_replaced(kept, rank, cell)
        bars = _training(kept.get((rank, cell), ()), 0.0, raw)
        if alive_again:  # it raised an exception and went on itself
            bars += _repair(ranks.get(rank, {}), detected, HEALTHY)
        lanes.append(Lane(f"rank {rank}", FAILED, rank, cell, tuple(bars), 0.0, *_place(victim.get("mesh"))))
        if alive_again:
            replaced.discard(rank)
            ranks.pop(rank, None)
    for rank in sorted(ranks):
        cells = [c for r, c in kept if r == rank and c not in failed]
        cell = cells[-1] if cells else -1
        role = HEALTHY if rank not in replaced else SPARE if cell in spares or not cells else NEW
        bars = _training(kept.get((rank, cell), ()), detected, raw)
        bars += _repair(ranks[rank], max([detected, *(b.end for b in bars if not b.new)]), role)
        label = f"rank {rank}" if role == HEALTHY else f"{role} {cell}" if cell >= 0 else f"rank {rank}"
        bars.sort(key=lambda b: b.begin)
        lanes.append(Lane(label, role, rank, cell, tuple(bars), None, *_place(places.get(str(rank)))))
    order = {HEALTHY: 0, FAILED: 1, SPARE: 2, NEW: 2}
    return sorted(lanes, key=lambda lane: (order[lane.role], lane.rank))


def _place(at: dict[str, int] | None) -> tuple[str, str]:
    return mesh.words(at), ", ".join(map(str, (at or {}).values()))


def _was_replaced(kept: dict[tuple[int, int], Any], rank: int, cell: int) -> bool:
    return any(r == rank and c != cell for r, c in kept)


def _training(rows: Iterable[list[Any]], end: float, raw: dict[str, Any]) -> list[Bar]:
    """The step in flight and the ones from `resume` on; earlier ones say nothing about the incident."""
    generation, bars = int(raw.get("generation", 0)), []
    rows = list(rows)
    flight = [int(v["step"]) for v in raw.get("victims", ()) if v.get("step") is not None]
    before = [row for row in rows if row[1] < generation and row[0] >= min(flight, default=0)]
    before = before if flight else before[-1:]
    after = [row for row in rows if row[1] >= generation and row[0] == int(raw.get("resume", 0))]
    for row in before[-2:] + after[-1:]:
        new = row[1] >= generation
        limit = float(raw.get("total_ms", 0.0)) if new else end
        bars += _bars(row, limit, new and any(r[0] == row[0] for r in before), new)
    return bars


def _bars(row: list[Any], limit: float, again: bool, new: bool) -> list[Bar]:
    step, _, _, *times = row
    kinds = list(zip(TRAINING, times[:4], strict=True))
    bars = []
    for at, (kind, begin) in enumerate(kinds):
        if begin is None:
            continue
        later = [t for t in times[at + 1 :] if t is not None]
        end = later[0] if later else limit
        if end >= begin:
            bars.append(Bar(kind, begin, end, step, not later, again, new))
    return bars


def _repair(times: dict[str, float], detected: float, role: str) -> list[Bar]:
    """What a rank did between the failure and the step that all go on with."""
    named = [(RESTORATION, "restore")] if role != HEALTHY else [(STOP, "stop"), (CLEAN, "clean"), (RESET, "reset")]
    if "moving" in times:
        named = [(kind, "moving" if kind == RESTORATION else key) for kind, key in named]
        named.append((RELOAD, "restore"))
    bars, at = [], detected
    for kind, key in named:
        if key in times:
            begin = times["moving"] if kind == RELOAD else at
            bars.append(Bar(kind, min(begin, times[key]), times[key], -1))
            at = times[key]
    if role != HEALTHY and "resume" in times:
        bars.append(Bar(ROLLBACK, at, times["resume"], -1))
    return bars


def _folded(lanes: list[Lane]) -> list[Lane]:
    """At most LANES_MOST lanes: those that failed or came new, and of the healthy ones the first and the slowest."""
    if len(lanes) <= LANES_MOST:
        return lanes
    healthy = [lane for lane in lanes if lane.role == HEALTHY]
    others = [lane for lane in lanes if lane.role != HEALTHY][: LANES_MOST - 2]
    room = max(2, LANES_MOST - len(others))
    slowest = sorted(healthy, key=lambda lane: -_stopped(lane))[: room // 2]
    chosen = {lane.rank for lane in [*healthy[: room - len(slowest)], *slowest]}
    return [*(lane for lane in healthy if lane.rank in chosen), *others]


def _stopped(lane: Lane) -> float:
    return max((bar.end for bar in lane.bars if bar.kind == STOP), default=0.0)


def _barriers(lanes: list[Lane]) -> Iterable[tuple[int, float]]:
    """A barrier opens for all at once, so the earliest rank that passed it shows when."""
    passed: dict[tuple[int, bool], float] = {}
    for lane in lanes:
        for bar in lane.updates():
            key = (bar.step, bar.new)
            passed[key] = min(bar.begin, passed.get(key, bar.begin))
    return sorted(((step, t) for (step, _), t in passed.items()), key=lambda b: b[1])


# -- parameters ----------------------------------------------------------------------------------------------------------


CONSISTENT, UPDATING = "Consistent Parameters", "Update Parameters"


def bands(story: Story) -> list[tuple[str, float, float]]:
    """Figures 000 and 001: when all ranks held the same parameters, and when those were being updated. From the step in
    flight to the end, without gaps. An update that was torn lasts until the replacement has whole parameters."""
    updates = []
    for step, new in sorted(
        {(bar.step, bar.new) for lane in story.lanes for bar in lane.updates()}, key=lambda k: (k[1], k[0])
    ):
        bars = [bar for lane in story.lanes for bar in lane.updates() if (bar.step, bar.new) == (step, new)]
        torn = any(bar.broken for bar in bars) and not new
        end = story.resumed if torn or (not new and max(b.end for b in bars) > 0) else max(b.end for b in bars)
        updates.append((min(bar.begin for bar in bars), end))
    found, at = [], story.begins
    for begin, end in updates:
        if begin > at:
            found.append((CONSISTENT, at, begin))
        found.append((UPDATING, max(at, begin), end))
        at = max(at, end)
    return [*found, (CONSISTENT, at, story.done)] if at < story.done else found


def done_again(bar: Bar, story: Story) -> bool:
    """Is this part of a step that was begun before, by whatever worker?"""
    redone = bool(story.redone) and not story.committed
    return bar.kind in TRAINING and (bar.again or (redone and bar.new and bar.step == story.resume))


@dataclass(frozen=True)
class Held:
    """The squares of figures 002 and 003: the share of a rank's parameters that is updated at a time, and from when until
    when that can be said, since a barrier means that updates begin. `last`: its process failed then."""

    time: float
    share: float
    since: float
    until: float
    last: bool

    def place(self, at: Callable[[float], float], size: float, gap: float) -> tuple[float, int]:
        """Where the squares begin, and how many there is room for. `at` gives the place of a time, `size` is that of a square."""
        begin, whole = at(self.time), SQUARES * size
        if not self.last:
            return begin, max(1, min(SQUARES, int((at(self.until) - begin) / size)))
        before = begin - gap - whole
        return (before if before >= at(self.since) else begin), SQUARES


def held(lane: Lane, story: Story) -> list[Held]:
    """As the step began, and at the failure or as training went on."""
    times = [] if lane.role in (SPARE, NEW) else [story.begins]
    times.append(0.0 if lane.role == FAILED else story.resumed)
    found, barriers = [], [at for _, at in story.barriers]
    for time in times:
        share = 0.0 if time == story.begins else updated(lane, time, story)
        since = max((at for at in barriers if at <= time), default=story.begins)
        until = min((at for at in barriers if at > time), default=story.done)
        found.append(Held(time, share, since, until, lane.role == FAILED and time == 0.0))
    return found


def updated(lane: Lane, at: float, incident: Story) -> float:
    """The part of the parameters in `lane` that hold step `incident.step`'s update at a time: 0, 1, or between."""
    step = incident.step if incident.step is not None else incident.resume
    if lane.role in (SPARE, NEW):
        return 1.0 if incident.last >= step and not incident.rollback else 0.0
    if incident.rollback and at >= incident.resumed:
        return 0.0
    share = 0.0
    for bar in lane.updates():
        if bar.step != step or bar.begin > at:
            continue
        whole = not bar.broken and at >= bar.end
        share = 1.0 if whole else max(share, min(0.9, (at - bar.begin) / max(bar.end - bar.begin, 1e-9)))
        if bar.broken and lane.fails is not None:
            share = 0.5  # nobody knows how far it came
    return share
