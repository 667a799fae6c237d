"""What shows that a value changed does so, wherever a script keeps it, and stays when nothing did."""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import logging
import random
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from ftrun.worker.variables.signs import sign_of


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
    "partial": (lambda: functools.partial(add, Box()), lambda v: v()),
    "method": (lambda: Box().__init__, lambda v: v(1)),
    "data set": (lambda: DataLoader(Points()), lambda v: v.dataset.stream.random()),
    "data set in a subset": (lambda: DataLoader(Subset(Points(), [1])), lambda v: v.dataset.dataset.stream.random()),
    "list iterator": (lambda: iter([1, 2]), next),
    "generator function": (lambda: (g := numbers(), next(g))[0], next),
    "zip": (lambda: zip([1], [2], strict=True), next),
    "loader's iterator": (lambda: iter(DataLoader(Points(), collate_fn=list)), next),
}  # fmt: skip


def sign(value: Any) -> bytes | None:
    return sign_of(value, {}, None)


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_seen(case: str) -> None:
    make, change = CASES[case]
    value = make()
    before = sign(value)
    assert before is not None
    if case not in ("zip", "loader's iterator"):  # they do not say how far they are
        assert sign(value) == before
    change(value)
    assert sign(value) != before


def test_what_holds_itself_comes_to_an_end() -> None:
    def depth(n: int) -> int:
        return n if n < 1 else depth(n - 1)

    ring: list[Any] = [depth]
    ring.append(ring)
    assert sign(ring) == sign(ring)


def test_what_many_hold_is_looked_at_once() -> None:
    """As in the modules of a framework, where everything leads to everything."""
    shared: Any = [0]
    for _ in range(40):
        shared = {n: [shared] for n in range(20)}
    before = sign(shared)
    assert sign(shared) == before
    inner = shared
    for _ in range(40):
        inner = inner[7][0]
    inner[0] = 1
    assert sign(shared) != before


def test_a_file_that_is_written_is_no_state(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        before = sign(file)
        file.write("x")
        assert sign(file) == before


@pytest.mark.parametrize("iterated", [False, True])
def test_the_place_in_a_file_that_is_read_is_state(tmp_path: Path, iterated: bool) -> None:
    (tmp_path / "data").write_text("1\n2\n3\n")
    with (tmp_path / "data").open() as file:
        before = sign(file)
        assert sign(file) == before
        line = next(file) if iterated else file.readline()
        assert line == "1\n" and sign(file) != before
    assert sign(file) == sign(file), "a closed one has no place"


def test_of_an_object_with_a_lock_the_rest_is_seen() -> None:
    value = [threading.Lock(), Box()]
    before = sign(value)
    assert before is not None and sign(value) == before
    value[0].acquire()
    assert sign(value) == before, "a lock is no state"
    value[1].n += 1
    assert sign(value) != before


@pytest.mark.parametrize("make", [lambda: np.zeros(1_000_000), lambda: torch.zeros(1_000_000), lambda: {n: str(n) for n in range(10_000)}])
def test_what_is_too_large_to_be_kept_is_seen(make: Callable[[], Any]) -> None:
    value = make()
    before = sign(value)
    assert before is not None and sign(value) == before
    value[7_777] = 1
    assert sign(value) != before


def test_objects_of_libraries_are_not_looked_into() -> None:
    value = [threading.Lock(), logging.LogRecord("a", 1, "b", 2, "c", (), None)]
    before = sign(value)
    value[1].msg = "d"
    assert sign(value) == before


@pytest.mark.parametrize("make", [list, dict.fromkeys, collections.deque])
def test_of_very_many_elements_the_ends_are_seen(make: Callable[[Any], Any]) -> None:
    value = make(range(100_000))
    before = sign(value)
    assert before is not None and sign(value) == before
    value[99_999] = "another"
    assert sign(value) != before
