"""Phases of the run as a whole: the controller decides by these names, and the views display them."""

from __future__ import annotations

import enum


class RunPhase(str, enum.Enum):
    """Phase of the run as a whole. NEW is before Begin."""

    NEW = "NEW"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    REPAIRING = "REPAIRING"
    RESTARTING = "RESTARTING"
    ENDING = "ENDING"
    ENDED = "ENDED"

    def __str__(self) -> str:
        return self.value


INCIDENT = (RunPhase.STOPPING, RunPhase.REPAIRING)
LIVE = (RunPhase.STARTING, RunPhase.RUNNING, *INCIDENT, RunPhase.RESTARTING)
OVER = (RunPhase.ENDING, RunPhase.ENDED)

# In place of REPAIRING people are told the stage of the least advanced worker. No decision reads it.
CLEANING, RESETTING, RESTORING, RESUMING = REPAIR_STAGES = ("CLEANING", "RESETTING", "RESTORING", "RESUMING")
INTERRUPTED = (RunPhase.STOPPING, *REPAIR_STAGES, RunPhase.RESTARTING)
