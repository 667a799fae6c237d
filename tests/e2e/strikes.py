"""Signals from outside: a process that ftrun does not know of sends them to ranks, spares and ftrun's own processes.

A seed fixes the victims, the signals and the pauses before them (`plan`), not what the machine does meanwhile. A strike comes some
gates after the one before, or, some of them, right behind it: into the repair. A freeze is for good: nobody sends SIGCONT.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ftrun.core.shared import gate
from ftrun.core.shared.board import Board, F, Head, Phase
from ftrun.core.shared.world import World, read_world
from tests.conftest import leaked_memory
from tests.e2e import harness
from tests.e2e.soaked import Program

PER_RUN = 30
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM, "segv": signal.SIGSEGV}
# whom what strikes -> how often, of 100
KINDS = {
    "rank kill": 40,
    "rank freeze": 12,
    "rank term": 9,
    "rank segv": 9,
    "spare kill": 6,
    "spare freeze": 4,
    "fork server kill": 4,
    "fork server freeze": 3,
    "store kill": 4,
    "store freeze": 3,
    "fd store kill": 4,
    "fd store freeze": 2,
}
SERVICES = {"fork server": "ftrun forksrv", "store": "ftrun store", "fd store": "ftrun fd store"}  # and their titles
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.GATE, Phase.UPDATE, Phase.IDLE)
SHOWN = {Phase.DONE: Phase.IDLE}  # the short time between two bodies has two names
AGAIN = 0.15  # how often the next strike does not wait for the recovery from this one
SETTLE = 0.5  # seconds that a new service is given to be told what the old one knew
REPLACED = 15.0  # seconds that ftrun is given to replace a frozen service, whose loss need not show before it is asked for something
PATIENCE = 60.0
CACHE = "torchinductor_"  # torch's, beside other temporary files, meant to stay
END = 120.0  # seconds from the last strike to the end of the run


@dataclass(frozen=True)
class Strike:
    """`rank` counts for a rank, `pause` seconds after a gate opened; `gates` = None does not wait for a gate."""

    kind: str
    rank: int
    pause: float
    gates: int | None

    @property
    def victim(self) -> str:
        return self.kind.rpartition(" ")[0]

    @property
    def signal(self) -> signal.Signals:
        return SIGNALS[self.kind.rpartition(" ")[2]]


def chosen(without: str = "") -> dict[str, int]:
    """The kinds of strikes that no part of the regular expression `without` names."""
    return {kind: often for kind, often in KINDS.items() if not (without and re.search(without, kind))}


def plan(seed: int, strikes: int = PER_RUN, without: str = "") -> list[Strike]:
    """The strikes of a run."""
    dice = random.Random(seed)
    kinds = chosen(without)

    def one() -> Strike:
        kind = dice.choices([*kinds], [*kinds.values()])[0]
        pause = dice.random() * dice.choice((0.03, 0.06))
        gates = dice.randint(1, 3) if dice.random() >= AGAIN else None
        return Strike(kind, dice.randrange(harness.RANKS), pause, gates)

    return [one() for _ in range(strikes)]


class Ended(Exception):
    """The run ended, or what is waited for does not come; the text says what, and is empty where the run ended."""


class Watched:
    """A run as it looks from outside: its board and its processes."""

    def __init__(self, running: harness.Running) -> None:
        self.running = running
        self.run_dir = running.run_dir()
        self.board = Board.open(self.run_dir / "board")

    def last(self) -> int:
        """The last opened gate."""
        return gate.unpack(self.board.gate()).last

    def closed(self) -> bool:
        """Is something being repaired?"""
        return gate.unpack(self.board.gate()).closed

    def world(self) -> World | None:
        with contextlib.suppress(FileNotFoundError):
            return read_world(self.run_dir, self.board[Head.PUBLISHED])
        return None

    def until(self, condition: Callable[[], object], what: str, every: float = 0.0005) -> None:
        """Wait for a condition.

        Args:
            condition: What is waited for.
            what: The same in words.
            every: Seconds between two looks.

        Raises:
            Ended: The run ended before it held, or it did not come in `PATIENCE` seconds.
        """
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.running.process.poll() is not None:
                raise Ended
            if time.monotonic() > deadline:
                raise Ended(f"waited {PATIENCE:.0f} s for {what}")
            time.sleep(every)

    def named(self, title: str) -> list[int]:
        """Live processes of the run with that title."""
        return [pid for pid in harness.strays(self.running.folder) if _name(pid).startswith(title)]

    def spares(self) -> list[int]:
        """Parked ones: a spare that took a rank over keeps its title for a while."""
        world = self.world()
        ranks = {self.board.cell(place.cell)[F.PID] for place in world.places} if world else set()
        return [pid for pid in self.named("ftrun spare") if pid not in ranks]


class Striker(Watched):
    """Carries out a plan on one run, as far as its steps go."""

    def __init__(self, running: harness.Running, strikes: list[Strike], steps: int) -> None:
        super().__init__(running)
        self.strikes = strikes
        self.steps = steps
        self.phases: collections.Counter[str] = collections.Counter()  # of ranks that were struck
        self.struck: collections.Counter[str] = collections.Counter()  # by kind
        self.frozen: set[int] = set()
        self.missed = ""  # what did not come in time

    def run(self) -> None:
        try:
            self._strike_all()
        except Ended as ended:
            self.missed = str(ended)

    def _strike_all(self) -> None:
        at = 0
        for strike in self.strikes:
            self.until(lambda at=at: self.last() >= at, f"gate {at}")
            if self.last() >= self.steps - 6:
                return
            end = time.monotonic() + strike.pause
            while time.monotonic() < end:  # a sleep would round the microseconds
                pass
            if strike.victim == "rank":
                self.until(lambda strike=strike: self._rank(strike), f"rank {strike.rank}")
            elif strike.victim == "spare":
                self.until(lambda strike=strike: self._spare(strike), "a spare", every=0.01)
            else:
                self._service(strike)
            self.struck[strike.kind] += 1
            at = self.last() + (strike.gates or 0)

    def _send(self, pid: int, signum: signal.Signals) -> bool:
        if pid in self.frozen and signum != signal.SIGKILL:
            return False  # it would not notice
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return False
        if signum == signal.SIGSTOP:
            self.frozen.add(pid)
        return True

    def _rank(self, strike: Strike) -> bool:
        """False when there is nobody to strike: the rank is being replaced."""
        world = self.world()
        if world is None:
            return False
        cell = self.board.cell(world.cell_of(strike.rank))
        pid, phase = cell[F.PID], cell.phase
        if not pid or cell[F.EXITED] or cell[F.FENCED]:
            return False
        recovering = self.closed()  # read first: the launcher closes it 0.1 ms later
        if not self._send(pid, strike.signal):
            return False
        self.phases["recovery" if recovering else SHOWN.get(phase, phase).name.lower()] += 1
        return True

    def _spare(self, strike: Strike) -> bool:
        return any(self._send(pid, strike.signal) for pid in self.spares())

    def _service(self, strike: Strike) -> None:
        """Strike it and wait for the new one. The fd store only in a healthy run: it holds the memory of the dead."""
        title = SERVICES[strike.victim]

        def alive() -> set[int]:
            return {*self.named(title)} - self.frozen

        if strike.victim == "fd store":
            healthy = self.last() + 3
            self.until(lambda: self.last() >= healthy and not self.closed(), "three steps without a repair")
        self.until(alive, title, every=0.01)
        old = alive()
        if not any(self._send(pid, strike.signal) for pid in old):
            raise Ended
        if strike.signal == signal.SIGSTOP:
            deadline = time.monotonic() + REPLACED
            self.until(lambda: alive() - old or time.monotonic() > deadline, f"another {title}", every=0.01)
        else:
            self.until(lambda: alive() - old, f"another {title}", every=0.01)
        time.sleep(SETTLE)


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@dataclass
class Leftovers:
    """Looks, after a run, for what it left: processes, its run directory, temporary files, shared memory."""

    folder: Path
    memory: set[str] = field(default_factory=lambda: {*os.listdir("/dev/shm")})

    def start(self, command: list[str], env: Mapping[str, str] | None = None) -> harness.Running:
        temporary = self.folder / "tmp"
        temporary.mkdir(parents=True)
        return harness.start(self.folder, command, {"TMPDIR": str(temporary), **(env or {})})

    def found(self, patience: float = 10.0) -> list[str]:
        """What is left when `patience` seconds are over."""
        deadline = time.monotonic() + patience
        while (left := [*self._now()]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _now(self) -> Iterator[str]:
        for pid in harness.strays(self.folder):
            yield f"process left: {pid} {_name(pid)}"
        for name in ("runs", "tmp"):
            left = (path.name for path in (self.folder / name).glob("*"))
            yield from (f"left in {name}: {path}" for path in left if not path.startswith(CACHE))
        yield from (f"shared memory left: {name}" for name in sorted(leaked_memory(self.memory)))


def processes(folder: Path) -> str:
    """The live processes of a run and what they wait for, to look at a hang."""
    lines = []
    for pid in harness.strays(folder):
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            lines.append(f"{pid} {state} {_name(pid)} {Path(f'/proc/{pid}/wchan').read_text()}")
    return "\n".join(lines)


def run(
    folder: Path,
    program: Program,
    strikes: list[Strike],
    reference: harness.Outcome,
    env: Mapping[str, str] | None = None,
) -> tuple[Striker, list[str]]:
    """One run with its strikes; who struck, and everything that is wrong with the end."""
    leftovers = Leftovers(folder)
    striker = Striker(leftovers.start(program.command(folder), env), strikes, program.steps)
    striker.run()
    hang = hanging(striker.running)
    found = [hang] if hang else [*judged(striker.running, reference), *leftovers.found()]
    return striker, [striker.missed, *found] if striker.missed else found


def hanging(running: harness.Running, patience: float = END) -> str:
    """Wait for the run's end. If it does not come: what hangs, after all of it was killed; else nothing."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.process.wait(patience)
        return ""
    (running.folder / "hang.txt").write_text(f"{running.describe()}\n\n{processes(running.folder)}\n")
    for pid in sorted(harness.strays(running.folder)):  # the launcher, which would make others, first
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    running.process.wait()
    return f"hang: no end in {patience:.0f} s; see hang.txt"


def judged(running: harness.Running, reference: harness.Outcome) -> list[str]:
    """What is wrong with the end of a run, beside that of the uninterrupted one."""
    try:
        outcome = harness.finish(running)
        if outcome.code:
            lines = [line for line in outcome.output.splitlines() if line.startswith("ftrun: ")]
            return [f"exit code {outcome.code}", *lines[-6:]]
        found = harness.differences(reference, outcome)
    except AssertionError as error:
        return [str(error)]
    if found and "bit-identical to an uninterrupted run: yes" in outcome.output:
        found.insert(0, "FALSE YES")
    return found
