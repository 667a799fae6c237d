"""DDP's reducer: its bucket layout decides the order of summation, so it must be a function of the resume step.

The order in which gradients became ready in the first synchronized backward is recorded; a new reducer is *primed*
with it (its hooks are called in that order, with collectives switched to local) and rebuilds its buckets as an
uninterrupted run did. A survivor's buckets are laid out that way already, and a reset leaves them so; but a reset reducer
wants to rebuild them after its next backward, by the order that it sees then. So every rank owes a priming after a
recovery, and pays after the step that is done again, when nobody waits for it. A replacement that can read how rank 0's
buckets lie builds a reducer with the same at once: priming would fill every bucket with zeros while all wait for it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftrun.core.errors import UsageError
from ftrun.worker import probe, torch_private
from ftrun.worker.groups import Registry, SwapGroup


class Reducers:
    """The reducers of every DDP module of this rank."""

    def __init__(self, modules: list[torch.nn.Module], registry: Registry) -> None:
        self._registry = registry
        self._each: list[_One] = []
        of_group: Counter[str] = Counter()
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                _refuse(module)
                key = str(module.process_group.key)
                self._each.append(_One(module, f"{zlib.crc32(key.encode()):08x}-{of_group[key]}", registry))
                of_group[key] += 1

    def record(self) -> None:
        """Note the order of gradients from now on, until one backward is complete."""
        for one in self._each:
            one.record()

    def facts(self) -> list[Any]:
        """For the manifest: per DDP module the order and the gate step in which it was complete, or None."""
        return [one.fact for one in self._each]

    def load(self, facts: list[Any] | None) -> None:
        """Take what a manifest says; None: it was written before any order was complete."""
        for one, fact in zip(self._each, facts or [None] * len(self._each), strict=True):
            one.fact = fact
            if fact is None:
                one.order.clear()
                one.record()

    def commit(self, step: int) -> bool:
        """A step is over for good: keep an order that became complete in it. True when there is something new."""
        return any([one.commit(step) for one in self._each])

    def forget(self) -> None:
        """The step in flight is done again: drop what it recorded."""
        for one in self._each:
            one.order.clear()

    def agree(self, resume: int) -> bool:
        """Take rank 0's order, as an uninterrupted run does when it rebuilds. Raises Interrupt when stopped.

        Only in the step in which it rebuilds: later on the order can be read where rank 0 has published it.
        True: this rank had primed with another one and must reset again.
        """
        self._registry.calling += 1
        try:
            return any([one.agree(resume) for one in self._each])
        finally:
            self._registry.calling -= 1

    def reset(self, resume: int) -> bool:
        """Bring every reducer to the layout an uninterrupted run has at gate step `resume`. False: cannot promise it."""
        exact = True
        for one in self._each:
            exact = one.reset(resume) and exact
        return exact

    def pay(self, step: int) -> None:
        """Gate step `step` is handed out: prime what a recovery at an earlier one left unprimed."""
        for one in self._each:
            one.pay(step)


_OWN: list[int] = []  # stands for the layout that torch made itself, from rank 0's order


class _One:
    """One DDP module. `fact` is [order, gate step in which it was complete], `layout` the order of its buckets."""

    def __init__(self, ddp: Any, name: str, registry: Registry) -> None:
        self.ddp = ddp
        self._name = name  # the same on every rank of the module's group
        self._registry = registry
        self.params: list[torch.nn.Parameter]
        self.params, self._sparse = torch_private.params_of_reducer(ddp)
        self.order: list[int] = []
        self.fact: list[Any] | None = None
        self.layout: list[int] | None = None  # None: as DDP's constructor made it, or not known
        self._buckets: list[list[int]] | None = None  # as rank 0 published them
        self._told = False  # it published them, or nobody will
        self._owes = -1  # the resume step of a recovery that left this reducer unprimed, -1 = none
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
            since = step - self.fact[1]
            if self.layout is None and torch_private.has_rebuilt(self.ddp) and since > 0:
                self.layout = _OWN  # torch rebuilt in a forward since, and all collectives of the step were good
            elif self.layout is _OWN and not self._told and since & (since - 1) == 0:
                self._tell_buckets()
            return False
        if len(self.order) < len(self.params):
            self.order.clear()
            return False
        self.fact = [list(self.order), step]
        self._publish()
        self.stop_recording()
        return True

    def agree(self, resume: int) -> bool:
        if not self.rebuilds or self.fact is None or resume != self.fact[1] + 1:
            return False
        # a sum with nothing from the others: unlike a broadcast it lets nobody go on before everyone is here
        order = torch.tensor(self.fact[0], dtype=torch.int64)
        if self.ddp.process_group.rank() != 0:
            order.zero_()
        self.ddp.process_group.allreduce([order], dist.AllreduceOptions()).wait()
        self.fact[0] = order.tolist()
        self._publish()
        return self.layout != self.fact[0]

    def _path(self) -> Path:
        context = self._registry.context
        attempt = context.world.attempt if context.world else 0
        return context.run_dir / f"buckets-{attempt}-{self._name}.json"

    def _publish(self, buckets: list[list[int]] | None = None) -> None:
        """Rank 0 of this module's group leaves its order in the run directory, whole, before it enters another step."""
        if self.fact is not None and self.ddp.process_group.rank() == 0:
            temporary = self._path().with_suffix(".tmp")
            temporary.write_text(json.dumps({"order": self.fact[0], "buckets": buckets}))
            os.replace(temporary, self._path())

    def _tell_buckets(self) -> None:
        """Publish how the buckets lie that torch laid out itself, once it has noted that: in one of its first forwards."""
        self._told = self.ddp.process_group.rank() != 0
        noted = torch_private.noted_by_ddp(self.ddp).get("rebuilt_per_bucket_param_indices")
        if noted and not self._told:
            self._told = True
            with suppress(OSError):  # a replacement can do without
                self._publish([[int(index) for index in bucket.split()] for bucket in noted.split(",")])

    def _read(self) -> bool:
        """Take the published order; False when there is none."""
        assert self.fact is not None
        try:
            published = json.loads(self._path().read_text())
        except (OSError, ValueError):
            return False
        self.fact[0], self._buckets = published["order"], published["buckets"]
        return True

    def reset(self, resume: int) -> bool:
        rebuilt = self.fact is not None and resume > self.fact[1]
        exact = rebuilt or (self.layout is None and not torch_private.has_rebuilt(self.ddp))
        if not exact:
            self.layout, self._told = (
                None,
                True,
            )  # torch will rebuild once more, and may have noted this layout for good
        torch_private.reset_reducer(self.ddp)
        if rebuilt and self.rebuilds and self.fact is not None:
            # in the first step after the recorded one a survivor may or may not have rebuilt, or from garbage
            kept = resume > self.fact[1] + 1
            exact = exact and (not kept or self._read())
            if not kept or (self.layout is not _OWN and self.layout != self.fact[0]):
                self._lay_out(kept)
            self._owes = resume if kept else -1
        return exact or not self.rebuilds

    def pay(self, step: int) -> None:
        _refuse(self.ddp)  # a hook may be registered after protect()
        if 0 <= self._owes < step:
            self._owes = -1
            torch_private.reset_reducer(self.ddp)
            self._prime()

    def _lay_out(self, kept: bool) -> None:
        """Have the buckets of an uninterrupted run; `kept`: as a survivor has them, who owes a priming."""
        if kept and self._build():
            return
        self._prime()
        if kept:
            torch_private.reset_reducer(self.ddp)

    def _build(self) -> bool:
        """A new reducer with the published buckets, which torch's constructor takes the last one first. False: cannot."""
        ddp, buckets = self.ddp, self._buckets or []
        params, sparse = torch_private.params_of_reducer(ddp)
        theirs = sorted(index for bucket in buckets for index in bucket)
        if list(map(id, params)) != list(map(id, self.params)) or theirs != list(range(len(params))):
            return False
        if probe.broken("prime"):
            return False
        if torch_private.make_reducer(ddp, params, sparse, buckets[::-1]) != len(buckets):
            return False
        assert self.fact is not None
        self.layout = self.fact[0]
        return True

    def _prime(self) -> None:
        assert self.fact is not None
        if probe.broken("prime"):
            return
        with _local(self._registry), _silent(self.params):
            self._rebuild(self.fact[0])
        self.layout = self.fact[0]

    def _rebuild(self, order: list[int]) -> None:
        grads = [p.grad for p in self.params]
        for param, sparse in zip(self.params, self._sparse, strict=True):
            param.grad = torch.zeros_like(param, layout=torch.sparse_coo) if sparse else None
        self.ddp.reducer.prepare_for_forward()
        self.ddp.reducer.prepare_for_backward([])
        _announce(torch_private.ready_hook(self.ddp), self.params, order)
        torch_private.rebuild_buckets(self.ddp)
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad


