"""Read devices.json of a run directory, the report of the launcher's device watch. A machine without devices has none."""

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
    """Return one entry for each device, or an empty list without a device watch.

    Keys: index, uuid, name, utilisation (%), temperature (C), memory_used and memory_total (bytes), throttle (list),
    quarantined (reason or None), rank (or None).
    """
    try:
        raw = loads((run_dir / FILE).read_bytes())
    except (OSError, ValueError):
        return []
    return [entry for entry in raw if _DEVICE(entry)] if isinstance(raw, list) else []


def of(found: list[dict[str, Any]], rank: int | None, word: int) -> dict[str, Any] | None:
    """Return the device of a rank. `word`: the board's device word, index + 1 or 0 for none."""
    for entry in found:
        if rank is not None and entry.get("rank") == rank:
            return entry
    return next((e for e in found if word and e.get("index") == word - 1), None)
