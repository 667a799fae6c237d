"""Defines the carriers of a rendezvous's records: a few small JSON objects by name, which every node sees.

A record has one writer, which replaces it whole. A record that several agents may want to write is created once and never
changed. No carrier compares clocks of machines: an agent that asks whether a peer lives watches the peer's record change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from ftrun.core.errors import FtrunError, UsageError

Record = dict[str, Any]
OVER = "over"  # the record that ends a run for everyone
_PAUSE = 0.5  # seconds between two tries to find a server
_T = TypeVar("_T")


def session(numbers: Iterable[int], is_over: Callable[[int], bool]) -> tuple[int, list[int]]:
    """Choose the session of a start among those that a run of this id has left; return also those to delete.

    A session that has ended is never used again, so that no agent reads records of an earlier run. The last one before the present one
    stays, since an agent that is slow to leave may still read it.
    """
    known = sorted(numbers)
    number = known[-1] if known else 0
    if known and is_over(number):
        number += 1
    return number, [old for old in known if old < number - 1]


class CarrierLost(FtrunError):
    """The records are out of reach for good; the message says where they were and what to check."""


class Denied(UsageError):
    """The service refuses a request. Of one that granted others that may pass: its rules may just be loaded anew, or a token renewed."""


class Carrier(Protocol):
    """A place for records. Names consist of letters, digits, '.', '_' and '-'.

    Raises:
        CarrierLost: By every method, if the records are out of reach for good.
        OSError: By every method, if they are for now.
    """

    serves: bool  # do the others lose the records when this agent leaves?

    def view(self) -> Mapping[str, Record]:
        """Return all records as they are now; those of a peer whose connection closed have "gone": True."""

    def put(self, name: str, record: Record) -> None:
        """Write or replace a record whole. Only its one writer calls this."""

    def create(self, name: str, record: Record) -> bool:
        """Write a record that does not exist yet. Return False, and do nothing, if it exists."""

    def close(self) -> None:
        """Leave. A carrier that serves other agents waits some seconds until they have left."""


def found_in_time(
    find: Callable[[], _T], join_timeout: float, stopped: Callable[[], bool], on_trouble: Callable[[str], None]
) -> _T | None:
    """Return what `find` returns once it raises no OSError; None when `stopped`.

    Args:
        find: Finds the server of a carrier.
        join_timeout: Seconds until it must have been found.
        stopped: Whether to give up.
        on_trouble: Called once with the reason if the first try fails.

    Raises:
        CarrierLost: If it was not found until then.
    """
    until, waited = time.monotonic() + join_timeout, False
    while not stopped():
        try:
            return find()
        except OSError as error:
            if time.monotonic() > until:
                raise CarrierLost(f"{error} (tried for {join_timeout:g} s); is it running, and can this node reach it?") from None
            if not waited:
                waited = True
                on_trouble(f"{error}; trying for {join_timeout:g} s")
        time.sleep(min(_PAUSE, join_timeout))
    return None
