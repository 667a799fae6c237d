"""Forty ways in which a script keeps a value that its loop changes. Each is a function that is given the steps, and gives what it has."""

from __future__ import annotations

import abc
import argparse
import array
import collections
import contextvars
import dataclasses
import enum
import functools
import queue
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

STEPS = 7
Steps = Iterator[int]

SCRIPTS: dict[str, Callable[[Steps], Any]] = {}


def script(function: Callable[[Steps], Any]) -> Callable[[Steps], Any]:
    SCRIPTS[function.__name__] = function
    return function


@script
def counter(steps: Steps) -> Any:
    n = 0
    for _ in steps:
        n += 1
    return n


@script
def running_mean(steps: Steps) -> Any:
    mean = 0.0
    for step in steps:
        mean = 0.9 * mean + 0.1 * step
    return mean


@script
def best_and_when(steps: Steps) -> Any:
    best, at = None, -1
    for step in steps:
        value = -abs(step - 3)
        if best is None or value > best:
            best, at = value, step
    return best, at


@script
def changed_once(steps: Steps) -> Any:
    stage = "first"
    for step in steps:
        if step == 3:
            stage = "second"
    return stage


@script
def history(steps: Steps) -> Any:
    losses: list[float] = []
    same = losses
    for step in steps:
        losses.append(step / 3)
    return losses, same is losses


@script
def nested_containers(steps: Steps) -> Any:
    logs: dict[str, Any] = {"train": {"loss": [], "n": 0}, "seen": set()}
    for step in steps:
        logs["train"]["loss"].append(step)
        logs["train"]["n"] += 2
        logs["seen"].add(step % 3)
    return logs


@script
def first_in_first_out(steps: Steps) -> Any:
    window: collections.deque[int] = collections.deque(maxlen=3)
    for step in steps:
        window.append(step)
    return list(window)


@script
def counts_of_words(steps: Steps) -> Any:
    counts: collections.Counter[str] = collections.Counter()
    table: dict[str, list[int]] = collections.defaultdict(list)
    for step in steps:
        counts["ab"[step % 2]] += 1
        table["ab"[step % 2]].append(step)
    return counts, dict(table)


@script
def in_an_order(steps: Steps) -> Any:
    cache: collections.OrderedDict[int, int] = collections.OrderedDict((n, 0) for n in range(3))
    for step in steps:
        cache.move_to_end(step % 3)
        cache[step % 3] += 1
    return list(cache.items())


@script
def arrays(steps: Steps) -> Any:
    total, few, raw = np.zeros(2), array.array("d", [0.0]), bytearray(1)
    for step in steps:
        total += step
        few[0] += step
        raw[0] += step
    return total.tolist(), few[0], bytes(raw)


@script
def tensors(steps: Steps) -> Any:
    total, average = torch.zeros(2), torch.zeros(2)
    for step in steps:
        total += step
        average = 0.5 * average + step
    return total.tolist(), average.tolist()


class Meter:
    def __init__(self) -> None:
        self.total, self.values = 0.0, []  # type: ignore[var-annotated]

    def add(self, value: float) -> None:
        self.total += value
        self.values.append(value)


@script
def an_object(steps: Steps) -> Any:
    meter = Meter()
    for step in steps:
        meter.add(step)
    return meter.total, meter.values


@script
def objects_in_a_dict(steps: Steps) -> Any:
    meters = {"loss": Meter(), "accuracy": Meter()}
    for step in steps:
        meters["loss"].add(step)
        meters["accuracy"].add(-step)
    return [meter.total for meter in meters.values()]


