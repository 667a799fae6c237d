"""Lists every kind of fault that can be injected, with its argument, its phases, and the way it arrives.

This is plain data and fires nothing. Plans, `ftrun inject-fault` and the tests read the same table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STEP_PHASES = ("forward", "backward", "gate", "update", "idle")
REPAIR_PHASES = ("stop", "reset", "restore")
PHASES = (*STEP_PHASES, *REPAIR_PHASES)

# the ways in which a kind arrives if no phase is given
SIGNAL = "signal"  # a signal from outside, at once
INSIDE = "inside"  # the worker does it to itself at its next phase change
DEVICE = "device"  # the device's driver reports it
MACHINE = "machine"  # it strikes the launcher, or everything on this node


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault. `argument` "" = it takes none; `phases`: a worker can fire it there; `lasts`: it may have a duration.

    `anywhere`: the phases that count if none is given.
    """

    name: str
    what: str
    arrives: str = INSIDE
    argument: str = ""
    phases: tuple[str, ...] = PHASES
    lasts: bool = False
    anywhere: tuple[str, ...] = STEP_PHASES


_GRADIENTS = ("forward", "backward")

_ALL = (
    FaultKind("kill", "SIGKILL", SIGNAL),
    FaultKind("term", "SIGTERM", SIGNAL),
    FaultKind("segv", "a segmentation fault", SIGNAL),
    FaultKind("abort", "SIGABRT, as a failed assertion in C++", SIGNAL),
    FaultKind("exit", "leaves with an exit code", argument="CODE"),
    # not at the gate: a rank that has arrived there runs no code of the script before it passes
    FaultKind("exception", "raises RuntimeError", phases=tuple(p for p in PHASES if p != "gate"), anywhere=_GRADIENTS),
    FaultKind("oom", "eats memory until the kernel kills it"),
    FaultKind("freeze", "SIGSTOP", SIGNAL, lasts=True),
    FaultKind("hang", "busy in Python for ever", lasts=True),
    FaultKind("gil", "hangs in C and keeps Python's lock", lasts=True),
    FaultKind("slow", "works FACTOR times as long", argument="FACTOR", lasts=True),
    FaultKind("nan", "one value of the loss or of a gradient is NaN", phases=_GRADIENTS, anywhere=_GRADIENTS),
    FaultKind("bitflip", "one bit of one parameter is wrong"),
    FaultKind("comm", "its connections to the other ranks are dropped"),
    FaultKind("xid", "the driver reports Xid N", DEVICE, argument="N"),
    FaultKind("gpu-lost", "the device does not answer any more", DEVICE),
    FaultKind("ecc", "an uncorrectable memory error of the device", DEVICE),
    FaultKind("launcher-kill", "SIGKILL for ftrun itself", MACHINE),
    FaultKind("node-kill", "SIGKILL for everything of the run on this node, at once", MACHINE),
)
KINDS: dict[str, FaultKind] = {kind.name: kind for kind in _ALL}


def parse(text: str) -> tuple[FaultKind, float | None]:
    """Parse a kind and its argument: `exit:3` -> (the kind, 3.0).

    Raises:
        ValueError: The kind is unknown, or the argument does not fit it; the message is for people.
    """
    name, colon, rest = text.partition(":")
    kind = KINDS.get(name)
    if kind is None:
        raise ValueError(f"unknown fault kind {text!r}{_meant(name)} (known: {', '.join(KINDS)})")
    if bool(colon) != bool(kind.argument):
        raise ValueError(
            f"{name} needs its {kind.argument}: write {name}:{kind.argument}"
            if kind.argument
            else f"{name} takes no argument: leave out :{rest}"
        )
    if not kind.argument:
        return kind, None
    try:
        argument = float(rest)
    except ValueError:
        argument = math.nan
    if name == "exit" and not (argument.is_integer() and 0 <= argument <= 255):
        raise ValueError(f"{text}: CODE must be 0 to 255")
    if name == "slow" and not 1.0 <= argument < math.inf:
        raise ValueError(f"{text}: FACTOR must be a number of at least 1")
    if name == "xid" and not (argument.is_integer() and 1 <= argument < 2**31):
        raise ValueError(f"{text}: N must be a whole number of at least 1")
    return kind, argument


def spelled(name: str, argument: float | None) -> str:
    """Invert `parse`."""
    return name if argument is None else f"{name}:{argument:g}"


def check_phase(kind: FaultKind, at: str) -> None:
    """Raise ValueError if there is no such phase, or the kind cannot strike in it."""
    if at not in PHASES:
        raise ValueError(f"unknown phase {at!r}{_near(at, PHASES)} (known: {', '.join(PHASES)})")
    if at not in kind.phases:
        *most, last = kind.phases
        raise ValueError(f"{kind.name} is possible in {', '.join(most)} and {last}, not in {at} ({kind.what})")


def check_duration(kind: FaultKind, seconds: float) -> None:
    """Raise ValueError if the kind has no duration, or `seconds` is not a positive finite number."""
    if not kind.lasts:
        lasting = ", ".join(k.name for k in _ALL if k.lasts)
        raise ValueError(f"{kind.name} has no duration; only these do: {lasting}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"the duration must be a number of seconds above 0, not {seconds:g}")


def _meant(name: str) -> str:
    return _near(name, KINDS)


def _near(word: str, known: object) -> str:
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)  # type: ignore[call-overload]
    return f", did you mean {close[0]}?" if close else ""
