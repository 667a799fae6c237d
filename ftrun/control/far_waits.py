"""Puts together what all nodes tell of their ranks while nothing moves, so that each judges its own ranks by the whole world.

Theory of operation. While no gate opens, each node tells the others where each of its ranks is, and for how many seconds it has shown no
sign of life. What was told may be old, and clocks of two machines are never compared. So a node also tells the time on its own clock, and
echoes the newest time that it had from each of the others. Who reads its own time back knows that what came with it is younger.

`Others.lag` is the greatest of these ages. Every rank was told to be still for some seconds, until at most `lag` seconds ago. So there was
a moment at which all of them had been still for the least of these times less `lag`; and who waits for ever then does so now. A node whose
record stands still, or that has not read ours, only makes `lag` grow as fast as time passes, so that nobody is judged.

No verdict without word from every other node, or while a rank of one is not in the loop: one that says nothing moves, or is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ftrun.control.waits import Rank, Silence

Facts = dict[str, Any]
_APART = ("cell", "members", "silence", "counted")  # are told in another form


@dataclass(frozen=True)
class Others:
    """The ranks of the other nodes of a world, as those tell of them, and the seconds by which that may be old.

    `apart`: some node's last gate is another than this one's. `first`: this is the first node of the world.
    """

    ranks: tuple[Rank, ...]
    lag: float
    apart: bool = False
    first: bool = False


def facts(now: float, generation: int, last: int, ranks: Sequence[Rank], heard: Mapping[str, Facts]) -> Facts:
    """Return what a node tells of its `ranks`, which have a `silence`.

    Args:
        now: Seconds on this node's clock.
        generation: That of its gate word; the numbers of two nodes may differ.
        last: The last gate that it opened.
        heard: What each other node, by its id, told.
    """
    return {
        "now": now,
        "heard": {node: told["now"] for node, told in heard.items() if told},
        "last": last,
        "groups": {str(r.group): r.members for r in ranks if r.members},
        "ranks": [_told(r, generation) for r in ranks],
    }


def others(me: str, now: float, generation: int, last: int, told: Mapping[str, Facts]) -> Others | None:
    """Read what the other nodes told, None unless all did and all their ranks are in the loop.

    `told`: of every node of the world, by its id and in their order. The other arguments are of this node, as those of `facts`.
    """
    far = {node: shown for node, shown in told.items() if node != me}
    if not all(shown and me in shown["heard"] for shown in far.values()):
        return None
    ranks = tuple(rank for shown in far.values() for rank in _read(shown, generation))
    if not all(rank.looping for rank in ranks):
        return None
    lag = max(now - shown["heard"][me] for shown in far.values())
    return Others(ranks, lag, any(shown["last"] != last for shown in far.values()), next(iter(told)) == me)


def _told(rank: Rank, generation: int) -> Facts:
    assert rank.silence is not None
    where = {name: value for name, value in asdict(rank).items() if name not in _APART}
    return {**where, "since": generation - rank.counted, "silence": [round(seconds, 3) for seconds in rank.silence]}


def _read(shown: Facts, generation: int) -> Iterable[Rank]:
    for one in shown["ranks"]:
        where = {name: value for name, value in one.items() if name not in ("since", "silence", "counts")}
        members, counts = tuple(shown["groups"].get(str(one["group"]), ())), tuple((group, number) for group, number in one["counts"])
        own = {"members": members if one["waiting"] else (), "counts": counts, "counted": generation - one["since"]}
        yield Rank(cell=-1, silence=Silence(*one["silence"]), **where, **own)
