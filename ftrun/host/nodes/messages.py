"""Frames between the agents of several nodes: a length of four bytes, then one JSON object.

Raises:
    ValueError
"""

from __future__ import annotations

import json
import struct
from typing import Any

from ftrun.core.shape import loads

VERSION = 6  # of the records and of these frames
MAX_FRAME = 8 * 1024 * 1024
_HEAD = struct.Struct(">I")


def text(message: Any) -> str:
    return json.dumps(message, separators=(",", ":"))


def pack(message: dict[str, Any]) -> bytes:
    return frame(text(message))


def frame(message: str) -> bytes:
    """Return the frame of an object that is JSON already."""
    data = message.encode()
    if len(data) > MAX_FRAME:
        raise ValueError(f"frame of {len(data)} bytes is larger than {MAX_FRAME}")
    return _HEAD.pack(len(data)) + data


def take(buffer: bytearray, largest: int = MAX_FRAME) -> dict[str, Any] | None:
    """Remove the first whole frame from `buffer`; None while there is none."""
    if len(buffer) < _HEAD.size:
        return None
    (size,) = _HEAD.unpack_from(buffer)
    if size > largest:
        raise ValueError(f"frame of {size} bytes is larger than {largest}: the peer is no ftrun")
    if len(buffer) < _HEAD.size + size:
        return None
    data = bytes(buffer[_HEAD.size : _HEAD.size + size])
    del buffer[: _HEAD.size + size]
    raw = loads(data)
    if not isinstance(raw, dict):
        raise ValueError("a frame that is no object")
    return raw
