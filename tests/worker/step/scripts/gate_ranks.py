"""Ranks that do nothing but pass gates on a board of their own; writes down how often each slept at each gate.

    python gate_ranks.py FOLDER RANKS GATES LATE CORES...

All of it on so many cores, and again on the next number of them. In each gate another rank is the last: it arrives `LATE` seconds after it
has seen all others there. FOLDER/CORES-RANK.json holds, for each gate, how often the rank's thread gave its core up from the arrival to the
pass, and how often it was asked whether the gate may open.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from ftrun import native
from ftrun.core import paths
from ftrun.core.shared import gate
from ftrun.core.shared.board import Board, F
from ftrun.core.shared.world import Place, World
from ftrun.host.run import gates
from ftrun.worker.comm.process_group import Registry
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.link.run_link import Context
from ftrun.worker.repair.kit import Kit
from ftrun.worker.step.gate import Gate
from ftrun.worker.step.same_gate import SameGate

_GENERATION = 1


class Asked(StepObserver):
    """How often this rank was asked whether the gate may open."""

    def __init__(self) -> None:
        self.times = 0

    def may_open(self, number: int) -> bool:
        self.times += 1
        return True


def rank(folder: Path, out: Path, me: int, world: World, gates_wanted: int, late: float) -> None:
    context = Context(folder, me)
    context.world = world
    registry = Registry(context)
    asked = Asked()
    registry.observers.add(SameGate(context), asked)
    nothing: Any = None  # of what a gate does not use
    kit = Kit(context, registry, *[nothing] * 8)
    mine, others = Gate(kit), [cell for cell in context.cells() if cell.index != me]
    found = []
    for number in range(gates_wanted):
        if number % world.size == me:
            there = native.AddressList([cell.field_address(F.ARRIVAL) for cell in others])
            while not native.all_equal64(there, gate.arrival(_GENERATION, number)):
                time.sleep(0.001)
            time.sleep(late)
        asked.times, before = 0, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        assert mine.arrive(number)
        found.append((resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before, asked.times))
    out.write_text(json.dumps(found))


def run(folder: Path, ranks: int, wanted: int, late: float, cores: int) -> int:
    """How many ranks failed."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    board = Board.create(folder / paths.BOARD, ranks)
    gates.reset(board, _GENERATION)
    world = World(_GENERATION, 0, tuple(Place(r, r, r) for r in range(ranks)), "", 0)
    pids = []
    for me in range(ranks):
        pid = os.fork()
        if pid == 0:
            rank(folder, folder / f"{cores}-{me}.json", me, world, wanted, late)
            os._exit(0)
        pids.append(pid)
    return sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


def main() -> int:
    folder, ranks, wanted, late = Path(sys.argv[1]), *map(int, sys.argv[2:4]), float(sys.argv[4])
    everywhere = os.sched_getaffinity(0)
    failed = 0
    for cores in map(int, sys.argv[5:]):
        os.sched_setaffinity(0, everywhere)
        failed += run(folder, ranks, wanted, late, cores)
    return failed


if __name__ == "__main__":
    sys.exit(main())
