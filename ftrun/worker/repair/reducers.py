"""DDP's reducer: its bucket layout decides the order of summation, so it must be a function of the resume step.

DDP lays its buckets out anew after the first synchronized backward, by the order in which rank 0's gradients became ready. ftrun
records that order. After a recovery beyond that step every rank resets its reducer and *primes* it: one backward of zeros per
parameter in the recorded order, with collectives switched to local, then the reducer lays its buckets out as an uninterrupted
run did. After a recovery before that step every rank only resets, and torch lays the buckets out later as it would have.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftrun.core.errors import UsageError
from ftrun.core.system import files
from ftrun.worker.comm.process_group import Registry
from ftrun.worker.torch_compat import torch_private


class Reducers:
    """The reducers of every DDP module of this rank."""

    def __init__(self, modules: list[torch.nn.Module], registry: Registry) -> None:
        self._registry = registry
        self._each: list[_One] = []
        self.recording = True  # some order is not complete yet
        of_group: Counter[str] = Counter()
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                _refuse(module)
                key = str(module.process_group.key)
                self._each.append(_One(module, f"{zlib.crc32(key.encode()):08x}-{of_group[key]}", registry))
                of_group[key] += 1

    def record(self) -> None:
        """Record the order of gradients from now on, until one backward is complete."""
        for one in self._each:
            one.record()

    def facts(self) -> list[Any]:
        """Return, for the manifest, each DDP module's order and the gate step that completed it, or None."""
        return [one.fact for one in self._each]

    def load(self, facts: list[Any] | None) -> None:
        """Take the facts of a manifest; None: no order was complete when it was written."""
        for one, fact in zip(self._each, facts or [None] * len(self._each), strict=True):
            one.fact = fact
            if fact is None:
                one.order.clear()
                one.record()
        self.recording = True  # until `commit` knows better

    def commit(self, step: int) -> bool:
        """Keep the orders that became complete in a step that is over for good. Return True if there are any."""
        fresh = any([one.commit(step) for one in self._each])
        self.recording = any(one.fact is None and one.rebuilds for one in self._each)
        return fresh

    def forget(self) -> None:
        """Drop what the step in flight recorded: it is done again."""
        for one in self._each:
            one.order.clear()

    def agree(self, resume: int) -> bool:
        """Take rank 0's order, as an uninterrupted run does when it rebuilds. Raises Interrupt if the world is stopped.

        The ranks ask only in the step in which DDP rebuilds: later they read the order that rank 0 has published, unless it is on another
        node.
        Return True if this rank had primed with another order and must reset again.
        """
        self._registry.calling += 1
        try:
            return any([one.agree(resume) for one in self._each])
        finally:
            self._registry.calling -= 1

    def reset(self, resume: int) -> bool:
        """Bring every reducer to the layout of an uninterrupted run at gate step `resume`. Return False if that is not certain."""
        exact = True
        for one in self._each:
            exact = one.reset(resume) and exact
        return exact

    def refuse_hooks(self) -> None:
        """Refuse what cannot be recovered, such as a communication hook registered after protect().

        Raises:
            UsageError
        """
        for one in self._each:
            _refuse(one.ddp)


