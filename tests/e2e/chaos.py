"""Impolite kills: a process outside ftrun SIGKILLs ranks, spares and ftrun's own processes; every run must end equal.

    python tests/e2e/chaos.py [--kills 300] [--seed S]

A seed fixes the victims and the pauses before the kills (`plan`), not what the machine does meanwhile. Prints a line for each
run, then the phases in which killed ranks were (read from the board just before). Exit code 0 when every run ended on the
digests of stock torchrun and at least --least kills fell into each phase; a failed run keeps its folder.

tests/e2e/chaos_seeds.json lists the seeds that tests/e2e/test_chaos.py runs each time, with their victims:
`python tests/e2e/chaos.py --table SEED...` prints it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ftrun.core.shared import gate
from ftrun.core.shared.board import Board, F, Head, Phase
from ftrun.core.shared.world import read_world
from tests.e2e import harness

SEEDS = Path(__file__).with_name("chaos_seeds.json")
STEPS = 300
ARGUMENTS = ["--steps", str(STEPS)]
STRETCH = "0.003"
PER_RUN = 30
RANKS = 4
# who dies -> how often, of 100 kills
VICTIMS = {"rank": 74, "spare": 11, "fork server": 5, "store": 5, "fd store": 5}
SERVICES = {"fork server": "ftrun forksrv", "store": "ftrun store", "fd store": "ftrun fd store"}  # and their titles
WANTED = (Phase.FORWARD, Phase.BACKWARD, Phase.GATE, Phase.UPDATE, Phase.IDLE)
SHOWN = {Phase.DONE: Phase.IDLE}  # the short time between two bodies has two names
AGAIN = 0.15  # how often the next kill does not wait for the recovery from this one
SETTLE = 0.5  # seconds that a new service is given to be told what the old one knew
PATIENCE = 60.0


@dataclass(frozen=True)
class Strike:
    """One kill: `rank` counts for a rank, `pause` seconds after a gate opened, `gates` = None does not wait for a gate."""

    victim: str
    rank: int
    pause: float
    gates: int | None


def plan(seed: int, kills: int = PER_RUN) -> list[Strike]:
    """The kills of a run."""
    dice = random.Random(seed)
    strikes = []
    for _ in range(kills):
        victim = dice.choices([*VICTIMS], [*VICTIMS.values()])[0]
        pause = dice.random() * dice.choice((0.03, 0.06))
        strikes.append(
            Strike(victim, dice.randrange(RANKS), pause, dice.randint(1, 3) if dice.random() >= AGAIN else None)
        )
    return strikes


def victims(seed: int, kills: int = PER_RUN) -> dict[str, int]:
    """How many of each kind a seed's run kills."""
    counted = collections.Counter(strike.victim for strike in plan(seed, kills))
    return {name: counted[name] for name in VICTIMS}


class Ended(Exception):
    """The run ended, or what is waited for does not come: the wait for the run's end reports what hangs."""


