"""Keep the position in a loader: a redone step gets the same batch, and a replacement starts at the right one.

ftrun iterates the script's loader as the script would, so a run without a fault draws the same numbers as without ftrun. It copies
nothing: a replacement makes the loader's iterator again at its place (the sampler skips, the data set is not read) and fetches the
batch in flight itself, from the random state that its predecessor had before the fetch. The loader's processes begin in the state of
its predecessor's (loader_workers.py).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ftrun.core.errors import UsageError
from ftrun.worker.link.callers import module_of
from ftrun.worker.link.trees import leaves, sketch
from ftrun.worker.state import rng
from ftrun.worker.state.loader_workers import crew_of
from ftrun.worker.torch_compat import loader_private
from ftrun.worker.torch_compat.torch_private import writes_to
from ftrun.worker.variables.copies import CannotPlace, copied, placed


class LoaderPosition:
    """A loader with a position: `index` counts batches over all epochs, -1 before the first.

    `late`: a step is handed out without its batch; the script asks for it later, by `ensure`.
    """

    def __init__(self, loader: Iterable[Any], late: bool = False) -> None:
        try:
            self.length = len(loader)  # type: ignore[arg-type]
        except TypeError:
            raise UsageError(f"job.batches: a {type(loader).__name__} has no length, so the end is not known", explain="F321") from None
        if self.length == 0:
            raise UsageError("job.batches: the loader has no batches")
        self.loader = loader
        self.late = late
        self.index = -1
        self.batch: Any = None
        self._used = -1  # `index` as the steps count it: a late batch stays here when its step goes back to its start
        self._after: dict[str, Any] | None = None  # random state once a late batch was there
        self._iterator: Iterator[Any] | None = None
        self._epoch_state: dict[str, Any] | None = None  # random state in which the epoch's iterator was made
        self._before: dict[str, Any] | None = None  # random state before the batch in flight was fetched
        self._values: list[int] = []
        self._copy: Any = None
        self._epochs: dict[int, int] = {}  # id of a sampler -> its epoch before the first pass
        self._moved: set[int] = set()  # ids of samplers whose epoch this class has set
        self._again = False  # the fetch repeats an earlier one
        self._held: dict[str, bytes] = {}  # state of the script's own samplers before the pass
        self._parts = list(_parts(loader))
        self._crews = [(part, crew_of(part)) for _, part in self._parts if _makes_processes(part)]
        self._skips = _is_standard(loader) and not any(crew.is_unknown(part) for part, crew in self._crews)
        for _, crew in self._crews:
            crew.numbered = self._skips

    def ensure(self, index: int) -> None:
        """Make `batch` hold batch `index`: the present one, or the next."""
        if index == self.index:
            if self._used != index and self._after is not None:
                self._set_streams(self._after)
            self._used = index
            if self._spoilt():
                self._fetch_again()
            return
        self._before = rng.capture()
        self._fetch(index)
        if self.late:
            self._after = self._streams()

    def _fetch(self, index: int) -> None:
        place = index % self.length
        if place == 0:
            self.finish()
        if place == 0 or self._epoch_state is None:
            self._epoch_state = self._streams()
            self._iterator = self._open(index // self.length, place)
        elif self._iterator is None:
            here = self._streams()
            self._set_streams(self._epoch_state)
            self._iterator = self._open(index // self.length, place)
            self._set_streams(here)
        assert self._iterator is not None
        self.batch = next(self._iterator)
        for part, crew in self._crews:
            crew.gave(part)
        self.index = self._used = index
        parts = list(leaves(self.batch))
        self._values = [_value(t) for t in parts if isinstance(t, torch.Tensor)]
        self._copy = None if all(isinstance(t, _FIXED) for t in parts) else copy.deepcopy(self.batch)

    def finish(self) -> None:
        """After the last batch of a pass, let the loader reach its end, where it may count the pass or draw once more."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and self.index % self.length == self.length - 1:
            next(iterator, None)
            for part, crew in self._crews:
                crew.passed(part)

    def _spoilt(self) -> bool:
        """Did the script write into the batch in flight? If there is a copy of the batch, restore it instead."""
        if self._copy is not None:
            self.batch = copy.deepcopy(self._copy)
            return False
        return [_value(t) for t in leaves(self.batch) if isinstance(t, torch.Tensor)] != self._values

    def _fetch_again(self) -> None:
        """Read the batch in flight once more, and leave every random stream as it was."""
        here = self._streams()
        assert self._before is not None and self._epoch_state is not None
        self._iterator, self._again = None, True
        for _, crew in self._crews:
            crew.go_back()
        if self.index % self.length == 0:
            self._set_streams(self._epoch_state)
        else:
            rng.apply(self._before)
        self._fetch(self.index)
        self._again = False
        self._set_streams(here)

    @property
    def before(self) -> dict[str, Any] | None:
        """The random streams before the batch in flight was fetched; None if it was not fetched when its step was handed out."""
        return None if self.late else self._before

    # -- for the slots -----------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Return the position, for a slot."""
        own = {path: g.get_state().numpy().tobytes() for path, g in self._generators().items()}
        epochs = [(_epoch_of(thing), self._epochs.get(id(thing))) for thing in self.with_epochs()]
        crews = [crew.capture() for _, crew in self._crews]
        return {
            "index": self._used, "epoch": self._epoch_state, "before": self._before, "own": own, "epochs": epochs, "crews": crews,
            "held": self._held,
        }  # fmt: skip

    def put_back(self, saved: dict[str, Any], step_index: int) -> None:
        """Go to a saved position; a replacement fetches the batch in flight again. The caller restores the main streams."""
        if self.index == saved["index"] or (self.late and self.index == saved["index"] + 1):
            self._used = saved["index"]
            return
        self._epoch_state, self._before, self._held = saved["epoch"], saved["before"], saved["held"]
        for thing, (now, begun) in zip(self.with_epochs(), saved["epochs"], strict=True):
            self._go_to_epoch(thing, now)
            if begun is not None:
                self._epochs[id(thing)] = begun
        for (_, crew), kept in zip(self._crews, saved["crews"], strict=True):
            crew.put_back(kept)
        self._iterator = None
        self.index = self._used = saved["index"]
        if self.index == step_index and self.index >= 0:
            self._fetch_again()
        self._set_own(saved["own"])

    # -- random streams of the loader --------------------------------------------------------------------------------

    def _generators(self) -> dict[str, torch.Generator]:
        """Return the generators of the loader and of its parts, by the attributes that lead to them."""
        found: dict[str, torch.Generator] = {}
        for path, part in self._parts:
            for name, thing in {"generator": getattr(part, "generator", None), **getattr(part, "__dict__", {})}.items():
                if isinstance(thing, torch.Generator) and not any(thing is known for known in found.values()):
                    found[f"{path}{name}"] = thing
        return found

    def _streams(self) -> dict[str, Any]:
        return {"main": rng.capture(), "own": {path: g.get_state().numpy().tobytes() for path, g in self._generators().items()}}

    def _set_streams(self, streams: dict[str, Any]) -> None:
        rng.apply(streams["main"])
        self._set_own(streams["own"])

    def _set_own(self, states: dict[str, bytes]) -> None:
        for path, generator in self._generators().items():
            if path in states:  # a sampler may make its own in its first iteration
                generator.set_state(torch.frombuffer(bytearray(states[path]), dtype=torch.uint8))

    def kept(self) -> list[Any]:
        """Return the loader and all its parts."""
        return [*self.with_epochs(), *(part for _, part in self._parts)]

    def with_epochs(self) -> list[Any]:
        """Return the loader and its samplers, if they have an epoch."""
        loader: Any = self.loader
        parts = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
        return [part for part in parts if hasattr(part, "set_epoch")]

    # -- iterators ---------------------------------------------------------------------------------------------------

    def _open(self, epoch: int, skip: int) -> Iterator[Any]:
        known = {f"part {path}": part for path, part in self._parts} | self._generators()
        own = {path: part for path, part in self._parts if isinstance(part, Sampler) and not _is_torchs(part)}
        if self._again:
            for path, data in self._held.items():
                with contextlib.suppress(
                    CannotPlace
                ):  # if the batch is then another one, `SameInputs` detects it by the inputs of the model
                    placed(vars(own[path]), data, known)
        else:
            ids = {id(thing): name for name, thing in known.items()}
            self._held = {path: copied(vars(part), ids).data for path, part in own.items() if hasattr(part, "__dict__")}
        for thing in self.with_epochs():
            self._go_to_epoch(thing, self._epochs.setdefault(id(thing), _epoch_of(thing)) + epoch)
        with contextlib.ExitStack() as stack:
            empty = [stack.enter_context(crew.beginning(loader, skip, self._again)) for loader, crew in self._crews]
            iterator = self._iterator_behind(skip, sum(empty))
            for _ in range(sum(empty)):
                with contextlib.suppress(Exception):  # a data set may raise when it is asked for nothing
                    next(iterator)
            if skip or self._skips or not self._crews:
                return iterator
            return itertools.chain([next(iterator)], iterator)  # it may make its processes at the first batch

    def _iterator_behind(self, skip: int, empty: int) -> Iterator[Any]:
        loader: Any = self.loader
        if hasattr(loader, "iterate_from"):
            return iter(loader.iterate_from(skip))
        if skip and self._skips:
            batches = _Batches(loader.batch_sampler, skip, empty)
            with loader_private.with_batches(loader, batches):
                iterator = iter(loader)  # draws the base of its processes' seeds, and then the sampler does
            batches.drawn.begin()
            batches.opened()
            return iterator
        iterator = iter(loader)
        for _ in range(skip):
            next(iterator)
        return iterator

    def _go_to_epoch(self, thing: Any, epoch: int) -> None:
        """Set the epoch, unless it is set; the script may have set it already where no epoch can be read."""
        if _epoch_of(thing) != epoch or id(thing) in self._moved:
            self._moved.add(id(thing))
            thing.set_epoch(epoch)


