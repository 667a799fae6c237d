"""The Works that a SwapGroup hands out: ftrun's own, so that it can complete them when the world stops.

A work of Gloo's cannot be ended from outside: a thread that waits for it waits until the group's timeout. Ours has its own future.
The end of the inner collective completes it, or the control thread does 4 ms after a stop; only the first counts. The value does not
tell which of the two it was, so `waited` looks at the gate word before anything uses the value.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Work

from ftrun.worker.comm.backend import Inner, Outcome
from ftrun.worker.comm.collective_replay import ReplayEntry
from ftrun.worker.torch_compat import torch_private

_LET_GO = object()  # the outcome of a wait that a stop of the world cut short


class WorkOwner(Protocol):
    """The interface of the group that a Work needs."""

    pending: set[Pending]  # its pending works

    def ended(self, work: Pending) -> bool:
        """Note that the work is complete; return False if it was before."""

    def failed(self, work: Pending) -> None:
        """Complete a work whose inner collective failed if a stop explains that; otherwise hold it back."""

    def began_waiting(self, name: str, peer: int) -> None: ...

    def stopped_waiting(self) -> None: ...

    def letting_go(self, work: Direct) -> AbstractContextManager[None]:
        """Let `work` go if the world is stopped while this context lasts."""

    def waited(self, since: int, over: bool = False) -> None:
        """Count the main thread's wait since `since`, ns. Raises Interrupt if the world was stopped."""

    def await_stop(self, error: BaseException) -> None:
        """Wait for a stop that explains `error`, then raise Interrupt."""

    def shown(self, error: Exception) -> None:
        """Note that `error` is raised in the script now."""

    def cut_off(self) -> Exception:
        """Return the error for a work that was completed early, without a result."""


def _future(tensors: list[torch.Tensor], on_gpu: bool) -> torch.futures.Future[Any]:
    """Make a future; if the tensors are on a GPU, a wait for it also waits for the GPU work behind it."""
    return torch.futures.Future(devices=sorted({t.device.index for t in tensors if t.is_cuda}) if on_gpu else None)


def _on_gpu(tensors: list[torch.Tensor]) -> bool:
    return any([t.is_cuda for t in tensors])


