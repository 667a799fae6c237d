"""Is a group whose connections were shut down over? Told by its threads: those of a collective that nobody ends sleep."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ftrun.core.system import procfs

_CIRCLES = 0.1  # seconds of processor time; what a connection's end brings about takes less than a hundredth of that
_TICK = os.sysconf("SC_CLK_TCK")


class Stillness:
    """Some threads of this process that wait for one another and for connections which were shut down.

    Each of them asleep, and none run in between two looks: whatever they wait for will not come.

    One of `loops`, which take what connections bring, may also run in circles: Gloo leaves a message alone whose buffer is gone
    (a collective failed in the middle of it), and asks again at once for what it left, for ever. Other collectives on that
    connection are not told of its end then.
    """

    def __init__(self, threads: Iterable[str], loops: Iterable[str] = ()) -> None:
        self._loops = set(loops)
        self._threads = {*threads, *self._loops}
        self._last: dict[str, str] = {}
        self._unread = -1  # bytes
        self._ticks: dict[str, int] = {}  # of each loop, at the look since which nothing was read

    def add(self, thread: int) -> None:
        """One more of them, by its number in this system."""
        self._threads.add(str(thread))

    def seen(self, unread: int = 0) -> bool:
        """Are they asleep, and were they since the look before? A loop may run in circles instead.

        `unread`: bytes that wait in the connections, of which no more can come.
        """
        now = {}
        for thread in sorted(self._threads - self._circling(unread)):
            said = procfs.status("self", thread)
            if said:
                now[thread] = _asleep(said)
            else:
                self._threads.discard(thread)  # it ended
        before, self._last = self._last, now
        return bool(self._threads) and "" not in now.values() and now == before

    def _circling(self, unread: int) -> set[str]:
        """The loops that have run for long and read nothing."""
        if unread != self._unread:
            self._unread = unread
            self._ticks = {thread: _ticks(thread) for thread in self._loops}
        return {thread for thread, ticks in self._ticks.items() if _ticks(thread) - ticks >= _CIRCLES * _TICK}


def threads() -> set[str]:
    """Those of this process, by their numbers in this system."""
    return set(procfs.tasks("self"))


def _asleep(said: dict[str, str]) -> str:
    """How often a thread was switched out so far, by its status; empty when it runs or waits for a disk."""
    if not said["State"].startswith("S"):
        return ""
    return f"{said['voluntary_ctxt_switches']} {said['nonvoluntary_ctxt_switches']}"


def _ticks(thread: str) -> int:
    """Processor time that it has used, in clock ticks."""
    fields = procfs.stat("self", thread)
    return int(fields[11]) + int(fields[12]) if fields is not None else 0
