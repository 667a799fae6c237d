"""Kills a worker between two of its writes, or leaves out a part of the recovery. Python imports this before anything else.

Nothing of ftrun is imported here: its classes are changed when its own processes have imported them. Each death and each part is a
wrapper around a method, or another method in its place, which a class of ftrun's must have: an import fails otherwise.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

DIE, WITHOUT = "INJECTED_DEATHS", "INJECTED_WITHOUT"
_DEATHS = [tuple(one.split(":")) for one in os.environ.get(DIE, "").split(",") if one]
_PART = os.environ.get(WITHOUT, "")

Change = Callable[[ModuleType], None]
Method = Callable[..., Any]


# ---- deaths ----


class Point(NamedTuple):
    """A call after which, or before which, a worker may die. `number`: the gate's, from the arguments and the result; None = not here."""

    module: str
    name: str
    number: Callable[[Sequence[Any], Any], int | None] = lambda args, _: args[1]
    before: bool = False


def _in_arrival(args: Sequence[Any], _: Any) -> int:
    return int(sys.modules["ftrun.core.shared.gate"].unpack(args[1]).last)


_REPAIR, _STEP = "ftrun.worker.repair", "ftrun.worker.step"
# in the order in which a step passes them
POINTS = {
    "slot-start": Point(f"{_REPAIR}.ledger", "Ledger.start"),
    "slot-gate": Point(f"{_STEP}.gate", "Gate.arrive", before=True),
    "arrive": Point("ftrun.native", "arrive", _in_arrival),
    "swap": Point("ftrun.core.shared.board", "Board.show_opening", before=True),
    "pass": Point(f"{_STEP}.gate", "Gate.arrive", lambda args, passed: args[1] if passed else None),
    "open": Point(f"{_STEP}.commit", "Commit.open", lambda args, _: args[0]._kit.position.number),
    "slot-end": Point(f"{_REPAIR}.ledger", "Ledger.end", lambda args, _: args[1] - 1),
    "sealed": Point(f"{_STEP}.commit", "Commit.seal"),
    "done": Point(f"{_STEP}.commit", "Commit.tell", before=True),
    "restored": Point(f"{_REPAIR}.replacement", "Restorer._take_over", lambda args, _: args[0].resume),
}


def _dies(point: str) -> Change:
    """Have whoever comes to a point die there, if it is named and nobody did before."""
    where = POINTS[point]

    def come(number: int | None) -> None:
        if (named := _named(point, number)) and _rank() in named and _is_first(point, number):
            os.kill(os.getpid(), signal.SIGKILL)

    def around(plain: Method) -> Method:
        def call(*args: Any, **kwargs: Any) -> Any:
            if where.before:
                come(where.number(args, None))
            result = plain(*args, **kwargs)
            if not where.before:
                come(where.number(args, result))
            return result

        return call

    return lambda module: _wrap(module, where.name, around)


def _leaves_gate(module: ModuleType) -> None:
    """Any rank may open a gate: the others leave it to the one that is to die of it."""

    def around(plain: Method) -> Method:
        def opens(gate: Any, raw: int, number: int, wanted: int) -> Any:
            named = [rank for rank in _named("swap", number) if not _mark("swap", number, rank).exists()]
            return module.gate.WAIT if named and _rank() not in named else plain(gate, raw, number, wanted)

        return opens

    _wrap(module, "Gate._opens", around)


def _named(point: str, number: int | None) -> list[int]:
    """The ranks that are to die there."""
    return [int(rank) for name, step, rank in _DEATHS if (name, int(step)) == (point, number)]


def _rank() -> int:
    return int(sys.modules["ftrun.worker.link.run_link"].Context.current.rank)


def _mark(*target: object) -> Path:
    return Path(os.environ["FTRUN_RUN_DIR"]) / "died-{}-{}-{}".format(*target)


