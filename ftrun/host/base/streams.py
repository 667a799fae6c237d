"""The streams of a worker that an option means: the values of --redirects and --tee. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntFlag

from ftrun.core.errors import UsageError

_ENTRY = re.compile(r"\s*(\d+)\s*:\s*([0-3])\s*")


class Std(IntFlag):
    """Sets of streams, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True)
class Streams:
    """`default` for every local rank that `by_rank` does not name."""

    default: Std = Std.NONE
    by_rank: dict[int, Std] = field(default_factory=dict)

    def of(self, local_rank: int) -> Std:
        return self.by_rank.get(local_rank, self.default)

    def __bool__(self) -> bool:
        return bool(self.default) or any(self.by_rank.values())


def parse(option: str, text: str) -> Streams:
    """`3`, or `0:3,1:1` per local rank (ranks not named: none).

    Raises:
        UsageError: Naming `option`.
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