def _announce(hook: Callable[[int], None] | None, params: list[torch.nn.Parameter], order: list[int]) -> None:
    """Have the reducer see every gradient become ready, in this order, inside one backward."""
    with torch.enable_grad():
        if hook is None:
            for index in order:
                params[index].view_as(params[index]).backward(torch.zeros_like(params[index]))
            return
        # the parameters have no gradient, so the buckets are filled with zeros; no gradient is made or copied
        spark = torch.zeros((), requires_grad=True)

        def ready(_: torch.Tensor) -> None:
            for index in order:
                hook(index)

        spark.register_hook(ready)
        (spark * 1.0).backward()


def _refuse(ddp: Any) -> None:
    if not isinstance(ddp.process_group, SwapGroup):
        raise UsageError(
            f'DistributedDataParallel over a "{dist.get_backend(ddp.process_group)}" group, which cannot be rebuilt in place: '
            "make its group by new_group() without a backend"
        )
    if ddp.static_graph:
        raise UsageError(
            "DistributedDataParallel(static_graph=True) cannot be recovered exactly; use static_graph=False"
        )
    if torch_private.comm_hooks(ddp):
        raise UsageError("DDP communication hooks keep state that ftrun cannot rewind; remove register_comm_hook")
    if ddp.mixed_precision is not None:
        raise UsageError("DistributedDataParallel(mixed_precision=...) uses a communication hook; use torch.autocast")


@contextmanager
def _local(registry: Registry) -> Iterator[None]:
    registry.local = True
    try:
        yield
    finally:
        registry.local = False


@contextmanager
def _silent(params: list[torch.nn.Parameter]) -> Iterator[None]:
    """Take the user's tensor hooks away for a while."""
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
