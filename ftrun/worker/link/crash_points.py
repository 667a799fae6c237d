"""Test-only switches: die at a named point between two board writes, or leave out a part of the rewind on purpose.

Both are off unless their variable is set when the worker starts; a production run never sets them.
FTRUN_TEST_PAUSE="name:gate_step:rank,..." kills this worker (SIGKILL) at each such point, once a run. For "swap" the other
ranks leave that gate to the named one, since any rank may open it.
FTRUN_TEST_BREAK="rng,batch,slots,prime,seal,sealed,abort,sharded,pipeline" leaves the named parts out, so that a test can prove
that it would notice, and a benchmark what they cost.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ftrun.core.paths import ENV_RUN_DIR

POINTS = ("arrive", "swap", "pass", "open", "sealed", "slot-start", "slot-gate", "slot-end", "done", "restored")

_broken = frozenset(filter(None, os.environ.get("FTRUN_TEST_BREAK", "").split(",")))


def broken(part: str) -> bool:
    """Is this part deliberately left out?"""
    return part in _broken


Target = tuple[str, int, int]


def _parse(text: str) -> frozenset[Target]:
    targets = (part.split(":") for part in text.split(",") if part)
    return frozenset((name, int(step), int(rank)) for name, step, rank in targets)


_targets = _parse(os.environ.get("FTRUN_TEST_PAUSE", ""))
armed = bool(_targets)  # look here first: a call in every step of a production run is not free


def point(name: str, step: int, rank: int) -> None:
    """Die here when FTRUN_TEST_PAUSE names this point, gate step and rank, and nobody did before."""
    if not _targets:
        return
    target = (name, step, rank)
    if target not in _targets:
        return
    try:
        os.close(os.open(_marker(target), os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_gate(step: int, rank: int) -> bool:
    """Is another rank the one that is to open the gate of `step` and die there?"""
    return bool(_targets) and any(
        t[:2] == ("swap", step) and t[2] != rank and not _marker(t).exists() for t in _targets
    )


def _marker(target: Target) -> Path:
    return Path(os.environ[ENV_RUN_DIR]) / "paused-{}-{}-{}".format(*target)
