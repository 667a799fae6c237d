"""Collectives of ftrun's own between nodes, at a gate: one rank of each node takes part, in a group that the script does not know.

They are no collectives of the script's: no observer hears of them, none is recorded, and a stop of the world ends them without an error.
Where a connection breaks and no stop explains it, this rank makes way. It has arrived, so another node may have opened the gate: it may
neither leave, as with an error, nor pass. Its replacement goes on from its slot of this gate, whatever is decided.
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


def greatest(nodes: SwapGroup, numbers: list[int]) -> list[int] | None:
    """Return the greatest of each of `numbers` over all members, once they have come here; None if the world is stopped before."""
    all_of_them, options = torch.tensor(numbers, device="cpu"), dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return all_of_them.tolist() if _done(nodes, lambda group: group.allreduce([all_of_them], options), all_of_them) else None


def gathered(nodes: SwapGroup, mine: torch.Tensor) -> torch.Tensor | None:
    """Return the tensors of all members, in one with a row for each, once they have come here; None if the world is stopped before.

    `mine`: int64, of the same shape on each.
    """
    found = mine.new_empty((len(nodes.ranks), *mine.shape))
    each = [[*found.unbind()]]
    return found if _done(nodes, lambda group: group.allgather(each, [mine]), found) else None


def passed_on(nodes: SwapGroup, mine: torch.Tensor) -> torch.Tensor | None:
    """Give `mine` to the next member, and return what the one before gives, of the same size; None if the world is stopped before."""
    me, size = nodes.my_rank, len(nodes.ranks)
    given, taken = [0] * size, [0] * size
    given[(me + 1) % size] = taken[(me - 1) % size] = mine.numel()
    found = torch.empty_like(mine)
    done = _done(nodes, lambda group: group.alltoall_base(found, mine, taken, given, dist.AllToAllOptions()), found)
    return found if done else None


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
            if not registry.over:
                context.make_way(f"{_FAILED}: {error}")
        return False
    if context.stop_pending() or registry.over:
        nodes.release(inner.generation + 1)  # the control thread may have been here before this one began
    pending.settle()
    if registry.broken_in is nodes and not context.stop_pending():
        context.make_way(f"{_FAILED}: {registry.broken}")
    return pending.succeeded and not context.stop_pending()


_FAILED = "the connection with another node failed at the gate, and nothing explains it"