def _parts(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield a loader and the loaders and samplers inside it, as a framework wraps them, each with the path that leads to it."""
    parts: list[tuple[str, Any]] = [("", loader)]
    for path, part in parts:  # it grows
        yield path, part
        wrapped = {name: getattr(part, name, None) for name in ("sampler", "batch_sampler")}
        for name, thing in {**wrapped, **getattr(part, "__dict__", {})}.items():
            if isinstance(thing, Sampler | DataLoader) and not any(thing is known for _, known in parts):
                parts.append((f"{path}{name}.", thing))


def _is_torchs(thing: Any) -> bool:
    return module_of(type(thing)).partition(".")[0] == "torch"


def _makes_processes(part: Any) -> bool:
    return isinstance(part, DataLoader) and "collate_fn" in vars(part) and part.num_workers > 0  # else it wraps one


def _is_standard(loader: Any) -> bool:
    """Is it a DataLoader that iterates as torch's does, over batches of indices?"""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
        and getattr(loader, "in_order", True)  # else whichever process is first gives the next batch
    )


def _epoch_of(thing: Any) -> int:
    return int(getattr(thing, "epoch", getattr(thing, "iteration", 0)))  # the loaders of accelerate have the latter


class _Batches:
    """A sampler that gives `empty` batches without indices, then continues `skip` batches further, in the next pass only."""

    def __init__(self, sampler: Any, skip: int, empty: int) -> None:
        self._sampler = sampler
        self._skip, self._empty = skip, empty
        self.drawn: _Drawn

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self.drawn = _Drawn(iter(self._sampler), self._skip, self._empty)
        return self.drawn

    def opened(self) -> None:
        """Skip nothing in later passes."""
        self._skip = self._empty = 0


class _Drawn(Iterator[Any]):
    def __init__(self, iterator: Iterator[Any], skip: int, empty: int) -> None:
        self._iterator, self._skip, self._empty = iterator, skip, empty
        self._begun = False
        self._ahead: list[Any] = []

    def begin(self) -> None:
        """Draw the first batch, once; a sampler takes its seed then."""
        if not self._begun:
            self._begun = True
            self._ahead = list(itertools.islice(self._iterator, self._skip, self._skip + 1))

    def __next__(self) -> Any:
        if self._empty:
            self._empty -= 1
            return []
        self.begin()
        return self._ahead.pop() if self._ahead else next(self._iterator)


def _value(tensor: torch.Tensor) -> int:
    """Combine a tensor's content with its count of writes; on a GPU return the count alone, since a read would wait for the device."""
    written = 0 if tensor.is_inference() else writes_to(tensor)
    value = sketch(tensor, written)
    return written if value is None else value


_FIXED = (torch.Tensor, int, float, str, bytes, bool, type(None))
