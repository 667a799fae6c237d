"""Define the form of each kind of journal line; all views of a run rely on it once `journal.parse` has accepted a line."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from ftrun.control.events import End, Event, Message, Publish, Say
from ftrun.core.shape import Check, digits, flag, listed, mapped, maybe, number, record, row, text, whole

_TYPES = {
    "float": number,
    "int": whole,
    "str": text,
    "bool": flag,
    "int | None": maybe(whole),
    "tuple[int, ...]": listed(whole),
    "tuple[str, ...]": listed(text),
}


def _of(kind: type[Message]) -> Check:
    """Return the check of an event or an action, from the fields that its class declares."""
    checks = {field.name: _TYPES[str(field.type)] for field in fields(kind)}  # type: ignore[arg-type]
    needed = [field.name for field in fields(kind) if field.default is MISSING]  # type: ignore[arg-type]
    return record({name: checks[name] for name in needed}, checks)


_MESSAGES = {
    name: _of(kind)
    for name, kind in Message.KINDS.items()
    if (issubclass(kind, Event) and kind is not Event) or kind in (Publish, Say, End)
}


def _message(value: Any) -> bool:
    """Is this a well-formed message, or one of a kind that no view reads?"""
    if not isinstance(value, dict) or not text(value.get("kind")):
        return False
    check = _MESSAGES.get(value["kind"])
    return (check is None or check(value)) and (value["kind"] != Publish.__name__ or _world(value))


def _world(publish: dict[str, Any]) -> bool:
    return all(0 <= rank < len(publish["workers"]) for rank in publish["replaced"])


_PLACE = mapped(whole)  # mesh coordinates by the names of the dimensions
_MESH = {"dims": mapped(whole), "ranks": mapped(_PLACE, digits)}
_MOMENT = {"step": maybe(whole), "epoch": maybe(whole), "end": whole, "phase": text}
VICTIM = record(
    {"rank": whole, "cell": whole, "cause": text},
    {**_MOMENT, "seen_ms": maybe(number), "fault": text, "evidence": text, "mesh": _PLACE},
)
_TIME = maybe(number)
_STEPS = record({"rank": whole, "cell": whole, "steps": listed(row(whole, whole, whole, *[_TIME] * 5))})
_MOVES = record({"rank": whole, "cell": whole, "moves": listed(row(text, whole, number, number))})
_NOTES = {
    "incident": record(
        {
            "victims": listed(VICTIM),
            "sources": mapped(record({"name": text, "bytes": whole}), digits),
            "ms": mapped(number),
            **dict.fromkeys(("generation", "resume", "redone", "began_ns"), whole),
            "total_ms": number,
            "restart": flag,
        },
        {
            **dict.fromkeys(("survivors", "last", "detected_ns"), whole),
            **dict.fromkeys(("stuck", "fault", "evidence"), text),
            "rollback": flag,
            "going_on": record({}, _MOMENT),
            "again_ms": number,
            "spares": listed(whole),
            "ranks": mapped(mapped(number), digits),
            "phases": listed(_STEPS),
            "moves": listed(_MOVES),
            "mesh": record(_MESH),
        },
    ),
    "node-incident": record(
        {"node": whole, "host": text, "here": flag, "own": maybe(whole), "round": whole, "number": whole, "ms": mapped(number)}
        | {"victims": listed(record({"rank": whole, "cause": text}, _MOMENT)), "total_ms": number, "sources": mapped(text, digits)}
    ),
    "drained": record({"node": whole, "host": text, "taker": text}),
    "drain-asked": record({"rank": maybe(whole), "by": whole}),
    "drain-outcome": record({"moved": flag}, {"why": text}),
    "mesh": record(_MESH),
    "kept": record({"not_kept": mapped(text)}),
    "failure": record({"root": maybe(record({"rank": whole, "kind": text, "cause": text}))}),
    "summary": record({"exact": flag, "incidents": whole, "redone": whole}),
    "protection": record({"protected": flag}),
    "told-to-end": record({"signal": text, "ranks": listed(whole)}),
    "exit": record({"worker": whole, "pid": whole, "code": maybe(whole)}),
    "service": record({"service": text, "pid": whole}),
    "service-exit": record({"service": text, "pid": whole, "code": maybe(whole)}),
    "stall": record({"since": number, "seconds": number, "culprits": listed(whole), "held_up": whole, "where": text, "line": text}),
    "fault": record(
        {"fired": record({"kind": text, "rank": maybe(whole), "phase": text, "step": maybe(whole), "t": number})}
    ),
}
_CONFIG = record({"nproc": whole, "spares": whole}, {"settings": record({}, {"argv": listed(text)})})
_LINES = {
    "config": record({"t": number, "wall": number, "config": _CONFIG}, {"run": text}),
    "event": record({"event": _message}),
    "phase": record({"phase": text, "generation": whole}, {"actions": listed(_message)}),
    "note": record({"note": text}),
}
_ANY = record({}, {"t": number})


def fits(line: Any) -> bool:
    """Is everything that the views read of this line well-formed? They ignore the rest."""
    if not _ANY(line) or not all(check(line) for key, check in _LINES.items() if key in line):
        return False
    noted = _NOTES.get(line.get("note", ""))
    return noted is None or noted(line)
