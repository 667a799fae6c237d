"""Maps each Xid of NVIDIA's driver to a class, and the class to a response.

Sources disagree, and `Xid.sources` names them: the catalogue is NVIDIA's as generated into gpud (October 2025),
the Kubernetes device plugin ignores some as the application's, DCGM's health check fails on others. No clock, no I/O.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ftrun.control.responses import Response


class Class(str, enum.Enum):
    """Who causes an Xid, as the catalogue sorts them."""

    APPLICATION = "application"
    LOG = "log only"
    COMPANION = "follows another event"
    RESET = "GPU needs a reset"
    MACHINE = "machine"
    NVLINK = "NVLink"
    CHANGED = "recovery action changed"
    UNKNOWN = "unknown"


ACTIONS: dict[Class, Response] = {
    Class.APPLICATION: Response.REPLACE,
    Class.LOG: Response.REPORT,
    Class.COMPANION: Response.REPORT,
    Class.RESET: Response.QUARANTINE,
    Class.MACHINE: Response.FAIL_NODE,
    Class.NVLINK: Response.LINKS,
    Class.CHANGED: Response.REPORT,  # the policy asks field 230 first, so it asked for nothing here
    Class.UNKNOWN: Response.SUSPECT,
}

_NUMBERS: dict[Class, tuple[int, ...]] = {
    Class.APPLICATION: (
        *(8, 11, 13, 25, 31, 32, 39, 40, 41, 60),
        *range(68, 73),
        *(75, 76, 77, 80, 94),
        *range(126, 136),
    ),
    Class.LOG: (37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 160, 161),
    Class.COMPANION: (45,),
    Class.RESET: (46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158),
    Class.MACHINE: (79,),
    Class.NVLINK: (74, *range(144, 151)),
    Class.CHANGED: (154,),
}
_MEANINGS = {
    8: "GPU stopped processing",
    13: "graphics engine exception",
    31: "memory page fault",
    32: "corrupted push buffer",
    43: "GPU stopped a channel",
    45: "channel cleaned up",
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    62: "micro-controller halted",
    63: "row remapping recorded",
    64: "row remapping failed",
    68: "video decoder exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timed out",
    119: "GSP does not answer",
    120: "GSP error",
    121: "C2C link error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization failed",
    154: "recovery action changed",
    **dict.fromkeys(range(144, 151), "NVLink error"),
}
_IGNORED, _FAILED = "the Kubernetes device plugin ignores it", "DCGM fails on it"
_PLUGIN_IGNORES = frozenset({13, 31, 43, 45, 68, 109})
_DCGM_FAILS = frozenset({48, 74, 79, 95, 119, 120, 140})


@dataclass(frozen=True)
class Xid:
    """One row. The run does `action` unless field 230 or the user says otherwise."""

    number: int
    kind: Class
    action: Response
    meaning: str
    sources: tuple[str, ...]

    @property
    def words(self) -> str:
        """`Xid 74 (NVLink error; DCGM fails on it)`: with the source that would do otherwise, if one would."""
        condemned = self.action in (Response.QUARANTINE, Response.FAIL_NODE)
        other = _IGNORED if condemned else _FAILED
        against = f"; {other}" if other in self.sources else ""
        return f"Xid {self.number} ({self.meaning}{against})"


def _sources(number: int, known: bool) -> tuple[str, ...]:
    return (
        *(("catalogue",) if known else ()),
        *((_IGNORED,) if number in _PLUGIN_IGNORES else ()),
        *((_FAILED,) if number in _DCGM_FAILS else ()),
    )


TABLE: dict[int, Xid] = {
    number: Xid(number, kind, ACTIONS[kind], _MEANINGS.get(number, kind.value), _sources(number, True))
    for kind, numbers in _NUMBERS.items()
    for number in numbers
}


def row(number: int) -> Xid:
    """Return the table's row; one of class UNKNOWN for a number that is not in it."""
    unknown = Xid(number, Class.UNKNOWN, ACTIONS[Class.UNKNOWN], "not in the table", _sources(number, False))
    return TABLE.get(number, unknown)
