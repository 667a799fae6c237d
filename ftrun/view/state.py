"""The one word that says how a run is, for people and for `ftrun status`'s exit code. Pure."""

from __future__ import annotations

from collections.abc import Collection

from ftrun.control.phases import INTERRUPTED
from ftrun.control.phases import RunPhase as Machine

HEALTHY, STARTING, RECOVERING, DEGRADED, ENDED = "healthy", "starting", "recovering", "degraded", "ended"
STALLED, UNPROTECTED = "stalled", "unprotected"
LOST, LEFT, SPARE, FINISHED = "lost", "left", "spare", "finished"  # of one of several nodes
_BUILDING = 30.0  # seconds before protect() in which a run counts as starting, not as unprotected
_GRAVEST_FIRST = (RECOVERING, STARTING, STALLED, DEGRADED, UNPROTECTED)
_SAME = {LOST: RECOVERING, LEFT: RECOVERING, FINISHED: HEALTHY}


def of_node(
    machine: str, *, repairing: bool, stalled: bool, impaired: bool, spares_missing: bool, protected: bool | None, seconds: float
) -> str:
    """Return the state of a node that lives and whose run is not over.

    Args:
        machine: The controller's phase.
        repairing: An incident goes on.
        impaired: A rank is not healthy, or a device is in quarantine.
        protected: As `health.protected` returns it.
        seconds: How long the run has been going.
    """
    if machine in (Machine.NEW, Machine.STARTING):
        return STARTING
    if machine in INTERRUPTED or repairing:
        return RECOVERING
    if stalled:
        return STALLED
    if impaired:
        return DEGRADED
    if protected is None:
        return STARTING if seconds < _BUILDING else UNPROTECTED
    return UNPROTECTED if not protected else DEGRADED if spares_missing else HEALTHY


def of_all(states: Collection[str]) -> str:
    """Return the state of a run from those of its nodes: the gravest."""
    found = {_SAME.get(state, state) for state in states}
    return next((state for state in _GRAVEST_FIRST if state in found), HEALTHY)
