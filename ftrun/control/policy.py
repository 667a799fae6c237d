"""Maps each fault to a response: one table, and the rows that a user overrides.

A device fault asks in this order: the user's rows, the recovery action that the driver asks for (NVML field 230), the
table of Xids. budgets.py counts; this file does not. No clock, no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ftrun.control.device import xid
from ftrun.control.device.xid import Class
from ftrun.control.responses import Response
from ftrun.core.faults import Fault

R = Response
NO_ANSWER = -1  # the driver has no field 230, or did not answer in time


@dataclass(frozen=True)
class PolicyRow:
    """The response, and what else a user may choose. An exit code alone never condemns a device."""

    response: Response
    choices: tuple[Response, ...]


_GONE = (R.REPLACE, R.ROLL_BACK, R.STOP)
_ON_DEVICE = (R.REPLACE, R.QUARANTINE, R.ROLL_BACK, R.STOP)
DEVICE_CHOICES = (R.REPLACE, R.QUARANTINE, R.LINKS, R.ROLL_BACK, R.STOP, R.FAIL_NODE, R.SUSPECT, R.REPORT)

OF_DEVICES = (Fault.XID, Fault.GPU_LOST, Fault.ECC)

TABLE: dict[Fault, PolicyRow] = {
    Fault.EXIT: PolicyRow(R.REPLACE, _GONE),
    Fault.SIGNAL: PolicyRow(R.REPLACE, _GONE),
    Fault.OOM: PolicyRow(R.REPLACE, _GONE),
    Fault.EXCEPTION: PolicyRow(R.REDO, (R.REDO, *_GONE)),
    Fault.FROZEN: PolicyRow(R.REPLACE, _ON_DEVICE),
    Fault.GIL: PolicyRow(R.REPLACE, _ON_DEVICE),
    Fault.HANG: PolicyRow(R.REPLACE, _ON_DEVICE),
    Fault.COLLECTIVE: PolicyRow(R.REPLACE, _ON_DEVICE),
    Fault.LINK: PolicyRow(R.LINKS, (R.LINKS, R.STOP)),
    Fault.NONFINITE: PolicyRow(R.REDO, (R.REDO, *_ON_DEVICE)),
    Fault.CORRUPT: PolicyRow(R.REPLACE, _ON_DEVICE),
    Fault.STRAGGLER: PolicyRow(R.REPORT, (*_ON_DEVICE, R.REPORT)),
    Fault.CUDA: PolicyRow(R.REPLACE, _ON_DEVICE),
    Fault.XID: PolicyRow(R.SUSPECT, ()),  # by number: [policy.xid], --xid-policy
    Fault.GPU_LOST: PolicyRow(R.QUARANTINE, (R.QUARANTINE, R.FAIL_NODE, R.STOP)),
    Fault.ECC: PolicyRow(R.QUARANTINE, DEVICE_CHOICES),
    Fault.DISK_FULL: PolicyRow(R.REPORT, (R.REPORT, R.STOP)),
    Fault.MEMORY_FULL: PolicyRow(R.REPORT, (R.REPORT, R.STOP)),
    Fault.DRAIN: PolicyRow(R.REPLACE, (R.REPLACE,)),
    Fault.GAVE_WAY: PolicyRow(R.REPLACE, (R.REPLACE,)),
    Fault.CUT_OFF: PolicyRow(R.REPLACE, (R.REPLACE,)),
}

# NVML field 230: the driver knows best what its device needs.
RECOVERY: dict[int, tuple[str, Response]] = {
    1: ("the driver asks for a reset", R.QUARANTINE),
    2: ("the driver asks for a reboot", R.FAIL_NODE),
    3: ("the driver asks to drain its peers", R.QUARANTINE),
    4: ("the driver asks to drain and reset it", R.QUARANTINE),
    5: ("the driver asks to recover the NVLink domain", R.LINKS),
    6: ("the driver asks for a bus reset", R.QUARANTINE),
    7: ("the driver asks for a reboot", R.FAIL_NODE),
}


@dataclass(frozen=True)
class Overrides:
    """Rows that a user overrides: (fault, response) and (Xid, response) by their names."""

    faults: tuple[tuple[str, str], ...] = ()
    xids: tuple[tuple[int, str], ...] = ()

    def fault(self, fault: Fault) -> Response | None:
        return _last(self.faults, fault.value)

    def xid(self, number: int) -> Response | None:
        return _last(self.xids, number)


@dataclass(frozen=True)
class Ruling:
    """`why` is for people. `counts`: the device caused it, and its budget is charged."""

    response: Response
    why: str
    counts: bool = True


def of_worker(overrides: Overrides, fault: str) -> Response:
    """Return the response to a fault of a worker; an unnamed one ("") is a worker that is gone."""
    if not fault:
        return R.REPLACE
    named = Fault(fault)
    return overrides.fault(named) or TABLE[named].response


def of_dead(overrides: Overrides, fault: str) -> Response:
    """Return the response when its process is gone: a new process does what needs a live one."""
    response = of_worker(overrides, fault)
    return R.REPLACE if response in (R.REDO, R.LINKS, R.REPORT, R.SUSPECT) else response


def of_device(overrides: Overrides, fault: str, code: int = 0, recovery: int = NO_ANSWER) -> Ruling:
    """Return the ruling on a fault of a device. `code`: the Xid, if it is one; `recovery`: the value of field 230."""
    named = Fault(fault)
    row = xid.row(code)
    if named is Fault.XID:
        what, chosen = row.words, overrides.xid(code)
        otherwise = row.action
    else:
        what, chosen = _WORDS.get(named, named.value), overrides.fault(named)
        otherwise = TABLE[named].response
    counts = named is not Fault.XID or row.kind is not Class.APPLICATION
    if chosen is not None:
        return Ruling(chosen, what, counts)
    if recovery in RECOVERY:
        asked, response = RECOVERY[recovery]
        return Ruling(response, f"{what}; {asked}", True)
    return Ruling(otherwise, what, counts)


_WORDS = {Fault.GPU_LOST: "the device does not answer", Fault.ECC: "uncorrectable memory error"}


def _last(rows: Iterable[tuple[object, str]], key: object) -> Response | None:
    found = [response for name, response in rows if name == key]
    return Response(found[-1]) if found else None
