"""Impolite kills: a process outside ftrun SIGKILLs random ranks at random microseconds; every run must end equal.

    python tests/e2e/chaos.py [--kills 300] [--seed S]

Prints the seed of each run, then a histogram of the phase in which each victim was (read from the board just before the
kill). Exit code 0 when every run ended on the digests of stock torchrun and at least --least kills fell into each
phase. A seed fixes the victims and pauses, not what the machine does meanwhile: a failed run keeps its folder.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ftrun.core import gate
from ftrun.core.board import Board, F, Head, Phase
from ftrun.core.world import read_world
from tests.e2e import harness

ARGUMENTS = ["--steps", "160"]
STEPS = 160
STRETCH = "0.003"
WANTED = (Phase.FORWARD, Phase.BACKWARD, Phase.GATE, Phase.UPDATE, Phase.IDLE)
SHOWN = {Phase.DONE: Phase.IDLE}  # the short time between two bodies has two names
AGAIN = 0.15  # how often the next kill does not wait for the recovery from this one


class Killer:
    """Kills ranks of one run until enough died or the loop is about to end."""

    def __init__(self, running: harness.Running, kills: int, seed: int) -> None:
        self.running = running
        self.dice = random.Random(seed)
        self.left = kills
        self.histogram: collections.Counter[str] = collections.Counter()
        self.run_dir = running.run_dir()
        self.board = Board.open(self.run_dir / "board")

    def last(self) -> int:
        """The last opened gate."""
        return gate.unpack(self.board.gate()).last

    def wait_for_gate(self, number: int) -> bool:
        """Until gate `number` was opened; False when the run ended before."""
        deadline = time.monotonic() + 60
        while self.last() < number:
            if self.running.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                return False  # the wait for the run's end reports what hangs
            time.sleep(0.0005)
        return True

    def kill(self) -> bool:
        """Kill one random rank; False when there is none to kill."""
        published = self.board[Head.PUBLISHED]
        try:
            world = read_world(self.run_dir, published)
        except FileNotFoundError:
            return False
        rank = self.dice.randrange(world.size)
        cell = self.board.cell(world.cell_of(rank))
        pid, phase = cell[F.PID], cell.phase
        if not pid or cell[F.EXITED] or cell[F.FENCED]:
            return False
        recovering = gate.unpack(self.board.gate()).closed  # read first: the launcher closes it 0.1 ms later
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.histogram["recovery" if recovering else SHOWN.get(phase, phase).name.lower()] += 1
        return True

    def run(self) -> None:
        at = 0
        while self.left and self.wait_for_gate(at) and self.last() < STEPS - 6:
            pause = self.dice.random() * self.dice.choice((0.03, 0.06))
            end = time.monotonic() + pause
            while time.monotonic() < end:  # a sleep would round the microseconds
                pass
            if self.kill():
                self.left -= 1
            wait = self.dice.random() >= AGAIN
            at = self.last() + self.dice.randint(1, 3) if wait else self.last()


def main() -> int:
    parser = argparse.ArgumentParser(description="Random SIGKILLs from outside; all runs must end equal.")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--per-run", type=int, default=30)
    parser.add_argument("--least", type=int, default=10, help="kills wanted in each phase")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ftrun-chaos-"))
    print(f"chaos: seed {args.seed}, {args.kills} kills, folder {root}", flush=True)
    reference = harness.torchrun(root / "torchrun", ARGUMENTS)
    reference.need()
    total: collections.Counter[str] = collections.Counter()
    bad: list[int] = []
    number = 0
    most = 3 * (args.kills // args.per_run + 1)

    def enough() -> bool:
        wanted = min(args.least, args.kills // 10)
        return total.total() >= args.kills and all(total[p.name.lower()] >= wanted for p in WANTED)

    while not enough() and number < most:
        seed = args.seed + number
        number += 1
        folder = root / f"run-{seed}"
        command = harness.ftrun_command(
            folder, [*ARGUMENTS, "--stretch", STRETCH], spares=2, options=["--max-replacements", "100000"]
        )
        running = harness.start(folder, command)
        left = args.kills - total.total()
        killer = Killer(running, min(args.per_run, left) if left > 0 else args.per_run, seed)
        killer.run()
        total += killer.histogram
        verdict = "equal"
        try:
            outcome = harness.finish(running, timeout=120)
            found = harness.differences(reference, outcome)
            harness.check_no_strays(folder)
        except AssertionError as error:
            found = [str(error)]
        if found:
            bad.append(seed)
            verdict = "FAILED\n" + "\n".join(found[:8])
        else:
            shutil.rmtree(folder)
        kinds = ", ".join(f"{k} {v}" for k, v in sorted(killer.histogram.items()))
        print(f"seed {seed}: {killer.histogram.total()} kills ({kinds}): {verdict}", flush=True)

    print("\nkills by phase of the victim")
    for name, count in total.most_common():
        print(f"  {name:9s} {count:4d} {'#' * (count * 50 // max(total.values()))}")
    good = enough() and not bad
    print(f"{total.total()} kills in {number} runs, {len(bad)} runs not equal{f' (seeds {bad})' if bad else ''}")
    if good:
        with contextlib.suppress(OSError):
            shutil.rmtree(root)
    elif not bad:
        print("too few kills in some phase, or in all")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
