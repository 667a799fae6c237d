"""What the records of a round tell of lost and drained nodes: which spare nodes took their places, in which incidents. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftrun.host.nodes.carriers.carrier import Record
from ftrun.host.nodes.membership.table import Node, RoundTable


@dataclass(frozen=True)
class Seat:
    """The place `node` of a lost node that a spare one takes in `incident`. `drained`: that node gave it up."""

    incident: int
    node: int
    taken_by: Node
    drained: bool = False


class Seats:
    """The places of round `number` that spare nodes took, in the order in which they did."""

    def __init__(self, view: Mapping[str, Record], number: int) -> None:
        self._number = number
        self.taken: list[Seat] = []
        incident = 1
        while (stop := view.get(f"stop.{number}.{incident}")) is not None:
            if "seat" in stop:
                self.taken.append(Seat(incident, int(stop["node"]), Node(**stop["seat"]), stop["kind"] == "drained"))
            incident += 1
        self._opened = {i for i in range(1, incident) if f"open.{number}.{i}" in view}

    def __len__(self) -> int:
        return len(self.taken)

    @property
    def lost(self) -> int:
        """Count the nodes that were lost: whoever gives its place up is no charge."""
        return sum(not seat.drained for seat in self.taken)

    def table(self, before: RoundTable) -> RoundTable:
        """Return the table of the round with them."""
        for seat in self.taken:
            before = before.seat(seat.node, seat.taken_by)
        return before

    def of(self, who: str) -> Seat | None:
        """Return the newest place that agent `who` took; None if it took none."""
        return next((seat for seat in reversed(self.taken) if seat.taken_by.id == who), None)

    def incident_of(self, who: str) -> int:
        """Return the incident in which agent `who` took its newest place; 0: it took none."""
        seat = self.of(who)
        return seat.incident if seat is not None else 0

    @property
    def store(self) -> str:
        """Return the name of the record that says where the workers meet: whoever takes the first place makes another store."""
        first = [seat.incident for seat in self.taken if seat.node == 0]
        return f"store.{self._number}.{first[-1]}" if first else f"store.{self._number}"

    @property
    def unrepaired(self) -> bool:
        """Has no gate opened since the last of them was taken?"""
        return bool(self.taken) and not any(i >= self.taken[-1].incident for i in self._opened)
