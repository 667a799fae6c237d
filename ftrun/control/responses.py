"""Names of the responses to a fault, as a policy file and the journal spell them."""

from __future__ import annotations

import enum


class Response(str, enum.Enum):
    """One response to a fault."""

    REPLACE = "replace"  # another worker takes the rank
    QUARANTINE = "quarantine"  # another worker takes the rank, on another device
    LINKS = "reset-links"  # every connection is made again, nobody is replaced
    REDO = "redo"  # everyone does the step again
    ROLL_BACK = "roll-back"  # all workers start again, from the script's last checkpoint
    STOP = "stop"  # the run ends, for a person to look: exit code 1
    FAIL_NODE = "fail-node"  # the run ends on this machine, worth running on another one: exit code 75
    SUSPECT = "suspect"  # probe the device, restart its worker there once, then quarantine it
    REPORT = "report"  # report it, do nothing

    def __str__(self) -> str:
        return self.value
