"""Bindings of names in a script's spaces: detect which were rebound, put them back, and group names that share an object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ftrun.worker.variables import histories
from ftrun.worker.variables.copies import CannotPlace, placed
from ftrun.worker.variables.in_place import InPlace
from ftrun.worker.variables.spaces import Space

BEHIND = "|"  # between a space and a name
_ABSENT = object()


class Named(NamedTuple):
    space: Space
    name: str

    @property
    def key(self) -> str:
        return f"{self.space.key}{BEHIND}{self.name}"

    @property
    def shown(self) -> str:
        return self.space.shown + self.name


class Bindings(NamedTuple):
    """Names of a space, and the objects that they were bound to at the last look.

    `locals_dict`: the dict that a look at a frame's variables fills; whoever looked restores its earlier content.
    """

    space: Space
    names: list[str]
    get: Callable[[Any], Any]
    before: Any
    length: int
    locals_dict: dict[str, Any] | None

    def rebound(self) -> list[str]:
        """Return the names that are bound to another object by now, as messages display them."""
        values = self.space.read()
        pairs = zip(self.names, self.before, strict=False)
        return [self.space.shown + name for name, before in pairs if values.get(name, _ABSENT) is not before]

    def undo(self) -> list[str]:
        """Bind these names to their earlier objects again, and return them."""
        found = self.rebound()
        for name, before in zip(self.names, self.before, strict=False):
            if self.space.shown + name in found:
                self.space.bind(name, before)
        return found


def put_back(places: list[Named], data: bytes, things: Mapping[str, Any], in_place: InPlace) -> None:
    """Put back a copy of one value, or of several values that were copied together.

    Raises:
        CannotPlace: If the copy cannot be put back as a whole.
        Exception: Whatever the script's own setter raises.
    """
    spaces_now = [place.space.read() for place in places]
    there = [values.get(place.name) for place, values in zip(places, spaces_now, strict=True)]
    together = len(places) > 1
    pickled, named = histories.parts_of(data)
    new = placed(tuple(there) if together else there[0], pickled, things, in_place, named)
    for place, values, value in zip(places, spaces_now, new if together else [new], strict=True):
        if place.name not in values or value is not values[place.name]:
            place.space.bind(place.name, value)


def put_back_as_it_stood(place: Named, stand: Any, things: Mapping[str, Any], in_place: InPlace) -> None:
    """Put back a value from the stand-in that `Variables` took of it.

    Raises:
        CannotPlace: If there is no copy, or as in `put_back`.
        Exception: Whatever the script's own setter raises.
    """
    if isinstance(stand, bytes):
        put_back([place], stand, things, in_place)
        return
    if stand is None:
        raise CannotPlace("it could not be copied before it changed")
    value = stand[-1] if len(stand) > 1 else things[stand[0]]
    if place.space.read().get(place.name, _ABSENT) is not value:
        place.space.bind(place.name, value)


def together(held: Mapping[str, Iterable[int]]) -> dict[int, set[str]]:
    """Map the id of each object that several names hold to those names. `held`: name -> ids of all objects in its value."""
    first: dict[int, str] = {}
    found: dict[int, set[str]] = {}
    for name, marks in held.items():
        for mark in marks:
            if first.setdefault(mark, name) != name:
                found.setdefault(mark, {first[mark]}).add(name)
    return found


def shared(held: Mapping[str, Iterable[int]], before: Iterable[list[str]]) -> tuple[dict[int, str], list[list[str]]]:
    """Group the names whose values share an object.

    Args:
        held: Name -> ids of all objects in its value.
        before: Earlier groups. They stay together, since they may share something again.

    Returns:
        Each id with the first name that holds it, and the groups of at least two names.
    """
    groups = {name: [name] for name in held}
    first: dict[int, str] = {}

    def unite(one: str, other: str) -> None:
        ours, theirs = groups[one], groups[other]
        if ours is not theirs:
            theirs += ours
            groups.update((name, theirs) for name in ours)

    for group in before:
        present = [name for name in group if name in held]
        for name in present[1:]:
            unite(name, present[0])
    for name, marks in held.items():
        for mark in marks:
            unite(name, first.setdefault(mark, name))
    return first, list({id(group): group for group in groups.values() if len(group) > 1}.values())