class _One:
    """One DDP module. `fact` is [order, gate step that completed it]."""

    def __init__(self, ddp: Any, name: str, registry: Registry) -> None:
        self.ddp = ddp
        self._name = name  # the same on every rank of the module's group
        self._registry = registry
        self.params: list[torch.nn.Parameter]
        self.params, self._sparse = torch_private.params_of_reducer(ddp)
        self.order: list[int] = []
        self.fact: list[Any] | None = None
        self._laid_out = False  # the buckets have left the layout of DDP's constructor
        self._handles: list[Any] = []
        self.rebuilds = not ddp.find_unused_parameters

    def record(self) -> None:
        if not self.rebuilds or self._handles:
            return
        for index, param in enumerate(self.params):
            self._handles.append(param.register_post_accumulate_grad_hook(self._hook(index)))

    def _hook(self, index: int) -> Any:
        def ready(_: torch.Tensor) -> None:
            if self.ddp.require_backward_grad_sync and len(self.order) < len(self.params):
                self.order.append(index)

        return ready

    def stop_recording(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def commit(self, step: int) -> bool:
        if self.fact is not None:
            return False
        if len(self.order) < len(self.params):
            self.order.clear()
            return False
        self.fact = [list(self.order), step]
        self._publish()
        self.stop_recording()
        return True

    def agree(self, resume: int) -> bool:
        if not self.rebuilds or self.fact is None or resume <= self.fact[1]:
            return False
        if resume > self.fact[1] + 1 and not self._spans():
            return False
        # the others add zeros: unlike a broadcast, a sum lets no rank go on before all are here
        mine = self.fact[0]
        order = torch.tensor(mine, dtype=torch.int64)
        if self.ddp.process_group.rank() != 0:
            order.zero_()
        self.ddp.process_group.allreduce([order], dist.AllreduceOptions()).wait()
        self.fact[0] = order.tolist()
        self._publish()
        return bool(mine != self.fact[0])

    def _path(self) -> Path:
        context = self._registry.context
        attempt = context.world.attempt if context.world else 0
        return context.run_dir / f"order-{attempt}-{self._name}.json"

    def _publish(self) -> None:
        """Publish the order of rank 0 of this module's group in the run directory, before that rank enters another step."""
        if self.fact is not None and self.ddp.process_group.rank() == 0:
            files.replace(self._path(), json.dumps(self.fact[0]), private=True)

    def _spans(self) -> bool:
        """May rank 0 of this module's group be on another node, where it publishes nothing for this one?"""
        world = self._registry.context.world
        return world is not None and world.span is not None

    def _read(self) -> bool:
        """Take the published order; return False if there is none."""
        assert self.fact is not None
        try:
            self.fact[0] = json.loads(self._path().read_text())
        except (OSError, ValueError):
            return False
        return True

    def reset(self, resume: int) -> bool:
        self._laid_out = self._laid_out or torch_private.has_rebuilt(self.ddp)
        torch_private.reset_reducer(self.ddp)
        if not self.rebuilds:
            return True
        if self.fact is None or resume <= self.fact[1]:
            return not self._laid_out
        # in the first step after the recorded one, and on several nodes, the ranks ask rank 0 (see `agree`)
        exact = resume == self.fact[1] + 1 or self._read() or self._spans()
        with _local(self._registry), _silent(self.params):
            self._prime(self.fact[0])
        self._laid_out = True
        return exact

    def _prime(self, order: list[int]) -> None:
        grads = [p.grad for p in self.params]
        for param in self.params:
            param.grad = None
        self.ddp.reducer.prepare_for_forward()
        self.ddp.reducer.prepare_for_backward([])
        with torch.enable_grad(), torch_private.signals_in_backward():
            for index in order:
                _backward_of_zeros(self.params[index], self._sparse[index])
        torch_private.rebuild_buckets(self.ddp)
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad


def _backward_of_zeros(param: torch.nn.Parameter, sparse: bool) -> None:
    """Make the parameter's gradient ready; `sparse`: the reducer expects a sparse one, as of some embeddings."""
    if sparse:
        nothing = torch.empty(0, dtype=torch.int64, device=param.device)
        torch.nn.functional.embedding(nothing, param, sparse=True).sum().backward()
    else:
        param.view_as(param).backward(torch.zeros_like(param))


def _refuse(ddp: Any) -> None:
    if ddp.static_graph:
        raise UsageError(
            "DistributedDataParallel(static_graph=True) cannot be recovered exactly; use static_graph=False"
        )
    if torch_private.is_joined(ddp):
        raise UsageError(
            "torch.distributed.algorithms.Join lets ranks take different numbers of steps, and ftrun repairs a step that every rank takes: "
            "give all ranks as many batches (DistributedSampler pads; drop_last=True), or run the script without protect()",
            explain="F397",
        )
    if torch_private.comm_hooks(ddp):
        raise UsageError("DDP communication hooks keep state that ftrun cannot rewind; remove register_comm_hook", explain="F315")
    if ddp.mixed_precision is not None:
        raise UsageError("DistributedDataParallel(mixed_precision=...) uses a communication hook; use torch.autocast", explain="F315")


@contextmanager
def _local(registry: Registry) -> Iterator[None]:
    registry.local = True
    try:
        yield
    finally:
        registry.local = False


@contextmanager
def _silent(params: list[torch.nn.Parameter]) -> Iterator[None]:
    """Remove the user's tensor hooks while the body runs."""
    saved = []
    for param in params:
        for hooks in torch_private.hooks_of(param):
            saved.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, content in saved:
            hooks.update(content)
