"""The gate of a step, as one rank passes it: no rank begins an update before every rank has all it needs to finish it.

Theory of operation. The gate is one 64-bit word on the board, (generation, closed, last); `ftrun.core.shared.gate` holds the
rules that move it. Two sides move it, and only by compare-and-swap:

    a rank        (g, open, i-1) -> (g, open, i)      after it saw an arrival (g, i) in the cell of every rank of the world
    the launcher  (g, open, x)   -> (g+1, closed, x)  to stop the world; it never changes x
    the launcher  (g, closed, x) -> (g, open, x)      once every rank has been restored in generation g

A rank at gate i is in one of four states; `Gate.arrive` returns in the last two.

    arrived       its own cell says (g, i), another rank's does not yet: it sleeps on the gate's bell
    all arrived   it has the proof: the observers compare the ranks while the gate is shut, then it swaps
    passed        last >= i, closed or not: an opened gate stays open, so a stop that comes later cannot split the ranks
    stopped       last < i in a newer generation: gate i never opened, so no rank has begun update i; it leaves the body

So both sides read the step to go on with from the same word: last + 1. Any rank may open the gate, without the launcher.
`native.arrive` stores the arrival, fences, and reads all arrivals: of ranks that arrive at once, the last one to fence sees all others.

Tried and rejected. tests/unit/test_gate_exhaustive.py explores every interleaving of up to three ranks, and finds what is wrong
with the first two of these:
- Decide by the gate that each rank notes as passed. A rank that dies between its look at the gate and its note has passed unseen:
  the world applies the step twice.
- Close by a plain store. It overwrites a gate that opened in between: the same.
- Generation and gate in two words. 1 of 120 kills ended on other weights, and nothing reported it.
- Ring at each arrival, or before the opening. It hides the time that a sleeper takes to wake while cores idle; on shared cores the
  woken take the core from the rank that is about to open, find the gate shut, and look at everything twice. Now the last rank to
  arrive opens first and rings once.
- Wait awake before going to sleep: measurements show no gain.

What a gate costs. Every rank waits for the slowest once more than the exchange of gradients makes it wait. With a core for each rank
that is the spread of the ranks' ways from the last gradient to the gate. Where ranks share cores (four on two), a core idles as soon
as fewer ranks are on their way than there are cores, so the wall time of a step grows by more than the processor time spent before
the gate: four ranks of a GPT on two cores paid 5.9 % of a step of 129 ms, two ranks 4.0 % of one of 394 ms. Only less work there
makes it smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ftrun import native
from ftrun.core.errors import WorkerError
from ftrun.core.shared import gate
from ftrun.core.shared.board import Busy, F
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.mirrors import Mirrors
from ftrun.worker.step import across

# seconds between two looks at the gate when no bell rings: each change there rings; for a dead rank the launcher rings
_LOOK = 1.0
_LOOK_BETWEEN = 0.1  # the same at the end of a loop or a call, where other ranks may be in a step: no bell tells that
_LOOK_AGAIN = "look again"  # at the gate's word, which has changed
_ELSEWHERE = "elsewhere"  # another rank asks the other nodes, or has to; or the world was stopped meanwhile
_BETWEEN = Busy.AT_LOOP_END | Busy.AT_CALL_END


class Gate:
    """The gate for one rank: arrivals of all ranks prove that it may open, and any of them opens it."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._observers = kit.observers
        self._arrival = kit.context.cell.field_address(F.ARRIVAL)
        self._arrivals: Any = None  # addresses of the arrivals of this node's ranks
        self._generation = 0  # the world of those arrivals
        self._spans = False  # that world has other nodes
        self._mirrors: Mirrors | None = None  # in it, where spare nodes wait
        self._seal_more: Callable[[int], None] | None = None  # what only mirrors need

    def arrive(self, number: int) -> bool:
        """Arrive at the gate of step `number`. True = passed, False = the launcher stopped the world first.

        Raises:
            WorkerError: If the run ends and the gate cannot open any more.
        """
        context, board, observers = self._kit.context, self._kit.context.board, self._observers
        generation = context.generation
        if self._generation != generation:
            self._arrivals = native.AddressList([cell.field_address(F.ARRIVAL) for cell in context.cells()])
            span = context.world.span if context.world is not None else None
            self._generation, self._spans = generation, span is not None
            self._mirrors = Mirrors(context) if span is not None and span.mirrored else None
            on_gpu = self._mirrors is not None and self._kit.state.arena.memory is not None
            self._seal_more = self._kit.ledger.seal_buffers_on_gpu if on_gpu else None
        if self._seal_more is not None:
            self._seal_more(number)
        wanted = gate.arrival(generation, number)  # with the generation: an arrival in a world that was stopped proves nothing
        complete = native.arrive(self._arrival, wanted, self._arrivals)
        if "arrived" in observers.heard:
            observers.arrived(number)
        ring = complete  # the last one sees all others: it opens the gate, or rings so that they look why it does not open
        while True:
            seen = board.gate_bell.count()  # before the look: a ring after it ends the wait at once
            raw = board.gate()  # the swap fails if it has changed by then: the world was stopped, or another rank was quicker
            verdict = gate.verdict(raw, generation, number)
            if raw >= context.stopped_from and verdict == gate.WAIT:
                self._stands_still(raw)
            elif verdict == gate.WAIT and complete:
                verdict = self._opens(raw, number, wanted)
            if verdict == gate.PASS:
                return True
            if verdict == gate.STOPPED:
                return False
            if verdict == _LOOK_AGAIN:
                continue
            if ring:
                ring = False
                board.gate_bell.ring()
                if verdict != _ELSEWHERE:
                    board.launcher_bell.ring()  # it may have to name a rank whose weights are corrupt
            board.gate_bell.wait(seen, _LOOK_BETWEEN if context.cell[F.BUSY] & _BETWEEN else _LOOK)
            complete = native.all_equal64(self._arrivals, wanted)
            if not complete:
                observers.waiting(number)
            if why := context.cut_short():
                raise WorkerError(why)

    def _stands_still(self, raw: int) -> None:
        """Answer the stop of several nodes: this rank has its gradients, and waits until they decide whether its gate opened."""
        context, stopped = self._kit.context, gate.unpack(raw).generation
        if context.cell[F.STOPPED] < stopped:
            context.answer(F.STOPPED, stopped)

    def _opens(self, raw: int, number: int, wanted: int) -> str:
        """Open the gate, whose word was `raw`, and pass it, since every rank has arrived.

        Of several nodes every rank of this one has: the first of them asks the other nodes, and opens when all have come.

        Raises:
            BaseException: Whatever an observer raises.
        """
        context, board = self._kit.context, self._kit.context.board
        try:
            if not self._observers.may_open(number):
                return gate.WAIT
        except BaseException:
            board.gate_bell.ring()  # so that the others look, and raise the same
            raise
        if self._spans:
            nodes = self._kit.registry.nodes
            if nodes is None or not across.all_here(context, nodes, self._observers, number, self._mirrors):
                return _ELSEWHERE
        new = gate.opened(raw, context.generation, number, (wanted,))
        if new is None:
            return gate.WAIT
        if not board.swap_gate(raw, new):
            return _LOOK_AGAIN  # another rank was quicker, or the launcher stopped the world
        board.show_opening(number, time.monotonic_ns())
        board.gate_bell.ring()
        return gate.PASS
