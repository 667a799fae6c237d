"""What two names hold a part of is one thing, in a replacement as well: whoever changes it by one name finds it changed by the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.worker.variables.kept_values import Steps
from tests.worker.variables.test_variables import run


class Meter:
    def __init__(self) -> None:
        self.n = 0


def made_in_the_loop(steps: Steps) -> Any:
    meters: dict[str, Meter] = {}
    current = None
    for step in steps:
        if step == 2:
            current = meters["a"] = Meter()
        if current is not None:
            current.n += 1
    return meters["a"].n, current is meters["a"]


def a_part_of_a_list(steps: Steps) -> Any:
    rows: list[list[int]] = [[0]]
    row = None
    for step in steps:
        if step == 2:
            rows.append([0])
            row = rows[-1]
        if row is not None:
            row.append(step)
    return rows, row is rows[-1]


def of_what_never_changed(steps: Steps) -> Any:
    """Until it is too late to look."""
    table = {"x": [0], "y": [0]}
    row = table["x"]
    for step in steps:
        if step == 2:
            row = table["y"]
        if step > 4:
            row.append(step)
    return table, row is table["y"]


def before_the_loop(steps: Steps) -> Any:
    table = {"x": Meter()}
    one = table["x"]
    for _ in steps:
        one.n += 1
    return table["x"].n, one is table["x"]


def two_names_of_one(steps: Steps) -> Any:
    a: list[int] = []
    b = a
    for step in steps:
        if step == 2:
            a = b = [1]
        b.append(step)
    return a, b is a


def in_two_containers(steps: Steps) -> Any:
    a: Any = None
    b: Any = None
    for step in steps:
        if step == 1:
            one = np.zeros(2)
            a, b = (one, 1), {"k": one}
        if a:
            a[0][0] += 1
    return a[0].tolist(), b["k"].tolist(), a[0] is b["k"]


def another_one_in_each_step(steps: Steps) -> Any:
    queues: list[list[int]] = [[], []]
    current = queues[0]
    for step in steps:
        current.append(step)
        current = queues[(step + 1) % 2]
    return queues, current is queues[(step + 1) % 2]


@pytest.mark.parametrize("cut", [3, 4, 5])
@pytest.mark.parametrize(
    "script",
    [
        made_in_the_loop, a_part_of_a_list, of_what_never_changed, before_the_loop, two_names_of_one, in_two_containers,
        another_one_in_each_step,
    ],
    ids=lambda script: script.__name__,
)  # fmt: skip
def test_a_shared_value_stays_shared(script: Callable[[Steps], Any], cut: int) -> None:
    wanted, slots, _, _ = run(script)
    found, _, _, lost = run(script, cut, slots[cut])
    assert found == wanted and not lost


def test_two_that_share_nothing_are_kept_by_themselves() -> None:
    def apart(steps: Steps) -> None:
        a, b = [0], [0]
        for _ in steps:
            a.append(1)
            b.append(1)

    _, slots, _, _ = run(apart)
    assert len([name for name in slots[5] if name.endswith(("|a", "|b"))]) == 2
