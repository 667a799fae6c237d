"""The Works that a SwapGroup hands out: our own, so that they can be completed when the world stops.

A work of Gloo's cannot be ended from outside: a thread that waits for it waits until the group's timeout. Ours has a future of its
own, which the inner group's end completes, or the control thread 4 ms after a stop; only the first counts. The value does not tell
which of the two it was, so `waited` looks at the gate word before anything uses it.
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

_LET_GO = object()  # the outcome of a wait that the end of its world has cut short


class WorkOwner(Protocol):
    """What a Work needs of the group that handed it out."""

    pending: set[Pending]  # those that are pending

    def ended(self, work: Pending) -> bool:
        """It is complete; False when it was before."""

    def failed(self, work: Pending) -> None:
        """Its inner collective failed: complete it when that is explained, or hold it back."""

    def began_waiting(self, name: str, peer: int) -> None: ...

    def stopped_waiting(self) -> None: ...

    def letting_go(self, work: Direct) -> AbstractContextManager[None]:
        """While it lasts `work` is let go when the world is stopped."""

    def waited(self, since: int, over: bool = False) -> None:
        """The main thread has waited since `since`, ns. Raises Interrupt when the world was stopped."""

    def await_stop(self, error: BaseException) -> None:
        """Wait for a stop that explains `error`, then raise Interrupt."""

    def shown(self, error: Exception) -> None:
        """The script is told of `error` now."""

    def cut_off(self) -> Exception:
        """Why a work that was completed early has no result."""


def _future(tensors: list[torch.Tensor], on_gpu: bool) -> torch.futures.Future[Any]:
    """One that makes whoever waits for it wait for the GPU work behind it, too, if the tensors are there."""
    return torch.futures.Future(devices=sorted({t.device.index for t in tensors if t.is_cuda}) if on_gpu else None)


def _on_gpu(tensors: list[torch.Tensor]) -> bool:
    return any([t.is_cuda for t in tensors])


class FinishedWork(Work):
    """A Work that is done: for collectives that are replayed or skipped."""

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
    """A collective of the inner group, with a future that we can complete."""

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
        self._divide = divide  # what is left to be done with the sum
        self._entry = entry
        self._error: Exception | None = None
        self._complete = False
        self.succeeded = False
        self._on_gpu = bool(result) and result[0].is_cuda and _on_gpu(result)
        self._future = _future(result, True) if self._on_gpu else torch.futures.Future()
        group.pending.add(self)  # before the callback: a collective may be over by now, and its end looks for it there
        try:
            future = work.get_future()
        except RuntimeError:  # Gloo's reduce_scatter has none, and is not done before somebody has waited for it
            inner.when_waited(work, self._ended)
        else:
            future.add_done_callback(self._ended)

    def _ended(self, inner: Outcome | torch.futures.Future[Any]) -> None:
        """The inner collective is over, or is once `value` has returned, which raises when it failed."""
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
        """Why the inner collective failed."""
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
        if timeout is not None and timeout > timedelta(0):  # torch's words for none are 0 and -1 ms
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

    The end of the connections wakes most waits and not all; whoever waits here is let go when the world stops.
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
        self._entry = entry  # in the record of what came before the first step, until somebody has waited
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
        """Wait in this thread, whose stream a work on a GPU is waited for by. Gives what torch gave, or its error."""
        try:
            return self._inner.wait() if timeout is None else self._inner.wait(timeout)
        except RuntimeError as error:
            return error

    def _wait_aside(self, timeout: timedelta | None) -> Any:
        with self._group.letting_go(self):
            self.of.aside(lambda: self._wait_inside(timeout), self._outcomes.put)
            return self._outcomes.get()

    def writes(self) -> bool:
        """May it still write into what it receives into, unless its group is still?"""
        return self._name != "send" and not (self.over or self._on_gpu)

    def let_go(self) -> None:
        """The world stops: whoever waits goes on. From any thread."""
        self._outcomes.put(_LET_GO)

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def _source_rank(self) -> int:
        """The rank in the group that a receive from any source has received from."""
        return torch_private.source_of(self._inner)

    source_rank = _source_rank
