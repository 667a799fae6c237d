"""One measured run: start it, kill ranks at chosen moments, read when each rank finished each step.

The moments come from outside (the killer's clock and the script's own files), the same way for ftrun and torchrun; the
journal is read only to explain them.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.e2e import harness

SCRIPTS = Path(__file__).resolve().parent / "scripts"


@dataclass
class Done:
    """A rank finished a step. `cpu_ns`: processor time of its process until then."""

    rank: int
    step: int
    ns: int
    pid: int
    cpu_ns: int


@dataclass
class Kill:
    """One SIGKILL and what followed. Times in ms."""

    rank: int
    killed_ns: int
    before: int  # highest step finished by any rank before the kill
    stall: float = 0.0
    again: int = 0  # steps done a second time, beyond the one in flight
    lost: float = 0.0  # how much later the run is, some seconds after the kill, than at its usual pace
    parts: dict[str, float] = field(default_factory=dict)  # of ftrun's journal, `detect` by the killer's clock


@dataclass
class Run:
    """A finished run. Times in ms."""

    system: str
    cold_start: float
    step: float  # median of steps that no kill touched
    kills: list[Kill]


def command(
    system: str, folder: Path, script: str, arguments: Sequence[str], ranks: int, restarts: int, spares: int = 1
) -> list[str]:
    """A measured script under a launcher; `restarts`: of torchrun."""
    out = ["--out", str(folder / "out")]
    path = str(SCRIPTS / script)
    if system == "ftrun":
        options = ["--spares", str(spares), "--max-replacements", "100"]
        return [harness.tool("ftrun"), "--nproc-per-node", str(ranks), *options, path, *out, *arguments]
    options = ["--standalone", "--max-restarts", str(restarts)]
    return [harness.tool("torchrun"), "--nproc-per-node", str(ranks), *options, path, *out, *arguments]


def read_times(folder: Path, rank: int) -> list[Done]:
    path = folder / "out" / f"rank-{rank}.times"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    fields = [line.split() for line in lines if line.startswith("done ")]
    return [Done(rank, *map(int, f[1:5])) for f in fields]


def last_step(folder: Path, rank: int) -> int:
    """The last step that a rank has finished, -1 for none: the end of its file alone is read, however many steps there are."""
    try:
        with (folder / "out" / f"rank-{rank}.times").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return -1
    done = [int(line.split()[1]) for line in lines[-1:] if line.startswith(b"done ")]
    return done[-1] if done else -1


def wait_for(running: harness.Running, what: str, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """The first true value of `condition`.

    Raises:
        AssertionError: When the run ends or time is up.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        ended = running.process.poll()
        assert ended is None, f"the run ended ({ended}) while waiting for {what}\n{running.output[-3000:]}"
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}\n{running.output[-3000:]}"
        time.sleep(0.03)  # it reads files, on processors that are being measured
    return value


def measure(
    system: str,
    folder: Path,
    victims: Sequence[int],
    *,
    ranks: int,
    order: str = "early",
    size: str = "10m",
    ballast: int = 0,
    fill: float = 0.0,
    spares: int = 1,
    apart: int = 20,
) -> Run:
    """Kill `victims` one after the other, `apart` steps between them (torchrun: a multiple of 10, each 5 after a checkpoint)."""
    (folder / "out").mkdir(parents=True)
    steps = 20 + apart * len(victims)
    arguments = ["--system", system, "--order", order, "--steps", str(steps), "--size", size, "--ballast", str(ballast)]
    arguments += ["--fill", str(fill)]
    launched = time.monotonic_ns()
    running = harness.start(folder, command(system, folder, "train.py", arguments, ranks, len(victims), spares))
    kills = []
    for number, victim in enumerate(victims):
        target = 14 + apart * number
        wait_for(running, f"step {target}", lambda v=victim, t=target: any(d.step == t for d in read_times(folder, v)))
        mine = read_times(folder, victim)
        gaps = [(b.ns - a.ns) for a, b in pairwise(mine) if b.pid == a.pid and b.step == a.step + 1]
        until = mine[-1].ns + statistics.median(gaps) / 2
        time.sleep(max(0.0, (until - time.monotonic_ns()) / 1e9))  # not by looking at the clock: it would take a core
        before = max(d.step for r in range(ranks) for d in read_times(folder, r))
        killed = time.monotonic_ns()
        os.kill(mine[-1].pid, signal.SIGKILL)
        kills.append(Kill(victim, killed, before))
    outcome = harness.finish(running, ranks=0, timeout=300)
    assert outcome.code == 0, outcome.tail()
    done = [d for r in range(ranks) for d in read_times(folder, r)]
    near = {k.before + i for k in kills for i in range(4)}  # the step in flight and those that warm up again
    clean = [
        (b.ns - a.ns) / 1e6
        for r in range(ranks)
        for a, b in _neighbours([d for d in done if d.rank == r])
        if b.step not in near and b.step > 3
    ]
    run = Run(system, 0.0, statistics.median(clean), kills)
    run.cold_start = (max(min(d.ns for d in done if d.rank == r) for r in range(ranks)) - launched) / 1e6
    for kill in kills:
        _evaluate(kill, run, done, ranks, outcome, apart)
    return run


def _evaluate(kill: Kill, run: Run, done: list[Done], ranks: int, outcome: harness.Outcome, apart: int) -> None:
    def end(step: int) -> int:
        """When the slowest rank had finished a step after the kill."""
        return max(
            min(d.ns for d in done if (d.rank, d.step) == (r, step) and d.ns > kill.killed_ns) for r in range(ranks)
        )

    after = [d for d in done if d.rank == kill.rank and d.ns > kill.killed_ns and d.step > kill.before]
    first = min(after, key=lambda d: d.ns).step
    kill.stall = (end(first) - kill.killed_ns) / 1e6
    again = [d.step for d in done if d.rank == kill.rank and kill.killed_ns < d.ns <= end(first)]
    kill.again = sum(s <= kill.before for s in again)
    behind = apart - 4  # steps; the next kill is near
    begun = max(d.ns for d in done if d.step == kill.before and d.ns <= kill.killed_ns)
    kill.lost = (end(kill.before + behind) - begun) / 1e6 - behind * run.step
    for note in outcome.notes("incident"):
        if 0 <= note["detected_ns"] - kill.killed_ns < kill.stall * 1e6:
            # the launcher does not know when the fault struck; the killer does
            kill.parts = {**note["ms"], "detect": (note["detected_ns"] - kill.killed_ns) / 1e6}


def _neighbours(mine: list[Done]) -> list[tuple[Done, Done]]:
    return [(a, b) for a, b in pairwise(mine) if a.pid == b.pid and b.step == a.step + 1]
