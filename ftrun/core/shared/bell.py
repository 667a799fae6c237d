"""A bell in shared memory: whoever has changed the memory rings, and whoever waits for a change wakes and looks."""

from __future__ import annotations

from ftrun import native


class Bell:
    """The 32-bit futex word at `address`."""

    def __init__(self, address: int) -> None:
        self._address = address

    def ring(self) -> None:
        """Wake everyone who waits."""
        native.bell_ring(self._address)

    def count(self) -> int:
        """Return how often it rang. Read it, look at the memory, then wait with it, so that no ring is missed."""
        return native.load32(self._address)

    def wait(self, seen: int, timeout: float) -> bool:
        """Sleep (GIL released) until it rings after the count `seen`, or for `timeout` seconds; return True if it rang."""
        return native.bell_wait(self._address, seen, timeout)
