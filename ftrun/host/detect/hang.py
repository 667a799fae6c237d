"""Feeds `ftrun.control.hangs` from the board and from the other nodes, and keeps it from accusing a rank that a debugger holds."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ftrun.control import far_waits
from ftrun.control.far_waits import Facts
from ftrun.control.hangs import Accused, HangVerdict, Limits, Standstill, Watch
from ftrun.control.waits import Rank, Sign
from ftrun.core.faults import Fault
from ftrun.core.shared import gate, notes
from ftrun.core.shared.board import COUNTS, Busy, Cell, F, Flag, Phase, collective_name, collective_of
from ftrun.core.shared.notes import GroupNote, WhereNote
from ftrun.host.detect import heartbeat

_BODY = (Phase.FORWARD, Phase.BACKWARD, Phase.GATE, Phase.UPDATE)
_LIFE = operator.itemgetter(
    *(F.PROGRESS, F.COLLECTIVE, F.COLLECTIVE_ENDED, F.STEP, F.ATTEMPT, F.COLLECTIVE_SINCE, F.ARRIVAL, F.PHASE)
)
_SOON = 0.01  # seconds between two looks, at least
_SUBJECT = "waits"  # under which nodes show one another where their ranks are
_TELL = 0.5  # seconds after which they are shown anew


class WorldNodes(Protocol):
    """The nodes of the present world, as far as this watch needs them."""

    def shows(self, subject: str, facts: Facts) -> None:
        """Show the other nodes something of this one."""

    def shown(self, subject: str) -> tuple[str, dict[str, Facts]]:
        """Return this node's id, and what each node of the world shows, by its id and in their order; nothing if it is alone."""


class HangWatch:
    """Watches for hangs in one run; call `look` at least every `pause` seconds."""

    def __init__(self, limits: Limits, pause: float, run_dir: Path, nodes: WorldNodes) -> None:
        self._watch = Watch(limits, pause)
        self._nodes = nodes
        self._told = 0.0  # when the other nodes were told of the ranks here, 0 = they are told nothing
        self._run_dir = run_dir
        self._groups: dict[int, tuple[int, ...]] = {}  # mark on the board -> ranks
        self.standstill: Standstill | None = None  # as of the last look

    @property
    def due(self) -> float:
        """Return the seconds after the last look until another one may accuse a rank."""
        return max(_SOON, self._watch.due)

    def quiet(self) -> None:
        """Forget the current wait: the time of a repair is not the length of a step."""
        self._watch.quiet()
        self.standstill = None
        self._hush()

    def look(self, raw_gate: int, cells: Sequence[Cell]) -> HangVerdict | None:
        """Detect the ranks that hold the world up, from the gate word and the cells of all ranks; None without a verdict."""
        word, now = gate.unpack(raw_gate), time.monotonic()
        self._watch.see(now, word.generation, word.last, [sign(c, word) for c in cells])
        if self._watch.moves:
            self.standstill = None
            self._hush()
            return None
        ranks = [describe(c, word, self._members) for c in cells]
        me, shown = self._nodes.shown(_SUBJECT)
        others = far_waits.others(me, now, word.generation, word.last, shown) if shown else None
        if shown and self._watch.tells and now - self._told >= _TELL:
            self._tell(now, word, ranks, cells, {node: told for node, told in shown.items() if node != me})
        unknown = bool(shown) and others is None
        verdict = None if unknown else self._watch.judge(word.last, ranks, others)
        if verdict is None:
            found = self._for_people(self._watch.standstill(word.last, ranks, others), cells)
            self.standstill = replace(found, left=None) if found is not None and unknown else found
            return None
        pids = [c[F.PID] for c in cells]
        if any(map(debugged, cells)) or any(heartbeat.why_still(pid) for pid in pids):
            self._watch.quiet()  # a debugger may take its time; BeatWatch handles a stopped process
            return None
        accused = tuple(Accused(a.cell, a.fault, a.evidence + self._line(a)) for a in verdict.accused)
        return HangVerdict(accused, verdict.what, verdict.evidence)

    def _tell(self, now: float, word: gate.GateWord, ranks: Sequence[Rank], cells: Sequence[Cell], heard: dict[str, Facts]) -> None:
        """Show the other nodes where the ranks of this one are; nothing while a debugger holds one, so that nobody is judged."""
        self._told = now
        held = any(map(debugged, cells))
        self._nodes.shows(_SUBJECT, {} if held else far_waits.facts(now, word.generation, word.last, self._watch.told(ranks), heard))

    def _hush(self) -> None:
        """Show nothing any more, since the world moves or is repaired."""
        if self._told:
            self._told = 0.0
            self._nodes.shows(_SUBJECT, {})

    def _members(self, mark: int) -> tuple[int, ...]:
        """Return the ranks of a group from the note of its first member; () for the world's group, or without a note."""
        if mark and mark not in self._groups:
            note = notes.read(GroupNote, self._run_dir, mark)
            if note is None:
                return ()
            self._groups[mark] = note.ranks
        return self._groups.get(mark, ())

    def _for_people(self, found: Standstill | None, cells: Sequence[Cell]) -> Standstill | None:
        """Return the standstill for display: without a deadline while a debugger holds a culprit."""
        if found is None or not any(c.index in found.cells and debugged(c) for c in cells):
            return found
        return replace(found, left=None, excuse="debugger")

    def where(self, cell: int, still: float) -> str:
        """Return the line of the script that a rank noted in the last `still` seconds; "" when it noted none."""
        note = notes.read(WhereNote, self._run_dir, cell)
        return note.line if note is not None and time.monotonic() - note.seen / 1e9 < still else ""

    def _line(self, accused: Accused) -> str:
        """Format the line of Python that a hung rank was in when its control thread last looked; "" without a note."""
        if accused.fault is not Fault.HANG:
            return ""
        note = notes.read(WhereNote, self._run_dir, accused.cell)
        return f"; last seen at {note.line}" if note is not None else ""


