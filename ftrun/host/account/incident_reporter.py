"""Tells the person what happens and keeps the account of incidents. Reads the board; decides nothing.

The loop calls it after it carried out the machine's actions, so that no sentence delays a recovery.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ftrun.control.events import (
    Action,
    CloseGate,
    DeviceFault,
    Died,
    Dying,
    Event,
    OpenGate,
    Probed,
    Protected,
    Publish,
    Raised,
    Say,
    Seated,
    Signalled,
    Spawn,
    Stalled,
    Stepped,
    Stuck,
)
from ftrun.control.machine import INCIDENT, RunPhase
from ftrun.core.account import RESTARTS, Account, Fact, Incident, cost_ms
from ftrun.core.faults import Fault
from ftrun.core.shared import gate, left_out, notes, replicas
from ftrun.core.shared.board import Cell, F, Flag, Head, Inexact, sum_of
from ftrun.core.shared.moment import AFTER_LOOP, CALL_AFTER, Moment
from ftrun.core.shared.notes import DoubtNote, LeftOutNote
from ftrun.core.shared.protection import PROTECTED, protection
from ftrun.core.shared.steps import phase_at
from ftrun.faults.trigger import fired
from ftrun.host.account import messages, transfer_times
from ftrun.host.account.attempt import Attempt
from ftrun.host.account.incident import measured, seen
from ftrun.host.account.kept_record import KeptRecord
from ftrun.host.account.mesh_record import MeshRecord
from ftrun.host.account.phase_record import PhaseRecord
from ftrun.host.base.context import SERVICES_LOG, LaunchContext

_FOLLOWING = ("failed", "restarting", "stalled_again", "failed_again", "world_stopped")  # they name the dead rank themselves
_SAME_FAULT = 60.0  # seconds: an injected fault older than this did not cause the death
_RAISED = {"raised": messages.raised, "raised_again": messages.raised_again}
_SIGNS: dict[str, int] = {
    Fault.FROZEN: F.BEAT,
    Fault.HANG: F.PROGRESS,
    Fault.GIL: F.PROGRESS,
    Fault.COLLECTIVE: F.PROGRESS,
}


class Narrator:
    """Tells and accounts one run. `global_rank` maps a rank of this node, as the machine counts them, to one of the world."""

    def __init__(self, context: LaunchContext, global_rank: Callable[[int], int] = lambda local: local) -> None:
        self._global_rank = global_rank
        self._run_dir = context.run_dir
        self._board = context.board
        self._logs = context.logs
        self._kept = context.logs if context.logs_kept else None
        self._settings = context.settings
        self._log = context.listener.log
        self._note = context.listener.note
        self.account = Account()
        self._dying: dict[int, tuple[int, int]] = {}  # cell -> (when the fault struck, when the loop woke for it), ns
        self._phases = PhaseRecord()  # of the open incident
        self._spares_used: dict[int, int] = {}  # rank -> cell that was a spare
        self._logged: set[tuple[int, int]] = set()  # (rank, cell) of the replacements reported in this incident
        self._replaced: set[int] = set()  # ranks with a new worker since the last incident was over
        self._first_cell = 0  # of the workers that started together
        self._attempt = Attempt()
        self._thrown = 0  # steps of the previous attempt that a restart threw away, as far as counted,
        self._thrown_first = 0  # the index of the first of them,
        self._thrown_ms = 0.0  # and the time that one took
        self._uncounted = False  # a restart threw steps away that nobody could count: the script protects nothing
        self._restart: dict[str, Any] | None = None  # a finished restart whose cost is not known yet
        self._claimed: set[str] = set()  # injected faults already matched with a death
        self._protection: str | None = None  # as last reported
        self._meshes = MeshRecord(context.run_dir, context.listener.note)
        self.values = KeptRecord(context.run_dir, context.listener.note, context.listener.log)
        self._since = time.monotonic()
        self._nodes = context.settings.nodes.most
        self.holders: dict[int, int] = {}
        self.inexact = Inexact(0)
        self._drained = False  # this node gave its place up: the run's result is not its to judge

    def published(self, publish: Publish, spares: Mapping[int, int]) -> None:
        """Record that a world was published; `spares` maps ranks of this node to the spares that took them."""
        if not publish.fresh:
            self._look_exact()  # the flags of a worker that is now replaced, maybe in the middle of an incident
        self.holders = {self._global_rank(local): cell for local, cell in enumerate(publish.workers)}
        self._spares_used.update({self._global_rank(local): cell for local, cell in spares.items()})
        self._replaced = set() if publish.fresh else self._replaced | {*map(self._global_rank, publish.replaced)}
        if publish.fresh:
            self._attempt, self._first_cell = Attempt(), min(publish.workers)
        self._fold("published", {**vars(publish), "spares": spares.values()})

    def closed(self, last: int) -> None:
        """Record that the gate closed after `last`; the ranks repeat the steps beyond it that some rank had begun."""
        furthest = max(self._cells(), key=lambda c: (c.step or 0) - c.shift, default=None)
        if furthest is not None:
            loop = {"shift": furthest.shift, "epoch": furthest.epoch, "end": furthest[F.LOOP_END]}
            self._fold("closed", {"last": last, "begun": self._begun(last), **loop})

    def _fold(self, kind: str, facts: dict[str, Any], now: float = 0.0) -> None:
        self.account = self.account.then(Fact(now, kind, facts))

    def _cells(self) -> list[Cell]:
        return [self._board.cell(cell) for cell in self.holders.values()]

    def _ends(self) -> int:
        return max((cell[F.ENDS] for cell in self._cells()), default=0)

    def _begun(self, last: int) -> list[Moment]:
        """Return what ranks have begun beyond gate `last`. A replacement is left out: its cell says where it will begin."""
        old = [self._board.cell(cell) for rank, cell in self.holders.items() if rank not in self._replaced]
        return [Moment.of(c) for c in old if c.step is not None and c.step - c.shift > last]

    def saw(
        self, event: Event, actions: tuple[Action, ...], phase: RunPhase, told: str, generation: int, woke: int, now: float
    ) -> None:
        """Record that the machine heard `event` at `now` (s), ordered `actions` and is in `phase`; the loop woke for it at `woke` ns.

        `told`: the phase as people read it (`State.told`).
        """
        if isinstance(event, Dying) and phase in INCIDENT:
            began = self._began(event.worker, woke)
            self._dying[event.worker] = began, woke
            self._strike(began, self._detected(event.worker))
        elif isinstance(event, (Died, Raised)) and (phase in INCIDENT or any(_begins(a) for a in actions)):
            self._begin(event, woke)
        elif isinstance(event, Died) and event.worker in self._dying and self.account.incident and not self.account.incident.victims:
            del self._dying[event.worker]
            self._fold("dropped", {})  # the run ends with this death: there is nothing to repair, and no incident
        elif isinstance(event, Stuck) and phase in INCIDENT and self.account.incident is None:
            at = time.monotonic_ns()
            self._strike(at, at, stuck=event.what, fault=event.fault, evidence=event.evidence)
        elif isinstance(event, Seated):
            at = time.monotonic_ns()
            self._fold("dropped", {})  # a node that lost its own place before has waited since
            how = "gave them up" if event.drained else "was lost"
            self._strike(at, at, evidence=f"the node that had these ranks {how}")
        elif isinstance(event, (DeviceFault, Probed)) and (phase in INCIDENT or any(_begins(a) for a in actions)):
            self._begin_device(actions, woke)
        if isinstance(event, Protected) and self._attempt.since is None:
            cells = self._cells()
            if cells and all(c.has(Flag.PROTECTED) for c in cells):
                first = min(c.shift for c in cells)
                self._settle(first - self._thrown_first)
                self._attempt.begin(time.monotonic_ns(), first)
                self._meshes.protected({c.rank: c.index for c in cells if c.rank is not None})
        if isinstance(event, (Protected, Stepped)):
            self._say_protection()
        if isinstance(event, Signalled) and phase is RunPhase.ENDED:
            self._log(messages.signalled_again(event.signum), "warning")
        for action in actions:
            if isinstance(action, OpenGate):
                self._look_at_phases()
                self._log_replaced()
            elif isinstance(action, Say):
                self._on_say(action, event, actions, phase)
        for action in actions:
            if isinstance(action, Publish) and action.tail:
                self._tail(action)
        for message in (event, *actions):
            self._fold(type(message).__name__, vars(message), now)
        self._fold("phase", {"phase": told, "generation": generation}, now)
        if self.account.incident is not None and self.account.incident.restart and phase is RunPhase.RUNNING:
            self._restarted(self.account.incident)

    def _say_protection(self) -> None:
        """Report the protection once a run, and again only when it changed."""
        cells = self._cells()
        known = protection(cells)
        if known is None or known == self._protection:
            return
        self._protection = known
        settings = self._settings
        if known == PROTECTED:
            line = messages.PROTECTED
        else:
            grouped = any(c.has(Flag.GROUP) for c in cells)
            line = messages.unprotected(grouped, settings.max_restarts)
        self._note("protection", protected=known == PROTECTED)
        self._log(line)

    def _begin(self, event: Died | Raised, woke: int) -> None:
        cell = self._board.cell(event.worker)
        if isinstance(event, Raised):
            # not the present time: the ranks were already rung, and what they do since is no part of the detection
            began = cell[F.RAISED_NS] or woke
            detected = max(began, woke)
        else:
            detected = self._detected(event.worker)
            dying = self._dying.pop(event.worker, None)
            began, woke = dying or (self._began(event.worker, self._last_sign(event, woke)), woke)
        began = min(began, detected)
        self._strike(began, detected)
        if cell.rank is not None:
            # a rank that raised lives, and may have begun the step again
            raised_in = phase_at(cell, began) if isinstance(event, Raised) else None
            phase = "" if raised_in is None else raised_in.name.lower()
            cause = event.signature or (event.cause if isinstance(event, Died) else "")
            known = isinstance(event, Raised) or began != woke
            took = (detected - began) / 1e6 if known else None
            victim = seen(cell, cause, phase, seen_ms=took, fault=event.fault, evidence=event.evidence)
            self._fold("victim", vars(victim))

    def _detected(self, worker: int) -> int:
        return self._board.cell(worker)[F.DETECTED_NS] or time.monotonic_ns()

    def _began(self, worker: int, otherwise: int) -> int:
        """Return when the fault struck, ns: the time of an injected one, else `otherwise`."""
        detected = self._detected(worker)
        return min(self._fault_time(self._board.cell(worker).rank, detected) or otherwise, detected)

    def _strike(self, began: int, detected: int, **more: str) -> Incident:
        """Return the open incident, or open one."""
        if self.account.incident is None:
            self._settle(0)
            self._phases, self._logged = PhaseRecord(), set()
            self._fold("struck", {"began": began, "detected": detected, **more})
        assert self.account.incident is not None
        return self.account.incident

    def _look_at_phases(self) -> None:
        if self.account.incident is not None:
            self._phases.look(self._board, self.holders, self.account.incident.victims)

    def _last_sign(self, event: Died, woke: int) -> int:
        """Return the latest time at which the fault began, ns: the last sign of life of a rank that only fell silent."""
        field = _SIGNS.get(event.fault)
        return woke if field is None else self._board.cell(event.worker)[field] or woke

    def _begin_device(self, actions: tuple[Action, ...], woke: int) -> None:
        if any(_begins(a) for a in actions):
            self._strike(woke, time.monotonic_ns())
        for action in actions:
            if isinstance(action, Say) and action.what == "died" and action.worker is not None:
                self._fold("victim", vars(seen(self._board.cell(action.worker), action.detail)))

    def _fault_time(self, rank: int | None, detected: int) -> int | None:
        """Return when the injected fault that struck `rank` fired, ns."""
        for firing in reversed(fired(self._run_dir)):
            at = int(firing.t * 1e9)
            if firing.rank == rank and firing.file not in self._claimed and 0 <= detected - at < _SAME_FAULT * 1e9:
                self._claimed.add(firing.file)
                return at
        return None

    def _on_say(self, say: Say, event: Event, actions: tuple[Action, ...], phase: RunPhase) -> None:
        if say.what == "died":
            followed = any(isinstance(a, Say) and a.what in _FOLLOWING for a in actions)
            if not followed and say.rank is not None:
                self._log_death(say, event, phase)
        elif say.what in ("raised", "raised_again"):
            step = self._board.cell(say.worker).step if say.worker is not None else None
            line = _RAISED[say.what](say.rank or 0, say.detail, step)
            if isinstance(event, Raised) and event.fault == Fault.NONFINITE:
                line = messages.poisoned(event.evidence, again=say.what == "raised_again")
            self._log(line, messages.level(say.what))
        elif say.what in RESTARTS:
            now = time.monotonic_ns()
            incident = self._strike(now, now)
            if not incident.restart:
                self._throw_away(incident.began)
            late = messages.early(event.early, event.age) if isinstance(event, Died) and event.early else ""
            self._log((messages.said(say) or "") + (f"; it failed {late}" if late else ""), messages.level(say.what))
        elif say.what == "recovered":
            self._recovered()
        elif say.what == "drained":
            self._drained = True
            self._log(messages.said(say) or "")
        elif say.what == "inexact":
            self._log(self._why_inexact(), messages.level(say.what))
        elif say.what == "spare_unneeded":
            self._note("spare-unneeded", worker=say.worker, why="the script ended without asking for its rank")
        elif say.what == "failed" and isinstance(event, Died) and event.early and not event.final:
            self._log(f"{messages.said(say)}, {messages.early(event.early, event.age)}", messages.level(say.what))
        else:
            words = messages.said(say)
            if words and say.what == "spare_died":
                words += messages.another() if any(isinstance(a, Spawn) for a in actions) else ""
                words += messages.printed_in(next(self._logs.glob(f"attempt_*/spare-{say.worker}"), None))
            if words:
                self._log(words, messages.level(say.what))
            if say.what == "service_given_up":
                self._log(messages.last_words(self._logs / SERVICES_LOG), messages.level(say.what))

    def _log_death(self, say: Say, event: Event, phase: RunPhase) -> None:
        victims = self.account.incident.victims if self.account.incident else []
        victim = next((v for v in reversed(victims) if v.cell == say.worker), None)
        if victim is None:
            why = {"fault": event.fault, "evidence": event.evidence} if isinstance(event, Died) else {}
            if isinstance(event, Stalled):
                why = {"fault": Fault.HANG.value}
            victim = seen(self._board.cell(say.worker or 0), say.detail, **why)
        survivors = len(self.holders) - len({v.rank for v in victims})
        self._log(messages.failed(victim, survivors, phase in INCIDENT), messages.level(say.what))

    def _log_replaced(self) -> None:
        incident = self.account.incident
        if incident is None:
            return
        sources = measured(incident, self._board, self.holders)["sources"]
        for rank in sorted(self._replaced):
            cell = self.holders.get(rank)
            if cell is None or (rank, cell) in self._logged:
                continue
            self._logged.add((rank, cell))
            was_spare = self._spares_used.get(rank) == cell
            what = incident.going_on()
            again = bool(incident.redone) or what.phase == CALL_AFTER
            self._log(messages.replaced(rank, cell, was_spare, what.what(), again, sources.get(str(rank))))

    def _tail(self, world: Publish) -> None:
        """Record a repair after the loop. It stops no rank and leaves the gate open: the new workers run the rest of the script."""
        if self.account.incident is None or not self.account.incident.victims:
            return
        replaced = map(self._global_rank, world.replaced)
        spares = [self._spares_used[rank] for rank in replaced if rank in self._spares_used]
        self._fold("published", {**vars(world), "spares": spares})
        self._log_replaced()

    def _recovered(self) -> None:
        self._log_replaced()
        self._look_at_phases()
        self._replaced = set()
        incident = self.account.incident
        if incident is None:
            return
        self._fold("dropped", {})
        facts = measured(incident, self._board, self.holders)
        if incident.rollback:  # the repair contains the first of them
            facts["again_ms"] = round(
                self._attempt.step_ms(incident.reached, self._ends(), incident.began) * (incident.redone - 1), 3
            )
        moved = transfer_times.gather(self._run_dir, self.holders, incident.generation, incident.began)
        self._keep(facts, self.holders, phases=self._phases.facts(incident.began), moves=moved)
        self._log(messages.recovered(facts))

    def _restarted(self, incident: Incident) -> None:
        self._fold("dropped", {})
        now = time.monotonic_ns()
        facts = measured(incident, self._board, {})
        facts["total_ms"] = round((now - incident.began) / 1e6, 3)
        self._log(f"all workers run again after {facts['total_ms'] / 1000:.2f} s")
        self._restart = facts
        if not self._thrown:
            self._settle(0)

    def _throw_away(self, began: int) -> None:
        """Count the steps of this attempt as all workers start again: they are lost as far as no checkpoint has them."""
        last = gate.unpack(self._board.gate()).last
        gates = last + 1 + bool(self._begun(last))
        self._thrown, self._thrown_first = self._attempt.steps(gates, self._ends()), self._attempt.first
        self._thrown_ms = self._attempt.step_ms(gates, self._ends(), began)
        self._uncounted |= self._attempt.since is None and any(c.has(Flag.STEPPED) for c in self._cells())

    def _settle(self, kept: int) -> None:
        """Account for a restart: the script continues `kept` steps after the first step of the previous attempt."""
        facts, self._restart = self._restart, None
        if facts is None:
            return
        again = max(0, self._thrown - max(0, kept))
        facts |= {"redone": again, "again_ms": round(self._thrown_ms * again, 3)}
        self._thrown = 0
        self._keep(facts, {})
        if again:
            self._log(messages.thrown_away(again, facts["again_ms"]))

    def _keep(self, facts: dict[str, Any], holders: Mapping[int, int], **more: Any) -> None:
        """Count an incident that is over, and journal it."""
        self._account("incident", facts)
        self._note("incident", **self._meshes.placed(facts, holders), **more)

    def _account(self, kind: str, facts: dict[str, Any]) -> None:
        self._fold(kind, facts)
        self._attempt.repairs_ms += cost_ms(facts)
        self._look_exact()

    def _are_equal(self, last: int) -> bool:
        if self._nodes > 1:
            return replicas.equal_over_nodes(last, self._cells(), bool(self._board[Head.EQUAL]))
        return replicas.equal_at(last, self._cells())

    def _look_exact(self) -> None:
        for cell in self.holders.values():
            self.inexact |= Inexact(self._board.cell(cell)[F.INEXACT])
        if self._board[Head.DIFFER]:  # the rank that saw it may be dead
            self.inexact |= Inexact.REPLICAS_DIFFER

    def _why_inexact(self) -> str:
        """Word why a repair of this attempt cannot be called exact."""
        found = notes.read_all(DoubtNote, self._run_dir, self._first_cell)
        left = {note.cell: note.names for note in notes.read_all(LeftOutNote, self._run_dir, self._first_cell)}
        flags = Inexact(0)
        for bits in (*(doubt.why for doubt in found), *(cell[F.INEXACT] for cell in self._cells())):
            flags |= Inexact(bits)
        repaired = sorted({self._global_rank(local) for local, cell in self.account.replaced if cell >= self._first_cell})
        return messages.inexact(repaired, flags, found, left, lambda cell: self._board.cell(cell).rank)

    def doubts(self) -> dict[str, Any]:
        """Return why the result of this node's ranks may not be called exact: flags, and names of what is not kept."""
        self._look_exact()
        return {"inexact": int(self.inexact), "left_out": [*left_out.reasons(self._run_dir)]}

    def end(self, code: int, elsewhere: Mapping[str, Any] | None = None) -> None:
        """Sum up the run that ended with `code`. `elsewhere`: the `doubts` of all nodes together, if there are several."""
        elsewhere = elsewhere or {}
        self._settle(0)
        self._look_exact()
        self.inexact |= Inexact(int(elsewhere.get("inexact", 0)))
        forgotten = sorted({*left_out.reasons(self._run_dir), *map(str, elsewhere.get("left_out", ()))})
        if self.account.incident is not None:
            facts = measured(self.account.incident, self._board, self.holders)
            if self.account.incident.then == AFTER_LOOP and code == 0:  # the script ended, so it is repaired
                self._look_at_phases()
                self._keep(facts, self.holders, phases=self._phases.facts(self.account.incident.began))
            else:
                self._account("cut off", facts)
        account = self.account
        if account.costs:
            lines = messages.summary(
                messages.run_shown(self._kept),
                len(account.costs),
                len(account.incidents) > 0,
                account.failed_attempts,
                None if self._uncounted else account.redone,
                account.lost_ms / 1000,
                self.inexact,
                forgotten,
                notes.read_all(DoubtNote, self._run_dir),
            )
            # a failed run has no result, and its report names the rank that raised
            for line in lines if code == 0 and not self._drained else lines[:1]:
                self._log(line)
        elif code == 0 and not self._drained:
            last = gate.unpack(self._board.gate()).last
            steps, equal = self._attempt.steps(last + 1, self._ends()), self._are_equal(last)
            took = time.monotonic() - self._since
            self._log(messages.done(steps, took, equal and not self.inexact, self._kept))
        cells = {rank: self._board.cell(cell) for rank, cell in sorted(self.holders.items())}
        if looked := {rank: cell[F.LOOKS] for rank, cell in cells.items() if cell[F.LOOKS]}:
            at = {rank: cells[rank][F.LOOKED_AT] - 1 + cells[rank].shift for rank in looked}
            compared = max((sum_of(cell[F.SUM_AT])[0] + cell.shift for cell in cells.values() if cell[F.REPLICAS]), default=None)
            self._note("checks", steps=looked, last=at, replicas=compared)
        self.values.note()
        incidents, restarts = len(account.costs), account.failed_attempts
        facts = {"incidents": incidents, "restarts": restarts, "redone": account.redone, "lost_ms": account.lost_ms}
        exact = code == 0 and not self._drained and not self.inexact and not restarts and not (incidents and forgotten)
        self._note("summary", exact=exact, inexact=int(self.inexact), left_out=forgotten, **facts)


def _begins(action: Action) -> bool:
    return isinstance(action, CloseGate) or (isinstance(action, Publish) and action.tail)
