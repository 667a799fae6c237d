"""`ftrun inject-fault`: a fault on a live run, now or where it is asked for. Waits until it struck and says so.

Exit code 0 it fired, 1 it did not, 2 usage, 3 the run is not running, 4 no such run. A request that did not fire in time, or
is interrupted, is taken back: it never strikes later.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from ftrun.cli.main import app
from ftrun.core.amounts import place
from ftrun.core.errors import EXIT_NOT_RUNNING, NoRunError, UsageError
from ftrun.core.text import tell

if TYPE_CHECKING:
    from ftrun.cli.live import Live
    from ftrun.faults.kinds import FaultKind
    from ftrun.faults.requests import Request

_WAIT = 60.0  # seconds
_LOOK = 0.1  # seconds between two looks when no bell rings
_KIND_AND_RUN = typer.Argument(None, metavar="KIND [RUN]", help="The kind of fault, and the run's name (in any order).")


@dataclass(frozen=True)
class Wish:
    """The typed request, checked as far as that goes without a run."""

    run: str | None
    kind: FaultKind
    argument: float | None
    rank: int | None
    at: str
    epoch: int | None
    step: int | None
    seconds: float | None
    wait: float
    as_json: bool

    @property
    def at_once(self) -> bool:
        """Does it come from outside, whatever the worker does?"""
        from ftrun.faults.kinds import INSIDE

        return self.kind.arrives != INSIDE and not self.at and self.step is None and self.epoch is None

    @property
    def name(self) -> str:
        from ftrun.faults.kinds import spelled

        return spelled(self.kind.name, self.argument)

    @property
    def machine(self) -> bool:
        from ftrun.faults.kinds import MACHINE

        return self.kind.arrives == MACHINE


class _Injecting(TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", "KIND [RUN]"]  # typer's releases differ in what they make of two words in one argument


@app.command(
    "inject-fault",
    cls=_Injecting,
    help="Strike a live run with a fault, now or where it is asked for. KIND is one of kill, term, segv, "
    "abort, exit:CODE, exception, oom, freeze, hang, gil, slow:FACTOR, nan, bitflip, comm, xid:N, gpu-lost, ecc, launcher-kill, "
    "node-kill. Exit code 0: it fired; 1: it did not.",
    epilog="Without RUN: the live run, if there is only one and it was started in this folder.\n\n"
    "Examples: ftrun inject-fault kill --rank 2 --at backward; ftrun inject-fault freeze brave-otter --for 2; "
    "ftrun inject-fault --random 0.02 --seed 7",
)
def inject_fault(
    words: list[str] = _KIND_AND_RUN,
    rank: int = typer.Option(None, "--rank", metavar="R", help="Whom to strike [default: the last rank]."),
    at: str = typer.Option(
        None, "--at", metavar="PHASE",
        help="forward, backward, gate, update, idle, stop, reset or restore [default: now, or the next phase of a step].",
    ),
    step: int = typer.Option(
        None, "--step", metavar="N", help="In this step, counted in its loop as step.index [default: the one that comes]."
    ),
    epoch: int = typer.Option(None, "--epoch", metavar="E", help="In this epoch of job.epochs [default: any]."),
    after: float = typer.Option(0.0, "--after", metavar="S", help="Seconds to wait before anything is done."),
    seconds: float = typer.Option(
        None, "--for", metavar="S", help="How long freeze, hang, gil or slow lasts [default: until ftrun ends it]."
    ),
    wait: float = typer.Option(
        _WAIT, "--wait", metavar="S", help="How long to wait for it to fire; 0: leave it waiting for its moment."
    ),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask; needed without a terminal."),
    random: float = typer.Option(
        None, "--random", metavar="RATE", help="Random faults from now on: how likely a step has one, 0 to 1 (0: no more)."
    ),
    seed: int = typer.Option(1, "--seed", metavar="S", help="Seed of the random faults."),
    as_json: bool = typer.Option(False, "--json", help="JSON instead of text."),
) -> int:  # fmt: skip
    from ftrun.cli import live

    try:
        if not 0 <= after < math.inf or not 0 <= wait < math.inf:
            raise UsageError("--after and --wait are seconds, 0 or more")
        if random is not None:
            if rank is not None or at is not None or seconds is not None or epoch is not None:
                raise UsageError("--random draws rank and phase itself: --rank, --at, --epoch and --for do not go with it")
            return _random(words or [], random, seed, step, after, yes, as_json)
        wish = _read(words or [], rank, at, epoch, step, seconds, wait, as_json)
        found = live.Live.find(wish.run, f"inject-fault {wish.name} RUN")
        target = _target(found, wish)
        if not live.confirmed(f"strike {_whom(found, wish, target)} with {wish.name}?", yes):
            tell("nothing was injected")
            return 1
        _sleep(found, after)
        return _at_once(found, wish, target) if wish.at_once else _ask(found, wish, target)
    except OSError as error:
        tell(f"error: nothing was injected: {error}")
        return 1


def _read(
    words: list[str],
    rank: int | None,
    at: str | None,
    epoch: int | None,
    step: int | None,
    seconds: float | None,
    wait: float,
    as_json: bool,
) -> Wish:
    from ftrun.faults import kinds

    if not 1 <= len(words) <= 2:
        raise UsageError(f"say which fault: ftrun inject-fault KIND [RUN] (KIND is one of {', '.join(kinds.KINDS)})")
    word, run_id = _kind_and_run(words)
    try:
        kind, argument = kinds.parse(word)
        if at is not None:
            kinds.check_phase(kind, at)
        if seconds is not None:
            kinds.check_duration(kind, seconds)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if kind.arrives == kinds.MACHINE and rank is not None and at is None and step is None and epoch is None:
        raise UsageError(f"{kind.name} strikes no rank: leave --rank out, or say --at which moment of that rank")
    for option, value in {"--step": step, "--epoch": epoch}.items():
        if value is not None and value < 0:
            raise UsageError(f"{option} must not be negative, not {value}")
    if kind.name == "oom":
        from ftrun.faults import oom

        if why := oom.why_not():
            raise UsageError(why)
    return Wish(run_id, kind, argument, rank, at or "", epoch, step, seconds, wait, as_json)


def _kind_and_run(words: list[str]) -> tuple[str, str | None]:
    """Tell the kind from the run's name among one or two words: the kind first, or last if only that can be meant."""
    from ftrun.faults.kinds import KINDS

    if len(words) == 1:
        return words[0], None
    first, last = (word.partition(":")[0] in KINDS for word in words)
    if first is last:  # a run is called like a kind, or the kind is misspelled: then a run of that name tells
        from ftrun.core.runs import find_run

        first = find_run(words[0]) is None
    return (words[0], words[1]) if first else (words[1], words[0])


