"""Parses the values of --redirects and --tee, which choose streams of the workers. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntFlag

from ftrun.core.errors import UsageError

_ENTRY = re.compile(r"\s*(\d+)\s*:\s*([0-3])\s*")


class Std(IntFlag):
    """A set of streams, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True)
class Streams:
    """The streams for each local rank; `default` is for the local ranks that `by_rank` does not name."""

    default: Std = Std.NONE
    by_rank: dict[int, Std] = field(default_factory=dict)

    def of(self, local_rank: int) -> Std:
        return self.by_rank.get(local_rank, self.default)

    def __bool__(self) -> bool:
        return bool(self.default) or any(self.by_rank.values())


def parse(option: str, text: str) -> Streams:
    """Parse `3` (for all ranks) or `0:3,1:1` (by local rank; other ranks: none).

    Raises:
        UsageError: `text` has neither form; the message names `option`.
    """
    if text.strip() in ("0", "1", "2", "3"):
        return Streams(Std(int(text)))
    by_rank: dict[int, Std] = {}
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise UsageError(
                f"{option} must be 0 (none), 1 (stdout), 2 (stderr), 3 (both), or such a number for each local rank "
                f"as in 0:3,1:1; not {text!r}"
            )
        by_rank[int(match[1])] = Std(int(match[2]))
    return Streams(Std.NONE, by_rank)
