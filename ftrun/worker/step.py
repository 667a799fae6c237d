"""One step of the loop: `with step:` is the body, and everything that can go wrong in it is handled on the way out."""

from __future__ import annotations

import os
import signal
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ftrun.core.errors import UsageError
from ftrun.worker.runtime.exception_report import report_exception
from ftrun.worker.runtime.run_link import Interrupt

if TYPE_CHECKING:
    from ftrun.worker.engine import Engine


class Step:
    """Handed out by `Job.steps` and `Job.batches`.

    `index`: the step, from 0. `attempt`: how often it was done again. `committed`: the update of this step is part of the
    model (test it in code after the `with`). `generation`: of the world it ran in.
    """

    def __init__(self, index: int, gate_number: int = -1, engine: Engine | None = None) -> None:
        self.index = index
        self.attempt = engine.attempt if engine else 0
        self.committed = False
        self._gate = gate_number
        self._engine = engine
        self._entered = False
        self._updated = False
        self.let_out = False  # an exception left the body: nobody may go on from here
        self._modes: tuple[Any, ...] = ()

    @property
    def generation(self) -> int:
        """Number of the world this step runs in; 0 outside ftrun."""
        return self._engine.context.generation if self._engine else 0

    @property
    def entered(self) -> bool:
        return self._entered

    def __enter__(self) -> Step:
        if self._entered:
            raise UsageError(f"step {self.index} was entered twice; take a new one from the loop")
        self._entered = True
        engine = self._engine
        if engine is None:
            return self
        if engine.context.in_body:
            raise UsageError(f"`with step` inside the body of step {engine.index_of(engine.step)}; bodies do not nest")
        self._modes = _thread_modes()
        engine.begin(self._gate)
        engine.current = self
        return self

    def optimizer_steps(self, optimizer: Any) -> None:
        """A protected optimizer is about to update: the first one in a body arrives at the gate."""
        engine = self._engine
        if engine is not None and not engine.passed:
            engine.pass_gate(self._gate, optimizer)
            self._updated = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        engine = self._engine
        if engine is None:
            self.committed = kind is None
            return False
        self.let_out = True  # also what `_leave` raises leaves the body
        try:
            aborted = self._leave(engine, error)
            self.let_out = error is not None and not aborted
            return aborted
        finally:
            engine.current = None

    def _leave(self, engine: Engine, error: BaseException | None) -> bool:
        try:
            if not engine.passed:  # else the gate has seen to it
                engine.context.forbid_interrupts()
            if error is None:
                if not engine.passed:
                    engine.pass_gate(self._gate)
                engine.complete(self._gate, self._updated)
                self.committed = True
                return False
        except Interrupt as interrupt:
            error = interrupt
        except Exception as failure:
            engine.leave()
            report_exception(engine.context, failure, "body")
            raise
        _restore_modes(self._modes)
        if isinstance(error, Interrupt):
            if engine.passed:
                # the update is half done and cannot be undone: a replacement takes it from a replica
                os.kill(os.getpid(), signal.SIGKILL)
            engine.leave()
            return True
        if isinstance(error, Exception) and engine.raised(error):
            engine.leave()
            return True
        engine.leave()
        return False


def _thread_modes() -> tuple[Any, ...]:
    """torch's settings of this thread that an interrupted `with` of the body may leave behind."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
    )


def _restore_modes(modes: tuple[Any, ...]) -> None:
    grad, cpu, cpu_type, cuda, cuda_type = modes
    torch.set_grad_enabled(grad)
    torch.set_autocast_enabled("cpu", cpu)
    torch.set_autocast_dtype("cpu", cpu_type)
    torch.set_autocast_enabled("cuda", cuda)
    torch.set_autocast_dtype("cuda", cuda_type)
    torch.clear_autocast_cache()
