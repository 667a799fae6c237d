"""What a run keeps of its script's values, as the first rank of a node told it: a file of the run directory, a journal note, and words.

For people; decides nothing. What is not kept stands in files of every rank, see left_out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ftrun.core.amounts import count, size
from ftrun.core.shape import listed, record, text, whole
from ftrun.core.system import files

FILE = "kept-values"  # without folder and suffix, see Context.report
TOLD = {"rank": whole, "step": whole, "looked": whole, "values": listed(record({"names": listed(text), "bytes": whole}))}


class KeptValues(NamedTuple):
    """`values`: names that are kept in one copy, with its bytes. `looked`: bodies that were looked at as a whole by `step`."""

    rank: int
    step: int
    looked: int
    values: list[tuple[list[str], int]]

    @property
    def number(self) -> int:
        """Of names."""
        return sum(len(names) for names, _ in self.values)

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "values": [{"names": names, "bytes": copied} for names, copied in self.values]}


def of_json(raw: Mapping[str, Any]) -> KeptValues | None:
    """None for what nobody told, or what is damaged."""
    if not record(TOLD)(raw):
        return None
    values = [(value["names"], value["bytes"]) for value in raw["values"] if value["names"]]
    return KeptValues(raw["rank"], raw["step"], raw["looked"], values)


def read(run_dir: Path) -> KeptValues | None:
    """What was told last; None while nothing was, or when the file is damaged."""
    return of_json(files.read_json(run_dir / "errors" / f"{FILE}.json"))


def in_words(kept: KeptValues) -> str:
    """How many, and the largest; `kept` has some."""
    names, copied = max(kept.values, key=lambda value: value[1])
    which = "" if kept.number == 1 else f"the largest {'is' if len(names) == 1 else 'are'} "
    return f"{count(kept.number, 'value')} of the script's own, {which}{shown(names)} ({size(copied)})"


def shown(names: list[str]) -> str:
    """Those of one copy."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def listing(kept: KeptValues | None, not_kept: Mapping[str, str]) -> list[str]:
    """All of it, a name a line, the largest first. Nothing when nothing is known."""
    lines: list[str] = []
    if kept is not None:
        what = f"{count(kept.number, 'value')} of the script's own" if kept.values else "no value of the script's own"
        lines.append(f"kept with each step: {what}, as of step {kept.step} on rank {kept.rank}")
        lines += _columns([(shown(names), size(copied)) for names, copied in sorted(kept.values, key=lambda value: -value[1])])
    if not_kept:
        lines += ["changed by the loop, and not kept:", *_columns(list(not_kept.items()))]
    return lines


def _columns(rows: list[tuple[str, str]]) -> list[str]:
    wide = max((len(name) for name, _ in rows), default=0)
    return [f"  {name.ljust(wide)}  {what}".rstrip() for name, what in rows]
