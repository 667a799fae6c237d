"""Carries requests to move a rank, or a whole node, from one agent to another: records `drain.<r>.<n>` of round r, created once.

A record has `to`, the id of the agent that is to carry it out, `node`, its number, and `rank`, of the world, or None for the whole node;
`key`, by which the outcome is known, `by`, the number of the node that asks, and `seconds`, within which it must begin.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftrun.host.nodes.carriers.carrier import Carrier, Record


class Drains:
    """One agent's part in the requests of round `number`. `before`: records whose requests are no news."""

    def __init__(self, carrier: Carrier, me: str, number: int, before: Mapping[str, Record]) -> None:
        self._carrier = carrier
        self._me = me
        self._number = number
        self._read = 0  # number of the last request that was read
        self._keys: set[str] = set()  # an order that failed halfway is tried again, and may have been written
        self.look(before)

    def ask(self, request: Record) -> None:
        """Write a request, under the next free number."""
        number = self._read + 1
        while not self._carrier.create(self._name(number), request):
            number += 1

    def look(self, view: Mapping[str, Record]) -> list[Record]:
        """Return the new requests to this agent."""
        found = []
        while (request := view.get(self._name(self._read + 1))) is not None:
            self._read += 1
            if request["to"] == self._me and request["key"] not in self._keys:
                self._keys.add(request["key"])
                found.append(request)
        return found

    def _name(self, number: int) -> str:
        return f"drain.{self._number}.{number}"
