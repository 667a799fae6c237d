"""Judges who holds up a world in which nothing moves, from what the board says of each rank.

Theory of operation. `Watch` looks at the ranks in a loop (`Rank.looping`). While a gate has opened lately (`moves`) it judges nothing:
the usual case, which costs no description of the ranks. Otherwise each rank is in one of two states:

    waiting   in a collective, in a send or receive, or at the gate, and its control thread ran within 0.75 s
    busy      everything else; `excuse` says what may take long: its first body, a job.call, a compilation, code outside a body

From that one of three verdicts follows:
- Everybody waits, and some for ranks that certainly do not come (`waits.for_ever`), or a rank's collective was cut: patience
  is of no use. `Watch` waits 2.8 typical steps and at least 0.9 s, so that it reports within three steps, or a second. `waits.split`
  names the fewest ranks that explain it; where it cannot tell, the links are the suspects: all ranks reconnect once and nobody is
  replaced. The next time at the same step it waits five times as long, since new connections are slow at first.
- Everybody waits, and what they wait for may be on its way (all are in one collective, or wait for a message): the message may be
  large and the network slow. They get as long as a busy rank, and each collective that ends counts as a sign of life.
- Some are busy while others wait: 15 typical steps, but between --hang-floor and --hang-ceiling (60 s and 600 s), and the latter where
  an excuse holds. Then the busy rank is accused: of a held GIL when its control thread did not run either, else of a hang.
Nobody is accused while all are busy, nor a rank for being slow. `standstill` tells a person much earlier, from 2 s on.

On several nodes each judges the whole world, with its own ranks as they are and those of the others as they were told (`far_waits`), and
accuses only its own. Only the first node suspects the links. Two cases are new: all ranks may wait at the gate, for the exchange of the
nodes there; and a node may have opened a gate that another has not (`Others.apart`), where nobody is missing, since all had come.

What is a sign of life. A rank's `mark` changes with everything that it writes to the board: phase, collective, step. Its beat does not
count: that comes from a native thread, which lives on in a process whose Python hangs. Time is counted from look to look, and a
late look counts as one in time, so a pause of the launcher or the machine does not count as silence. Looks may be rare: a rank says
when it last showed life, and `due` says when the first limit is reached. A rank that was stopped inside a collective, by a debugger maybe,
gets its full time again when its Python runs again.

Tried and rejected:
- One second for every world that waits. A slow all-reduce was called a broken link.
- The newest collective of the whole world decides who is missing. With subgroups its number says nothing about the others, and sends
  and receives are counted by each side for itself; so blame follows the waits, over all groups.
- Comparing counts across a repair: a replacement has not made the collectives before it, so all count from the last repair on.
- A limit in steps alone: with steps of 50 ms a busy second would be a hang. The floor for a busy rank was 20 s first, and is a minute.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ftrun.control.far_waits import Others
from ftrun.control.waits import Rank, Sign, Silence, for_ever, split
from ftrun.core.faults import Fault
from ftrun.core.text import ranks as named

STUCK_STEPS = 2.8  # typical steps after which a world of waiting ranks is stuck: reported within three
STUCK_LEAST = 0.9  # seconds: reported within one
STUCK_FIRST = 60.0  # seconds, before the length of a step is known
STUCK_AGAIN = 5.0  # times longer, when the connections were made anew at this very step
HANG_STEPS = 15.0  # typical steps that a rank may be busy while others wait for it
FIRST_STEPS = 10.0  # explicit timeouts that a first body may take
KNOWN_AFTER = 3  # gates until the length of a step is known
GIL_AFTER = 0.75  # seconds without any Python (its control thread looks four times a second) that tell a held GIL from a busy one
STALL_LEAST = 2.0  # seconds without progress after which people are told, long before anybody is accused
STALL_STEPS = 3.0  # typical steps
STALL_FIRST = 10.0  # seconds, before the length of a step is known
STALL_OUTSIDE = 30.0  # seconds, where a checkpoint may be written: between two steps, or while every rank is busy
_STEPS = 65


@dataclass(frozen=True)
class Accused:
    """A rank that holds the others up."""

    cell: int
    fault: Fault
    evidence: str


@dataclass(frozen=True)
class HangVerdict:
    """`accused` hold all others up; without one the links are the suspects, and `what` names what every rank waits in."""

    accused: tuple[Accused, ...] = ()
    what: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class Standstill:
    """Nothing moves, and nobody is accused yet. Times in seconds.

    `culprits` hold up the ranks in `waiting`, which are at `where`; without a culprit all are. `cells`: of the culprits on this node.
    `left`: until something is done about it, None = nothing will be. `excuse`: what gives a culprit more time.
    """

    still: float
    left: float | None
    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    where: str
    excuse: str = ""
    cells: tuple[int, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Times in seconds. `timeout` None: learned from the run, between `floor` and `ceiling`."""

    timeout: float | None = None
    floor: float = 60.0
    ceiling: float = 600.0


