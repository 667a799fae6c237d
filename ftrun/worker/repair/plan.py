"""Which memory a replaced rank's state comes from: decided from facts alone. Nothing is read, written or waited for here.

Theory of operation
-------------------
A rank died, and its world goes on at the gate number `resume`. Its state has two halves, each with a source of its own.

*Weights* (parameters and optimizer state) are the same on all replicas and lie in arenas with a commit mark, the `seal`: the gate number
as of whose start the memory is whole. *The rank's own* (random streams, Python state, buffers, place in the data) is nobody else's, and
lies in its three slots: START and END of `resume` are what is wanted; a GATE slot of the step before lacks what the update changed.

The first source that holds is taken:

1. ADOPT: the rank's own arena is sealed for `resume`. No byte moves.
2. MAKE: it has no replica and died at its gate: its gradients lie sealed beside it, and the others tell which update it lacks.
3. COPY: the arena of a replica that is sealed for it.
4. SNAPSHOT: everyone goes back to the host snapshot. The launcher decides that, after this rank has refused; here it only says whether the
   rank can take part.

The others may still be in the update that the dead rank missed. So there are three answers: a plan, a refusal with its reason and with what
would have helped, and None: look again when somebody has moved. Only the living move: what the dead have left is as it is.

What was tried and rejected: to fill a rank from one whose parameters have the same shapes (a pipeline's stage got its neighbour's weights);
to take an update for done by the phase on the board (only a commit mark says so); to keep a history of all updates of all ranks, so that
optimizers which alternate from body to body could be told of as well (51 lines for scripts that nobody had sent).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftrun.worker.repair.rank_state import RankState

NONE = -1  # the tag of a slot that holds nothing, and the seal of memory that is being written
KEPT = 5.0  # seconds that a new fd store gets to be handed the survivors' memory
PEER = 60.0  # seconds that survivors get to finish the update they are in
SNAPSHOTS = "take host snapshots (--snapshot-every)"
HYBRID = "shard over a mesh that has replicas, too (HSDP)"
PROVE = "prove by DistributedDataParallel, or say by protect(..., replicas=group), which ranks hold the same"


class LastWrites(Enum):
    """What is known of those of the dead incarnation."""

    ENDED = auto()  # it runs no more code
    CORRUPT = auto()  # nor does this one, but what it wrote is not to be trusted
    MISSED = auto()  # it may still write: the fence missed its deadline


class Weights(Enum):
    """Where parameters and optimizer state come from."""

    ADOPT = auto()
    MAKE = auto()
    COPY = auto()
    SNAPSHOT = auto()


class Own(Enum):
    """Where the rank's own state comes from."""

    START = auto()  # its slot of the resume step
    END = auto()  # its slot behind the step before
    REPLICA_START = auto()  # its slots are lost: a replica's
    REPLICA_END = auto()
    GATE_AND_REPLICA = auto()  # its gate before, and what a replica's update changed
    GATE_AND_UPDATE = auto()  # its gate before, and the update that it has no replica of
    SNAPSHOT = auto()


@dataclass(frozen=True)
class Tags:
    """What one rank's memory holds, as gate numbers; NONE for nothing whole."""

    seal: int = NONE
    start: int = NONE
    gate: int = NONE
    end: int = NONE


@dataclass(frozen=True)
class Peer:
    """Another rank. `living`: it may complete what it is in. `kept`: its memory is at hand. `refused`: why that was of no use."""

    rank: int
    tags: Tags = Tags()
    living: bool = True
    kept: bool = True
    refused: str = ""


@dataclass(frozen=True)
class Evidence:
    """Everything that the decision rests on.

    Attributes:
        resume: The gate number at which the world goes on.
        rollback: Everyone goes back to the host snapshot.
        own: This rank's memory, as its predecessor left it.
        last_writes: What is known of the predecessor's.
        has_slots: The fd store has this rank's slots.
        lost: Its arena cannot be mapped, and a new one stands in its place.
        on_gpu: A part of it lies on a GPU, where a kernel may write behind the END slot.
        in_call: It died in a `job.call`, in which a script may have others in place of its weights (an average).
        peers: The ranks that hold the same, the next one first.
        differ: Ranks that should hold the same were seen to differ.
        sharded: Parameters are spread over ranks.
        lonely: None: others hold the same. Else a parameter that nobody else is known to hold, "" where no one rank holds all of them.
        has_a_part: Does the rank hold a part of a model by its script's design (a pipeline's stage)? Dear: only a refusal asks.
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
    has_a_part: Callable[[], bool] = lambda: False
    waited: float = 0.0

    @property
    def alone(self) -> bool:
        """Is there no replica by the script's design?"""
        return self.lonely is not None


