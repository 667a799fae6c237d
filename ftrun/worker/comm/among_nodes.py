"""Collectives of ftrun's own between nodes, at a gate: one rank of each node takes part, in a group that the script does not know.

They are no collectives of the script's: no observer hears of them, none is recorded, and a stop of the world ends them without an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ftrun.worker.comm.process_group import SwapGroup
from ftrun.worker.comm.work import Pending
from ftrun.worker.link.position import Interrupt


def greatest(nodes: SwapGroup, number: int) -> int | None:
    """Return the greatest `number` of all members, once they have come here; None if the world is stopped before.

    Raises:
        Exception: The error of a connection that no stop explained.
    """
    numbers, options = torch.tensor([number], device="cpu"), dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return int(numbers) if _done(nodes, lambda group: group.allreduce([numbers], options), numbers) else None


def gathered(nodes: SwapGroup, mine: torch.Tensor) -> torch.Tensor | None:
    """Return the tensors of all members, in one with a row for each, once they have come here; None if the world is stopped before.

    `mine`: int64, of the same shape on each.

    Raises:
        Exception: The error of a connection that no stop explained.
    """
    found = mine.new_empty((len(nodes.ranks), *mine.shape))
    each = [[*found.unbind()]]
    return found if _done(nodes, lambda group: group.allgather(each, [mine]), found) else None


def _done(nodes: SwapGroup, begin: Callable[[Any], Any], result: torch.Tensor) -> bool:
    """Begin a collective, and wait for its end. False: the world was stopped, or the run ends."""
    inner, context, registry = nodes.inner, nodes.context, nodes.registry
    if inner is None or context.stop_pending():
        return False
    try:
        pending = Pending(nodes, inner, begin(inner.group), [result], None, None)
    except RuntimeError as error:
        with contextlib.suppress(Interrupt):
            nodes.await_stop(error)
            raise
        return False
    if context.stop_pending() or registry.over:
        nodes.release(inner.generation + 1)  # the control thread may have been here before this one began
    pending.settle()
    if registry.broken is not None:
        registry.check()
    return pending.succeeded and not context.stop_pending()
