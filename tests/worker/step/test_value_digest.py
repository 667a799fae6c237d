"""Digests of copies: equal for equal values, in whatever process and order they came about; another one for another value."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftrun.worker.step.value_digest import digest
from ftrun.worker.variables.copies import copied

ROOT = Path(__file__).resolve().parents[3]
WORDS = [f"word {number}" for number in range(200)]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Meter:
    total: float
    names: set[str]


class Slotted:
    __slots__ = ("a",)


def slotted(a: Any) -> Slotted:
    thing = Slotted()
    thing.a = a
    return thing


def ring(number: int) -> list[Any]:
    holder: list[Any] = [number]
    holder.append(holder)
    return holder


# each makes a value of what it is given, 1 or 2
VALUES: dict[str, Callable[[int], Any]] = {
    "numbers": lambda n: [n, 2.0, True, None, 1j, float("nan")],
    "bytes": lambda n: (b"ab" * n, bytearray(b"c")),
    "strings in a set": lambda n: {*WORDS, f"{n}"},
    "a dict by strings of a set": lambda n: dict.fromkeys({*WORDS, f"{n}"}),
    "an object with a set": lambda n: Meter(0.5, {*WORDS, f"{n}"}),
    "slots": lambda n: slotted(frozenset({*WORDS, f"{n}"})),
    "a tensor": lambda n: torch.arange(4.0) * n,
    "an array": lambda n: np.arange(4) * n,
    "a deque": lambda n: collections.deque([1, n], maxlen=3),
    "a counter": lambda n: collections.Counter([*{*WORDS}, f"{n}"]),
    "an ordered dict": lambda n: collections.OrderedDict([(n, 0), (3 - n, 1)]),
    "a default dict": lambda n: collections.defaultdict(list, {"a": [n]}),
    "an enumeration": lambda n: [Colour(n)],
    "a partial": lambda n: functools.partial(max, n),
    "what holds itself": ring,
    "random": lambda n: random.Random(n),
    "random of numpy": lambda n: np.random.default_rng(n),
    "random of torch": lambda n: torch.Generator().manual_seed(n),
    "a range": lambda n: range(n),
    "a class": lambda n: [Meter, Slotted][n - 1],
}


def digests(number: int) -> dict[str, int | None]:
    return {name: digest(copied(make(number), {}).data) for name, make in VALUES.items()}


def elsewhere(seed: int) -> dict[str, Any]:
    """The digests that another process gives, which hashes strings in its own way."""
    program = "import json; from tests.worker.step.test_value_digest import digests; print(json.dumps(digests(1)))"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": str(seed)}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_equal_values_of_other_processes_are_equal_and_others_are_not() -> None:
    one, other = elsewhere(1), elsewhere(2)
    assert one == other and None not in one.values()
    assert all(digests(2)[name] != one[name] for name in VALUES)
    plain = [pickle.dumps(VALUES["strings in a set"](1)) for _ in range(2)]
    assert plain[0] == plain[1], "within one process the order is the same: this test needs two"


def test_shared_or_not_is_the_same() -> None:
    part = ["a"]
    assert digest(copied([part, part], {}).data) == digest(copied([["a"], ["a"]], {}).data)
    assert pickle.dumps([part, part]) != pickle.dumps([["a"], ["a"]])


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), ("a", b"a"), ([1], (1,)), ({1}, frozenset({1})), ([], {})])
def test_what_is_another_kind_is_another_value(one: Any, other: Any) -> None:
    assert digest(pickle.dumps(one)) != digest(pickle.dumps(other))


class Setter:
    """Given its state by a function that is called with it."""

    def __reduce__(self) -> Any:
        return object.__new__, (Setter,), {"a": 1}, None, None, setattr


def test_what_cannot_be_seen_is_not_compared() -> None:
    assert digest(pickle.dumps(Setter(), 5)) is None
    assert digest(pickle.EMPTY_LIST * 50_000 + pickle.APPEND * 49_999 + pickle.STOP) is None, "a list in a list, again and again"
    assert digest(b"no pickle") is None


class Calls:
    """Its copy calls a function of the script."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made by a copy",)


def test_nothing_that_a_copy_names_is_called_or_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert digest(pickle.dumps(Calls())) is not None and not list(tmp_path.iterdir())
    absent = b"cno_such_module\nname\n."
    assert digest(absent) is not None and "no_such_module" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(absent)  # noqa: S301
