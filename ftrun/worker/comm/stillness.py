"""Tell from the threads of a group whose connections were shut down whether it is over: threads that nothing can wake sleep."""

from __future__ import annotations

from collections.abc import Iterable

from ftrun.core.system import procfs


class Stillness:
    """Threads of this process that wait for one another and for connections which were shut down.

    If all of them sleep, and none ran between two looks, they wait in vain.
    """

    def __init__(self, threads: Iterable[str]) -> None:
        self._threads = set(threads)
        self._last: dict[str, str] = {}

    def add(self, thread: int) -> None:
        """Add a thread by its native id."""
        self._threads.add(str(thread))

    def seen(self) -> bool:
        """Do all threads sleep, and have they slept since the last look?"""
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
    """Return the native ids of this process's threads."""
    return set(procfs.tasks("self"))


def _asleep(said: dict[str, str]) -> str:
    """Return from a thread's status how often it was switched out so far; "" if it runs or waits for a disk."""
    if not said["State"].startswith("S"):
        return ""
    return f"{said['voluntary_ctxt_switches']} {said['nonvoluntary_ctxt_switches']}"
