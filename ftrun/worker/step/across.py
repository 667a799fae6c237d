"""The gate of a node among several: proof that all nodes are here, and the comparison of their ranks' checksums.

Theory of operation. A node's word opens gate i when every rank of the world has its gradients of i. Of its own ranks the arrivals on the
board tell. For the others one rank of each node, its first, takes part in an all-reduce of some bytes, which it begins only when all ranks
of its node have arrived: so the all-reduce cannot be complete anywhere before all of them have. It completes on each node by itself.
A node that dies in between may have opened a gate that another did not, but never two (docs/design/protocol.md).

Where spare nodes wait, each node first gives the slots of its ranks to the next one (ftrun/worker/repair/mirrors.py).

The numbers that go round say whether all nodes are at the same gate, whether some rank has made a checksum for it, which host snapshot
every rank has, so that nobody overwrites it, and, where spare nodes wait, whether all nodes have made their copies of it. If there are
checksums, all are gathered and compared before any word opens. Every node judges the same checksums, so where a rank is corrupt no word
opens before it is replaced.
"""

from __future__ import annotations

import itertools

import torch

from ftrun.core.amounts import count
from ftrun.core.errors import UsageError
from ftrun.core.shared.board import Busy, F, Head, snapshots_of
from ftrun.core.shared.replicas import SumRow, sum_row
from ftrun.worker.comm import among_nodes
from ftrun.worker.comm.process_group import SwapGroup
from ftrun.worker.link.observer import Observers
from ftrun.worker.link.run_link import Context
from ftrun.worker.repair.mirrors import Mirrors
from ftrun.worker.step.same_gate import KINDS, WORDS, not_together

_KIND_BITS = int(KINDS).bit_length()
_NOTHING = SumRow(-1, 0, 0, 0, trusted=False)
_SIGN = 1 << 63  # a word of the board has 64 bits without a sign, a tensor's number has one


def all_here(context: Context, nodes: SwapGroup, observers: Observers, number: int, mirrors: Mirrors | None = None) -> bool:
    """Wait until every rank of every node has arrived at gate `number`; False: the world was stopped first, or has to be.

    Raises:
        UsageError: If another node is at another gate, or at another kind of gate.
        Exception: Whatever an observer raises.
    """
    board = context.board
    mine = [sum_row(cell, number) for cell in context.cells()]
    place = number << _KIND_BITS | context.cell[F.BUSY] & KINDS
    kept = max(snapshots_of(context.cells()), default=-1) if context.snapshot_every else -1
    need = mirrors.collect() if mirrors is not None else 0
    copied = board[Head.SNAPSHOT] if board[Head.COPIES_AT] == board[Head.SNAPSHOT] else 0
    while True:
        if mirrors is not None and not mirrors.exchange(nodes):
            return False
        found = among_nodes.greatest(nodes, [place, -place, int(any(mine)), need, -kept, -copied][: 5 if mirrors is None else 6])
        if found is None:
            return False
        if mirrors is None or not mirrors.again(found[3]):
            break
    furthest, last, some = found[0], -found[1], found[2]
    if mirrors is not None:
        board[Head.COPIED] = -found[5]
    board.show_snapshot(-found[4])
    if furthest != last:
        kinds = [Busy(at & KINDS) for at in (last, furthest)]
        ahead = (furthest >> _KIND_BITS) - (last >> _KIND_BITS)
        where = ", ".join(f"one {WORDS[kind]}" for kind in kinds) if kinds[0] is not kinds[1] else f"one is {count(ahead, 'gate')} ahead"
        raise UsageError(not_together("nodes", where))
    if not some:
        return True
    rows = _gathered(context, nodes, mine)
    return rows is not None and observers.sums_gathered(number, rows)


def _gathered(context: Context, nodes: SwapGroup, mine: list[SumRow | None]) -> list[SumRow] | None:
    """Return the checksums of all ranks that made one; None: the world was stopped."""
    world = context.world
    assert world is not None and world.span is not None
    firsts = (*world.span.firsts, world.span.size)
    counts = [after - first for first, after in itertools.pairwise(firsts)]
    padded = [row or _NOTHING for row in mine] + [_NOTHING] * (max(counts) - len(mine))
    numbers = torch.tensor([[word - _SIGN for word in row[1:]] for row in padded], dtype=torch.int64, device="cpu")
    found = among_nodes.gathered(nodes, numbers)
    if found is None:
        return None
    rows = []
    for first, size, those in zip(firsts, counts, found.tolist(), strict=False):
        for rank, row in enumerate(those[:size], first):
            replicas, value, python, trusted = (word + _SIGN for word in row)
            if replicas:
                rows.append(SumRow(rank, replicas, value, python, bool(trusted)))
    return rows
