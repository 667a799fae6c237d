"""What a stop of the world does to the variables of a rank that lives on."""

from __future__ import annotations

import pytest

from ftrun.worker.variables.variables import Variables
from tests.worker.variables.test_variables import LOOP


@pytest.mark.parametrize(("rewind", "handed_out"), [(True, False), (False, True), (False, False)])
def test_what_changed_unseen_is_named_when_the_world_stops(rewind: bool, handed_out: bool) -> None:
    variables = Variables([], {}, ["slots", "lost"])
    lost: list[str] = []
    variables.told = lost.extend
    table = {"a": {"n": 0}}
    for step in LOOP(variables, 0, None, {}):
        if step == 5:
            table["a"]["n"] += 1  # in place, and never before
            variables.stopped(rewind, handed_out)
            break
    assert lost == ["table"]


def test_what_was_bound_after_the_body_stays_when_the_next_step_is_not_handed_out() -> None:
    variables = Variables([], {}, ["slots", "lost"])
    lost: list[str] = []
    variables.told = lost.extend
    best = 0
    for step in LOOP(variables, 0, None, {}):
        if step == 5:
            variables.capture(False)  # at the end of the body
            best = step
            variables.stopped(rewind=False)
            break
    assert best == 5 and not lost


@pytest.mark.parametrize("rewind", [True, False])
def test_a_name_that_a_body_binds_first_is_not_lost_when_the_world_stops(rewind: bool) -> None:
    """The body that is done again makes it, and the slot of one that was complete has it."""
    variables = Variables([], {}, ["slots", "lost"])
    lost: list[str] = []
    variables.told = lost.extend
    for step in LOOP(variables, 0, None, {}):
        if step == 5:
            each = 7
            variables.capture(False)
            variables.stopped(rewind)
            break
    assert each == 7 and not lost


def test_a_name_that_is_bound_before_the_body_is_not_lost_when_the_world_stops_there() -> None:
    """Whoever is handed out that step binds it."""
    variables = Variables([], {}, ["slots", "lost"])
    lost: list[str] = []
    variables.told = lost.extend
    for step in LOOP(variables, 0, None, {}):
        if step == 0:
            batch = [1.0]
            variables.stopped(rewind=False, handed_out=True)
            break
    assert batch and not lost
