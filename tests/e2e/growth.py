"""One run with many repairs: nothing may become more with each of them.

Two ranks are struck in turns, the other two survive all of it. After the 10th repair the survivors' and ftrun's own processes' file
descriptors and threads are counted, and the files in the run directory; then again after every further ten.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ftrun.core.shared.board import F
from tests.e2e import harness, soaked, strikes

EACH = 10  # repairs between two counts
LOOK = 1.5  # seconds of a count: what comes and goes is left out
STEPS_A_REPAIR = 15
FREEZE_EVERY = 5
SURVIVORS = (0, 1)
Counts = dict[str, int]


class Growing(strikes.Watched):
    def __init__(self, running: harness.Running) -> None:
        super().__init__(running)
        self.repairs = 0
        self.rows: dict[int, Counts] = {}
        self.files: dict[int, set[str]] = {}  # in the run directory, after so many repairs

    def repair(self, dice: random.Random) -> None:
        """Strike a rank, and wait until its replacement has done a step and there is a spare again."""
        rank = harness.RANKS - 1 - self.repairs % 2
        old = self._pid(rank)
        frozen = self.repairs % FREEZE_EVERY == FREEZE_EVERY - 1
        time.sleep(dice.random() * 0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(old, signal.SIGSTOP if frozen else signal.SIGKILL)
        self.until(lambda: self._pid(rank) not in (0, old) and not self.closed(), f"a new rank {rank}")
        at = self.last()
        self.until(lambda: self.last() >= at + 2 and not self.closed(), f"gate {at + 2}")
        self.until(self.spares, "a spare", every=0.02)
        self.repairs += 1

    def _pid(self, rank: int) -> int:
        world = self.world()
        return self.board.cell(world.cell_of(rank))[F.PID] if world else 0

    def count(self) -> Counts:
        """The least of each number that is seen for a while."""
        least: Counts = {}
        end = time.monotonic() + LOOK
        while time.monotonic() < end:
            self.files[self.repairs] = self._files()
            for name, number in self._now().items():
                least[name] = min(number, least.get(name, number))
            time.sleep(0.05)
        return least

    def _files(self) -> set[str]:
        return {os.path.relpath(os.path.join(at, name), self.run_dir) for at, _, names in os.walk(self.run_dir) for name in names}

    def more_files(self) -> list[str]:
        """Those that came after the first count and were there at the last, without the cells' own."""
        first, last = self.files[min(self.files)], self.files[max(self.files)]
        return [f"in the run directory: {name}" for name in sorted(last - first)]

    def _now(self) -> Counts:
        who = {"launcher": self.running.process.pid, **{f"rank {rank}": self._pid(rank) for rank in SURVIVORS}}
        for service, title in strikes.SERVICES.items():
            for pid in self.named(title):
                who[service] = pid
        found = {"files in the run directory": len(self._files())}
        for name, pid in who.items():
            for what, folder in (("fds", "fd"), ("threads", "task")):
                with contextlib.suppress(OSError):
                    found[f"{what} of {name}"] = len(os.listdir(f"/proc/{pid}/{folder}"))
        return found


def table(rows: dict[int, Counts]) -> list[str]:
    """A line for each number, a column for each count."""
    lines = [f"{'after repair':30s}" + "".join(f"{n:>6d}" for n in rows)]
    for name in sorted({name for counts in rows.values() for name in counts}):
        lines.append(f"{name:30s}" + "".join(f"{counts.get(name, '-'):>6}" for counts in rows.values()))
    return lines


def grown(rows: dict[int, Counts]) -> list[str]:
    """What became more after the first count."""
    first, last = rows[min(rows)], rows[max(rows)]
    each = {name: (first[name], last[name]) for name in first if name in last}
    return [f"{name} grew from {a} to {b}" for name, (a, b) in each.items() if b > a]


def run(folder: Path, repairs: int, seed: int, say: Callable[[str], None]) -> tuple[dict[int, Counts], list[str]]:
    """The counts by number of repairs, and what is wrong with the run."""
    program = soaked.ddp(repairs * STEPS_A_REPAIR, stretch=0.006)
    reference = program.plain(folder / "plain")
    leftovers = strikes.Leftovers(folder / "run")
    growing = Growing(leftovers.start(program.command(folder / "run", spares=1)))
    dice = random.Random(seed)
    missed = ""
    try:
        growing.until(lambda: growing.last() >= 2 and growing.spares(), "steps and a spare", every=0.02)
        while growing.repairs < repairs:
            growing.repair(dice)
            if growing.repairs % EACH == 0:
                growing.rows[growing.repairs] = growing.count()
                say(f"{growing.repairs} repairs")
    except strikes.Ended as ended:
        missed = str(ended)
    found = [] if growing.repairs == repairs else [f"{growing.repairs} repairs instead of {repairs} {missed}"]
    hang = strikes.hanging(growing.running, strikes.END + repairs)
    found += [hang] if hang else [*strikes.judged(growing.running, reference), *leftovers.found()]
    grew = grown(growing.rows) if growing.rows else []
    return growing.rows, found + grew + (growing.more_files() if grew else [])
