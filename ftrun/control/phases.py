"""What the run as a whole does: names that the controller decides by and the views show."""

from __future__ import annotations

import enum


class RunPhase(str, enum.Enum):
    """What the run as a whole does. NEW is before Begin."""

    NEW = "NEW"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    CLEANING = "CLEANING"
    RESETTING = "RESETTING"
    RESTORING = "RESTORING"
    RESUMING = "RESUMING"
    RESTARTING = "RESTARTING"
    ENDING = "ENDING"
    ENDED = "ENDED"

    def __str__(self) -> str:
        return self.value


INCIDENT = (RunPhase.STOPPING, RunPhase.CLEANING, RunPhase.RESETTING, RunPhase.RESTORING, RunPhase.RESUMING)
LIVE = (RunPhase.STARTING, RunPhase.RUNNING, *INCIDENT, RunPhase.RESTARTING)
REPAIRING = (*INCIDENT, RunPhase.RESTARTING)
OVER = (RunPhase.ENDING, RunPhase.ENDED)
