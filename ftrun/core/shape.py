"""Checks the shape of data from a file before other code uses it. Small checks combine into larger ones.

The reader of a file refuses another version's, a torn or a forged one here, so that no later code meets a TypeError. A check
returns True or False and never raises. It ignores unknown keys, which later versions may use.
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
_DEEPEST = 24  # levels of nested lists and objects: printing deeper ones could exhaust the stack
_LARGEST = 1e12  # the largest number of seconds or milliseconds that is accepted
_WORD = 1 << 64  # whole numbers fit into a word of the board


def loads(data: str | bytes) -> Any:
    """Parse a JSON text in UTF-8.

    Raises:
        ValueError: It is not UTF-8, not JSON, or nested too deeply.
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
    """Is it a whole number from -1 (none) to 2**64 - 1, as ranks, cells, steps, bytes and nanoseconds are?"""
    return type(value) is int and -1 <= value < _WORD


def number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST  # False for nan


def digits(value: Any) -> bool:
    """Is it the text of a whole number, as JSON writes a number that is a key?"""
    return isinstance(value, str) and value.isdecimal() and len(value) < 20


def maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def listed(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def row(*checks: Check) -> Check:
    """Return a check for a list with exactly these entries."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(v) for check, v in zip(checks, value, strict=True))
    )


def mapped(check: Check, key: Check = text) -> Check:
    return lambda value: isinstance(value, dict) and all(key(k) and check(v) for k, v in value.items())


def record(needed: dict[str, Check], more: dict[str, Check] | None = None) -> Check:
    """Return a check for an object with all `needed` keys; the keys of `more` may be absent."""
    every = {**needed, **(more or {})}
    return lambda value: (
        isinstance(value, dict)
        and needed.keys() <= value.keys()
        and all(check(value[key]) for key, check in every.items() if key in value)
    )


_types: Callable[[type], dict[str, Any]] = functools.cache(get_type_hints)  # the types of a dataclass's fields
_PLAIN: dict[type, Check] = {str: text, bool: flag, int: whole, float: number}


def typed(kind: type[T], raw: Any) -> T | None:
    """Rebuild the dataclass instance that `asdict` and JSON turned into `raw`; return None for anything else.

    Fields with a default may be missing. A field's type may be a plain type, an enumeration, a dataclass, tuple[T, ...], T | None,
    dict[str, T], or dict[int, T], whose keys are texts in JSON.
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