def _target(found: Live, wish: Wish) -> int:
    """The rank to strike.

    Raises:
        UsageError
    """
    from ftrun.core.shared.board import Flag

    rank = found.world().places[-1].rank if wish.rank is None else wish.rank
    cell = found.cell(rank)
    if cell.has(Flag.LOOP_DONE) and not wish.at_once:
        raise UsageError(f"rank {rank} has finished its steps; no phase of a step comes any more")
    if wish.epoch is not None and cell.epoch is None and cell.has(Flag.LOOPING):
        raise UsageError(f"rank {rank} is in no loop of job.epochs, so its steps are in no epoch: leave --epoch out")
    if cell.step is None:
        return rank
    here = place(cell.step, cell.epoch, 0)
    if wish.epoch is not None and cell.epoch is not None and wish.epoch < cell.epoch:
        raise UsageError(f"epoch {wish.epoch} is over: rank {rank} is in {here}")
    if wish.step is not None and wish.epoch == cell.epoch and wish.step < cell.step:  # else it comes in a later epoch
        raise UsageError(f"{place(wish.step, wish.epoch, 0)} is over: rank {rank} is in {here}")
    return rank


def _whom(found: Live, wish: Wish, rank: int) -> str:
    return f"run {found.run.run_id}" if wish.machine else f"rank {rank} of run {found.run.run_id}"


def _sleep(found: Live, seconds: float) -> None:

    if found.ended_within(seconds):
        raise NoRunError(f"run {found.run.run_id} ended before the fault was due", EXIT_NOT_RUNNING)


# ---- from outside ----------------------------------------------------------------------------------------------------


