"""Decide from facts only which memory a replaced rank's state comes from. This file never reads, writes or waits.

Theory of operation
-------------------
A rank died, and its world goes on at the gate number `resume`. Its state has two halves, each with a source of its own.

*Weights* (parameters and optimizer state) are the same on all replicas and lie in arenas with a commit mark, the `seal`: the gate number
at whose start the memory is whole. *The rank's own state* (random streams, Python state, buffers, place in the data) belongs to no
other rank. Of its slots, START or END of `resume` is complete; a GATE slot of the step before lacks what the update changed.

The plan takes the first source that holds:

1. ADOPT: the rank's own arena is sealed for `resume`. No byte moves.
2. MAKE: the rank has no replica and died at its gate: its gradients lie sealed beside its arena, and the others' slots tell which
   update it lacks.
3. COPY: the arena of a replica is sealed for `resume`.
4. SNAPSHOT: everyone goes back to the host snapshot. The launcher decides that after this rank has refused; the plan only decides
   whether the rank can take part.

The others may still be in the update that the dead rank missed. So there are three answers: a plan; a refusal with its reason and
remedies; and None: look again when a rank has moved. Only living ranks move: the memory of dead ones does not change.

Tried and rejected: filling a rank from one with parameters of the same shapes (a pipeline's stage got its neighbour's weights);
judging by the phase on the board that an update is done (only a commit mark proves it); keeping a history of all updates of all ranks
for optimizers that alternate from body to body (51 lines for scripts that nobody had sent).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftrun.worker.repair.rank_state import RankState

NONE = -1  # the tag of a slot that holds nothing, and the seal of memory that is being written
KEPT = 5.0  # seconds that survivors get to hand their memory to a new fd store
PEER = 60.0  # seconds that survivors get to finish the update they are in
IF_A_PART = None  # see `Refusal.requeue`
SNAPSHOTS = "take host snapshots (--snapshot-every)"
HYBRID = "shard over a mesh that has replicas, too (HSDP)"
PROVE = "prove by DistributedDataParallel, or say by protect(..., replicas=group), which ranks hold the same"


class LastWrites(Enum):
    """The state of the dead incarnation's last writes, as far as it is known."""

    ENDED = auto()  # it runs no more code
    CORRUPT = auto()  # it runs no more code, but its writes cannot be trusted
    MISSED = auto()  # it may still write: the fence missed its deadline


class Weights(Enum):
    """The source of parameters and optimizer state."""

    ADOPT = auto()
    MAKE = auto()
    COPY = auto()
    SNAPSHOT = auto()


class Own(Enum):
    """The source of the rank's own state."""

    START = auto()  # its START slot of the resume step
    END = auto()  # its END slot of the step before
    REPLICA_START = auto()  # its slots are lost: a replica's START slot
    REPLICA_END = auto()
    GATE_AND_REPLICA = auto()  # its GATE slot of the step before, and what a replica's update changed
    GATE_AND_UPDATE = auto()  # its GATE slot of the step before, and its own update, made again
    SNAPSHOT = auto()


@dataclass(frozen=True)
class Tags:
    """The gate numbers for which a rank's memory is whole; NONE for none."""

    seal: int = NONE
    start: int = NONE
    gate: int = NONE
    end: int = NONE


@dataclass(frozen=True)
class Peer:
    """Another rank. `living`: it may complete its update. `kept`: its memory is at hand. `refused`: why that was of no use.

    `pending`: its node was not reached, and is asked again.
    """

    rank: int
    tags: Tags = Tags()
    living: bool = True
    kept: bool = True
    refused: str = ""
    pending: bool = False


