"""Journals each requested and each fired fault, and carries out drains and device faults.

The desk reads the run directory when the bell rings; the files there are the facts. It decides nothing about recovery.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftrun.core import amounts, paths
from ftrun.core.faults import Fault as Found
from ftrun.core.shared.board import Head
from ftrun.core.system.procfs import process_start
from ftrun.faults import device, oom, requests, trigger
from ftrun.faults.plan import load_plan
from ftrun.host.account import messages
from ftrun.host.base.context import LaunchContext
from ftrun.host.run.whole_job import WholeJob
from ftrun.host.workers.pool import WorkerPool


class FaultDesk:
    """Accounts for the injected faults of one run.

    `on_device` takes messages in the form of the device watcher's, `job` requests to move a rank of another node, or a node, and hears
    of ranks that are drained; None: the run is on one node.
    """

    def __init__(
        self,
        context: LaunchContext,
        pool: WorkerPool,
        on_device: Callable[[dict[str, Any]], None],
        job: WholeJob | None,
    ) -> None:
        settings = context.settings
        self._run_dir = context.run_dir
        self._plan = self._run_dir / paths.FAULT_PLAN if settings.fault_plan else None
        self._board = context.board
        self._pool = pool
        self._note = context.listener.note
        self._log = context.listener.log
        self._on_device = on_device
        self._job = job
        self._others = settings.nodes.most > 1  # other nodes have ranks of this run
        self._seen = 0
        self._requests: set[int] = set()
        self._files: set[str] = set()
        self._nans: dict[
            str, trigger.Firing
        ] = {}  # by file: the firings that may have changed a result
        self._groups: dict[int, Path] = {}  # process -> the memory cgroup made for it
        if settings.random_faults:
            rate, _, seed = settings.random_faults.partition(":")
            self._note("random-faults", rate=float(rate), seed=int(seed), first=0, kind="")

    def look(self) -> None:
        """Journal the requests and firings since the last look, and carry out drains and device faults."""
        if self._board[Head.REQUESTS] != self._seen:
            self._seen = self._board[Head.REQUESTS]
            for request in requests.pending(self._run_dir):
                if request.number not in self._requests:
                    self._requests.add(request.number)
                    self._asked(request)
        try:
            names = {n for n in os.listdir(self._run_dir / trigger.FOLDER) if n.endswith(".json")}
        except FileNotFoundError:
            return
        if names - self._files:
            for firing in trigger.fired(self._run_dir):
                if firing.file not in self._files:
                    self._fired(firing)
            self._files |= names
        self._look_at_nans()
        self._tidy()

    def _look_at_nans(self) -> None:
        """Report each NaN firing whose rank has recorded that it changed nothing."""
        for file, firing in list(self._nans.items()):
            if trigger.was_unfelt(self._run_dir, firing):
                del self._nans[file]
                self._note("unfelt", file=file)
                self._log(messages.unfelt(firing.rank, firing.step, firing.epoch), "warning")

    def _asked(self, request: requests.Request) -> None:
        if request.op == requests.RANDOM:
            self._note(
                "random-faults", rate=request.rate, seed=request.seed, first=request.step or 0, kind=request.kind
            )
            self._log(messages.random_faults(request.rate, request.seed))
        elif request.op == requests.DEVICE:
            requests.take(self._run_dir, request.number)
            self._on_device(device.message(request))
        elif request.op == requests.MOVE:
            requests.take(self._run_dir, request.number)
            if self._job is not None:
                self._job.passes_on(request)
        else:
            self._note("request", request=vars(request))

    def _fired(self, firing: trigger.Firing) -> None:
        self._files.add(firing.file)
        self._note("fault", file=firing.file, fired=vars(firing))
        if firing.kind == "oom":
            self._groups[firing.pid] = Path(firing.detail)
        elif firing.kind == "nan":
            self._nans[firing.file] = firing
        if firing.kind == Found.DRAIN:
            self._drain(firing)
            if self._job is not None:
                self._job.fired(firing)
        elif firing.source != "plan":
            words = messages.injected(firing.kind, firing.rank, firing.phase, firing.step, firing.epoch)
            self._log(words, "warning")

    def _tidy(self) -> None:
        """Remove the memory cgroups of processes that are gone; note the move of a process that lives."""
        for pid, group in list(self._groups.items()):
            if process_start(pid) is not None:
                self._pool.moved(pid)
            elif oom.discard(group):
                del self._groups[pid]

    def _drain(self, firing: trigger.Firing) -> None:
        """Condemn the rank's worker, which stands between two steps and waits for its end."""
        for worker in self._pool.living():
            if worker.pid == firing.pid:
                self._pool.condemn(worker, Found.DRAIN.value, Found.DRAIN, "a person asked for another worker")

    def end(self) -> None:
        """Report the last firings, and the planned or requested faults that did not fire. Call after the run."""
        self.look()
        if self._plan is not None:
            for fault, count in trigger.unfired(load_plan(self._plan), self._run_dir):
                if self._others and fault.rank not in {worker.rank for worker in self._pool.workers.values()}:
                    continue  # it is for a rank of another node
                self._log(f"planned fault did not fire ({amounts.count(count, 'time')} of {fault.times}): {fault}")
                self._note("unfired", fault=str(fault), count=count)
        for request in requests.pending(self._run_dir):
            if request.op != requests.RANDOM:
                self._log(f"requested fault did not fire: {request}")
                self._note("unfired", fault=str(request), count=0)
