"""Read, set and make each kind of random generator that a script or a data set may have for itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ftrun.worker.memory import serialization


class GeneratorKind(NamedTuple):
    """Reads, sets and makes one kind of generator; the state that `read` returns is a plain value."""

    read: Callable[[Any], Any]
    set: Callable[[Any, Any], None]
    make: Callable[[Any], Any]  # takes the state that was read


def _bits(state: bytes) -> Any:
    return getattr(np.random, serialization.decode(state)["bit_generator"])()


def _set_numpy(thing: np.random.Generator, state: bytes) -> None:
    thing.bit_generator.state = serialization.decode(state)


KINDS: dict[type, GeneratorKind] = {
    random.Random: GeneratorKind(
        lambda thing: thing.getstate(), lambda thing, state: thing.setstate(state), lambda _: random.Random()
    ),
    torch.Generator: GeneratorKind(
        lambda thing: thing.get_state().numpy().tobytes(),
        lambda thing, state: thing.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
        lambda _: torch.Generator(),
    ),
    np.random.Generator: GeneratorKind(
        lambda thing: serialization.pack(thing.bit_generator.state, "a generator"),
        _set_numpy,
        lambda state: np.random.Generator(_bits(state)),
    ),
    np.random.RandomState: GeneratorKind(
        lambda thing: serialization.pack(thing.get_state(legacy=False), "a generator"),
        lambda thing, state: thing.set_state(serialization.decode(state)),
        lambda state: np.random.RandomState(_bits(state)),
    ),
}


def read(thing: Any) -> tuple[str, Any] | None:
    """Return the kind and state of a generator; None for anything else."""
    return next(((_name(kind), how.read(thing)) for kind, how in KINDS.items() if isinstance(thing, kind)), None)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def placed(name: str, state: Any, there: Any) -> Any:
    """Return a generator of that kind with that state: `there`, if it is of that kind, or a new one."""
    kind, how = next((kind, how) for kind, how in KINDS.items() if _name(kind) == name)
    found = there if isinstance(there, kind) else how.make(state)
    how.set(found, state)
    return found