@dataclass(frozen=True)
class Evidence:
    """The facts that decide.

    Attributes:
        resume: The gate number at which the world goes on.
        rollback: All ranks go back to the host snapshot.
        own: This rank's memory, as its predecessor left it.
        last_writes: What is known of the predecessor's last writes.
        has_slots: The fd store has this rank's slots.
        lost: Its arena cannot be mapped, and a new one stands in its place.
        on_gpu: A part of it lies on a GPU, where a kernel may write behind the END slot.
        in_call: It died in a `job.call`, in which a script may have put other values (an average) in place of its weights.
        peers: The ranks that hold the same, the next one first.
        differ: A check saw ranks differ that should hold the same.
        sharded: Parameters are spread over ranks.
        lonely: None if others hold the same; else a parameter that no other rank is known to hold, or "" if no one rank holds all.
        waited: Seconds since the first look.
    """

    resume: int
    own: Tags
    peers: tuple[Peer, ...] = ()
    last_writes: LastWrites = LastWrites.ENDED
    rollback: bool = False
    has_slots: bool = True
    lost: bool = False
    on_gpu: bool = False
    in_call: bool = False
    differ: bool = False
    sharded: bool = False
    lonely: str | None = None
    waited: float = 0.0

    @property
    def alone(self) -> bool:
        """Is there no replica by the script's design?"""
        return self.lonely is not None


@dataclass(frozen=True)
class Sources:
    """The chosen sources. `replica`: the rank whose memory is copied."""

    weights: Weights
    own: Own
    replica: int | None = None
    other: int | None = None  # the rank whose END slot tells what the update changed


@dataclass(frozen=True)
class Refusal:
    """No source holds.

    `requeue`: script and machine are sound, and only this part of the state is lost: the run may start again. IF_A_PART: only
    if the rank holds a part of a model by its script's design (a pipeline's stage), which is dear to find out.
    `remedies`: what would have helped.
    """

    why: str
    requeue: bool | None = False
    remedies: tuple[str, ...] = ()


def plan(facts: Evidence) -> Sources | Refusal | None:
    """Plan the sources of a replaced rank's state. None: a living rank may still complete one; look again when a rank has moved."""
    if facts.rollback:
        return _from_snapshot(facts)
    weights = _own_weights(facts)
    source: Peer | None = None
    if weights is None:
        found = _first(facts, lambda tags: tags.seal == facts.resume)
        if not isinstance(found, Peer):
            return found
        weights, source = Weights.COPY, found
    return _own_state(facts, weights, source)


def _from_snapshot(facts: Evidence) -> Sources | Refusal:
    if not facts.has_slots:
        return Refusal("the fd store has no slots of this rank")
    if facts.last_writes is LastWrites.MISSED:
        return Refusal("its predecessor may still run, so its memory cannot be used")
    return Sources(Weights.SNAPSHOT, Own.SNAPSHOT)


def _own_weights(facts: Evidence) -> Weights | None:
    """Return how this rank's own memory serves; None if it does not."""
    own, resume = facts.own, facts.resume
    if facts.last_writes is not LastWrites.ENDED or facts.lost or (facts.in_call and not facts.alone):
        return None
    if own.seal == resume:
        return Weights.ADOPT
    if not facts.alone:
        return None
    if own.seal == NONE and own.end == resume and not facts.on_gpu:
        return Weights.ADOPT  # it died between its END slot, written after the last write, and the commit mark
    if resume > 0 and own.seal == own.gate == resume - 1:
        return Weights.MAKE
    return None


def _own_state(facts: Evidence, weights: Weights, source: Peer | None) -> Sources | Refusal | None:
    """Complete the plan with the source of the rank's own state."""
    own, resume = facts.own, facts.resume
    copied = source.rank if source is not None else None
    if own.start == resume:
        return Sources(weights, Own.START, copied)
    if own.end == resume:
        return Sources(weights, Own.END, copied)
    if own.end == own.gate == NONE and source is not None:
        if source.tags.start == resume:
            return Sources(weights, Own.REPLICA_START, copied)
        if source.tags.end == resume:
            return Sources(weights, Own.REPLICA_END, copied)
        return Refusal(f"rank {source.rank}'s slots hold nothing for step {resume}")
    if resume == 0 or own.gate != resume - 1:
        return Refusal(f"this rank's slots hold nothing for step {resume}")
    if facts.alone:
        return Sources(weights, Own.GATE_AND_UPDATE, copied)
    if source is not None and source.tags.end == resume:
        return Sources(weights, Own.GATE_AND_REPLICA, copied, copied)
    found = _first(facts, lambda tags: tags.end == resume)
    return Sources(weights, Own.GATE_AND_REPLICA, copied, found.rank) if isinstance(found, Peer) else found


