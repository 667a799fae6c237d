"""Is a group whose connections were shut down over? Told by its threads: those of a collective that nobody ends sleep."""

from __future__ import annotations

from collections.abc import Iterable

from ftrun.core.system import procfs


class Stillness:
    """Some threads of this process that wait for one another and for connections which were shut down.

    Each of them asleep, and none run in between two looks: whatever they wait for will not come.
    """

    def __init__(self, threads: Iterable[str]) -> None:
        self._threads = set(threads)
        self._last: dict[str, str] = {}

    def add(self, thread: int) -> None:
        """One more of them, by its number in this system."""
        self._threads.add(str(thread))

    def seen(self) -> bool:
        """Are they asleep, and were they since the look before?"""
        now = {}
        for thread in sorted(self._threads):
            said = procfs.status("self", thread)
            if said:
                now[thread] = _asleep(said)
            else:
                self._threads.discard(thread)  # it ended
        before, self._last = self._last, now
        return bool(self._threads) and "" not in now.values() and now == before


def threads() -> set[str]:
    """Those of this process, by their numbers in this system."""
    return set(procfs.tasks("self"))


def _asleep(said: dict[str, str]) -> str:
    """How often a thread was switched out so far, by its status; empty when it runs or waits for a disk."""
    if not said["State"].startswith("S"):
        return ""
    return f"{said['voluntary_ctxt_switches']} {said['nonvoluntary_ctxt_switches']}"