@script
def objects_made_in_the_loop(steps: Steps) -> Any:
    meters: list[Meter] = []
    for step in steps:
        meters.append(Meter())
        meters[step // 2].add(step)
    return [meter.values for meter in meters]


class Trainer:
    """Callbacks know it."""

    def __init__(self) -> None:
        self.step, self.callbacks, self.state = 0, [Callback(self)], {"best": 0}

    def train(self, steps: Steps) -> None:
        for step in steps:
            self.step += 1
            for callback in self.callbacks:
                callback.done(step)


class Callback:
    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.calls = trainer, 0

    def done(self, step: int) -> None:
        self.calls += 1
        self.trainer.state["best"] = max(self.trainer.state["best"], step * self.calls)


@script
def a_trainer(steps: Steps) -> Any:
    trainer = Trainer()
    trainer.train(steps)
    return trainer.step, trainer.callbacks[0].calls, trainer.state, trainer.callbacks[0].trainer is trainer


@dataclasses.dataclass
class Progress:
    epoch: int = 0
    marks: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Fixed:
    n: int = 0


@script
def dataclasses_of_both_kinds(steps: Steps) -> Any:
    progress, fixed = Progress(), Fixed()
    for step in steps:
        progress.epoch += 1
        progress.marks.append(step)
        fixed = dataclasses.replace(fixed, n=fixed.n + 1)
    return progress, fixed


class Slotted:
    __slots__ = ("n", "names")

    def __init__(self) -> None:
        self.n, self.names = 0, []  # type: ignore[var-annotated]


@script
def slots(steps: Steps) -> Any:
    thing = Slotted()
    for step in steps:
        thing.n += step
        thing.names.append(str(step))
    return thing.n, thing.names


class Guarded:
    def __init__(self) -> None:
        self._level = 1.0

    @property
    def level(self) -> float:
        return self._level

    @level.setter
    def level(self, value: float) -> None:
        self._level = max(value, 0.1)


@script
def a_property(steps: Steps) -> Any:
    thing = Guarded()
    for _ in steps:
        thing.level *= 0.7
    return thing.level


class Named(abc.ABC):  # noqa: B024
    made = 0
    registry: dict[str, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        type(self).made += 1
        Named.registry[f"{self.made}"] = self.made


@script
def a_counter_of_a_class(steps: Steps) -> Any:
    Named.made, Named.registry = 0, {}
    kind = Named
    for _ in steps:
        kind()
    return Named.made, Named.registry


class Mode(enum.Enum):
    WARM = 1
    FULL = 2


@script
def an_enum(steps: Steps) -> Any:
    mode = Mode.WARM
    for step in steps:
        mode = Mode.FULL if step > 2 else mode
    return mode is Mode.FULL


Point = collections.namedtuple("Point", "x y")


@script
def tuples(steps: Steps) -> Any:
    pair, point = (0, [0]), Point(0, 0)
    for step in steps:
        pair = pair[0] + 1, pair[1]
        pair[1].append(step)
        point = point._replace(x=point.x + step)
    return pair, point


@script
def a_closure(steps: Steps) -> Any:
    def counting() -> Callable[[], int]:
        n = 0

        def count() -> int:
            nonlocal n
            n += 1
            return n

        return count

    count = counting()
    last = 0
    for _ in steps:
        last = count()
    return last


@script
def a_default(steps: Steps) -> Any:
    def remember(value: int, seen: list[int] = []) -> list[int]:  # noqa: B006
        seen.append(value)
        return seen

    found: list[int] = []
    for step in steps:
        found = remember(step)
    return list(found)


def accumulate(value: int) -> int:
    accumulate.total = getattr(accumulate, "total", 0) + value  # type: ignore[attr-defined]
    return accumulate.total  # type: ignore[attr-defined,no-any-return]


@script
def hung_on_a_function(steps: Steps) -> Any:
    accumulate.total = 0  # type: ignore[attr-defined]
    how = accumulate
    return [how(step) for step in steps][-1]


_calls = 0
_cache: dict[int, int] = {}


def called(step: int) -> None:
    global _calls
    _calls += 1
    _cache[step] = _calls


@script
def global_variables(steps: Steps) -> Any:
    global _calls
    _calls = 0
    _cache.clear()
    for step in steps:
        called(step)
    return _calls, dict(_cache)


_context: contextvars.ContextVar[int] = contextvars.ContextVar("_context", default=0)


@script
def a_context_variable(steps: Steps) -> Any:
    _context.set(0)
    for _ in steps:
        _context.set(_context.get() + 1)
    return _context.get()


@script
def random_generators(steps: Steps) -> Any:
    python, numpy, old, torchs = random.Random(1), np.random.default_rng(2), np.random.RandomState(3), torch.Generator()
    torchs.manual_seed(4)
    found: list[float] = []
    for _ in steps:
        found = [python.random(), float(numpy.random()), float(old.rand()), torch.rand(1, generator=torchs).item()]
    return found


@script
def one_that_is_made_late(steps: Steps) -> Any:
    rng = None
    value = 0.0
    for _ in steps:
        if rng is None:
            rng = random.Random(5)
        value = rng.random()
    return value


@script
def a_queue(steps: Steps) -> Any:
    waiting: queue.Queue[int] = queue.Queue()
    for step in steps:
        waiting.put(step)
        if step % 3 == 2:
            waiting.get()
    return list(waiting.queue)


@script
def bags_of_values(steps: Steps) -> Any:
    space, options = types.SimpleNamespace(n=0), argparse.Namespace(lr=1.0)
    for _ in steps:
        space.n += 1
        options.lr *= 0.5
    return space.n, options.lr


@script
def a_while_loop(steps: Steps) -> Any:
    done, patience = 0, 3
    while patience and done < STEPS:
        step = next(steps, None)
        if step is None:
            break
        done += 1
        patience -= step == 5
    return done, patience


@script
def an_own_generator_around_the_loop(steps: Steps) -> Any:
    def numbered() -> Iterator[tuple[int, int]]:
        number = 100
        for step in steps:
            number += 1
            yield number, step

    last = 0
    for number, _ in numbered():
        last = number
    return last


@script
def a_function_in_the_middle(steps: Steps) -> Any:
    totals: list[int] = []

    def one_epoch(limit: int) -> int:
        running = 0
        for step in steps:
            running += step
            totals.append(limit + running)
        return running

    return one_epoch(10), totals


@script
def what_is_bound_in_the_loop_alone(steps: Steps) -> Any:
    for step in steps:
        if step == 0:
            base = 5  # a replacement never comes here
        base += step
    return base


@script
def one_thing_by_two_names(steps: Steps) -> Any:
    values: list[int] = []
    holder = Meter()
    holder.values = values
    for step in steps:
        values.append(step)  # noqa: PERF402
    return holder.values is values, values


@script
def made_of_things_that_cannot_be_copied(steps: Steps) -> Any:
    thing = Meter()
    thing.function = lambda value: 2 * value  # type: ignore[attr-defined]
    thing.reference = weakref.ref(thing)  # type: ignore[attr-defined]
    thing.partial = functools.partial(thing.function, 3)  # type: ignore[attr-defined]
    for _ in steps:
        thing.add(thing.partial())  # type: ignore[attr-defined]
    return thing.total, thing.reference() is thing  # type: ignore[attr-defined]
