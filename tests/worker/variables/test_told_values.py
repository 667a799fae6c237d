"""What is told of variables: which are kept, how large their copies are, and why others are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ftrun.core.shared import kept, left_out
from ftrun.core.shared.notes import KeptCopy, KeptNote
from ftrun.worker.variables.variables import Variables
from tests.worker.variables.test_variables import LOOP


def told(**options: Any) -> tuple[dict[str, int], Variables, dict[str, bool]]:
    """As of step 4 of a loop: what is kept, with sizes, and every name that has a copy, with whether it is kept."""
    variables = Variables([], {}, ["variables", "options", "found", "values"], **options)
    found: dict[str, int] = {}
    values: dict[str, bool] = {}
    n, losses, best = 0, [], 1e9  # type: ignore[var-annotated]
    constant, text = {"a": 1}, "x"
    feed, table = iter(range(99)), torch.zeros(600_000)
    shared: list[int] = []
    one, other = {"part": shared}, {"part": shared}
    for step in LOOP(variables, 0, None, {}):
        if step == 4:
            found = {" + ".join(sorted(names)): size for names, size in variables.sizes()}
            values = {place.shown: is_kept for place, copy, is_kept in variables.values() if copy is not None}
        n += 2
        losses.append(float(step))
        best = min(best, 1 / (1 + step))
        table[next(feed)] += 1
        shared.append(len(text) + len(constant))
    assert one["part"] is other["part"]
    return found, variables, values


def test_each_value_that_changes_is_told_with_the_size_of_its_copy() -> None:
    found, variables, values = told()
    assert {"n", "losses", "best", "one + other + shared"} == found.keys()
    assert found["losses"] > found["n"] > 0
    assert values["losses"] and values["shared"] and not values["constant"] and not values["text"] and "feed" not in values
    assert variables.why_not("feed") == "is a range_iterator" and variables.why_not("table") == "larger than 1 MB"
    assert not variables.why_not("losses") and not variables.why_not("nobody")


@pytest.mark.parametrize(
    ("only", "why"),
    [([], 'protect(..., variables="off")'), (["n"], "protect(..., variables=...) does not name it")],
)
def test_why_a_name_is_not_kept_where_others_are_wanted(only: list[str], why: str) -> None:
    found, variables, _ = told(only=only)
    assert [*found] == only and variables.why_not("losses") == why


def test_words() -> None:
    copies = (KeptCopy(("a",), 20), KeptCopy(("losses",), 12_400), KeptCopy(("b", "c", "d"), 300))
    first = KeptNote(0, 3, 3, copies)
    assert kept.in_words(first) == "5 values of the script's own, the largest is losses (12.4 kB)"
    assert kept.in_words(replace(first, values=copies[:1])) == "1 value of the script's own, a (20 B)"
    assert kept.in_words(replace(first, values=copies[2:])) == "3 values of the script's own, the largest are b, c and d (300 B)"
    assert kept.listing(first, {"feed": "is a range_iterator", "x": ""}) == [
        "kept with each step: 5 values of the script's own, as of step 3 on rank 0",
        "  losses      12.4 kB",
        "  b, c and d  300 B",
        "  a           20 B",
        "changed by the loop, and not kept:",
        "  feed  is a range_iterator",
        "  x",
    ]
    assert kept.listing(None, {}) == []
    assert left_out.shown(["a", "b"], {"a": "larger than 1 MB"}) == "a (larger than 1 MB), b"
