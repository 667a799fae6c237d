"""Carriers of a rendezvous's records: a few small JSON objects by name, seen by every node.

A record has one writer, who replaces it whole; what several may want to write is created once and never changed. No
carrier compares clocks of machines: whoever wants to know whether a peer lives watches its record change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ftrun.core.errors import FtrunError

Record = dict[str, Any]
OVER = "over"  # the record that ends a run for everyone


class CarrierLost(FtrunError):
    """The records cannot be reached any more; the message says where they were and what to look at."""


class Carrier(Protocol):
    """Names are letters, digits, '.', '_' and '-'. Errors of every method: CarrierLost for good, OSError for now."""

    def view(self) -> Mapping[str, Record]:
        """All records as they are now; those of a peer whose connection closed have "gone": True."""

    def put(self, name: str, record: Record) -> None:
        """Write or replace a record whole; for its one writer."""

    def create(self, name: str, record: Record) -> bool:
        """Write a record that is not there yet; False (and nothing done) when somebody did so before."""

    def close(self) -> None:
        """Leave. A carrier that others depend on waits a little for them."""