def _is_first(point: str, number: int | None) -> bool:
    try:
        _mark(point, number, _rank()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _wrap(module: ModuleType, name: str, around: Callable[[Method], Method]) -> None:
    owner, _, attribute = name.rpartition(".")
    holder = getattr(module, owner) if owner else module
    plain = getattr(holder, attribute)
    setattr(holder, attribute, functools.wraps(plain)(around(plain)))


# ---- parts that are left out ----


def _nothing(*_: Any) -> None:
    pass


def _fetches_anew(plain: Method) -> Method:
    """A batch that is asked for again is the next one, and comes at the end of its pass."""

    def ensure(loader: Any, index: int) -> None:
        if index != loader.index:
            plain(loader, index)
            return
        if loader._iterator is not None:
            loader._iterator = itertools.chain(loader._iterator, [loader.batch])
        loader._fetch(index)

    return ensure


def _stamps_gate(plain: Method) -> Method:
    """What the slot of the gate holds is said to be of the next one."""

    def write(slots: Any, slot: int, tag: int, data: bytes) -> None:
        places = sys.modules[type(slots).__module__]
        if slot == places.GATE and slots.tag(slot) >= 0:
            slots.segment.store(slot * places._ROOM + places._TAG, tag + 1)
        else:
            plain(slots, slot, tag, data)

    return write


def _seals_early(plain: Method) -> Method:
    """The update is said to be done before it is."""

    def opened(arena: Any) -> None:
        step = arena.seal
        plain(arena)
        arena.sealed(step + 1)

    return opened


def _keeps_nothing(plain: Method) -> Method:
    """No gradients are sealed."""

    def made(region: Any, *args: Any) -> None:
        plain(region, *args)
        region.gave_up = True

    return made


def by_torch_alone(states: list[Any]) -> None:
    """FSDP2 is reset by torch's own call, which leaves things out."""
    kept = [(param, param.grad) for param, _ in sys.modules["ftrun.worker.torch_compat.sharded_private"].fsdp_params(states)]
    for state in states:
        if state._is_root:
            state._reset_iter_state()
    for param, grad in kept:
        param.grad = grad


def _told_to_the_driver(plain: Method) -> Method:
    """A fault of a device is no message to the launcher, but a line to the fake NVML library that the run has."""

    def prepare(run_dir: Path, board: Any, rank: int, kind: Any, argument: float | None) -> tuple[str, Callable[[], None]]:
        plain(run_dir, board, rank, kind, argument)
        gpu = sys.modules["ftrun.faults.device"]._device_of(run_dir, rank)["index"]
        words = [str(gpu), kind.name.removeprefix("gpu-"), *([] if argument is None else [f"{argument:g}"])]

        def act() -> None:
            with open(os.environ["FTRUN_FAKE_NVML"], "a") as control:
                control.write(" ".join(words) + "\n")

        return f"{kind.name} on fake device {gpu}", act

    return prepare


PARTS: dict[str, tuple[str, str, Callable[[Method], Method]]] = {
    "rng": ("ftrun.worker.state.rng", "apply", lambda _: _nothing),
    "batch": ("ftrun.worker.state.loader_position", "LoaderPosition.ensure", _fetches_anew),
    "slots": (f"{_REPAIR}.recovery_points", "Slots.write", _stamps_gate),
    "prime": (f"{_REPAIR}.reducers", "_One._prime", lambda _: _nothing),
    "seal": ("ftrun.worker.memory.arena", "Arena.open", _seals_early),
    "sealed": (f"{_REPAIR}.update_region", "UpdateRegion.__init__", _keeps_nothing),
    "abort": ("ftrun.worker.comm.backend", "Inner.abort", lambda _: _nothing),
    "sharded": ("ftrun.worker.torch_compat.sharded_private", "reset_fsdp", lambda _: by_torch_alone),
    "simulation": ("ftrun.faults.device", "prepare", _told_to_the_driver),
    "pipeline": (f"{_REPAIR}.pipelines", "Pipeline.load_state_dict", lambda _: _nothing),
}


# ---- when a module was imported ----


def _changes() -> Iterator[tuple[str, Change]]:
    """Of which module, and what."""
    points = dict.fromkeys(name for name, *_ in _DEATHS)
    for point in points:
        yield POINTS[point].module, _dies(point)
    if "swap" in points:
        yield f"{_STEP}.gate", _leaves_gate
    if _PART:
        module, name, around = PARTS[_PART]
        yield module, lambda imported: _wrap(imported, name, around)


class _Finder(MetaPathFinder):
    """Finds what everybody finds, and changes it once it has run."""

    def __init__(self, changes: list[tuple[str, Change]]) -> None:
        self._changes = changes

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        changes = [change for module, change in self._changes if module == fullname]
        spec = PathFinder.find_spec(fullname, path, target) if changes else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                for change in changes:
                    change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _DEATHS or _PART:
    sys.meta_path.insert(0, _Finder([*_changes()]))
