"""Which bodies are looked at as a whole: the first ones, then as often as their budget pays for."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.core.shared.board import F
from ftrun.worker.link.observer import Observers, StepObserver
from ftrun.worker.state import looks as module
from ftrun.worker.state.looks import Looks

MS = 1_000_000


def looks_of(every: int = 0) -> tuple[Looks, Any]:
    """With the state that they tell; nobody else hears of them."""
    state: Any = SimpleNamespace(looking=True)
    looks = Looks(state, {F.LOOKS: 0}, every)
    Observers().add(looks)
    return looks, state


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: self.now))


def looked_at(looks: Looks, state: Any, clock: Clock, bodies: int, step_ns: int, cost_ns: int) -> list[int]:
    """Numbers, from 1, of the bodies that are looked at when each takes `step_ns`, and `cost_ns` more where it is."""
    found = []
    for _ in range(bodies):
        looks.begins(looks.bodies)
        clock.now += step_ns
        if state.looking:
            found.append(looks.bodies)
            since = clock.now
            clock.now += cost_ns
            looks.spent(since)
    return found


@pytest.mark.parametrize(
    ("cost_ns", "distance"),
    [(0, 1), (5_000, 1), (50_000, 10), (500_000, 100), (50 * MS, 100)],
    ids=["nothing", "within", "ten", "hundred", "dear"],
)
def test_as_often_as_the_budget_pays_for(monkeypatch: pytest.MonkeyPatch, cost_ns: int, distance: int) -> None:
    (looks, state), clock = looks_of(), Clock(monkeypatch)
    found = looked_at(looks, state, clock, 3 + 5 * distance, MS, cost_ns)
    assert found[:3] == [1, 2, 3]
    assert [b - a for a, b in itertools.pairwise(found[2:])] == [distance] * 5


def test_a_person_may_say_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    (looks, state), clock = looks_of(every=7), Clock(monkeypatch)
    assert looked_at(looks, state, clock, 25, MS, MS) == [1, 2, 3, 10, 17, 24]


@pytest.mark.parametrize("looked", [False, True], ids=["in between", "in one that is looked at"])
def test_after_a_repair_the_next_one_is_looked_at_however_long_it_took(
    monkeypatch: pytest.MonkeyPatch, looked: bool
) -> None:
    (looks, state), clock = looks_of(), Clock(monkeypatch)
    assert looked_at(looks, state, clock, 3 if looked else 10, MS, MS) == [1, 2, 3]
    assert state.looking is looked
    looks.aborted(raised=False)
    assert state.looking is True
    clock.now += 10_000 * MS
    after = looks.bodies + 1  # and its length counts for nothing
    assert looked_at(looks, state, clock, 50, MS, 50_000) == [after, *range(after + 10, after + 50, 10)]


def test_those_that_only_look_then_hear_nothing_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    class Other(StepObserver):
        def body_started(self) -> None:
            heard.append(looks.bodies)

    observers, other = Observers(), Other()
    state: Any = SimpleNamespace(looking=True)
    looks, clock = Looks(state, {F.LOOKS: 0}), Clock(monkeypatch)
    looks.tell(other, "body_started")
    observers.add(looks, other)
    for _ in range(30):
        looks.begins(looks.bodies)
        observers.body_started()
        clock.now += MS
        if state.looking:
            since, clock.now = clock.now, clock.now + 50_000
            looks.spent(since)
    assert heard == [1, 2, 3, 13, 23]
    assert ("body_started" in observers.heard) is state.looking