class FinishedWork(Work):
    """A complete Work, for collectives that are replayed or skipped."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._future = _future(result, _on_gpu(result))
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Pending(Work):
    """A collective of the inner group, with a future that ftrun can complete."""

    def __init__(
        self,
        group: WorkOwner,
        inner: Inner,
        work: Any,
        result: list[torch.Tensor],
        divide: Callable[[], None] | None,
        entry: ReplayEntry | None,
    ) -> None:
        super().__init__()
        self._group = group
        self.of = inner  # the inner group that this is a collective of
        self.generation = inner.generation
        self.result_tensors = result
        self._inner = work
        self._divide = divide  # turns the sum into an average
        self._entry = entry
        self._error: Exception | None = None
        self._complete = False
        self.succeeded = False
        self._on_gpu = bool(result) and result[0].is_cuda and _on_gpu(result)
        self._future = _future(result, True) if self._on_gpu else torch.futures.Future()
        group.pending.add(self)  # before the callback: a collective may be over by now, and its end looks for it there
        try:
            future = work.get_future()
        except RuntimeError:  # Gloo's reduce_scatter has none, and does its work in the call that waits for it
            inner.when_waited(work, self._ended)
        else:
            future.add_done_callback(self._ended)

    def _ended(self, inner: Outcome | torch.futures.Future[Any]) -> None:
        """Finish this work when the inner collective ends; `inner.value` waits for that, and raises if it failed."""
        try:
            inner.value()
            if self._on_gpu:
                self._inner.synchronize()  # Gloo's future alone does not stand for its copies back to the GPU
            if self._divide is not None:
                self._divide()
            if self._entry is not None:
                self._entry.store(self.result_tensors)
            self.succeeded = True
        except Exception as error:
            self._error = error
            if self._entry is not None:
                self._entry.fail(error)
        self._inner = self._divide = self._entry = (
            None  # no cycle: the inner group must not wait for the garbage collector
        )
        if self.succeeded:
            self.complete()
        else:
            self._group.failed(self)

    @property
    def error(self) -> Exception | None:
        """The error of the inner collective, if it failed."""
        return self._error

    def settle(self) -> None:
        """Wait for the end, without raising."""
        self._future.wait()

    def complete(self) -> None:
        """Let every waiter go on; only the first call counts."""
        if self._group.ended(self):  # a future that is set twice raises
            self._complete = True
            self._future.set_result(self.result_tensors)

    def inner_is_completed(self) -> bool:
        return self._inner is None or bool(self._inner.is_completed())

    def wait(self, timeout: timedelta | None = None) -> bool:
        begin = time.monotonic_ns()
        if timeout is not None and timeout > timedelta(0):  # for torch, 0 and -1 ms mean no timeout
            self._wait_for(timeout)
        else:
            self._future.wait()
        self._group.waited(begin, over=self.succeeded)
        if self._error is not None:
            self._group.shown(self._error)
            raise self._error
        if not self.succeeded:
            raise self._group.cut_off()
        return True

    def _wait_for(self, timeout: timedelta) -> None:
        over = threading.Event()
        self._future.add_done_callback(lambda _: over.set())
        if not over.wait(timeout.total_seconds()):
            raise RuntimeError(f"Timed out: the collective was not complete after {timeout}")

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._complete

    def is_success(self) -> bool:
        return self._complete and self._error is None

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self.result_tensors


class Direct(Work):
    """A point-to-point Work, which has no future in Gloo: another thread waits in the inner group for it.

    The end of the connections wakes most waits but not all; a stop of the world ends a wait here.
    """

    def __init__(
        self,
        group: WorkOwner,
        inner: Inner,
        work: Any,
        name: str,
        peer: int,
        received: list[torch.Tensor],
        on_gpu: bool,
        entry: ReplayEntry | None,
    ) -> None:
        super().__init__()
        self._group = group
        self.of = inner
        self._inner = work
        self._name = name
        self._peer = peer  # a rank in the world
        self._received = received
        self._on_gpu = on_gpu
        self._entry = entry  # its entry in the record of collectives outside the loops, until it is over
        self._outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        begin = time.monotonic_ns()
        self._group.began_waiting(self._name, self._peer)
        outcome = self._wait_inside(timeout) if self._on_gpu else self._wait_aside(timeout)
        if isinstance(outcome, RuntimeError):
            if self._entry is not None:
                self._entry.fail(outcome)
            try:
                self._group.await_stop(outcome)
            finally:
                self._group.stopped_waiting()
            raise outcome
        self._group.stopped_waiting()
        if outcome is not _LET_GO:
            self.over = True
            entry, self._entry = self._entry, None
            if entry is not None:
                entry.store(self._received)
        self._group.waited(begin)
        if outcome is _LET_GO:
            raise self._group.cut_off()
        return bool(outcome)

    def _wait_inside(self, timeout: timedelta | None) -> Any:
        """Wait in this thread, whose stream must wait for work on a GPU. Return torch's result, or its error."""
        try:
            return self._inner.wait() if timeout is None else self._inner.wait(timeout)
        except RuntimeError as error:
            return error

    def _wait_aside(self, timeout: timedelta | None) -> Any:
        with self._group.letting_go(self):
            self.of.aside(lambda: self._wait_inside(timeout), self._outcomes.put)
            return self._outcomes.get()

    def writes(self) -> bool:
        """May it still write into the tensors that it receives into, unless its group is still?"""
        return self._name != "send" and not (self.over or self._on_gpu)

    def let_go(self) -> None:
        """End a wait, since the world stops. Any thread may call it."""
        self._outcomes.put(_LET_GO)

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def _source_rank(self) -> int:
        """Return the rank in the group whose message a receive from any source got."""
        return torch_private.source_of(self._inner)

    source_rank = _source_rank
