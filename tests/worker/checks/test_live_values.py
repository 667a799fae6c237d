"""What stands for a live value changes with it, wherever a script keeps it, and stays when nothing does."""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import os
import random
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from ftrun.worker.checks.live_values import LiveValues
from ftrun.worker.state.loop_names import loop_names


class Box:
    def __init__(self, value: Any = 0) -> None:
        self.n = value


class Slotted:
    __slots__ = ("n",)


class Points(Dataset[int]):
    def __init__(self) -> None:
        self.stream = np.random.default_rng(1)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def counting() -> Callable[[], None]:
    n = 0

    def count() -> None:
        nonlocal n
        n += 1

    return count


def on_default(memo: list[int] = [0]) -> None:  # noqa: B006 - that is what is looked at
    memo[0] += 1


def numbers() -> Any:
    i = 0
    while True:
        yield i
        i += 1


def slotted() -> Slotted:
    one = Slotted()
    one.n = 0
    return one


def add(one: Any) -> None:
    one.n += 1


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list in dict": (lambda: {"a": [1, 2]}, lambda v: v["a"].append(3)),
    "object in object": (lambda: Box(Box()), lambda v: add(v.n)),
    "object in dict in list": (lambda: [{"a": Box()}], lambda v: add(v[0]["a"])),
    "slots": (slotted, add),
    "namespace": (lambda: types.SimpleNamespace(n=0), add),
    "arguments": (lambda: argparse.Namespace(n=0), add),
    "class": (lambda: type("T", (), {"n": 0, "__module__": __name__}), add),
    "array": (lambda: np.zeros(3), lambda v: v.__setitem__(0, 1)),
    "array in list": (lambda: [np.zeros(3)], lambda v: v[0].__setitem__(0, 1)),
    "deque": (lambda: collections.deque([1], maxlen=1), lambda v: v.append(2)),
    "set": (lambda: {1}, lambda v: (v.remove(1), v.add(2))),
    "tensor": (lambda: torch.zeros(3), lambda v: v.add_(1)),
    "model in list": (lambda: [torch.nn.Linear(2, 2)], lambda v: v[0].weight.data.add_(1)),
    "number on a model": (lambda: copy.deepcopy(torch.nn.Linear(2, 2)), lambda v: setattr(v, "calls", 1)),
    "hook on a model": (lambda: torch.nn.Linear(2, 2), lambda v: v.register_forward_hook(lambda *a: None)),
    "generator": (lambda: torch.Generator(), lambda v: torch.rand(1, generator=v)),
    "random": (lambda: [random.Random(1)], lambda v: v[0].random()),
    "numpy's generator": (lambda: np.random.default_rng(1), lambda v: v.random()),
    "closure": (counting, lambda v: v()),
    "default": (lambda: on_default, lambda v: v()),
    "partial": (lambda: functools.partial(add, Box()), lambda v: v()),
    "method": (lambda: Box().__init__, lambda v: v(1)),
    "data set": (lambda: DataLoader(Points()), lambda v: v.dataset.stream.random()),
    "data set in a subset": (lambda: DataLoader(Subset(Points(), [1])), lambda v: v.dataset.dataset.stream.random()),
    "list iterator": (lambda: iter([1, 2]), next),
    "generator function": (lambda: (g := numbers(), next(g))[0], next),
    "zip": (lambda: zip([1], [2], strict=True), next),
    "loader's iterator": (lambda: iter(DataLoader(Points(), collate_fn=list)), next),
}  # fmt: skip


SAME: list[Callable[[], Any]] = [
    lambda: {"a", "b", "c", "d", "e"},
    lambda: {Box: 1, ("a", 1): 2, on_default: 3},
    lambda: np.array([Box(), {"b", "c"}], dtype=object),
    *(CASES[case][0] for case in ("list in dict", "closure", "method", "data set", "class")),
]


class Looks:
    """A look of its own for each value."""

    def __init__(self) -> None:
        self._values = looking()

    def of(self, value: Any) -> Any:
        self._values.look()
        return self._values.of(value)


@pytest.fixture
def values() -> Looks:
    return Looks()


def looking() -> LiveValues:
    segment = types.SimpleNamespace(address=0, length=0)
    state = types.SimpleNamespace(arena=types.SimpleNamespace(segment=segment), iterated=set())
    return LiveValues(state, set())  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_seen(values: Looks, case: str) -> None:
    make, change = CASES[case]
    value = make()
    before = values.of(value)
    if case not in ("zip", "loader's iterator"):  # they do not say how far they are
        assert values.of(value) == before
    change(value)
    assert values.of(value) != before


def test_two_processes_have_the_same_repr_of_the_same() -> None:
    program = (
        "from tests.worker.checks import test_live_values as t; values = t.looking(); values.look(across=True); "
        "print(*(values.of(make()) for make in t.SAME), sep='\\n')"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1, found


def test_what_holds_itself_comes_to_an_end(values: Looks) -> None:
    def depth(n: int) -> int:
        return n if n < 1 else depth(n - 1)

    ring: list[Any] = [depth]
    ring.append(ring)
    assert values.of(ring) == values.of(ring)


def test_what_many_hold_is_looked_at_once(values: Looks) -> None:
    """As in the modules of a framework, where everything leads to everything."""
    shared: Any = [0]
    for _ in range(40):
        shared = {n: [shared] for n in range(20)}
    before = values.of(shared)
    assert values.of(shared) == before
    inner = shared
    for _ in range(40):
        inner = inner[7][0]
    inner[0] = 1
    assert values.of(shared) != before


def test_the_order_of_a_dict_is_no_change(values: Looks) -> None:
    assert values.of({"a": 1, "b": [2]}) == values.of({"b": [2], "a": 1}) != values.of({"a": 2, "b": [1]})


def test_a_file_that_is_written_is_no_state(values: Looks, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        before = values.of(file)
        file.write("x")
        assert values.of(file) == before


@pytest.mark.parametrize("iterated", [False, True])
def test_the_place_in_a_file_that_is_read_is_state(values: Looks, tmp_path: Path, iterated: bool) -> None:
    (tmp_path / "data").write_text("1\n2\n3\n")
    with (tmp_path / "data").open() as file:
        before = values.of(file)
        assert values.of(file) == before
        line = next(file) if iterated else file.readline()
        assert line == "1\n" and values.of(file) != before
    assert values.of(file) == values.of(file), "a closed one has no place"


def test_what_a_loop_around_makes_anew_is_told_from_what_this_one_does() -> None:
    source = "for e in range(2):\n    seen = []\n    for s in steps:\n        x = s + 1\n        seen.append(x)\n        n = n + 1\n"
    names = loop_names(source, 5)
    assert names is not None
    assert names.fresh == {"s", "x"}
    assert names.outside >= {"seen"}
