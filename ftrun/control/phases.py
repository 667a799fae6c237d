"""What the run as a whole does: names that the controller decides by and the views show."""

from __future__ import annotations

import enum


class Phase(str, enum.Enum):
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


INCIDENT = (Phase.STOPPING, Phase.CLEANING, Phase.RESETTING, Phase.RESTORING, Phase.RESUMING)
LIVE = (Phase.STARTING, Phase.RUNNING, *INCIDENT, Phase.RESTARTING)
REPAIRING = (*INCIDENT, Phase.RESTARTING)
OVER = (Phase.ENDING, Phase.ENDED)
