"""Polls for a condition that rings no bell, up to a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(done: Callable[[], object], seconds: float, pause: float) -> bool:
    """Poll `done()` every `pause` seconds until it is true; return False if it is not true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True
