"""Checks of data that was read from a file, before anybody uses it. Small checks make up larger ones.

A file of another version, a torn one or a forged one is turned down here, where it is read, and not by a TypeError where it
is drawn. A check tells True or False and never raises; keys that nobody asks for may be there, as they are free for later.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Check = Callable[[Any], bool]
T = TypeVar("T")
_DEEPEST = 24  # lists and objects within each other: beyond, showing them could exhaust the stack
_LARGEST = 1e12  # of seconds and milliseconds: what a clock can still say
_WORD = 1 << 64  # whole numbers are words of the board at most


def loads(data: str | bytes) -> Any:
    """The content of a JSON text in UTF-8.

    Raises:
        ValueError: Whatever is wrong with it.
    """
    try:
        value = json.loads(data.decode() if isinstance(data, bytes) else data)
    except RecursionError:
        raise ValueError("too many levels") from None
    if not _shallow(value, _DEEPEST):
        raise ValueError("too many levels")
    return value


def _shallow(value: Any, levels: int) -> bool:
    if not isinstance(value, (list, dict)):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_shallow(v, levels - 1) for v in inner)


def text(value: Any) -> bool:
    return isinstance(value, str)


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def whole(value: Any) -> bool:
    """-1 (none) or more: ranks, cells, steps, bytes, nanoseconds."""
    return type(value) is int and -1 <= value < _WORD


def number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST  # not nan either


def digits(value: Any) -> bool:
    """A whole number as the key of an object."""
    return isinstance(value, str) and value.isdecimal() and len(value) < 20


def maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def listed(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def row(*checks: Check) -> Check:
    """A list with exactly these entries."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(v) for check, v in zip(checks, value, strict=True))
    )


def mapped(check: Check, key: Check = text) -> Check:
    return lambda value: isinstance(value, dict) and all(key(k) and check(v) for k, v in value.items())


def record(needed: dict[str, Check], more: dict[str, Check] | None = None) -> Check:
    """An object with the `needed` keys; those of `more` fit where they are there."""
    every = {**needed, **(more or {})}
    return lambda value: (
        isinstance(value, dict)
        and needed.keys() <= value.keys()
        and all(check(value[key]) for key, check in every.items() if key in value)
    )


_types: Callable[[type], dict[str, Any]] = functools.cache(get_type_hints)  # of fields
_PLAIN: dict[type, Check] = {str: text, bool: flag, int: whole, float: number}


def typed(kind: type[T], raw: Any) -> T | None:
    """The instance of a dataclass of which `asdict` and JSON have made `raw`; None for anything else.

    Fields with a default may be missing. Types of fields: plain ones, enumerations, dataclasses; tuple[T, ...], T | None,
    dict[str, T], and dict[int, T], whose keys JSON makes texts of.
    """
    try:
        found: T = _typed(kind, raw)
    except (KeyError, TypeError, ValueError):
        return None
    return found


def _typed(wanted: Any, raw: Any) -> Any:
    inner = get_args(wanted)
    if get_origin(wanted) is UnionType:
        return None if raw is None else _typed(inner[0], raw)
    if get_origin(wanted) is tuple and isinstance(raw, list):
        return tuple(_typed(inner[0], part) for part in raw)
    if get_origin(wanted) is dict and isinstance(raw, dict):
        return {int(key) if inner[0] is int else key: _typed(inner[1], value) for key, value in raw.items()}
    if isinstance(wanted, type) and is_dataclass(wanted) and isinstance(raw, dict):
        types = _types(wanted)
        return wanted(**{of.name: _typed(types[of.name], raw[of.name]) for of in fields(wanted) if of.name in raw})
    if isinstance(wanted, type) and issubclass(wanted, Enum) and whole(raw):
        return {member.value: member for member in wanted}[raw]
    if _PLAIN[wanted](raw):
        return raw
    raise ValueError(f"no {wanted}")
