"""A user's rows of the policy: `[policy]` of the configuration file, and the file of --xid-policy.

    [policy]                 # in the configuration file
    signal = "stop"          # fault = what is done about it, see ftrun.control.policy
    device-faults = 5        # faults of a device within the window before it is quarantined
    window = 3600            # seconds: for those, and for --max-replacements

    [policy.xid]             # the file of --xid-policy has these rows only, and goes first
    79 = "quarantine"
    "144-150" = "report"

Every mistake is a ConfigError that starts with FILE:LINE and names the nearest word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.cli.config import ConfigFile
from ftrun.cli.spelling import nearest
from ftrun.control import policy
from ftrun.control.responses import Response
from ftrun.core.errors import ConfigError
from ftrun.core.faults import Fault
from ftrun.core.toml import parse, read_text

_MOST = 65535  # no driver has Xids of more than three digits
_BUDGETS = ("device-faults", "window")


@dataclass(frozen=True)
class Chosen:
    """The changes that a user makes; None = the default. `window` in seconds."""

    overrides: policy.Overrides
    device_faults: int | None = None
    window: float | None = None


def read(config: ConfigFile, xid_file: str | None) -> Chosen:
    """The rows of the configuration file, then those of --xid-policy.

    Raises:
        ConfigError
    """
    found = _section(config)
    if xid_file is None:
        return found
    overrides = policy.Overrides(found.overrides.faults, (*found.overrides.xids, *_file(Path(xid_file))))
    return Chosen(overrides, found.device_faults, found.window)


def _section(config: ConfigFile) -> Chosen:
    raw = config.policy
    prefix = f"{config.table}." if config.table else ""
    place = _Place(config.path, config.text, f"{prefix}policy")
    if not isinstance(raw, dict):
        raise place.error("policy", f"policy must be a table, not {raw!r}")
    faults: list[tuple[str, str]] = []
    xids: tuple[tuple[int, str], ...] = ()
    budgets: dict[str, float] = {}
    names = [fault.value for fault in Fault if fault is not Fault.XID]
    for key, value in raw.items():
        name = key.replace("_", "-")
        if name == Fault.XID.value:
            xids = _xids(_Place(config.path, config.text, f"{prefix}policy.xid"), value)
        elif name in _BUDGETS:
            budgets[name] = _amount(place, key, value, whole=name == "device-faults")
        elif name in names:
            choices = policy.TABLE[Fault(name)].choices
            faults.append((name, _response(place, key, value, choices)))
        else:
            raise place.error(key, f"there is no fault {key!r}{_hint(name, (*names, 'xid', *_BUDGETS))}")
    count = budgets.get("device-faults")
    return Chosen(policy.Overrides(tuple(faults), xids), None if count is None else int(count), budgets.get("window"))


def _file(path: Path) -> tuple[tuple[int, str], ...]:
    text = read_text(path, "the Xid policy")
    raw = parse(path, text)
    if "xid" not in raw:
        return _xids(_Place(path, text, ""), raw)
    more = next((key for key in raw if key != "xid"), None)
    if more is not None:
        raise _Place(path, text, "").error(more, f"{more!r} stands beside [xid]; a file of --xid-policy has Xids only")
    return _xids(_Place(path, text, "xid"), raw["xid"])


def _xids(place: _Place, raw: Any) -> tuple[tuple[int, str], ...]:
    if not isinstance(raw, dict):
        raise place.error("xid", f"xid must be a table of Xids, not {raw!r}")
    return tuple(
        (number, _response(place, key, value, policy.DEVICE_CHOICES))
        for key, value in raw.items()
        for number in _numbers(place, key)
    )


def _numbers(place: _Place, key: str) -> range:
    match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", key)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not first <= last <= _MOST:
        raise place.error(key, f'{key!r} is no Xid; write a number, or a range as in "144-150"')
    return range(first, last + 1)


def _response(place: _Place, key: str, value: Any, choices: Sequence[Response]) -> str:
    words = [choice.value for choice in choices]
    if value in words:
        return str(value)
    if isinstance(value, str) and value in [response.value for response in Response]:
        raise place.error(key, f"{value} is no answer to {key}; there are {', '.join(words)}")
    hint = _hint(value, words) if isinstance(value, str) else f"; there are {', '.join(words)}"
    raise place.error(key, f"{key} = {value!r}: there is no such answer{hint}")


def _amount(place: _Place, key: str, value: Any, *, whole: bool) -> float:
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not (0 if whole else 1) <= value < float("inf"):
        wanted = "a whole number, 0 or more" if whole else "a number of seconds, 1 or more"
        raise place.error(key, f"{key} must be {wanted}, not {value!r}")
    return float(value)


def _hint(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = nearest(word, known)
    return f"; did you mean {close}?" if close else f"; there are {', '.join(known)}"


class _Place:
    """Finds the line of a key, which the TOML reader does not tell."""

    def __init__(self, path: Path | None, text: str, table: str) -> None:
        self._path = path
        self._lines = text.splitlines()
        self._table = table

    def error(self, key: str, what: str) -> ConfigError:
        return ConfigError(f"{self._path}:{self._line(key)}: {what}")

    def _line(self, key: str) -> int:
        wanted = re.compile(rf"\s*\[?(?:[\w.\"'-]+\.)?[\"']?{re.escape(key)}[\"']?\s*(?:=|\.|\])")
        header = re.compile(rf"\s*\[\s*{re.escape(self._table)}\s*\]")
        first = next((n for n, line in enumerate(self._lines) if self._table and header.match(line)), 0)
        found = (n for n, line in enumerate(self._lines[first:], first + 1) if wanted.match(line))
        return next(found, first + 1)


def as_rows(overrides: policy.Overrides) -> Mapping[str, str]:
    """The rows that the user put in place of the table's, for people."""
    return {**dict(overrides.faults), **{f"Xid {number}": response for number, response in overrides.xids}}
