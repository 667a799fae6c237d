"""Copies of a script's values: what comes back holds the same, in the things that are there."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import itertools
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ftrun.worker.variables.copies import CannotPlace, TooLarge, copied, placed


@dataclasses.dataclass
class Meter:
    total: float = 0.0
    history: list[float] = dataclasses.field(default_factory=list)


class Slotted:
    __slots__ = ("a", "later")

    def __init__(self, a: Any) -> None:
        self.a = a


class Holder:
    def __init__(self, **things: Any) -> None:
        vars(self).update(things)

    def double(self) -> int:
        return 2 * self.n  # type: ignore[attr-defined,no-any-return]


class Words(list[str]):
    pass


class Custom:
    """It has a protocol of its own."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __reduce__(self) -> Any:
        return Custom, (self.n,)


Point = collections.namedtuple("Point", "x y")


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one) is type(other) and bool((one == other).all())
    if isinstance(one, queue.Queue):
        return list(one.queue) == list(other.queue)
    if isinstance(one, Slotted):
        return bool(one.a == other.a) and getattr(one, "later", 0) == getattr(other, "later", 0)
    if isinstance(one, Holder):
        return vars(one) == vars(other)
    if isinstance(one, random.Random):
        return one.getstate() == other.getstate()
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state == other.bit_generator.state
    if isinstance(one, torch.Generator):
        return bool((one.get_state() == other.get_state()).all())
    return bool(one == other) and type(one) is type(other)


def _add(things: Any) -> None:
    things.append(7)


def drawn(thing: Any) -> None:
    thing.random() if not isinstance(thing, torch.Generator) else torch.rand(1, generator=thing)


def written(thing: Any) -> None:
    thing[0] = 5


def grown(counts: Any) -> None:
    counts["new"] += 3


# what makes a value, as the script's first lines do, and what the loop does to it
IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], _add),
    "a list in a list": (lambda: [[1], 2], lambda v: v[0].append(3)),
    "dict": (lambda: {"a": 1}, lambda v: v.update(b=[2])),
    "set": (lambda: {1}, lambda v: v.add(2)),
    "deque": (lambda: collections.deque([1, 2], maxlen=2), _add),
    "OrderedDict": (lambda: collections.OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "defaultdict": (lambda: collections.defaultdict(int, new=0), grown),
    "Counter": (lambda: collections.Counter("ab"), lambda v: v.update("bc")),
    "bytearray": (lambda: bytearray(b"ab"), written),
    "array": (lambda: array.array("d", [1.0]), written),
    "numpy": (lambda: np.zeros(3), written),
    "tensor": (lambda: torch.zeros(3), written),
    "parameter": (lambda: torch.nn.Parameter(torch.zeros(3)), lambda v: v.data.fill_(2)),
    "dataclass": (Meter, lambda v: (_add(v.history), setattr(v, "total", 2.0))),
    "slots": (lambda: Slotted(1), lambda v: setattr(v, "later", 2)),
    "object": (lambda: Holder(n=1, gone=2), lambda v: (delattr(v, "gone"), setattr(v, "more", [1]))),
    "subclass of list": (lambda: Words("a"), lambda v: v.append("b")),
    "namespace": (lambda: types.SimpleNamespace(n=1), lambda v: setattr(v, "n", 2)),
    "UserDict": (lambda: collections.UserDict(v=1.0), lambda v: v.update(v=2.0)),
    "queue": (queue.Queue, lambda v: v.put(1)),
    "Random": (lambda: random.Random(1), drawn),
    "numpy generator": (lambda: np.random.default_rng(1), drawn),
    "torch generator": (lambda: torch.Generator().manual_seed(1), drawn),
}  # fmt: skip


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_thing_is_changed_in_place(kind: str) -> None:
    make, change = IN_PLACE[kind]
    value, there = make(), make()
    change(value)
    assert not equal(value, there)
    result = placed(there, copied(value, {}).data, {})
    assert result is there and equal(value, there)


@pytest.mark.parametrize("kind", [kind for kind in IN_PLACE if kind != "queue"])  # its locks cannot be copied
def test_a_thing_that_was_not_there_is_made(kind: str) -> None:
    make, change = IN_PLACE[kind]
    value = make()
    change(value)
    result = placed(None, copied(value, {}).data, {})
    assert equal(value, result) and result is not value