def _at_once(found: Live, wish: Wish, rank: int) -> int:
    from ftrun.core.shared.board import F
    from ftrun.faults import device, kinds, outside, requests, trigger

    cell = found.cell(rank)
    pid = cell[F.PID]
    if wish.kind.arrives == kinds.DEVICE:
        try:
            detail, act = device.prepare(found.run.path, found.board, rank, wish.kind, wish.argument)
        except device.NoDevice as error:
            return _did_not(found, wish, str(error))
    else:
        detail, act = "", lambda: None
    try:
        pidfd = os.pidfd_open(found.run.pid if wish.machine else pid)
    except OSError:
        return _did_not(found, wish, f"rank {rank} has no process just now; try again")
    # from here on it counts: written down before it strikes
    request = requests.post(found.run.path, _request(wish, -1 if wish.machine else rank), taken=True)
    phase, step = cell.phase.name.lower(), cell.step
    fault = request.as_fault()
    struck = found.run.pid if wish.machine else pid
    firing = trigger.claim(found.run.path, fault, phase, -1 if step is None else step, cell[F.ATTEMPT], struck, detail, cell.epoch)
    found.board.launcher_bell.ring()
    with contextlib.suppress(ProcessLookupError):
        if wish.machine:
            if firing is not None:
                outside.await_journal(found.run.path, firing.file)
            (outside.kill_launcher if wish.kind.name == "launcher-kill" else outside.kill_node)(found.run.pid)
        elif wish.kind.arrives == kinds.DEVICE:
            act()
        else:
            outside.strike(pidfd, pid, wish.kind.name)
            if wish.seconds is not None:
                _thaw(pidfd, wish.seconds)
    os.close(pidfd)
    where = "outside a step" if step is None else f"in {phase} of {place(step, cell.epoch, 0)}"
    whom = (
        f"process {struck} of run {found.run.run_id}"
        if wish.machine
        else f"{_whom(found, wish, rank)} (process {pid}) {where}"
    )
    more = {} if cell.epoch is None else {"epoch": cell.epoch}
    return _did(found, wish, f"{wish.name} struck {whom}", rank, phase, step, struck, request.number, more)


def _thaw(pidfd: int, seconds: float) -> None:
    """Let a stopped process go on after that time, also when we are interrupted before."""
    try:
        time.sleep(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):  # ftrun has replaced it meanwhile
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)


# ---- at a phase of the worker ------------------------------------------------------------------------------------------


def _request(wish: Wish, rank: int) -> Request:
    from ftrun.faults import requests

    at, step = wish.at, wish.step
    return requests.Request(requests.FAULT, wish.kind.name, wish.argument, rank, at, step, wish.seconds, epoch=wish.epoch)


def _ask(found: Live, wish: Wish, rank: int) -> int:
    from ftrun.faults import requests, trigger

    if not wish.wait:
        request = requests.post(found.run.path, _request(wish, rank))
        ring(found, request)
        words = f"in run {found.run.run_id} {request} waits for its moment"
        return _did(found, wish, words, rank, wish.at, wish.step, None, request.number)
    request, firing = ask(found, _request(wish, rank), wish.wait)
    if firing is not None:
        whom = f"{_whom(found, wish, rank)} (process {firing.pid})"
        words = f"{wish.name} struck {whom} in {firing.phase} of {place(firing.step, firing.epoch, 0)}"
        unfelt = _unfelt(found, firing)
        if unfelt:
            words += f"; {trigger.UNFELT}"
        more = ({} if unfelt is None else {"unfelt": unfelt}) | ({} if firing.epoch is None else {"epoch": firing.epoch})
        return _did(found, wish, words, rank, firing.phase, firing.step, firing.pid, request.number, more)
    if not found.alive():
        return _did_not(found, wish, "the run ended before that")
    return _did_not(found, wish, f"no such moment came in {wish.wait:g} s: {_standing(found, wish, rank)}")


def _unfelt(found: Live, firing: Any) -> bool | None:
    """Did a wrong number in the forward change no gradient? None for other faults, or when that is not known in time."""
    from ftrun.core.shared.board import F
    from ftrun.faults import trigger

    if (firing.kind, firing.phase) != ("nan", "forward"):
        return None
    deadline = time.monotonic() + _WAIT
    while time.monotonic() < deadline and found.alive():
        seen = found.board.launcher_bell.count()
        cell = found.cell(firing.rank)
        over = cell[F.PID] != firing.pid or cell.step != firing.step or cell[F.ATTEMPT] != firing.attempt
        if trigger.was_unfelt(found.run.path, firing):
            return True
        if over:
            return False
        found.board.launcher_bell.wait(seen, _LOOK)
    return None


def ring(found: Live, request: Request) -> None:
    """Tell workers and launcher that there is a request."""
    from ftrun.core.shared.board import Head

    found.board[Head.REQUESTS] = request.number
    found.board.launcher_bell.ring()


def ask(found: Live, request: Request, seconds: float) -> tuple[Request, Any]:
    """Post a request and wait for its firing, None when it was taken back. A Ctrl-C takes it back whenever it comes."""
    from ftrun.faults import requests

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # held back while it is only half asked
    request = requests.post(found.run.path, request)
    try:
        ring(found, request)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return request, _await_firing(found, request, seconds)
    except KeyboardInterrupt:
        if requests.take(found.run.path, request.number):
            tell("taken back; nothing was done")
        raise


