"""devices.json of a run directory: what the launcher's device watch knows. Absent on a machine without devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftrun.core.shape import listed, loads, maybe, number, record, text, whole

FILE = "devices.json"
_DEVICE = record(
    {},
    {
        **dict.fromkeys(("uuid", "name", "quarantined"), maybe(text)),
        **dict.fromkeys(("index", "rank", "memory_used", "memory_total"), maybe(whole)),
        **dict.fromkeys(("utilisation", "temperature"), maybe(number)),
        "throttle": maybe(listed(text)),
    },
)


def read(run_dir: Path) -> list[dict[str, Any]]:
    """One entry a device: index, uuid, name, utilisation (%), temperature (C), memory_used and memory_total (bytes),
    throttle (list), quarantined (why, or None), rank (or None). Empty when nobody watches devices."""
    try:
        raw = loads((run_dir / FILE).read_bytes())
    except (OSError, ValueError):
        return []
    return [entry for entry in raw if _DEVICE(entry)] if isinstance(raw, list) else []


def of(found: list[dict[str, Any]], rank: int | None, word: int) -> dict[str, Any] | None:
    """The device of a rank; `word` is the board's: index + 1, 0 = none."""
    for entry in found:
        if rank is not None and entry.get("rank") == rank:
            return entry
    return next((e for e in found if word and e.get("index") == word - 1), None)