@pytest.mark.parametrize(
    "value",
    [1, 1.5, "a", None, (1, 2), frozenset("a"), Point(1, [2]), np.float32(2.0), torch.float16, int, Holder, dict.fromkeys],
    ids=lambda value: getattr(value, "__qualname__", str(value)),  # no address: each process names the tests
)
def test_a_name_is_bound_anew(value: Any) -> None:
    result = placed(7, copied(value, {}).data, {})
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_large_array_is_copied(order: Any) -> None:
    there, made = np.zeros((100, 1000), order=order), np.arange(100_000.0).reshape(100, 1000)
    assert placed(there, copied(made, {}, 1 << 20).data, {}) is there and (there == made).all()
    with pytest.raises(TooLarge):
        copied(made, {}, 1 << 19)


def test_equal_values_give_equal_bytes_and_others_do_not() -> None:
    first = copied(Meter(1.0, [1.0]), {}).data
    assert first == copied(Meter(1.0, [1.0]), {}).data != copied(Meter(1.0, [2.0]), {}).data


def test_what_is_shared_stays_shared() -> None:
    value, there = Holder(n=1, a=[1]), Holder(n=1, a=[1])
    value.b, there.b = value.a, there.a
    value.a.append(2)
    value.c = value.a
    kept = there.a
    result = placed(there, copied(value, {}).data, {})
    assert result.a is result.b is result.c is kept and kept == [1, 2]


def test_what_holds_itself() -> None:
    value, there = Holder(n=1), Holder(n=0)
    value.me, there.me = [value], [there]
    result = placed(there, copied(value, {}).data, {})
    assert result is there and there.me[0] is there and there.n == 1


def test_a_tuple_that_holds_the_same_things_stays() -> None:
    there = ([1], 2)
    kept = there[0]
    result = placed(there, copied(([1, 3], 2), {}).data, {})
    assert result is there and kept == [1, 3]


def test_what_the_job_knows_is_bound_and_not_copied() -> None:
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    mine, theirs = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    data = copied({"current": other, "n": 1}, {id(one): "a", id(other): "b"}).data
    result = placed({"current": mine, "n": 0}, data, {"a": mine, "b": theirs})
    assert result == {"current": theirs, "n": 1}
    assert not torch.equal(theirs.weight, other.weight)


def test_what_cannot_be_copied_stays_where_it_is() -> None:
    value, there = (Holder(n=n, lock=threading.Lock(), log=open("/dev/null"), f=lambda: None) for n in (1, 0))  # noqa: SIM115
    lock, log, function = there.lock, there.log, there.f
    made = copied(value, {})
    assert made.left == ["lock", "TextIOWrapper", "function"]
    result = placed(there, made.data, {})
    assert result is there and there.n == 1 and (there.lock, there.log, there.f) == (lock, log, function)
    value.log.close()
    log.close()


@pytest.mark.parametrize(
    "thing",
    [
        itertools.count(),
        iter([1]),
        enumerate([1]),
        (x for x in [1]),
        map(str, [1]),
        weakref.ref(Holder()),
        object(),
        threading.Lock(),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_where_there_is_none_that_could_stay_the_copy_cannot_be_put_back(thing: Any) -> None:
    made = copied({"a": thing}, {})
    assert made.left == [type(thing).__qualname__]
    there: dict[str, Any] = {"a": 1}
    with pytest.raises(CannotPlace):
        placed(there, made.data, {})
    assert there == {"a": 1}


def test_a_thing_in_one_of_a_protocol_of_its_own_cannot_stay() -> None:
    with pytest.raises(CannotPlace):
        placed({"a": 1}, copied({"a": Custom(threading.Lock())}, {}).data, {})  # type: ignore[arg-type]
    assert placed(None, copied(Custom(3), {}).data, {}).n == 3


def test_methods_and_partials_call_what_is_there() -> None:
    value, there = Holder(n=3), Holder(n=1)
    for one in (value, there):
        one.how = one.double
        one.add = functools.partial(_add, [1])
    held = there.add.args[0]
    value.add.args[0].append(2)
    placed(there, copied(value, {}).data, {})
    assert there.how() == 6 and there.how.__self__ is there and there.add.args[0] is held == [1, 2]


def test_a_class_of_a_module_that_is_not_imported_is_not_found() -> None:
    data = copied(Meter(), {}).data.replace(b"test_copies", b"test_copied")
    with pytest.raises(CannotPlace):
        placed(Meter(), data, {})


def test_an_object_of_another_class_is_bound_and_the_old_one_left_alone() -> None:
    there = Meter(1.0)
    result = placed(there, copied(Holder(n=2), {}).data, {})
    assert type(result) is Holder and there.total == 1.0


def test_a_tensor_of_another_shape_is_bound_anew() -> None:
    there = torch.zeros(2)
    result = placed(there, copied(torch.ones(3), {}).data, {})
    assert torch.equal(result, torch.ones(3)) and torch.equal(there, torch.zeros(2))
