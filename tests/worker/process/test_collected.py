"""What Python itself collects over a loop of the script is refused: a replacement would begin it anew."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from ftrun.core.errors import UsageError
from ftrun.worker.process.handed import Handed

Steps = Iterator[int]


def given(steps: Iterable[int]) -> Iterator[int]:
    for step in steps:
        yield step + 1


def handed_on(steps: Iterable[int]) -> Iterator[int]:
    yield from given(steps)


def by_for(steps: Steps) -> list[int]:
    found = []
    for step in (step for step in handed_on(steps)):
        found.append(step)  # noqa: PERF402
    return found


def by_next(steps: Steps) -> list[int]:
    found: list[int] = []
    own = given(steps)
    while (step := next(own, None)) is not None:
        found.append(step)
    return found


def with_a_comprehension_in_the_loop(steps: Steps) -> list[int]:
    found = []
    for step in given(steps):
        found += [each for each in (step,) if each]
    return found


def steps_of(number: int) -> Steps:
    return Handed(iter(range(number)), "job.steps", lambda: "train.py:1", set())


@pytest.mark.parametrize("script", [by_for, by_next, with_a_comprehension_in_the_loop], ids=lambda script: str(script.__name__))
def test_what_the_script_asks_for_one_by_one(script: Callable[[Steps], list[int]]) -> None:
    assert script(steps_of(3)) == [1, 2, 3]


CALLS = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not say where in a line it is")
COLLECTS: dict[str, Callable[[Steps], Any]] = {
    "list": lambda steps: [step for step in steps],  # noqa: C416
    "set": lambda steps: {step % 2 for step in steps},
    "dict": lambda steps: {step: 1 for step in given(steps)},  # noqa: C420
    "the second": lambda steps: [step + each for each in (1, 2) for step in handed_on(steps)],
}
CALLED: dict[str, Callable[[Steps], Any]] = {
    "sum()": lambda steps: sum(step for step in steps),
    "list()": lambda steps: list(handed_on(steps)),
    "sorted()": lambda steps: [step for step in sorted(given(steps))],  # noqa: C416
    "''.join()": lambda steps: "".join(str(step) for step in steps),
}


@pytest.mark.parametrize("kind", COLLECTS)
def test_a_comprehension(kind: str) -> None:
    with pytest.raises(UsageError, match=r"a comprehension over job.steps\(...\), at train.py:1: .* write `for step in job.steps\(n\):`"):
        COLLECTS[kind](steps_of(3))


@CALLS
@pytest.mark.parametrize("name", CALLED)
def test_a_call_that_asks_for_all(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        CALLED[name](steps_of(3))
    assert str(refused.value).startswith(f"{name} over job.steps(...), at train.py:1: ")