@dataclass(frozen=True)
class Sources:
    """What to do. `replica`: the rank that is copied, or whose update tells what this rank's lacks."""

    weights: Weights
    own: Own
    replica: int | None = None
    other: int | None = None  # where the weights' source does not tell of the update: the rank that does


@dataclass(frozen=True)
class Refusal:
    """No source holds.

    `requeue`: the script and the machine are as they should be, only this part of the state is lost: the run may be started again.
    `remedies`: what would have helped.
    """

    why: str
    requeue: bool = False
    remedies: tuple[str, ...] = ()


def plan(facts: Evidence) -> Sources | Refusal | None:
    """The sources of a replaced rank's state. None: a living rank may still complete one, so look again when somebody has moved."""
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
    """How this rank's own memory serves; None: not at all."""
    own, resume = facts.own, facts.resume
    if facts.last_writes is not LastWrites.ENDED or facts.lost or (facts.in_call and not facts.alone):
        return None
    if own.seal == resume:
        return Weights.ADOPT
    if not facts.alone:
        return None
    if own.seal == NONE and own.end == resume and not facts.on_gpu:
        return Weights.ADOPT  # it died between its END slot, which comes behind the last write, and the commit mark
    if resume > 0 and own.seal == own.gate == resume - 1:
        return Weights.MAKE
    return None


def _own_state(facts: Evidence, weights: Weights, source: Peer | None) -> Sources | Refusal | None:
    """Complete the plan by the slot that the rank's own state comes from."""
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
    """The next rank of those that hold the same whose memory is as wanted."""
    if facts.alone:
        return _nobody(facts)
    order = [peer for peer in facts.peers if not peer.refused]
    for peer in order:
        if peer.kept and holds(peer.tags):
            return peer
    if not order and facts.peers:
        return Refusal("; ".join(peer.refused for peer in facts.peers), facts.has_a_part(), (SNAPSHOTS,))
    if not any(peer.living for peer in order):
        why = f"no rank's memory is whole as of step {facts.resume}: all of them died in its making"
        return Refusal(why, facts.has_a_part(), (SNAPSHOTS,))
    if facts.waited > KEPT and not any(peer.kept for peer in order):
        return Refusal("no other rank's memory is kept, and this rank's was being written when it died")
    if facts.waited > PEER:
        return Refusal(f"no replica completed the update before step {facts.resume} within {PEER:.0f} s")
    return None


def _nobody(facts: Evidence) -> Refusal:
    """No rank is known to hold the same."""
    if facts.differ:
        why = "ranks that should hold the same were seen to differ, so none gives its values to another one"
        return Refusal(why, facts.has_a_part(), (SNAPSHOTS,))
    if facts.sharded:
        why = f"it died inside its update, and its shard of {facts.lonely} is no other rank's"
        return Refusal(why, True, (SNAPSHOTS, HYBRID))
    what = facts.lonely or "all its parameters at once"
    return Refusal(f"no other rank is known to hold the same values of {what}", facts.has_a_part(), (SNAPSHOTS, PROVE))


def completed(peers: Sequence[Peer], resume: int, waited: float) -> tuple[list[int], bool] | None:
    """The ranks that completed the update before `resume` and can tell of it, and False where a living one did not within PEER seconds.

    One that is sealed for `resume` without an END slot was copied or made by a replacement of its own, and tells nothing. None: look again.
    """
    done = [peer.rank for peer in peers if peer.kept and peer.tags.end == resume]
    pending = [peer for peer in peers if peer.living and not (peer.kept and resume in (peer.tags.end, peer.tags.seal))]
    if not pending or waited > PEER:
        return done, not pending
    return None


def missing_update(gate: RankState, ends: Sequence[RankState], optimizers: int) -> list[int] | Refusal:
    """Which of its optimizers a rank without replica would have stepped, and in which order.

    The others tell, where what they did is all there is to tell, and where this rank never did anything else.

    Args:
        gate: The slot of its gate.
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
    """What a person is told: with what would have helped, but for what the run has; then with why that does not help.

    Args:
        refusal: Of the upper rungs.
        snapshot: Gate number of the newest host snapshot that everyone has, NONE for none.
        why_no_snapshot: Why there is none, although they are taken; "" where they are not.
    """
    if snapshot != NONE:
        return refusal
    remedies = [remedy for remedy in refusal.remedies if not (why_no_snapshot and remedy == SNAPSHOTS)]
    text = "; ".join(filter(None, (refusal.why, why_no_snapshot, ", or ".join(remedies))))
    return Refusal(text, refusal.requeue)
