"""Ctrl-C at random moments: in the start-up, in a step, in a repair, after the loop. Every run ends in five seconds, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from ftrun.core.shared.board import F
from tests.e2e import soaked, strikes

WITHIN = 5.0
MOMENTS = ("start-up", "step", "repair", "after the loop")
CODES = {128 + signal.SIGINT, -signal.SIGINT}  # a Python that was hardly there kills itself by the signal
STEPS = 60


@dataclass(frozen=True)
class Interrupt:
    """`part`: of the time that the moment lasts."""

    moment: str
    part: float
    rank: int


def plan(seed: int, number: int) -> list[Interrupt]:
    """The moments in turns, so that few interrupts meet all."""
    dice = random.Random(seed)
    return [Interrupt(MOMENTS[n % len(MOMENTS)], dice.random(), dice.randrange(4)) for n in range(number)]


class Interrupted:
    """One run and its Ctrl-C. `start_up`: how many seconds a run of this machine takes until its first step."""

    def __init__(self, folder: Path, interrupt: Interrupt, start_up: float) -> None:
        self.folder = folder
        self.interrupt = interrupt
        self.start_up = start_up
        self.seconds = 0.0

    def run(self) -> list[str]:
        """What is wrong."""
        leftovers = strikes.Leftovers(self.folder)
        running = leftovers.start(soaked.ddp(STEPS).command(self.folder, spares=1))
        with contextlib.suppress(strikes.Ended):
            if self.interrupt.moment == "start-up":
                time.sleep(self.interrupt.part * self.start_up)
            else:
                self._wait(strikes.Watched(running))
        begun = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGINT)  # a terminal's goes to all of the group
        hang = strikes.hanging(running, 6 * WITHIN)
        self.seconds = time.monotonic() - begun
        if hang:
            return [hang]
        code = running.process.returncode
        found = [] if self.seconds <= WITHIN else [f"the end took {self.seconds:.1f} s"]
        if code not in CODES and not (code == 0 and self.interrupt.moment == "after the loop"):
            found.append(f"exit code {code}")
        return found + leftovers.found(3.0)

    def _wait(self, watched: strikes.Watched) -> None:
        if self.interrupt.moment == "after the loop":
            watched.until(lambda: watched.last() >= STEPS - 1, "the last step")
            time.sleep(self.interrupt.part * 0.3)
            return
        watched.until(lambda: watched.last() >= 3, "a step")
        time.sleep(self.interrupt.part * 0.3)
        if self.interrupt.moment == "repair":
            world = watched.world()
            assert world is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(watched.board.cell(world.cell_of(self.interrupt.rank))[F.PID], signal.SIGKILL)
            watched.until(lambda: watched.closed() or watched.last() >= STEPS - 1, "a repair")
            time.sleep(self.interrupt.part * 0.4)


def start_up(folder: Path) -> float:
    """Seconds from the start of a run to its first step, here and now."""
    leftovers = strikes.Leftovers(folder)
    watched = strikes.Watched(leftovers.start(soaked.ddp(STEPS).command(folder, spares=1)))
    watched.until(lambda: watched.last() >= 0, "a step")
    seconds = time.monotonic() - watched.running.begun
    assert not strikes.hanging(watched.running)
    return seconds
