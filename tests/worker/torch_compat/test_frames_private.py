"""Local variables of a function that runs are read and bound, and the function sees nothing of it but what was bound."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import pytest

from ftrun.worker.torch_compat.frames_private import bind_local, dict_of_locals, has_own_locals, leave, locals_of


def as_each_step_looks(frame: FrameType) -> Mapping[str, Any]:
    """As `Variables.capture` does without a call."""
    found = dict_of_locals(frame)
    before = dict(found or {})
    now = dict(frame.f_locals)
    if found is not None:
        leave(found, before)
    return now


def here() -> FrameType:
    return sys._getframe(1)


LOOKS = pytest.mark.parametrize("look", [locals_of, as_each_step_looks, has_own_locals], ids=lambda look: str(look.__name__))


@LOOKS
def test_what_the_script_took_by_locals_stays_as_it_is(look: Callable[[FrameType], Any]) -> None:
    def main(rate: float, steps: int) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
        taken = locals()
        frame, later = here(), [1]
        look(frame)
        taken["mine"] = 1
        look(frame)
        return taken, dict(taken), {*locals(), *map(str, later)}

    taken, found, at_last = main(0.1, 3)
    assert found == {"rate": 0.1, "steps": 3, "look": look, "mine": 1}
    assert at_last >= {"rate", "steps", "taken", "frame", "later"} and taken["rate"] == 0.1


@LOOKS
def test_what_the_script_lets_go_is_gone(look: Callable[[FrameType], Any]) -> None:
    class Large:
        pass

    def main() -> bool:
        large, frame = Large(), here()
        reference = weakref.ref(large)
        look(frame)
        del large
        return reference() is None

    assert main()


def test_what_is_bound_is_seen_and_nothing_else_changes() -> None:
    def main() -> tuple[Any, ...]:
        taken = locals()
        number, frame, word = 1, here(), "a"
        closed = [0]

        def inner() -> list[int]:
            return closed

        bind_local(frame, "number", 2)
        bind_local(frame, "closed", [5])
        return taken, number, word, closed, inner()

    assert main() == ({}, 2, "a", [5], [5])


def test_variables_of_a_generator_that_waits() -> None:
    def counting() -> Iterator[int]:
        number = 0
        while True:
            number += 1
            yield number

    numbers = counting()
    assert [next(numbers), next(numbers)] == [1, 2]
    frame = numbers.gi_frame  # type: ignore[attr-defined]
    assert locals_of(frame)["number"] == 2
    bind_local(frame, "number", 7)
    assert next(numbers) == 8 and locals_of(frame)["number"] == 8


KINDS = """
def function(): {}
class Body:
    name = 1
    kinds['class'] = seen(here())
kinds['comprehension'] = [seen(here()) for _ in [1]][0]
kinds['module'] = seen(here())
def in_function():
    return [seen(here()) for _ in [1]][0], seen(here())
kinds['comprehension in a function'], kinds['function'] = in_function()
exec("own = 1; kinds['exec'] = seen(here())", globals(), {"kinds": kinds})
"""


def test_whose_variables_they_are() -> None:
    """A comprehension runs in a frame of its own until Python 3.11, in that of the code around it since."""
    kinds: dict[str, bool] = {}
    exec(KINDS, {"kinds": kinds, "seen": has_own_locals, "here": here})  # noqa: S102
    has_a_frame = sys.version_info < (3, 12)
    assert kinds == {
        "class": True, "module": False, "function": True, "exec": True,
        "comprehension": has_a_frame, "comprehension in a function": True,
    }  # fmt: skip