class Killer:
    """Carries out the plan of a seed on one run, as far as its steps go."""

    def __init__(self, running: harness.Running, strikes: list[Strike]) -> None:
        self.running = running
        self.strikes = strikes
        self.phases: collections.Counter[str] = collections.Counter()  # of killed ranks
        self.killed: collections.Counter[str] = collections.Counter()  # by kind of victim
        self.run_dir = running.run_dir()
        self.board = Board.open(self.run_dir / "board")

    def last(self) -> int:
        """The last opened gate."""
        return gate.unpack(self.board.gate()).last

    def until(self, condition: Callable[[], object]) -> None:
        """Errors: Ended."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.running.process.poll() is not None or time.monotonic() > deadline:
                raise Ended
            time.sleep(0.0005)

    def run(self) -> None:
        at = 0
        with contextlib.suppress(Ended):
            for strike in self.strikes:
                self.until(lambda at=at: self.last() >= at)
                if self.last() >= STEPS - 6:
                    return
                end = time.monotonic() + strike.pause
                while time.monotonic() < end:  # a sleep would round the microseconds
                    pass
                if strike.victim == "rank":
                    self.until(lambda strike=strike: self._kill_rank(strike.rank))
                elif strike.victim == "spare":
                    self.until(self._kill_spare)
                else:
                    self._kill_service(strike.victim)
                self.killed[strike.victim] += 1
                at = self.last() + (strike.gates or 0)

    def _kill_rank(self, rank: int) -> bool:
        """False when there is nobody to kill: the rank is being replaced."""
        try:
            world = read_world(self.run_dir, self.board[Head.PUBLISHED])
        except FileNotFoundError:
            return False
        cell = self.board.cell(world.cell_of(rank))
        pid, phase = cell[F.PID], cell.phase
        if not pid or cell[F.EXITED] or cell[F.FENCED]:
            return False
        recovering = gate.unpack(self.board.gate()).closed  # read first: the launcher closes it 0.1 ms later
        if not _kill(pid):
            return False
        self.phases["recovery" if recovering else SHOWN.get(phase, phase).name.lower()] += 1
        return True

    def _kill_spare(self) -> bool:
        world = read_world(self.run_dir, self.board[Head.PUBLISHED])
        ranks = {self.board.cell(place.cell)[F.PID] for place in world.places}
        found = [pid for pid in harness.strays(self.running.folder) if _name(pid).startswith("ftrun spare")]
        return any(_kill(pid) for pid in found if pid not in ranks)

    def _kill_service(self, service: str) -> None:
        """Kill it and wait for the new one. The fd store only in a healthy run: it holds the memory of the dead."""

        def alive() -> int | None:
            found = (p for p in harness.strays(self.running.folder) if _name(p) == SERVICES[service])
            return next(found, None)

        if service == "fd store":
            healthy = self.last() + 3
            self.until(lambda: self.last() >= healthy and not gate.unpack(self.board.gate()).closed)
        self.until(alive)
        old = alive()
        if old is None or not _kill(old):
            raise Ended
        self.until(lambda: alive() not in (None, old))
        time.sleep(SETTLE)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def run(folder: Path, strikes: list[Strike], reference: harness.Outcome) -> tuple[Killer, list[str]]:
    """One run with its kills; the killer that did them, and what is not as in `reference`."""
    command = harness.ftrun_command(
        folder, [*ARGUMENTS, "--stretch", STRETCH], spares=2, options=["--max-replacements", "100000"]
    )
    killer = Killer(harness.start(folder, command), strikes)
    killer.run()
    try:
        outcome = harness.finish(killer.running, timeout=120)
        found = harness.differences(reference, outcome)
        harness.check_no_strays(folder)
    except AssertionError as error:
        found = [str(error)]
    return killer, found


def main() -> int:
    parser = argparse.ArgumentParser(description="Random SIGKILLs from outside; all runs must end equal.")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--least", type=int, default=10, help="kills wanted in each phase")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--table", type=int, nargs="+", metavar="SEED", help="print the victims of seeds, and run nothing"
    )
    args = parser.parse_args()
    if args.table:
        print(json.dumps([{"seed": seed, "kills": PER_RUN, **victims(seed)} for seed in args.table], indent=1))
        return 0
    root = Path(tempfile.mkdtemp(prefix="ftrun-chaos-"))
    print(f"chaos: seed {args.seed}, {args.kills} kills, folder {root}", flush=True)
    reference = harness.torchrun(root / "torchrun", ARGUMENTS)
    reference.need()
    phases: collections.Counter[str] = collections.Counter()
    killed: collections.Counter[str] = collections.Counter()
    bad: list[int] = []
    number = 0

    def enough() -> bool:
        wanted = min(args.least, args.kills // 10)
        return killed.total() >= args.kills and all(phases[p.name.lower()] >= wanted for p in WANTED)

    while not enough() and number < 3 * (args.kills // PER_RUN + 1):
        seed = args.seed + number
        number += 1
        folder = root / f"run-{seed}"
        left = args.kills - killed.total()
        killer, found = run(folder, plan(seed)[: left if 0 < left < PER_RUN else PER_RUN], reference)
        phases += killer.phases
        killed += killer.killed
        if found:
            bad.append(seed)
        else:
            shutil.rmtree(folder)
        kinds = ", ".join(f"{k} {v}" for k, v in sorted((killer.killed + killer.phases).items()))
        verdict = "FAILED\n" + "\n".join(found[:8]) if found else "equal"
        print(f"seed {seed}: {killer.killed.total()} kills ({kinds}): {verdict}", flush=True)

    print("\nkilled ranks by their phase, then all victims by kind")
    for name, count in [*phases.most_common(), *killed.most_common()]:
        print(f"  {name:9s} {count:4d} {'#' * (count * 50 // max(phases.values()))}")
    good = enough() and not bad
    print(f"{killed.total()} kills in {number} runs, {len(bad)} runs not equal{f' (seeds {bad})' if bad else ''}")
    if good:
        with contextlib.suppress(OSError):
            shutil.rmtree(root)
    elif not bad:
        print("too few kills in some phase, or in all")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
