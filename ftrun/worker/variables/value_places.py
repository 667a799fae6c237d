"""Find the places of a script's values around a loop: names in its frames, its modules, and the objects that these lead to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from ftrun.worker.link.callers import module_of, script_frames
from ftrun.worker.torch_compat.frames_private import has_own_locals
from ftrun.worker.variables import spaces
from ftrun.worker.variables.bindings import Named
from ftrun.worker.variables.loop_names import made_anew, names_of
from ftrun.worker.variables.spaces import Space


class ValuePlaces:
    """The places of one rank's values.

    Args:
        modules: The protected modules.
        known: Name -> object that the job keeps itself: names are bound to it, and it is not copied.
        ignored: Names and objects to leave out.
        only: The names, such as `x` or `self.meters`, that count; None = all.

    Attributes:
        frames: The script's frames around the loop, the innermost first; none outside of loops.
        spaces: The spaces that the search found from there.
        roots: Frames and modules from which a search has found spaces so far.
        carried: Names that loops on the stack carry from one iteration to the next.
        by_id: id -> name of each object that is bound and not copied.
        whole: Places to which the loop binds one object after the other; such an object is copied together with its attributes.
        iterated: ids of loaders and samplers that are kept with the place in the data.
    """

    def __init__(
        self, modules: list[torch.nn.Module], known: Mapping[str, Any], ignored: Iterable[Any], only: Iterable[str] | None
    ) -> None:
        self._modules = modules
        self.only = None if only is None else frozenset(only)
        self._given = dict(known)
        for number, root in enumerate(modules):
            self._given |= {f"model {number}.{name}": part for name, part in root.named_modules()}
            self._given |= {f"parameter {number}.{name}": param for name, param in root.named_parameters()}
        self._ignored = {name for name in ignored if isinstance(name, str)}
        self._passed_over = {id(thing) for thing in [*self._given.values(), *ignored]}
        self.iterated: set[int] = set()
        self.frames: list[FrameType] = []
        self._fresh: tuple[str, frozenset[str]] = ("", frozenset())  # key of a space, and names there
        self.carried: frozenset[str] = frozenset()
        self.spaces: list[Space] = []
        self.roots: set[str] = set()
        self._there: set[str] = set()  # keys of the spaces that existed when a search first met their root
        self.by_id: dict[int, str] = {}
        self.whole: set[str] = set()

    def come(self) -> bool:
        """Take the script's frames around this call. Return whether they are others than before."""
        frames = script_frames()
        if [*map(id, frames)] == [*map(id, self.frames)]:
            return False
        self.frames = frames
        self._fresh = self._fresh_names()
        found = [(names_of(frame).carried, spaces.module_prefix(frame.f_globals)) for frame in frames]
        self.carried = frozenset(prefix + name for names, of_module in found for prefix in ("", of_module) for name in names)
        return True

    def _fresh_names(self) -> tuple[str, frozenset[str]]:
        """Return the key of the innermost function's or module's space, and the names there that its loop makes anew."""
        if not self.frames:
            return "", frozenset()
        frame = self.frames[0]
        key = f"{frame.f_code.co_name}()." if has_own_locals(frame) else f"global {spaces.module_prefix(frame.f_globals)}"
        return key, made_anew(frame)

    def leave(self) -> None:
        """Drop frames and spaces, so that the frames may end."""
        self.frames, self.spaces = [], []

    def find(self) -> None:
        """Search for all spaces."""
        self.spaces = spaces.found(self.frames, self._modules, self.is_passed_over, self.counts, self._is_one)
        self._there |= {space.key for space in self.spaces}
        self.roots |= {space.root for space in self.spaces}
        self.by_id = {id(thing): name for name, thing in self._given.items()}
        for space in self.spaces:
            if space.owner is not None:
                self.by_id.setdefault(id(space.owner), _at(space))

    def _is_one(self, space: Space) -> bool:
        """Did the space exist from the first? An object that the loop makes later is a part of another: a replacement lacks its place."""
        if is_under(space.key, self.whole):
            return False
        return space.root not in self.roots or space.key in self._there

    def is_passed_over(self, thing: Any) -> bool:
        if isinstance(thing, list | tuple | dict):  # it is a value even if it is iterated
            return id(thing) in self._passed_over
        known = id(thing) in self._passed_over or id(thing) in self.iterated
        return known or module_of(type(thing)).startswith("ftrun.")

    def values(self) -> Iterator[tuple[Named, Any]]:
        """Yield each place with its value."""
        for space in self.spaces:
            for name, value in list(space.read().items()):
                if self.counts(space, name):
                    yield Named(space, name), value

    def counts(self, space: Space, name: str) -> bool:
        """Is that name of a space a place of values?"""
        if name[:2] == "__" or name[:1] in ".@" or space.shown + name in self._ignored:
            return False
        if self.only is not None:
            return is_under(space.shown + name, self.only)
        return space.key != self._fresh[0] or name not in self._fresh[1]

    def things(self) -> dict[str, Any]:
        """Return name -> object for the objects in `by_id`."""
        return {**self._given, **{_at(space): space.owner for space in self.spaces if space.owner is not None}}


def _at(space: Space) -> str:
    """Return the name of the object whose attributes lie in a space."""
    return f"at {space.key}"


def is_under(name: str, holders: Iterable[str]) -> bool:
    """Is that name one of `holders`, or a part of one?"""
    return any(name == one or name.startswith((f"{one}.", f"{one}[")) for one in holders)
