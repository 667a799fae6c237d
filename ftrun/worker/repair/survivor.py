"""A survivor leaves a stopped world and joins the next: stop, clean, reset.

It runs in the script's thread that trains, outside a body. It answers each stage on the board; if another stop comes, it begins again.
"""

from __future__ import annotations

import contextlib
import time

from ftrun.core.shared import gate
from ftrun.core.shared.board import F, Head, Inexact, Source
from ftrun.core.shared.world import World
from ftrun.worker.link.position import Interrupt
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.rollback import survivor_goes_back

WORLD = 120.0  # seconds that a stopped rank waits for the next world
_PATIENCE = 0.1  # seconds that a rank waits for the others after the interrupted step


class Survivor:
    """Takes this rank from one generation of its world to the next."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._context = kit.context
        self._looked_in = 0  # the last generation for which the script's values were looked at
        self.tidy = False  # an interrupted step is done, and `tidy_up` is still to be called

    def rejoin(self, rewind: bool) -> int:
        """Join the next world, as often as it is stopped again; return the gate number to go on with.

        `rewind`: the body of the step handed out last was interrupted, so the step goes back to its start.
        """
        number = self.rejoin_at(None, rewind)
        assert number is not None
        return number

    def rejoin_at(self, wanted: int | None, rewind: bool = False) -> int | None:
        """Do the same, but join nothing and return None if the next world goes on with another gate number than `wanted`.

        That happens when everyone goes back to the host snapshot: the step that was handed out must not begin there.
        """
        while True:
            with contextlib.suppress(Interrupt):
                return self._once(wanted, rewind)

    def _once(self, wanted: int | None, rewind: bool) -> int | None:
        kit, context = self._kit, self._context
        world = self._stop(wanted)
        if world is None:
            return None
        self._clean(world, rewind, handed_out=wanted is not None)
        if world.rollback and kit.pending.went_back != world.generation:
            survivor_goes_back(kit)
        self._reset(world)
        kit.registry.shown.handed_out()  # a replacement counts from here, and a stopped job.call calls again what it began
        kit.observers.stage("restore", kit.position.number)
        context.restoring = False
        context.answer(F.RESTORED)
        kit.pending.redo = (world.generation, world.resume)
        self._await(world, F.SETTLED)  # the next step changes memory that others may still be copying from this rank
        if world.span is not None:
            self._await_open()  # so may ranks of other nodes
        self.tell_missed(world.resume)
        return world.resume

    def begins_again(self) -> bool:
        """Rewind a body that only this rank leaves, before the others wait for it. Return False if the world was stopped meanwhile."""
        kit = self._kit
        if self._context.stop_pending():
            return False
        kit.ledger.variables.stopped(True)
        self._rewind(kit.position.number)
        return True

    def _rewind(self, resume: int) -> None:
        kit = self._kit
        kit.reducers.forget()
        kit.state.set_grads([False] * len(kit.state.params), None)
        if resume == kit.position.number:
            kit.state.rewind_buffers()

    def _stop(self, wanted: int | None) -> World | None:
        """Answer that this rank stopped, and wait for the next world. Return None if that does not go on with `wanted`."""
        context = self._context
        stopped = gate.unpack(context.board.gate()).generation
        self._answer_once(F.STOPPED, stopped)
        self._kit.observers.stage("stop", self._kit.position.number)
        newest = context.await_world(lambda w: w.generation >= stopped, stopped - 1, WORLD)
        if newest.rank_of(context.cell.index) is None:
            context.make_way("another worker holds its rank by now")
        if wanted is not None and newest.resume != wanted:
            return None
        self._kit.observers.aborted(self._raised(context.world))
        context.world = newest
        context.cell[F.GENERATION] = newest.generation
        if self._kit.pending.redo is None and not context.restoring:
            context.cell[F.SOURCE] = Source.NONE  # the last source was of an incident that is over
        return newest

    def _raised(self, world: World | None) -> bool:
        """Did a body raise in `world`, perhaps because of gradients that are not finite?"""
        board = self._context.board
        return world is not None and any(board.cell(p.cell)[F.RAISED] == world.generation for p in world.places)

    def _clean(self, world: World, rewind: bool, handed_out: bool) -> None:
        kit, context = self._kit, self._context
        kit.registry.drain(world.generation)  # an old collective may still write a buffer that is rewound now
        kit.sharded.reset()
        if self._looked_in != world.generation:
            self._looked_in = world.generation
            kit.ledger.variables.stopped(rewind, handed_out)
        if rewind:
            self._rewind(world.resume)
        self._answer_once(F.CLEANED, world.generation)
        if context.stop_pending():
            raise Interrupt

    def _reset(self, world: World) -> None:
        kit, context = self._kit, self._context
        kit.observers.stage("reset", kit.position.number)
        context.settled(world.generation)
        self._answer_once(F.READY, world.generation)
        kit.registry.rebuild(world, lambda: self._reset_reducers(world.resume))
        self._answer_once(F.RESET, world.generation)
        if kit.reducers.agree(world.resume):
            self._reset_reducers(world.resume)

    def _answer_once(self, stage: int, generation: int) -> None:
        """Answer a stage unless this rank has: a replacement that met the others ahead of time has answered some."""
        if self._context.cell[stage] < generation:
            self._context.answer(stage, generation)

    def _reset_reducers(self, resume: int) -> None:
        if not self._kit.reducers.reset(resume):
            self._context.note_inexact(Inexact.DDP_LAYOUT)

    def _await(self, world: World, stage: int) -> None:
        """Wait for every rank of the world. Raises Interrupt if it is stopped: the launcher sets the deadline."""
        context = self._context
        while not context.wait_until(lambda: world.everyone(context.board, stage), 3600.0):
            pass

    def _await_open(self) -> None:
        """Wait until every rank of every node is restored. Raises Interrupt if the world is stopped."""
        context = self._context
        while not context.wait_until(lambda: not gate.unpack(context.board.gate()).closed, 3600.0):
            pass

    # -- the first step after it -------------------------------------------------------------------------------------

    def tell_missed(self, number: int) -> None:
        """Report what this rank did just before step `number`, and a replacement did not run: draws, and changes of variables."""
        ledger, board = self._kit.ledger, self._context.board
        step, names = ledger.changed_between
        if ledger.drew_before != number and (step != number or not names):
            return
        if board[Head.MISSED] == number + 1 or any(board.cell(cell)[F.MISSED] == number + 1 for cell in range(board.cells)):
            if ledger.drew_before == number:
                self._context.note_inexact(Inexact.DREW_BETWEEN)
            if step == number:
                ledger.variables.lose(map(ledger.variables.shown, names))

    def step_begins(self) -> None:
        """Tell the launcher that this rank computes again."""
        redo = self._kit.pending.redo
        if redo is not None and self._context.cell[F.RESUMED] < redo[0]:
            self._context.answer(F.RESUMED, redo[0])

    def step_done(self, number: int) -> None:
        """Tell the launcher that the interrupted step, or the first one after it, is done."""
        redo = self._kit.pending.redo
        if redo is not None and number >= redo[1]:
            self._context.cell[F.REDONE_NS] = time.monotonic_ns()
            self._context.answer(F.FIRST_DONE, redo[0])
            self._kit.pending.redo = None
            self.tidy = True

    def tidy_up(self) -> None:
        """Destroy retired groups, after a short wait for ranks still in the interrupted step: they may share a processor."""
        self.tidy = False
        context = self._context
        if context.world is not None:
            cells, here = context.cells(), context.cell[F.STEP]

            def all_here() -> bool:
                return all(cell[F.STEP] >= here for cell in cells)

            if all_here():
                context.board.ring_workers()
            else:
                with contextlib.suppress(Interrupt):
                    context.wait_until(all_here, _PATIENCE)
        self._kit.registry.destroy_retired()
