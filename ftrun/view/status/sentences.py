"""Write the whole sentences of `ftrun status`: on a stall, on a stopped launcher, on deaths in an unprotected run."""

from __future__ import annotations

from typing import Any

from ftrun.core.amounts import count
from ftrun.core.shared.moment import Moment
from ftrun.core.text import ranks as named
from ftrun.view import text

_EXCUSES = {
    "call": "in job.call",
    "compiling": "compiling",
    "first": "in its first step",
    "outside": "between two steps",
    "debugger": "held by a debugger",
}

_SOURCES = {
    "adopt": "adopted in place",
    "peer": "from a peer",
    "remote": "from another node",
    "sealed": "adopted, update made from sealed gradients",
}


def cause(victim: dict[str, Any]) -> str:
    """Return cause, rank and moment: "SIGKILL → rank 2 in backward of step 60"."""
    return f"{victim['cause']} → rank {victim['rank']} {Moment.told(victim).words()}".rstrip()


def source(name: str) -> str:
    """Return where a replaced rank's state came from, by the name in the account: "adopted in place"."""
    return _SOURCES.get(name, f"from {name}")


def stall(found: dict[str, Any]) -> str:
    """Return a sentence on a stall: the waiting ranks, the culprits, the duration, and the time until ftrun acts."""
    since = f"for {text.duration(found['seconds'])}"
    left = found["acts_in"]
    soon = None if left is None else f"in {text.duration(left)}" if left > 0 else "any moment now"
    where = f" {found['where']}" if found["where"] else ""
    if not found["culprits"]:
        if not found["waiting"]:
            return f"{since}: every rank is busy with something of its own; nobody is replaced for that"
        rest = "no timeout watches that" if soon is None else f"their connections are made anew {soon}"
        return f"{since}: all ranks wait{where}; {rest}"
    one, several = named(found["culprits"]), len(found["culprits"]) > 1
    doing = [_EXCUSES[found["excuse"]]] if found["excuse"] in _EXCUSES else []
    doing += [f"last seen at {found['line']}"] if found["line"] else []
    blamed = f"{one} ({', '.join(doing)})" if doing else one
    if found["held_up"]:
        waiting = named(found["waiting"]) if found["held_up"] == len(found["waiting"]) else count(found["held_up"], "rank")
        told = f"{waiting} {'waits' if found['held_up'] == 1 else 'wait'}{where} for {blamed}"
    else:
        told = f"{blamed} {'are' if several else 'is'} busy"
    end = "no timeout watches that" if soon is None else f"replaced {soon} unless {'they move' if several else 'it moves'}"
    return f"{since}: {told}; {end}"


def unprotected(restarts_left: int, trained: bool) -> str:
    """Return a sentence on the effect of a death. `trained`: the optimizers step already, so protection comes too late."""
    so_far = "" if trained else " so far"
    death = "ends the run" if restarts_left <= 0 else f"restarts all workers ({count(restarts_left, 'restart')} left)"
    return f"not protected{so_far}: ftrun.protect() was not called, so a death {death}, and steps are not known here"


def launcher_stopped(pid: int) -> str:
    return f"the launcher (process {pid}) is stopped: nothing is noticed or repaired until it goes on: kill -CONT {pid}"
