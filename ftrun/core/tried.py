"""Lists the releases of torch that ftrun was tried with."""

from __future__ import annotations

import re

TORCH_FROM, TORCH_TO = (2, 12), (2, 15)  # the oldest and the newest
SHARDED_FROM = (2, 13)  # the oldest whose FSDP2 can be put back


def _to_newest(oldest: tuple[int, int]) -> str:
    return f"torch {oldest[0]}.{oldest[1]} to {TORCH_TO[0]}.{TORCH_TO[1]}"


TORCH_RANGE, SHARDED_RANGE = _to_newest(TORCH_FROM), _to_newest(SHARDED_FROM)


def version_of(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