class Watch:
    """Watches the ranks of one world, at least every `pause` seconds while the launcher runs."""

    def __init__(self, limits: Limits, pause: float) -> None:
        self._limits = limits
        self._longest = 2 * pause  # a look later than that counts as one in time
        self._gap = 0.0  # seconds since the look before, as they are counted
        self.due = math.inf  # seconds from the last look to the one at which the first limit is reached
        self._clock = 0.0  # seconds that we watched
        self._at: float | None = None
        self._marks: dict[int, tuple[tuple[int, ...], float]] = {}  # cell -> mark, and our clock when it last changed
        self._python: dict[int, tuple[int, float]] = {}
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._last = -1
        self._opened_at = 0.0
        self._opened = 0
        self._generation = -1
        self._linked: int | None = None  # gate at which the links were suspected
        self._others: Others | None = None  # the ranks of other nodes, which are judged together with these

    # -- patience ----------------------------------------------------------------------------------------------------

    @property
    def typical(self) -> float | None:
        """Return the seconds of a typical step, None while that is not known."""
        return statistics.median(self._steps) if self._opened >= KNOWN_AFTER and self._steps else None

    @property
    def stuck_after(self) -> float:
        """Return the seconds after which a world is stuck in which every rank waits, and some for ever."""
        return self._at_least(STUCK_FIRST)

    def _at_least(self, first: float) -> float:
        """`first`: seconds before the length of a step is known."""
        typical, timeout = self.typical, self._limits.timeout
        least = first if typical is None else max(STUCK_LEAST, STUCK_STEPS * typical)
        return least if timeout is None else min(timeout, least)

    @property
    def silent_after(self) -> float:
        """Return the seconds after which a world is stuck whose data may be under way, though no collective ends."""
        if self._limits.timeout is not None:
            return self._limits.timeout
        return max(STUCK_FIRST, self._limits.floor) if self.typical is None else self.patience("")

    def patience(self, excuse: str) -> float:
        """Return the seconds that a busy rank may keep others waiting."""
        typical, limits = self.typical, self._limits
        if limits.timeout is not None:
            if excuse in ("call", "compiling"):
                return max(limits.ceiling, limits.timeout)
            return limits.timeout * (FIRST_STEPS if excuse == "first" else 1.0)
        if excuse or typical is None:
            return limits.ceiling
        return min(limits.ceiling, max(limits.floor, HANG_STEPS * typical))

    def _enough(self, last: int, here: Sequence[Rank]) -> float:
        """Return the seconds that all of them may wait."""
        again = STUCK_AGAIN if self._linked == last + 1 else 1.0
        if any(r.cut for r in here):
            limit = self._at_least(STUCK_LEAST)  # one of them knows that it is cut: no step is needed to compare with
        else:
            limit = self.stuck_after if not self._apart and for_ever(here) else self.silent_after
        return again * max(self._enough_in(r.excuse, limit) for r in here)

    def _enough_in(self, excuse: str, limit: float) -> float:
        """Return the seconds for a rank with `excuse`; `limit` without one."""
        if not excuse:
            return limit
        if excuse in ("call", "outside"):
            return self.patience(excuse)  # a checkpoint may be gathered in one collective that takes minutes
        return min(self.patience(excuse), max(STUCK_FIRST, limit))

    # -- looking -----------------------------------------------------------------------------------------------------

    def quiet(self) -> None:
        """Forget since when nothing moved: the world is being repaired, or somebody holds a rank on purpose."""
        self._marks.clear()
        self._python.clear()
        self._opened_at = self._clock
        self._at = None
        self.due = math.inf

    def see(self, now: float, generation: int, last: int, signs: Iterable[Sign]) -> None:
        """Remember who showed life since the last look; `last` is the last opened gate. While the world `moves` no more is needed."""
        self._count(now, generation, last)
        self.due = math.inf
        for one in signs:
            if self._marks.get(one.cell, ((), 0.0))[0] != one.mark:
                ago = now - one.life  # a sign from before the last look is not new
                self._marks[one.cell] = one.mark, self._clock - (ago if 0 < ago < self._gap else 0.0)
            python, since = self._python.setdefault(one.cell, (one.python, self._clock))
            if python != one.python:
                self._python[one.cell] = one.python, self._clock
                if self._clock - since > GIL_AFTER and one.waits:
                    # it was stopped, by a debugger maybe: what it waits for gets its time from now on
                    self._marks[one.cell] = one.mark, self._clock

    @property
    def moves(self) -> bool:
        """Did a gate open so lately that there is nothing to judge? The usual case."""
        return self._clock - self._opened_at <= min(STALL_LEAST, self.stuck_after / 2)

    @property
    def tells(self) -> bool:
        """Has no gate opened for so long that the other nodes should know of the ranks here? Long before anybody is accused."""
        return not self.moves and self._clock - self._opened_at > self._at_least(STUCK_LEAST) / 2

    def told(self, ranks: Sequence[Rank]) -> list[Rank]:
        """Return ranks of this node with their `silence`, for the other nodes."""
        return [replace(r, silence=Silence(self._still(r), self._no_python(r))) for r in ranks]

    def judge(self, last: int, ranks: Sequence[Rank], others: Others | None = None) -> HangVerdict | None:
        """Judge the ranks, whose signs `see` has just taken in. None = nothing is wrong (yet).

        `others`: those of the other nodes; a verdict accuses none of them.
        """
        self._others = others
        here = self._looping(ranks)
        waiting = [r for r in here if self._waits(r)]
        if here and len(waiting) == len(here):
            return self._all_wait(last, here)
        return self._some_wait(here, waiting)

    def _looping(self, ranks: Sequence[Rank]) -> list[Rank]:
        """Return the ranks of the world that are in a loop, in their order."""
        known = ranks if self._others is None else sorted((*ranks, *self._others.ranks), key=lambda r: r.rank)
        return [r for r in known if r.looping]

    @property
    def _apart(self) -> bool:
        return self._others is not None and self._others.apart

    def _count(self, now: float, generation: int, last: int) -> None:
        self._gap = 0.0
        if self._at is not None:
            self._gap = min(max(0.0, now - self._at), self._longest)
            self._clock += self._gap
        if generation != self._generation:
            self._generation = generation
            self.quiet()  # an incident may be over before anybody looks
        self._at = now
        if last == self._last:
            return
        if last < self._last:  # a new attempt: its first steps say how long steps take
            self._steps.clear()
            self._opened = 0
        if self._last >= 0 and last > self._last:
            passed = last - self._last
            self._steps.extend([(self._clock - self._opened_at) / passed] * min(passed, _STEPS))
            self._opened += passed
        if self._linked is not None and last >= self._linked:
            self._linked = None
        self._last, self._opened_at = last, self._clock

    def _still(self, rank: Rank) -> float:
        """Return the seconds without a sign of life."""
        return self._clock - self._marks[rank.cell][1] if rank.silence is None else rank.silence.still

    def _surely(self, rank: Rank) -> float:
        """Return the seconds without a sign of life in which the ranks of all nodes were seen together."""
        return self._still(rank) if self._others is None else max(0.0, self._still(rank) - self._others.lag)

    def _no_python(self, rank: Rank) -> float:
        return self._clock - self._python[rank.cell][1] if rank.silence is None else rank.silence.python

    def _waits(self, rank: Rank) -> bool:
        # a rank whose GIL is held cannot say that its collective is over
        return (rank.waiting or rank.at_gate) and self._no_python(rank) < GIL_AFTER

    # -- before anybody is accused -------------------------------------------------------------------------------------

    def standstill(self, last: int, ranks: Sequence[Rank], others: Others | None = None) -> Standstill | None:
        """Return what people may know already, from the same ranks as `judge`."""
        self._others = others
        here = self._looping(ranks)
        if not here or self.moves:
            return None
        waiting = [r for r in here if self._waits(r)]
        culprits = [r for r in here if r not in waiting]
        if not culprits:
            return self._all_still(last, here)
        if not waiting and len(here) > 1:  # `judge` accuses nobody
            if not all(self._noticed(r, self.patience(r.excuse), STALL_OUTSIDE) for r in here):
                return None
            return Standstill(min(map(self._still, here)), None, (), (), "")
        held = [r for r in culprits if self._noticed(r, self.patience(r.excuse))]
        if not held:
            return None
        still = max(map(self._still, held))
        left = min(max(0.0, self.patience(r.excuse) - self._surely(r)) for r in held)
        return _standstill(still, left, held, waiting)

    def _all_still(self, last: int, here: list[Rank]) -> Standstill | None:
        inside = [r for r in here if r.waiting]
        enough = self._enough(last, here)
        if not all(self._noticed(r, enough) for r in here):
            return None
        still = min(map(self._still, here))
        absent, present = ([], []) if self._apart else split(here)
        left = max(0.0, enough - min(map(self._surely, here))) if inside or self._others is not None else None
        return _standstill(still, left, absent, present or here)

    def _noticed(self, rank: Rank, enough: float, least: float = STALL_LEAST) -> bool:
        """Has this rank been silent for so long that people should know, and has no gate opened meanwhile?"""
        typical = self.typical
        if rank.excuse == "outside":
            least = STALL_OUTSIDE
        least = max(least, STALL_FIRST if typical is None else STALL_STEPS * typical)
        if rank.excuse in ("first", "call", "compiling"):
            least = enough / 2
        return min(self._still(rank), self._clock - self._opened_at) > min(least, enough / 2)

    # -- every rank waits --------------------------------------------------------------------------------------------

    def _all_wait(self, last: int, here: list[Rank]) -> HangVerdict | None:
        others = self._others
        inside = [r for r in here if r.waiting]
        still = min(map(self._surely, here))
        if not inside and others is None:
            return None
        least = self._at_least(STUCK_LEAST)  # in no case sooner
        enough = least if still < least else self._enough(last, here)
        if still < enough:
            self._look_in(enough - still)
            return None
        absent, present = ([], []) if self._apart else split(here)
        if absent:
            waited = f"{named([r.rank for r in present])} {'has' if len(present) == 1 else 'have'} waited {_place(present[0])}"
            return _accusing(
                Accused(r.cell, Fault.COLLECTIVE, f"{waited} for {still:.1f} s and it is not there, but {_place(r)}")
                for r in absent
                if r.silence is None
            )
        if others is not None and not others.first:
            return None
        self._linked = last + 1
        what = ", ".join(sorted({r.name for r in inside})) or f"the exchange of the nodes {_place(here[0])}"
        places: dict[str, list[int]] = {}
        for r in here:
            places.setdefault(_place(r), []).append(r.rank)
        listed = "; ".join(f"{named(ranks)} {place}" for place, ranks in places.items())
        return HangVerdict((), what, f"nothing moved for {still:.1f} s: {listed}")

    def _look_in(self, seconds: float) -> None:
        """Ask for a look when a limit is reached; news of other nodes come when they come."""
        if self._others is None:
            self.due = min(self.due, seconds)

    # -- some are busy -----------------------------------------------------------------------------------------------

    def _some_wait(self, here: list[Rank], waiting: list[Rank]) -> HangVerdict | None:
        if not waiting and len(here) > 1:
            return None  # all are busy with something of their own
        accused = []
        for rank in here:
            still, patience = self._surely(rank), self.patience(rank.excuse)
            if rank in waiting or rank.silence is not None:
                continue
            if still <= patience:
                self._look_in(patience - still)
                continue
            gil = self._no_python(rank) > max(GIL_AFTER, still / 2)
            fault = Fault.GIL if gil else Fault.HANG
            how = (
                "no Python of the process ran though its threads do: something holds the GIL"
                if gil
                else "Python runs and gets nowhere"
            )
            accused.append(
                Accused(rank.cell, fault, f"no progress for {still:.1f} s: {how}{_kept_waiting(rank, waiting)}")
            )
        return _accusing(accused)