def debugged(cell: Cell) -> bool:
    """Does a debugger hold this rank?"""
    return bool(cell[F.BUSY] & Busy.DEBUGGER) or heartbeat.traced(cell[F.PID])


def _unknown(mark: int) -> tuple[int, ...]:
    return ()


def sign(cell: Cell, word: gate.GateWord) -> Sign:
    """Return a rank's last sign of life, and whether it waits; `word` is the gate. Reads only a few words of the cell."""
    words = cell.words()
    mark = _LIFE(words)
    since = words[F.COLLECTIVE_SINCE]
    life = max(since, words[F.PROGRESS], words[F.COLLECTIVE_ENDED]) / 1e9
    return Sign(cell.index, mark, words[F.PYTHON], since > 0 or _is_at_gate(words[F.ARRIVAL], word), life)


def _is_at_gate(arrival: int, word: gate.GateWord) -> bool:
    at = gate.unpack(arrival)
    return bool(arrival) and at.generation == word.generation and at.last > word.last


def describe(cell: Cell, word: gate.GateWord, members: Callable[[int], tuple[int, ...]] = _unknown) -> Rank:
    """Describe a rank for the judgement; `word` is the gate, `members` returns the ranks of a group from its mark."""
    group, number = collective_of(cell[F.COLLECTIVE])
    phase = cell.phase
    waiting = cell[F.COLLECTIVE_SINCE] > 0
    at_gate = _is_at_gate(cell[F.ARRIVAL], word)
    busy = Busy(cell[F.BUSY])
    if (waiting or at_gate) and not cell[F.DEVICE]:
        busy &= ~Busy.FIRST  # it waits, and on the CPU a group connects before any rank waits in it
    return Rank(
        rank=cell.rank or 0,
        cell=cell.index,
        step=cell.step or 0,
        looping=cell.has(Flag.LOOPING) and not cell.has(Flag.LOOP_DONE) and not cell.has(Flag.EXITING),
        waiting=waiting,
        at_gate=at_gate,
        group=group,
        number=number,
        name=collective_name(cell[F.COLLECTIVE_NAME]),
        excuse=_excuse(busy, phase),
        peer=cell[F.PEER] - 1,
        members=members(group) if waiting else (),
        counts=tuple(_counts(cell)),
        all_counted=not cell[F.FIRST_COUNT + COUNTS - 1],
        counted=cell[F.COUNTED],
        cut=cell[F.CUT] == word.generation + 1,
    )


def _counts(cell: Cell) -> Iterator[tuple[int, int]]:
    """Yield each group's mark and the number of its collectives that the rank has entered."""
    for slot in range(COUNTS):
        word = cell[F.FIRST_COUNT + slot]
        if not word:
            return
        group, number = collective_of(word)
        yield group, number - 1


def _excuse(busy: Busy, phase: Phase) -> str:
    if busy & Busy.COMPILING:
        return "compiling"
    if busy & Busy.CALL:
        return "call"
    if phase not in _BODY:
        return "outside"
    return "first" if busy & Busy.FIRST else ""
