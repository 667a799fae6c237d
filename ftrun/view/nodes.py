"""Read nodes.json of a run directory: what each node of a run showed of itself when this one last saw it. One node has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from ftrun.core import paths
from ftrun.core.shape import flag, listed, loads, maybe, number, record, text, whole
from ftrun.view.state import DEGRADED, ENDED, FINISHED, LEFT, LOST, SPARE, STARTING, of_all, of_node

_NODE = record({"node": maybe(whole), "id": text, "host": text, "nproc": whole, "state": text, "here": flag, "silent": whole})
_STALL = record(
    {"seconds": number, "acts_in": maybe(number), "culprits": listed(whole), "held_up": whole, "waiting": listed(whole)}
    | dict.fromkeys(("where", "excuse", "line"), text)
)
_COUNTS = ("healthy", "spares", "spares_ready", "spares_wanted", "replacements", "restarts", "quarantined", "step", "generation")
_STATUS = record(
    {"run": text, "phase": text, "repairing": flag, "protected": maybe(flag), "unwell": listed(whole), "stall": maybe(_STALL)}
    | dict.fromkeys(_COUNTS, whole)
)
_OUTCOME = record({"moved": flag}, {"why": text, **dict.fromkeys(("step", "from", "to"), whole)})
_SHOWN = ("run", "step", "generation", "replacements", "restarts", "spares_ready", "spares_wanted", "unwell", "stall")


def read(run_dir: Path, own: str = "", seconds: float = 0.0, live: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return one entry for each node of the run, then one for each that waits as a spare; [] in a run on one node.

    Args:
        own: The state of this node, as its own files tell it.
        seconds: How long the run has been going.
        live: What is known of this node from its own files: newer than what it showed.
    """
    raw = _read(run_dir)
    firsts = accumulate((entry["nproc"] for entry in raw if entry["node"] is not None), initial=0)
    return [{**entry, **live} if live and entry["here"] and entry["ranks"] else entry for entry in _entries(raw, firsts, own, seconds)]


def outcomes(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return what came of the newest requests of `ftrun drain`, by their keys: moved, and why not, or step, from and to (processes)."""
    found: dict[str, dict[str, Any]] = {}
    for entry in _read(run_dir):
        shown = entry.get("shows")
        told = shown.get("drains") if isinstance(shown, dict) else None
        found |= {key: one for key, one in told.items() if _OUTCOME(one)} if isinstance(told, dict) else {}
    return found


def _read(run_dir: Path) -> list[dict[str, Any]]:
    try:
        raw = loads((run_dir / paths.NODES).read_bytes())
    except (OSError, ValueError):
        return []
    return raw if listed(_NODE)(raw) else []


def state(nodes: list[dict[str, Any]], own: str) -> str:
    """Return the state of the run from those of its nodes. A spare node that looks at it is none of them."""
    states = [entry["state"] for entry in nodes if entry["node"] is not None]
    states += [DEGRADED for entry in nodes if entry["node"] is not None and entry["silent"]]
    return of_all(states) if states and own != ENDED else own


def _entries(raw: list[dict[str, Any]], firsts: Iterator[int], own: str, seconds: float) -> Iterator[dict[str, Any]]:
    for entry in raw:
        member, told = entry["node"] is not None, entry.get("shows")
        status = told.get("status") if isinstance(told, dict) else None
        status = status if _STATUS(status) else None
        first = next(firsts) if member else None
        yield {
            **{name: entry[name] for name in ("node", "id", "host", "nproc", "here", "silent")},
            "ranks": None if first is None else [first, first + entry["nproc"] - 1],
            "state": _state(entry, status, own, seconds) if member else SPARE,
            "machine": status["phase"] if status else None,
            "healthy": status["healthy"] if status and member else None,
            **{name: status[name] if status else None for name in _SHOWN},
        }


def _state(entry: dict[str, Any], status: dict[str, Any] | None, own: str, seconds: float) -> str:
    if entry["state"] in (FINISHED, LOST, LEFT):
        return str(entry["state"])
    if entry["here"]:
        return own
    if status is None:
        return STARTING
    return of_node(
        status["phase"],
        repairing=status["repairing"],
        stalled=status["stall"] is not None,
        impaired=status["healthy"] < entry["nproc"] or status["quarantined"] > 0,
        spares_missing=status["spares"] < status["spares_wanted"],
        protected=status["protected"],
        seconds=seconds,
    )
