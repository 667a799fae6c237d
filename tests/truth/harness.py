"""Runs one script clean under ftrun, with a fault under ftrun, and under torchrun; compares what the ranks hold at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.e2e import harness

RANKS = 4
NOTHING: Mapping[str, str] = MappingProxyType({})
PRELUDE = "from tests.truth.prelude import *\n"
_ANSWER = re.compile(r"result bit-identical to an uninterrupted run: (yes|not known|no)(?: \((.*)\))?")
_LOST = "is known to hold the same values|nobody has its value|no other rank"


@dataclass(frozen=True)
class Seen:
    """How a run ended: its exit code, each rank's digests, and everything it printed."""

    code: int
    ranks: dict[int, Any]
    output: str

    @property
    def answer(self) -> str:
        """What ftrun says of the result: one of the words of docs/truth.md."""
        said = _ANSWER.search(self.output)
        if said:
            return said[1]
        if self.code == 2:
            return "refused"
        if self.code == 1:
            return "lost" if re.search(_LOST, self.output) else "error"
        return "no incident" if self.code == 0 else f"exit {self.code}"

    @property
    def reason(self) -> str:
        """What the closing line names, "" without one."""
        said = _ANSWER.search(self.output)
        return (said[2] or "") if said else ""

    def names(self, what: str) -> bool:
        """Does the closing line name what could not be kept or may differ, `what` among it?"""
        return re.search(rf"(?<!\w){re.escape(what)}(?!\w)", self.reason) is not None


def _environment(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    return {"TRUTH_OUT": str(folder / "out"), "PYTHONPATH": str(harness.ROOT), **more}


def _seen(outcome: harness.Outcome, ranks: int) -> Seen:
    files = {r: outcome.folder / "out" / f"{r}.json" for r in range(ranks)}
    return Seen(outcome.code, {r: json.loads(f.read_text()) for r, f in files.items() if f.exists()}, outcome.output)


def by_torch(folder: Path, script: Path, ranks: int = RANKS, env: Mapping[str, str] = NOTHING, torchrun: bool = False) -> Seen:
    """Stock torch may abort while it exits, when every rank has written what it holds: that is no failure of the script.

    `torchrun`: the command itself, for what a script sees of how it was started.
    """
    outcome = harness.by_torch(
        folder,
        [str(script)],
        0,
        _environment(folder, env),
        workers=ranks,
        torchrun=torchrun or harness.BY_TORCHRUN,
        enough=lambda ended: len(_seen(ended, ranks).ranks) == ranks,
    )
    seen = _seen(outcome, ranks)
    return Seen(0, seen.ranks, seen.output) if len(seen.ranks) == ranks else seen


def under_ftrun(
    folder: Path,
    script: Path,
    faults: Sequence[str] = (),
    options: Sequence[str] = (),
    ranks: int = RANKS,
    env: Mapping[str, str] = NOTHING,
) -> Seen:
    line = harness.script_command(
        folder, script, (), faults, ranks=ranks, options=["--max-replacements", "10", *options]
    )
    return _seen(harness.finish(harness.start(folder, line, _environment(folder, env)), ranks=0, timeout=120), ranks)


@dataclass(frozen=True)
class Three:
    """The three runs of one script."""

    clean: Seen
    killed: Seen
    stock: Seen

    @property
    def false_yes(self) -> bool:
        """Did ftrun call a result exact that is not what torchrun ends with?"""
        return self.killed.answer == "yes" and self.killed.ranks != self.stock.ranks

    @property
    def silent(self) -> bool:
        """Did a clean run end well with something else than torchrun ends with?"""
        return self.clean.code == 0 and self.clean.ranks != self.stock.ranks


def three(folder: Path, source: str, faults: Sequence[str]) -> Three:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "script.py"
    script.write_text(PRELUDE + source)
    return Three(
        under_ftrun(folder / "clean", script),
        under_ftrun(folder / "killed", script, faults),
        by_torch(folder / "stock", script),
    )
