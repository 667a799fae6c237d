"""Fires faults inside a worker (from a plan, at random, or by request on a live run) and records each firing.

Theory of operation. The worker calls `fire` at every phase change. For a fault that is due, the trigger prepares it (CannotStrike: it tries
again at the next such place), takes its request, claims the firing, and strikes. A fault may end the process that fires it, so the claim
comes first: a file RUN_DIR/faults/NAME-N.json, which a hard link creates whole and at once. A replacement sees the claims of the dead
worker, so a fault fires at most `times` times. This file decides nothing about recovery and never imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ftrun.core.amounts import place
from ftrun.core.paths import ENV_RUN_DIR
from ftrun.core.shared.board import Board, Head
from ftrun.core.system import files
from ftrun.core.waiting import wait_for
from ftrun.faults import device, oom, outside, requests
from ftrun.faults.dice import Dice
from ftrun.faults.kinds import DEVICE, KINDS, MACHINE, STEP_PHASES
from ftrun.faults.plan import InjectedFault, Plan

FOLDER = "faults"
_UNFELT_FILE = ".unfelt"  # in place of .json: the firing changed nothing
UNFELT = (
    "it changed nothing: every gradient is finite all the same (where a model gives its loss itself, no gradient depends on "
    "the loss's value; nan at backward strikes a gradient)"
)

# phases in which a slowed rank works by itself; stretching its waits would slow it twice
_WORKING = frozenset(("forward", "backward", "update"))
_DRAINED = 30.0  # seconds that a drained worker waits for its end before it goes on

# prepares a fault that only the worker itself can do: (phase, seed) -> the fault in words, and the function that does it
Prepare = Callable[[str, int], tuple[str, Callable[[], None]]]


class CannotStrike(Exception):
    """This fault cannot strike here and now; the message says why."""


@dataclass(frozen=True)
class Firing:
    """One firing: fault `fault` of its `source` for the `count`-th time. `time` is unix seconds, `t` monotonic seconds.

    `source` is "plan", "request" or "random-SEED" (there `fault` is the step). `pid`: the process that the fault strikes.
    """

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
    source: str = "plan"
    detail: str = ""
    epoch: int | None = None

    @property
    def file(self) -> str:
        """Return the name of its file, which no other firing has."""
        prefix = "" if self.source == "plan" else f"{self.source}-"
        return f"{prefix}{self.fault}-{self.count}.json"


class Trigger:
    """The faults of one rank. The worker calls `fire` at every phase change, which is cheap while no fault waits.

    `rank` None (a parked spare) never fires. `run_dir` defaults to the worker's own run directory. Without `board` it reads no
    requests. `own` prepares the kinds that need the worker's state: nan, bitflip, comm.
    """

    def __init__(
        self,
        plan: Plan | None,
        rank: int | None,
        run_dir: Path | None = None,
        board: Board | None = None,
        own: Mapping[str, Prepare] | None = None,
        dice: Dice | None = None,
    ) -> None:
        self._run_dir = run_dir or Path(os.environ[ENV_RUN_DIR])
        self._rank = rank
        self._board = board
        self._own = own or {}
        self._seed = plan.seed if plan else 0
        self.seen = 0  # value of the word REQUESTS up to which requests are known
        self._known: set[int] = set()
        self._dice = [dice] if dice else []
        self._thrown = -1  # step for which the dice were thrown last
        self._waiting: dict[str, list[InjectedFault]] = {}
        for fault in plan.faults if plan else ():
            self._expect(fault)
        self.armed = True  # a later call of `fire` may have an effect even without a new request
        self._factor = 1.0
        self._slow_until: float | None = None
        self._phase = ""
        self._since = 0.0

    def _expect(self, fault: InjectedFault) -> None:
        if fault.rank != self._rank:
            return
        phases = (fault.at,) if fault.at else KINDS[fault.kind].anywhere if fault.kind in KINDS else STEP_PHASES
        for phase in phases:
            self._waiting.setdefault(phase, []).append(fault)

    def fire(self, phase: str, step: int, attempt: int, epoch: int | None = None) -> None:
        """Fire the faults that are due at this place. Some kinds end the process.

        Raises:
            RuntimeError: The kind is "exception".
        """
        if self._factor > 1.0:
            self._stretch(phase)
        if self._board is not None and self._board[Head.REQUESTS] != self.seen:
            self._read_requests(self._board)
        self.armed = bool(self._dice or self._factor > 1.0 or any(self._waiting.values()))
        if self._dice and step != self._thrown:
            self._throw(step)
        waiting = self._waiting.get(phase)
        if not waiting:
            return
        for fault in list(waiting):
            if fault.is_due(epoch, step):
                self._attempt(fault, phase, step, attempt, epoch)

    # -- due faults --------------------------------------------------------------------------------------------------

    def _read_requests(self, board: Board) -> None:
        """Read the new requests, after a change of the word REQUESTS."""
        self.seen = board[Head.REQUESTS]
        for request in requests.pending(self._run_dir):
            if request.number in self._known:
                continue
            self._known.add(request.number)
            if request.op in (requests.DEVICE, requests.MOVE):
                continue
            if request.op == requests.RANDOM:
                first, ranks = request.step or 0, int(os.environ["WORLD_SIZE"])  # of all nodes
                dice = Dice(request.rate, request.seed, ranks, request.kind, request.argument, first)
                self._dice = [*(d for d in self._dice if d.seed != request.seed), dice] if request.rate else []
                self._thrown = -1
            else:
                self._expect(request.as_fault())

    def _throw(self, step: int) -> None:
        self._thrown = step
        for dice in self._dice:
            fault = dice.draw(step)
            if fault is not None:
                self._expect(fault)

    def _forget(self, fault: InjectedFault) -> None:
        for waiting in self._waiting.values():
            with contextlib.suppress(ValueError):
                waiting.remove(fault)

    # -- one firing --------------------------------------------------------------------------------------------------

    def _attempt(self, fault: InjectedFault, phase: str, step: int, attempt: int, epoch: int | None) -> None:
        try:
            detail, act = self._prepare(fault, phase, place(step, epoch, 0))
        except CannotStrike:
            return  # try again the next time that the worker reaches this place
        if fault.source == requests.REQUEST and not requests.take(self._run_dir, fault.index):
            self._forget(fault)
            return
        firing = claim(self._run_dir, fault, phase, step, attempt, os.getpid(), detail, epoch)
        if firing is None:
            self._forget(fault)
            if fault.kind == "oom":
                oom.discard(Path(detail))
            return
        if self._board is not None:
            self._board.launcher_bell.ring()
        if fault.kind in KINDS and KINDS[fault.kind].arrives == MACHINE:
            outside.await_journal(self._run_dir, firing.file)
        act()

    def _prepare(self, fault: InjectedFault, phase: str, where: str) -> tuple[str, Callable[[], None]]:
        """Return the fault in words, and the function that does it.

        Raises:
            CannotStrike: The fault is not possible here and now.
        """
        kind, argument, seconds = fault.kind, fault.argument or 0.0, fault.seconds
        own = self._own.get(kind)
        if own is not None:
            return own(phase, self._seed * 1_000_003 + fault.index)
        if kind in KINDS and KINDS[kind].arrives == DEVICE:
            return self._prepare_device(fault)
        if kind == "oom":
            try:
                group = oom.make()
            except oom.NotPossible as error:
                raise CannotStrike(str(error)) from None
            return str(group), lambda: self._run_out(group)

        def act() -> None:
            self._strike(kind, argument, seconds, f"rank {fault.rank} in {phase} of {where}", phase)

        return "", act

    def _run_out(self, group: Path) -> None:
        oom.enter(group)
        if self._board is not None:
            self._board.launcher_bell.ring()  # the launcher then looks up this process's new group
        oom.eat()

    def _prepare_device(self, fault: InjectedFault) -> tuple[str, Callable[[], None]]:
        try:
            if self._board is None:
                raise device.NoDevice("a device is struck only in a run")
            return device.prepare(self._run_dir, self._board, fault.rank, KINDS[fault.kind], fault.argument)
        except device.NoDevice as error:
            raise CannotStrike(str(error)) from None

    def _strike(self, kind: str, argument: float, seconds: float | None, where: str, phase: str) -> None:
        match kind:
            case "kill" | "term":
                os.kill(os.getpid(), outside.SIGNALS[kind])
            case "segv" | "abort":
                _die_of(outside.SIGNALS[kind])
            case "exit":
                os._exit(int(argument))
            case "exception":
                raise RuntimeError(f"injected fault: exception on {where}")
            case "freeze":
                _freeze(seconds)
            case "hang":
                end = time.monotonic() + seconds if seconds else float("inf")
                while time.monotonic() < end:
                    pass
            case "gil":
                _hold_python(seconds)
            case "slow":
                self._factor = max(self._factor, argument)
                self._phase, self._since = phase, time.monotonic()
                self._slow_until = self._since + seconds if seconds else None
            case "drain":
                _await_end(_DRAINED)
            case "launcher-kill":
                outside.kill_launcher(self._launcher())
            case "node-kill":
                outside.kill_node(self._launcher())
            case other:
                raise AssertionError(other)

    def _launcher(self) -> int:
        assert self._board is not None
        return self._board[Head.LAUNCHER_PID]

    def _stretch(self, phase: str) -> None:
        """Sleep until the phase that just ended has lasted `_factor` times as long; end the slowness when its time is over."""
        if self._slow_until is not None and time.monotonic() > self._slow_until:
            self._factor, self._slow_until = 1.0, None
            return
        if self._phase in _WORKING:
            time.sleep((time.monotonic() - self._since) * (self._factor - 1.0))
        self._phase, self._since = phase, time.monotonic()


def claim(
    run_dir: Path, fault: InjectedFault, phase: str, step: int, attempt: int, pid: int, detail: str = "", epoch: int | None = None
) -> Firing | None:
    """Claim and return the next free firing of `fault`, None if all are taken; raise OSError if its file cannot be written."""
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    for count in range(1, fault.times + 1):
        firing = Firing(
            fault.index,
            count,
            fault.kind,
            fault.rank,
            step,
            phase,
            attempt,
            pid,
            time.time(),
            time.monotonic(),
            fault.source,
            detail,
            epoch,
        )
        target = folder / firing.file
        if target.exists():
            continue
        temporary = target.with_suffix(f".{os.getpid()}")
        files.write_private(temporary, json.dumps(asdict(firing)))
        try:
            os.link(temporary, target)
        except FileExistsError:
            continue
        else:
            return firing
        finally:
            temporary.unlink()
    return None


def unfelt(run_dir: Path, step: int, attempt: int) -> None:
    """Record that the NaN of this process in that step changed nothing."""
    for firing in fired(run_dir):
        if (firing.kind, firing.pid, firing.step, firing.attempt) == ("nan", os.getpid(), step, attempt):
            (run_dir / FOLDER / firing.file).with_suffix(_UNFELT_FILE).touch()


def was_unfelt(run_dir: Path, firing: Firing) -> bool:
    """Is this firing recorded as one that changed nothing?"""
    return (run_dir / FOLDER / firing.file).with_suffix(_UNFELT_FILE).exists()


def _freeze(seconds: float | None) -> None:
    """Stop this process; after `seconds` a helper in its process group, which dies with it, continues it."""
    if seconds is not None:
        thaw = f"sleep {seconds:f}; kill -CONT {os.getpid()}"
        helper = os.posix_spawn("/bin/sh", ["sh", "-c", thaw], os.environ)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(helper, 0)
        return
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_python(seconds: float | None) -> None:
    """Sleep in C while holding the GIL: no other Python thread of the process runs meanwhile."""
    sleep = ctypes.PyDLL(None).usleep
    end = time.monotonic() + seconds if seconds else float("inf")
    while (left := end - time.monotonic()) > 0:
        sleep(int(min(left, 3600.0) * 1e6))  # a longer time does not fit into usleep's argument; a signal ends the sleep early


def _await_end(seconds: float) -> None:
    """Wait between two steps, with no step half done, until the launcher ends this process to move its rank."""
    wait_for(lambda: False, seconds, 0.01)


def _die_of(signum: signal.Signals) -> None:
    """Die of `signum` whatever handler is set, without leaving a core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def fired(run_dir: Path) -> list[Firing]:
    """Return every firing of the run so far, oldest first."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    firings = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # the run ends, and its folder goes
            firings.append(Firing(**json.loads(path.read_text())))
    return sorted(firings, key=lambda f: f.t)


def unfired(plan: Plan, run_dir: Path) -> list[tuple[InjectedFault, int]]:
    """Return the faults of a plan that fired less often than planned, each with the number of its firings."""
    counts: dict[int, int] = {}
    for firing in fired(run_dir):
        if firing.source == "plan":
            counts[firing.fault] = counts.get(firing.fault, 0) + 1
    return [(f, counts.get(f.index, 0)) for f in plan.faults if counts.get(f.index, 0) < f.times]