def _accusing(accused: Iterable[Accused]) -> HangVerdict | None:
    found = tuple(accused)
    return HangVerdict(found) if found else None


def _place(rank: Rank) -> str:
    if rank.waiting:
        between = f" {'to' if rank.name == 'send' else 'from'} rank {rank.peer}" if rank.peer >= 0 else ""
        among = f" among {named(rank.members)}" if rank.members and rank.group and not between else ""
        return f"in {rank.name} #{rank.number}{between}{among} of step {rank.step}"
    return f"at the gate of step {rank.step}"


def _standstill(still: float, left: float | None, held: list[Rank], waiting: list[Rank]) -> Standstill:
    inside = [r for r in waiting if r.waiting] or waiting
    where = _place(inside[0]) if inside else ""
    excuse = next((r.excuse for r in held if r.excuse), "")
    culprits, cells = tuple(r.rank for r in held), tuple(r.cell for r in held if r.silence is None)
    return Standstill(still, left, culprits, tuple(r.rank for r in waiting), where, excuse, cells)


def _kept_waiting(rank: Rank, waiting: list[Rank]) -> str:
    others = [r for r in waiting if r is not rank]
    if not others:
        return ""
    inside = [r for r in others if r.waiting]
    verb = "waits" if len(others) == 1 else "wait"
    where = _place(inside[0]) if inside else "at the gate"
    return f"; {named([r.rank for r in others])} {verb} for it {where}"
