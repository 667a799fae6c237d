"""Parses CUDA_VISIBLE_DEVICES as CUDA does. The caller matches its entries with devices."""

from __future__ import annotations

import re
from itertools import takewhile

VARIABLE = "CUDA_VISIBLE_DEVICES"
_ENTRY = re.compile(r"\d+|(GPU|MIG)-.+")


def entries(value: str) -> list[str]:
    """Return the indices and UUIDs that the variable names. CUDA ignores the first invalid entry and all after it."""
    return list(takewhile(_ENTRY.fullmatch, map(str.strip, value.split(","))))
