"""Who is told of weights that changed before a gate: the script, where it must have been the script; else the replicas are compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.core.errors import UsageError, WorkerError
from ftrun.worker.step.hidden_writes import HiddenWrites


class Rank:
    """A rank whose weights change in a body, and what it knows of its replicas."""

    def __init__(self, replicas: int, attempt: int, compared: bool) -> None:
        self.weights = 0
        self.void = False
        holders = SimpleNamespace(comparable=lambda: frozenset(range(replicas)), differ=lambda: self.void)
        state: Any = SimpleNamespace(
            checksum=lambda: self.weights, check_places=lambda: None, writes_to_params=list, gpu=None, holders=holders
        )
        position: Any = SimpleNamespace(attempt=attempt)
        looks: Any = SimpleNamespace(spent=lambda since: None)
        due: Any = SimpleNamespace(due=lambda number: compared)
        self.check = HiddenWrites(position, state, looks, due)

    def body(self, number: int) -> None:
        """One in which something is written before the gate."""
        self.check.handed_out(number)
        self.check.body_started()
        self.weights += 1
        self.check.gate_reached(number, None, [])
        self.check.step_done(number)


@pytest.mark.parametrize(
    ("number", "replicas", "attempt"),
    [(0, 4, 0), (2, 4, 0), (50, 1, 0), (50, 0, 0), (50, 4, 1)],
    ids=["first body", "third body", "no replica", "nothing known of any", "done again"],
)
@pytest.mark.parametrize("compared", [False, True])
def test_the_script_is_told(number: int, replicas: int, attempt: int, compared: bool) -> None:
    with pytest.raises(UsageError, match="changed between the start of the step and its gate"):
        Rank(replicas, attempt, compared).body(number)


def test_else_the_step_is_done_again() -> None:
    with pytest.raises(WorkerError, match="the step is done again and the replicas are compared") as raised:
        Rank(replicas=4, attempt=0, compared=False).body(50)
    assert not isinstance(raised.value, UsageError), "that would end the run"


def test_where_they_are_compared_anyway_and_equal_it_was_the_script() -> None:
    rank = Rank(replicas=4, attempt=0, compared=True)
    rank.body(50)
    with pytest.raises(UsageError, match="changed between the start of the step and its gate"):
        rank.check.handed_out(51)


@pytest.mark.parametrize("how", ["one was replaced", "nobody can say which is wrong"])
def test_where_they_are_not_equal_it_was_not(how: str) -> None:
    rank = Rank(replicas=4, attempt=0, compared=True)
    rank.body(50)
    if how == "one was replaced":
        rank.check.aborted(raised=False)
    rank.void = how != "one was replaced"
    rank.check.handed_out(51)
