"""Reads the fault plan: a TOML file that lists faults with rank, place and number of times.

    seed = 1

    [[fault]]
    kind = "kill"        # see ftrun/faults/kinds.py
    rank = 2
    epoch = 3            # of job.epochs; left out: any, or a script without
    step = 5             # counted in its loop, as step.index; left out: the first step in which `at` is reached
    at = "backward"      # see kinds.PHASES; default "forward"
    times = 1            # default 1
    for = 2.5            # seconds, for kinds that can end by themselves; left out: for ever

This file only reads: it fires nothing, writes nothing and never imports torch. Every mistake is a ConfigError that starts with FILE:LINE.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.core import toml
from ftrun.core.amounts import place
from ftrun.core.errors import ConfigError
from ftrun.faults import kinds

_TOP_KEYS = ("seed", "fault")
_FAULT_KEYS = ("kind", "rank", "epoch", "step", "at", "times", "for")
_HEADER = re.compile(r"\s*\[\[\s*[\"']?fault[\"']?\s*\]\]")
_KEY = re.compile(r"\s*[\"']?([A-Za-z0-9_-]+)[\"']?\s*(?:\.|=)")
_EXAMPLES = {"kind": 'kind = "kill"', "rank": "rank = 0"}
_TABLE = re.compile(r"\s*\[+\s*[\"']?([A-Za-z0-9_-]+)")


@dataclass(frozen=True)
class InjectedFault:
    """One fault to fire. `index` identifies it within its `source`: entry of the plan from 0, number of the request, or the random step.

    `argument` is None for kinds that take none; `step` None = any step; `epoch` None = any, or a script without epochs.
    """

    index: int
    kind: str
    argument: float | None
    rank: int
    step: int | None
    at: str
    times: int
    line: int
    seconds: float | None = None  # how long it lasts; None = for ever
    epoch: int | None = None
    source: str = "plan"  # its origin: "plan", "request" on the live run, or "random-SEED" (ftrun.faults.dice)

    def __str__(self) -> str:
        kind = kinds.spelled(self.kind, self.argument)
        return f"{kind} on rank {self.rank} in {self.at} of {where(self.epoch, self.step) or 'any step'}"

    def is_due(self, epoch: int | None, step: int) -> bool:
        """Is the fault due in that step of that epoch?"""
        return self.step in (None, step) and self.epoch in (None, epoch)


def where(epoch: int | None, step: int | None) -> str:
    """Name the steps of a fault in words; "" for any step."""
    if step is not None:
        return place(step, epoch, 0)
    return "" if epoch is None else f"epoch {epoch}"


@dataclass(frozen=True)
class Plan:
    """A valid plan. `path` is for messages."""

    path: Path
    seed: int
    faults: tuple[InjectedFault, ...]

    def check_ranks(self, world_size: int) -> None:
        """Check that every fault's rank exists.

        Raises:
            ConfigError: A fault names a rank that the run does not have.
        """
        for fault in self.faults:
            if fault.rank >= world_size:
                raise ConfigError(
                    f"{self.path}:{fault.line}: rank {fault.rank}, but the run has ranks 0 to {world_size - 1}"
                )


class _Lines:
    """The line of each key in the file, which the TOML parser does not report."""

    def __init__(self, text: str) -> None:
        self.headers: list[int] = []
        self.keys: dict[tuple[int, str], int] = {}  # (entry, or -1 for the top of the file; key) -> line
        entry = -1
        for number, line in enumerate(text.splitlines(), 1):
            if _HEADER.match(line):
                self.headers.append(number)
                entry = len(self.headers) - 1
            elif found := _TABLE.match(line):
                self.keys.setdefault((-1, found[1]), number)
            elif found := _KEY.match(line):
                self.keys.setdefault((entry, found[1]), number)

    def of(self, entry: int, key: str) -> int:
        header = self.headers[entry] if 0 <= entry < len(self.headers) else 1
        return self.keys.get((entry, key), header)


def load_plan(path: Path | str) -> Plan:
    """Read a plan.

    Raises:
        ConfigError: The file cannot be read, or is not a valid plan.
    """
    return parse_plan(read_text(path), path)


def read_text(path: Path | str) -> str:
    """Read the text of a plan.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    return toml.read_text(path, "the fault plan")


def parse_plan(text: str, path: Path | str) -> Plan:
    """Parse the text of a plan; errors name `path`.

    Raises:
        ConfigError: The text is not a valid plan.
    """
    return _Reader(Path(path), _Lines(text)).plan(toml.parse(path, text))


class _Reader:
    """A checker that turns the parsed file into a Plan, key by key."""

    def __init__(self, path: Path, lines: _Lines) -> None:
        self._path = path
        self._lines = lines

    def plan(self, raw: dict[str, Any]) -> Plan:
        self._known(-1, raw, _TOP_KEYS, "at the top of a plan")
        seed = self._integer(-1, raw, "seed", 1, 0)
        entries = raw.get("fault", [])
        if not isinstance(entries, list) or any(not isinstance(e, dict) for e in entries):
            raise self._error(-1, "fault", "write each fault as a table of its own, with two brackets: [[fault]]")
        return Plan(self._path, seed, tuple(self._fault(i, e) for i, e in enumerate(entries)))

    def _fault(self, index: int, raw: dict[str, Any]) -> InjectedFault:
        self._known(index, raw, _FAULT_KEYS, "in [[fault]]")
        for key in ("kind", "rank"):
            if key not in raw:
                raise self._error(index, "", f"[[fault]] needs {key}, as in {_EXAMPLES[key]}")
        kind, argument = self._kind(index, raw["kind"])
        at = raw.get("at", kind.anywhere[0])
        if not isinstance(at, str):
            raise self._error(index, "at", f"at must be a string, not {at!r}")
        try:
            kinds.check_phase(kind, at)
        except ValueError as error:
            raise self._error(index, "at", str(error)) from None
        seconds = self._seconds(index, kind, raw["for"]) if "for" in raw else None
        return InjectedFault(
            index=index,
            kind=kind.name,
            argument=argument,
            rank=self._integer(index, raw, "rank", 0, 0),
            step=self._integer(index, raw, "step", 0, 0) if "step" in raw else None,
            epoch=self._integer(index, raw, "epoch", 0, 0) if "epoch" in raw else None,
            at=at,
            times=self._integer(index, raw, "times", 1, 1),
            line=self._lines.of(index, ""),
            seconds=seconds,
        )

    def _kind(self, index: int, value: Any) -> tuple[kinds.FaultKind, float | None]:
        if not isinstance(value, str):
            raise self._error(index, "kind", f"kind must be a string, not {value!r}")
        try:
            return kinds.parse(value)
        except ValueError as error:
            raise self._error(index, "kind", str(error)) from None

    def _seconds(self, index: int, kind: kinds.FaultKind, value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._error(index, "for", f"for must be a number of seconds, not {value!r}")
        try:
            kinds.check_duration(kind, float(value))
        except ValueError as error:
            raise self._error(index, "for", str(error)) from None
        return float(value)

    def _known(self, entry: int, raw: dict[str, Any], known: tuple[str, ...], where: str) -> None:
        for key in raw:
            if key not in known:
                raise self._error(entry, key, f"unknown key {key!r} {where} (known: {', '.join(known)})")

    def _integer(self, entry: int, raw: dict[str, Any], key: str, default: int, least: int) -> int:
        value = raw.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._error(entry, key, f"{key} must be an integer of at least {least}, not {value!r}")
        return value

    def _error(self, entry: int, key: str, what: str) -> ConfigError:
        return ConfigError(f"{self._path}:{self._lines.of(entry, key)}: {what}")
