"""Firing a plan's faults inside a worker, and the record of what fired.

A fault may end the process that fires it, so it is counted before it strikes: each firing first claims a file
RUN_DIR/faults/INDEX-N.json, made whole and at once by a hard link. A replacement sees the claims of the dead and
fires no more than `times`. This file decides nothing about recovery and never imports torch.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ftrun.core.paths import ENV_RUN_DIR
from ftrun.faults.plan import Fault, Plan

FOLDER = "faults"

# phases in which a slowed rank works by itself; stretching its waits would slow it twice
_WORKING = frozenset(("forward", "backward", "update"))


@dataclass(frozen=True)
class Firing:
    """One firing: entry `fault` of the plan for the `count`-th time. `time` is unix seconds, `t` monotonic seconds."""

    fault: int
    count: int
    kind: str
    rank: int
    step: int
    phase: str
    attempt: int
    pid: int
    time: float
    t: float


class Trigger:
    """The faults of one rank. The worker calls `fire` at every phase change; without a match that is one look-up.

    `rank` None (a parked spare) never fires. `run_dir` defaults to the worker's own run directory.
    """

    def __init__(self, plan: Plan, rank: int | None, run_dir: Path | None = None) -> None:
        self._folder = (run_dir or Path(os.environ[ENV_RUN_DIR])) / FOLDER
        self._waiting: dict[str, list[Fault]] = {}
        for fault in plan.faults:
            if fault.rank == rank:
                self._waiting.setdefault(fault.at, []).append(fault)
        self._factor = 1.0
        self._phase = ""
        self._since = 0.0

    def fire(self, phase: str, step: int, attempt: int) -> None:
        """Fire what the plan has for this place. Errors: RuntimeError for kind "exception"; others may not return."""
        if self._factor > 1.0:
            self._stretch(phase)
        waiting = self._waiting.get(phase)
        if not waiting:
            return
        for fault in list(waiting):
            if fault.step is not None and fault.step != step:
                continue
            if self._claim(fault, phase, step, attempt):
                self._strike(fault, phase, step)
            else:
                waiting.remove(fault)

    def _claim(self, fault: Fault, phase: str, step: int, attempt: int) -> bool:
        """Take the next free firing of `fault`; False when all are taken."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for count in range(1, fault.times + 1):
            target = self._folder / f"{fault.index}-{count}.json"
            if target.exists():
                continue
            firing = Firing(
                fault.index,
                count,
                fault.kind,
                fault.rank,
                step,
                phase,
                attempt,
                os.getpid(),
                time.time(),
                time.monotonic(),
            )
            temporary = target.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(asdict(firing)))
            try:
                os.link(temporary, target)
            except FileExistsError:
                continue
            else:
                return True
            finally:
                temporary.unlink()
        return False

    def _strike(self, fault: Fault, phase: str, step: int) -> None:
        argument = fault.argument or 0.0
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "segv":
                _die_of(signal.SIGSEGV)
            case "abort":
                _die_of(signal.SIGABRT)
            case "exit":
                os._exit(int(argument))
            case "exception":
                raise RuntimeError(f"injected fault: exception on rank {fault.rank} in {phase} of step {step}")
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                while True:
                    pass
            case "slow":
                self._factor = max(self._factor, argument)
                self._phase, self._since = phase, time.monotonic()
            case other:
                raise AssertionError(other)

    def _stretch(self, phase: str) -> None:
        """Make the phase that just ended `factor` times as long; holds until the process ends."""
        if self._phase in _WORKING:
            time.sleep((time.monotonic() - self._since) * (self._factor - 1.0))
        self._phase, self._since = phase, time.monotonic()


def _die_of(signum: signal.Signals) -> None:
    """Die of `signum` whatever handler is set, without leaving a core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def fired(run_dir: Path) -> list[Firing]:
    """Every firing of the run so far, oldest first."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    firings = [Firing(**json.loads(p.read_text())) for p in folder.glob("*.json")]
    return sorted(firings, key=lambda f: f.t)


def unfired(plan: Plan, run_dir: Path) -> list[tuple[Fault, int]]:
    """The faults that fired less often than planned, each with how often it did fire."""
    counts: dict[int, int] = {}
    for firing in fired(run_dir):
        counts[firing.fault] = counts.get(firing.fault, 0) + 1
    return [(f, counts.get(f.index, 0)) for f in plan.faults if counts.get(f.index, 0) < f.times]
