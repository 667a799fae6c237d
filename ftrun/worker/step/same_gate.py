"""Check that all ranks are at the same kind of gate: a rank that made a call or a step that the others did not is an error."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ftrun.core.errors import UsageError
from ftrun.core.shared import gate
from ftrun.core.shared.board import Busy, Cell, F, Phase
from ftrun.core.text import ranks
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.link.run_link import Context

_TOGETHER = 0.3  # seconds that the other ranks get to follow the first one, so that the message names them all
KINDS = Busy.AT_LOOP_END | Busy.AT_CALL_END
WORDS = {
    0: "in a step",
    Busy.AT_LOOP_END: "at the end of the loop",
    Busy.AT_CALL_END: "at the end of a job.call between two loops",
}


class SameGate(StepObserver):
    """Compares the ranks' gates when all have arrived, and are still there, and while one waits at the end of a loop or call."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._since: float | None = None  # when this rank first saw another one elsewhere

    def waiting(self, number: int) -> None:
        """Check, at the end of a loop or call, that no other rank is in the body of a step with this number or a later one.

        Raises:
            UsageError: If one stays there.
        """
        context = self._context
        here = context.cell[F.BUSY] & KINDS
        if not here:
            return
        ahead = [cell.rank or 0 for cell in context.cells() if _body_of(cell) >= number]
        self._since = (self._since or time.monotonic()) if ahead else None
        if self._since is not None and time.monotonic() - self._since >= _TOGETHER and self._is_shut(number):
            raise UsageError(_sentence({here: [context.rank], 0: ahead}))

    def may_open(self, number: int) -> bool:
        """Raises UsageError, on each rank that would open the gate, if the ranks' gates differ in kind."""
        if len({words[F.BUSY] & KINDS for words in self._context.words_of_ranks}) < 2:
            return True
        if not self._is_shut(number):
            return False  # another rank has opened it, and the first ones went on
        found: dict[int, list[int]] = {}
        for cell in self._context.cells():
            found.setdefault(cell[F.BUSY] & KINDS, []).append(cell.rank or 0)
        raise UsageError(_sentence(found))

    def _is_shut(self, number: int) -> bool:
        return gate.verdict(self._context.board.gate(), self._context.generation, number) == gate.WAIT


def _body_of(cell: Cell) -> int:
    """Return the gate number of the step whose body a rank is in, before its gate; -1: in none."""
    step, shift, phase = cell[F.STEP], cell.shift, cell.phase
    within = phase in (Phase.FORWARD, Phase.BACKWARD) and cell[F.STEP] == step
    return step - 1 - shift if within else -1


def _sentence(found: Mapping[int, Sequence[int]]) -> str:
    return not_together("ranks", ", ".join(f"{ranks(those)} {WORDS[Busy(kind)]}" for kind, those in found.items()))


def not_together(what: str, where: str) -> str:
    """Word the error of ranks or nodes (`what`) that are at different gates."""
    return f"the {what} are not at the same place of the script: {where}; every rank makes the same steps and the same job.call"
