"""Finds whose failure ended a run: the root cause, failures like it, independent ones, and those that only lost a peer.

No clock, no I/O, no torch here: it sorts what the launcher gathered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ftrun.core import grace, symptoms

START_UP = 10.0  # seconds within which a worker that neither has a group nor trains counts as starting up
BEFORE_SCRIPT = "before its script"
AT_START = "at start-up"
LATER = ""


@dataclass(frozen=True)
class Failure:
    """One rank's failure. `at`: unix time, of the exception where there was one, else of the death.

    `kind`, `message`, `where` ("train.py:31") name an exception, empty without one; `cause` says how the process ended.
    """

    cell: int
    rank: int
    at: float
    cause: str
    kind: str = ""
    message: str = ""
    where: str = ""


@dataclass(frozen=True)
class Verdict:
    """`same`: failed as the root did; `others`: in their own way; `bereft`: only lost a peer. All in time order.

    `root` is None when it is on another node.
    """

    root: Failure | None
    same: tuple[Failure, ...] = ()
    others: tuple[Failure, ...] = ()
    bereft: tuple[Failure, ...] = ()

    @property
    def own(self) -> tuple[Failure, ...]:
        """Return the failures that are more than the loss of a peer."""
        return (*(() if self.root is None else (self.root,)), *self.same, *self.others)


def judge(failures: Iterable[Failure], decisive: int | None = None) -> Verdict | None:
    """Sort `failures`; return None when there are none. `decisive`: the cell whose failure could not be repaired, when known.

    The first failure by time is the root, unless its rank only lost a peer whose own failure is known.
    """
    ordered = sorted(failures, key=lambda f: (f.at, f.rank))
    if not ordered:
        return None
    own = [f for f in ordered if not lost_a_peer(f)]
    bereft = [f for f in ordered if f not in own and any(o.at <= f.at + grace.REPORTED for o in own)]
    left = [f for f in ordered if f not in bereft]
    root = next((f for f in left if f.cell == decisive), left[0])
    if not own:
        # all of them lost somebody: the first one to notice is the nearest to the cause
        return Verdict(root, bereft=tuple(f for f in ordered if f is not root))
    rest = [f for f in left if f is not root]
    return Verdict(
        root, tuple(f for f in rest if alike(f, root)), tuple(f for f in rest if not alike(f, root)), tuple(bereft)
    )


def caused_elsewhere(failures: Iterable[Failure]) -> Verdict:
    """Sort `failures` of a node when another node's was the root cause."""
    ordered = sorted(failures, key=lambda f: (f.at, f.rank))
    bereft = tuple(f for f in ordered if lost_a_peer(f))
    return Verdict(None, others=tuple(f for f in ordered if f not in bereft), bereft=bereft)


def lost_a_peer(failure: Failure) -> bool:
    """Does the exception say no more than that another process is gone?"""
    return symptoms.named([failure.kind], failure.message).peer


def alike(one: Failure, other: Failure) -> bool:
    """Did two ranks fail in the same way: with one exception at one place, or with one end and no exception?"""
    if one.kind or other.kind:
        return (one.kind, one.where) == (other.kind, other.where)
    return one.cause == other.cause


def how_far(in_script: bool, under_way: bool, age: float) -> str:
    """Return how far a worker came that lived for `age` seconds: BEFORE_SCRIPT, AT_START or LATER.

    `under_way`: it has a group of ours, or trains.
    """
    if not in_script:
        return BEFORE_SCRIPT
    return AT_START if not under_way and age < START_UP else LATER