def _first(facts: Evidence, holds: Callable[[Tags], bool]) -> Peer | Refusal | None:
    """Return the next rank that holds the same and whose tags meet `holds`."""
    if facts.alone:
        return _nobody(facts)
    order = [peer for peer in facts.peers if not peer.refused]
    for peer in order:
        if peer.kept and holds(peer.tags):
            return peer
    if facts.waited <= PEER and any(peer.pending or (not peer.kept and holds(peer.tags)) for peer in order):
        return None  # also memory on a GPU of another node, which can be read when the rank's replacement has adopted it
    if not order and facts.peers:
        return Refusal("; ".join(peer.refused for peer in facts.peers), IF_A_PART, (SNAPSHOTS,))
    if not any(peer.living for peer in order):
        why = f"no rank's memory is whole as of step {facts.resume}: all of them died in its making"
        return Refusal(why, IF_A_PART, (SNAPSHOTS,))
    if facts.waited > KEPT and not any(peer.kept for peer in order):
        return Refusal("no other rank's memory is kept, and this rank's was being written when it died")
    if facts.waited > PEER:
        return Refusal(f"no replica completed the update before step {facts.resume} within {PEER:.0f} s")
    return None


def _nobody(facts: Evidence) -> Refusal:
    """Refuse because no rank is known to hold the same."""
    if facts.differ:
        why = "ranks that should hold the same were seen to differ, so none gives its values to another one"
        return Refusal(why, IF_A_PART, (SNAPSHOTS,))
    if facts.sharded:
        how = "its node or its memory was lost" if facts.lost else "it died inside its update"
        why = f"{how}, and its shard of {facts.lonely} is no other rank's"
        return Refusal(why, True, (SNAPSHOTS, HYBRID))
    what = facts.lonely or "all its parameters at once"
    return Refusal(f"no other rank is known to hold the same values of {what}", IF_A_PART, (SNAPSHOTS, PROVE))


def completed(peers: Sequence[Peer], resume: int, waited: float) -> tuple[list[int], bool] | None:
    """Return the ranks whose END slots tell of the update before `resume`, and False if a living one is not done in PEER seconds.

    None: look again. A rank sealed for `resume` without an END slot was copied or made by its own replacement, and tells nothing.
    """
    done = [peer.rank for peer in peers if peer.kept and peer.tags.end == resume]
    pending = [peer for peer in peers if peer.living and not (peer.kept and resume in (peer.tags.end, peer.tags.seal))]
    if not pending or waited > PEER:
        return done, not pending
    return None


def missing_update(gate: RankState, ends: Sequence[RankState], optimizers: int) -> list[int] | Refusal:
    """Return which optimizers a rank without replica would have stepped, in order, or a refusal.

    The others' updates decide, if their regions had nothing else and this rank has always stepped the same.

    Args:
        gate: Its GATE slot.
        ends: END slots of ranks without replica that completed this update.
        optimizers: How many this rank has.
    """
    if len({repr((end.updates, end.kept)) for end in ends}) > 1 or not all(end.plain for end in ends):
        return Refusal(
            "it died at its gate, after which comes more than the updates of protected optimizers, or not the same on every rank, so that "
            "nobody can make its update",
            True,
            (SNAPSHOTS,),
        )
    updates = ends[0].updates
    usual = gate.usual == updates or (gate.usual == [] and sorted(updates) == list(range(optimizers)))
    if (gate.began is None and not updates) or (updates and gate.began == updates[0] and usual and min(updates) >= 0):
        return updates
    return Refusal(
        "it died at its gate, after which the other ranks' optimizers stepped otherwise than its own did before, so that nobody "
        "knows which updates it lacks",
        True,
        (SNAPSHOTS,),
    )


def with_remedies(refusal: Refusal, snapshot: int, why_no_snapshot: str) -> Refusal:
    """Add to a refusal, for people, the remedies that the run does not have, and why there is no host snapshot.

    Args:
        refusal: The refusal of the upper rungs.
        snapshot: Gate number of the newest host snapshot that everyone has, NONE for none.
        why_no_snapshot: Why there is none, although the run takes them; "" if it does not.
    """
    if snapshot != NONE:
        return refusal
    remedies = [remedy for remedy in refusal.remedies if not (why_no_snapshot and remedy == SNAPSHOTS)]
    text = "; ".join(filter(None, (refusal.why, why_no_snapshot, ", or ".join(remedies))))
    return Refusal(text, refusal.requeue)
