"""Waiting for a condition that nothing rings for: by looking again, up to a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(done: Callable[[], object], seconds: float, pause: float) -> bool:
    """Look every `pause` seconds until `done()` holds; False when it did not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True
