"""Parses the text of an option: one function for each kind of value.

Each takes the option's name as it is called in messages and the text, gives the value, and raises UsageError with a
sentence that says what would have been right. Looks at the machine only to count its processors and GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ftrun.core.errors import UsageError

Check = Callable[[str, str], Any]

_NOT_CATCHABLE = ("SIGKILL", "SIGSTOP")
_OURS = ("SIGCHLD", "SIGCONT")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


def text(name: str, value: str) -> str:
    return value


def flag(name: str, value: str) -> bool:
    """Read a flag as torchrun reads its variables: a number, not 0 = on; also true and false in words."""
    word = value.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    try:
        return bool(int(word))
    except ValueError:
        raise UsageError(f"{name} must be 0 or 1, not {value!r}") from None


def number(name: str, value: str) -> int:
    """A whole number that is not negative."""
    try:
        count = int(value)
    except ValueError:
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None
    if count < 0:
        raise UsageError(f"{name} must not be negative, not {count}")
    return count


def _real(wanted: str, holds: Callable[[float], bool]) -> Check:
    """A number for which `holds`; `wanted` says what it must be."""

    def check(name: str, value: str) -> float:
        given = _float(value)
        if not holds(given):
            raise UsageError(f"{name} {wanted}, not {value}")
        return given

    return check


probability = _real("is how likely a step has a fault, 0 to 1 (0.02: one step in 50)", lambda given: 0 <= given <= 1)
seconds = _real("must be a number of seconds above 0", lambda given: 0 < given < float("inf"))
beat = _real("must be a number of seconds from 0.01 to 60", lambda given: 0.01 <= given <= 60)
patience = _real("must be a number of seconds, 0 or more", lambda given: 0 <= given < float("inf"))


def seconds_or_auto(name: str, value: str) -> float | None:
    """None for auto."""
    if value.strip().lower() == "auto":
        return None
    duration = _float(value)
    if not 0 < duration < float("inf"):
        raise UsageError(f"{name} must be auto or a number of seconds above 0, not {value!r}")
    return duration


def gigabytes(name: str, value: str) -> float | None:
    """None for all."""
    if value.strip().lower() == "all":
        return None
    most = _float(value)
    if not 0 <= most < float("inf"):
        raise UsageError(f"{name} must be all or a number of gigabytes, 0 or more, not {value!r}")
    return most


def _float(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return float("nan")


def one_of(*words: str) -> Check:
    """A choice of words."""

    def check(name: str, value: str) -> str:
        if value not in words:
            raise UsageError(f"{name} must be {_either(words)}, not {value!r}")
        return value

    return check


def _either(words: tuple[str, ...]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def workers(name: str, value: str) -> int:
    from ftrun.host.devices.counting import worker_count

    return worker_count(value)


def nodes(name: str, value: str) -> tuple[int, int]:
    """N, or MIN:MAX."""
    match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", value)
    if match is None:
        raise UsageError(f"{name} must be a number of nodes, or a range as in 1:4, not {value!r}")
    least = int(match[1])
    most = int(match[2] or match[1])
    if not 1 <= least <= most:
        raise UsageError(f"{name} must be at least 1, and MIN not above MAX, not {value!r}")
    return least, most


def backend(name: str, value: str) -> str:
    if value == "etcd-v2":  # torch's second name for it; what the servers of today speak is version 3
        return "etcd"
    if value not in ("static", "c10d", "file", "etcd", "kubernetes"):
        raise UsageError(f"{name} {value} is not supported, use c10d, file, etcd or kubernetes (or static, with --node-rank)")
    return value


def port(name: str, value: str) -> int:
    try:
        given = int(value)
    except ValueError:
        given = -1
    if not 0 <= given <= 65535:
        raise UsageError(f"{name} must be a port between 0 and 65535, not {value!r}")
    return given


def endpoint(name: str, value: str) -> str:
    """HOST or HOST:PORT, an IPv6 address in brackets."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/]+)(?::(.*))?", value.strip())
    if match is None:
        raise UsageError(f"{name} must be HOST or HOST:PORT (an IPv6 address in brackets), not {value!r}")
    if match[2] is not None:
        port(f"{name}: the port", match[2])
    return value.strip()


def pairs(name: str, value: str) -> dict[str, str]:
    """`key=value,key=value`."""
    found: dict[str, str] = {}
    for entry in value.split(",") if value.strip() else ():
        key, _, content = (part.strip() for part in entry.partition("="))
        if not key or not content:
            raise UsageError(f"{name} must be key=value,key=value, and {entry!r} in it is not")
        found[key] = content
    return found


def streams(name: str, value: str) -> Any:
    from ftrun.host.base.streams import parse

    return parse(name, value)


def ranks(name: str, value: str) -> tuple[int, ...]:
    """`0,2`; nothing = every rank."""
    try:
        found = tuple(int(part) for part in value.split(",")) if value.strip() else ()
    except ValueError:
        found = (-1,)
    if any(rank < 0 for rank in found):
        raise UsageError(f"{name} must be local ranks with commas between them, as in 0,2; not {value!r}")
    return tuple(dict.fromkeys(found))


def filters(name: str, value: str) -> tuple[str, ...]:
    """Pieces of text with commas between them; a double comma is a comma."""
    mark = "\0"
    return tuple(part.replace(mark, ",") for part in value.replace(",,", mark).split(",") if part)


def signals(name: str, value: str) -> tuple[int, ...]:
    """Names with or without SIG."""
    import signal

    found: dict[int, None] = {}
    for entry in value.split(","):
        word = entry.strip().upper()
        full = word if word.startswith("SIG") else f"SIG{word}"
        if not word or full not in signal.Signals.__members__:
            raise UsageError(f"{name}: {entry.strip()!r} is no signal; name signals as in SIGTERM,USR1")
        if full in _NOT_CATCHABLE:
            raise UsageError(f"{name}: no program can handle {full}")
        if full in _OURS:
            raise UsageError(f"{name}: ftrun needs {full} itself")
        found[signal.Signals[full]] = None
    return tuple(found)


def signals_or_none(name: str, value: str) -> tuple[int, ...]:
    return signals(name, value) if value.strip() else ()


def exhausted(name: str, value: str) -> str:
    if value == "shrink":
        raise UsageError(f"{name} shrink is not yet supported: a smaller world ends on other weights; use fail or wait")
    return str(one_of("fail", "shrink", "wait")(name, value))


def logs_specs(name: str, value: str) -> str:
    if value != "default":
        raise UsageError(f"{name} {value!r} is not known: ftrun loads no log plugins, leave it out or say default")
    return value


def run_name(name: str, value: str) -> str:
    from ftrun.host.base.settings import check_run_id

    return check_run_id(value)


def prefix(name: str, value: str) -> str:
    """A template with fields in braces."""
    from ftrun.host.output.logformat import check_template

    return check_template(name, value)
