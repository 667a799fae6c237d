"""The iterators that a job hands out; they refuse Python iterators and comprehensions around them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ftrun.core.errors import UsageError
from ftrun.worker.process.collected import collector

T = TypeVar("T")

_CURES = {
    "enumerate": "write `{loop}` and count by step.index",
    "zip": "write `{loop}` and take what belongs to a step by step.index",
    "islice": "give {call} the number of steps, or leave the loop by `break`",
}
_OTHER = "write `{loop}` and do in the loop what it does"
_LOOPS = {
    "job.steps": "for step in job.steps(n):",
    "job.batches": "for step, batch in job.batches(loader):",
    "job.late_batches": "for step, fetch in job.late_batches(loader, n):",
    "job.epochs": "for epoch in job.epochs(n):",
}


class Handed(Iterator[T]):
    """An iterator of a job. `call`: the job's method that makes it. `places`: lines of the script that were checked already."""

    def __init__(self, inner: Iterator[T], call: str, caller: Callable[[], str], places: set[str]) -> None:
        self._next = inner.__next__
        self._call = call
        self._caller = caller
        self._places = places
        self._begun = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._begun:
            self._begun = True
            self._refuse_counters()
        return self._next()

    def _refuse_counters(self) -> None:
        """Refuse Python's own iterators and comprehensions around this one: in a replacement, their state would begin anew.

        Raises:
            UsageError: If there is one.
        """
        place = self._caller()
        if place in self._places:
            return  # a search of all objects takes some 50 ms
        self._places.add(place)
        collects = collector()
        if collects:
            raise UsageError(
                f"{collects} over {self._call}(...), at {place}: what it has collected could not be put back in a replacement; "
                f"write `{_LOOPS[self._call]}` and append to a list in the loop"
            )
        around = _around(self)
        if around:
            how = _CURES.get(around, _OTHER).format(loop=_LOOPS[self._call], call=self._call)
            count = "epoch" if self._call == "job.epochs" else "step.index"
            raise UsageError(
                f"{around}({self._call}(...)), at {place}: how far {around} is could not be put back in a replacement; "
                f"{how.replace('step.index', count)}"
            )


def _around(thing: Any) -> str:
    """Return the name of one of Python's own iterators that holds `thing`; "" = none does."""
    held = [one for one in gc.get_referrers(thing) if type(one) is tuple]  # zip has one
    for holder in gc.get_referrers(thing, *held):
        kind = type(holder)
        if (
            kind.__module__ in ("builtins", "itertools")
            and isinstance(holder, Iterator)
            and kind.__name__ != "generator"
        ):
            return kind.__name__
    return ""