def _await_firing(found: Live, request: Request, seconds: float) -> Any:
    """The firing of a request, or None: then it was taken back and will never fire."""
    from ftrun.faults import requests, trigger

    deadline = time.monotonic() + seconds
    grace = 1.0  # seconds between taking a request and writing down what it does, at most
    taken_back = False
    while True:
        seen = found.board.launcher_bell.count()
        for firing in trigger.fired(found.run.path):
            if (firing.source, firing.fault) == (requests.REQUEST, request.number):
                return firing
        now = time.monotonic()
        if now > deadline or not found.alive():
            taken_back = taken_back or requests.take(found.run.path, request.number)
            if taken_back or not found.run.path.exists() or now > deadline + grace:
                return None
        found.board.launcher_bell.wait(seen, _LOOK)


def _standing(found: Live, wish: Wish, rank: int) -> str:
    """What the rank does, which may be why a fault did not fire."""
    from ftrun.core.shared.board import Flag
    from ftrun.core.shared.moment import Moment
    from ftrun.faults.kinds import REPAIR_PHASES

    cell = found.cell(rank)
    if not cell.has(Flag.PROTECTED):
        return f"rank {rank} is in no loop of ftrun.protect, so it has no phases; kill, term, segv, abort and freeze need none"
    if wish.at in REPAIR_PHASES:
        return (
            f"{wish.at} is reached only while another fault is repaired (--wait 0 leaves the request waiting for one)"
        )
    return f"rank {rank} is {Moment.of(cell).words()}"


# ---- random faults ---------------------------------------------------------------------------------------------------


def _random(words: list[str], rate: float, seed: int, step: int | None, after: float, yes: bool, as_json: bool) -> int:
    from ftrun.cli import live
    from ftrun.faults import dice, kinds, requests

    if len(words) > 2:
        raise UsageError("say: ftrun inject-fault [KIND] [RUN] --random RATE --seed S")
    run_id, kind, argument = None, "", None
    try:
        dice.check(rate, seed)
        if len(words) == 2 or (words and words[0].partition(":")[0] in kinds.KINDS):
            word, run_id = _kind_and_run(words)
            found_kind, argument = kinds.parse(word)
            kind = found_kind.name
            if found_kind.arrives not in (kinds.SIGNAL, kinds.INSIDE) or kind == "oom":
                raise ValueError(f"{kind} cannot be random")
        elif words:
            run_id = words[0]
    except ValueError as error:
        raise UsageError(str(error)) from None
    found = live.Live.find(run_id, f"inject-fault RUN --random {rate:g}")
    what = f"{100 * rate:g} faults in 100 steps on average" if rate else "no more random faults"
    if rate and not live.confirmed(f"strike run {found.run.run_id} with {what}?", yes):
        tell("nothing was injected")
        return 1
    _sleep(found, after)
    steps = [found.board.cell(place.cell).step for place in found.world().places]
    # a step that no rank has begun, so that all ranks agree on which faults there are
    first = max([step or 0, *(s + 2 for s in steps if s is not None)])
    request = requests.post(
        found.run.path, requests.Request(requests.RANDOM, kind, argument, step=first, rate=rate, seed=seed)
    )
    ring(found, request)
    words_said = f"{what} in run {found.run.run_id}" + (f" from step {first} on, seed {seed}" if rate else "")
    if as_json:
        print(json.dumps({"run": found.run.run_id, "rate": rate, "seed": seed, "first": first, "kind": kind or None}))
    else:
        tell(words_said)
    return 0


# ---- what is said ----------------------------------------------------------------------------------------------------


def _did(
    found: Live,
    wish: Wish,
    words: str,
    rank: int,
    phase: str,
    step: int | None,
    pid: int | None,
    number: int,
    more: Mapping[str, int] | None = None,
) -> int:
    if wish.as_json:
        facts = {"fired": pid is not None, "run": found.run.run_id, "kind": wish.name, **(more or {})}
        where = {"rank": None if wish.machine and not wish.at else rank, "phase": phase or None, "step": step}
        print(json.dumps({**facts, **where, "pid": pid, "request": number}))
    else:
        tell(words)
    return 0


def _did_not(found: Live, wish: Wish, why: str) -> int:
    if wish.as_json:
        print(json.dumps({"fired": False, "run": found.run.run_id, "kind": wish.name, "why": why}))
    tell(f"error: {wish.name} did not fire in run {found.run.run_id}: {why}")
    return 1
