"""Leaving a stopped world and joining the next: stop, clean, reset, as one rank does them.

Runs in the script's main thread, outside a body. Each stage is answered on the board; a stop in the middle begins again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from ftrun.core import gate
from ftrun.core.board import F, Inexact, Source
from ftrun.core.world import World
from ftrun.worker import goback
from ftrun.worker.runtime.run_link import Interrupt

if TYPE_CHECKING:
    from ftrun.worker.engine import Engine

WORLD = 120.0  # seconds that a stopped rank waits for the next world


class Rejoining:
    """Of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._context = engine.context

    def rejoin(self, rewind: bool) -> int:
        """Do it as often as the world is stopped again; returns the gate number to go on with.

        `rewind`: the body of the engine's step was interrupted, so the step is put back to its start when it is handed
        out again.
        """
        number = self.rejoin_at(None, rewind)
        assert number is not None
        return number

    def rejoin_at(self, wanted: int | None, rewind: bool = False) -> int | None:
        """The same; None, and nothing joined, where the next world goes on with another gate number than `wanted`.

        That is so when everyone goes back to the host snapshot: the step that was handed out must not begin there.
        """
        while True:
            with contextlib.suppress(Interrupt):
                return self._once(wanted, rewind)

    def _once(self, wanted: int | None, rewind: bool) -> int | None:
        engine, context = self._engine, self._context
        world = self._stop(wanted)
        if world is None:
            return None
        self._clean(world, rewind)
        if world.rollback and engine.went_back != world.generation:
            goback.survivor(engine)
        self._reset(world)
        engine.join_world()
        engine.fire("restore", engine.step)
        context.restoring = False
        context.answer(F.RESTORED)
        engine.redo = (world.generation, world.resume)
        self._await(world, F.SETTLED)  # the next step changes what others may still be copying from us
        return world.resume

    def _stop(self, wanted: int | None) -> World | None:
        """Answer that this rank stopped, and wait for the world that comes. None: it goes on with another step."""
        engine, context = self._engine, self._context
        stopped = gate.unpack(context.board.gate()).generation
        self._answer_once(F.STOPPED, stopped)
        engine.fire("stop", engine.step)
        newest = context.await_world(lambda w: w.generation >= stopped, stopped - 1, WORLD)
        if newest.rank_of(context.cell.index) is None:
            os.kill(os.getpid(), signal.SIGKILL)  # another incarnation has our rank: this one must not go on
        if wanted is not None and newest.resume != wanted:
            return None
        if self._raised(context.world):
            engine.vigil.suspect()
        context.world = newest
        context.cell[F.GENERATION] = newest.generation
        if engine.redo is None and not context.restoring:
            context.cell[F.SOURCE] = Source.NONE  # of an incident that is over
        return newest

    def _raised(self, world: World | None) -> bool:
        """Was `world` stopped because a body raised: for gradients that are not finite, maybe?"""
        board = self._context.board
        return world is not None and any(board.cell(p.cell)[F.RAISED] == world.generation for p in world.places)

    def _clean(self, world: World, rewind: bool) -> None:
        engine, context = self._engine, self._context
        engine.registry.drain(world.generation)  # an old collective may be of a buffer that is rewound now
        if rewind:
            engine.reducers.forget()
            engine.state.set_grads([False] * len(engine.state.params), None)
            if world.resume == engine.step:
                engine.state.rewind_buffers()
        self._answer_once(F.CLEANED, world.generation)
        if context.stop_pending():
            raise Interrupt

    def _reset(self, world: World) -> None:
        engine, context = self._engine, self._context
        engine.fire("reset", engine.step)
        context.settled(world.generation)
        self._answer_once(F.READY, world.generation)
        engine.registry.rebuild(world, lambda: self._reset_reducers(world.resume))
        self._answer_once(F.RESET, world.generation)
        if engine.reducers.agree(world.resume):
            self._reset_reducers(world.resume)

    def _answer_once(self, stage: int, generation: int) -> None:
        """A replacement that met the others ahead of time has answered some of them then."""
        if self._context.cell[stage] < generation:
            self._context.answer(stage, generation)

    def _reset_reducers(self, resume: int) -> None:
        if not self._engine.reducers.reset(resume):
            self._engine.note_inexact(Inexact.DDP_LAYOUT)

    def _await(self, world: World, stage: int) -> None:
        """Wait for every rank of the world. Raises Interrupt when it is stopped: the launcher sets the deadline."""
        context = self._context
        while not context.wait_until(lambda: world.everyone(context.board, stage), 3600.0):
            pass
