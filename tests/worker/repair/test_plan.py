"""The plan of a repair, over all combinations of what a rank's memory and that of two others can hold."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.worker.repair.plan import (
    IF_A_PART,
    KEPT,
    NONE,
    PEER,
    SNAPSHOTS,
    Evidence,
    LastWrites,
    Own,
    Peer,
    Refusal,
    Sources,
    Tags,
    Weights,
    completed,
    missing_update,
    plan,
    with_remedies,
)

RESUME = 3
TAGS = (NONE, RESUME - 1, RESUME)
PEERS = [
    Peer(1, Tags(seal, start, end=end), living, kept, refused)
    for seal, start, end in itertools.product(TAGS, TAGS, TAGS)
    for living, kept, refused in ((True, True, ""), (False, True, ""), (True, False, ""), (True, True, "rank 1: no"))
]


def every_evidence() -> Iterator[Evidence]:
    """Every combination but for what cannot matter to it."""
    owns = [Tags(*tags) for tags in itertools.product(TAGS, repeat=4)]
    for own, last, lost, in_call, on_gpu in itertools.product(owns, LastWrites, *[(False, True)] * 3):
        common = Evidence(RESUME, own, last_writes=last, lost=lost, in_call=in_call, on_gpu=on_gpu)
        for peer in PEERS:
            yield dataclasses.replace(common, peers=(peer,))
        yield common
        yield dataclasses.replace(common, lonely="weight")


def test_every_plan_rests_on_memory_that_holds_what_it_takes() -> None:
    seen: Counter[Any] = Counter()
    for facts in every_evidence():
        decided = plan(facts)
        own, peers = facts.own, {peer.rank: peer for peer in facts.peers}
        if decided is None:
            assert any(peer.living and not peer.refused for peer in facts.peers), facts
            assert isinstance(plan(dataclasses.replace(facts, waited=PEER + 1)), Refusal), facts
            seen[None] += 1
            continue
        if isinstance(decided, Refusal):
            seen[decided.why.partition(" of step")[0]] += 1
            continue
        seen[decided.weights, decided.own] += 1
        may_use = facts.last_writes is LastWrites.ENDED and not facts.lost and not (facts.in_call and not facts.alone)
        if decided.weights is Weights.ADOPT:
            assert may_use and (own.seal == RESUME or (facts.alone and own.seal == NONE and own.end == RESUME and not facts.on_gpu))
        elif decided.weights is Weights.MAKE:
            assert may_use and facts.alone and own.seal == own.gate == RESUME - 1
        else:
            assert decided.weights is Weights.COPY and decided.replica is not None
            source = peers[decided.replica]
            assert source.kept and not source.refused and source.tags.seal == RESUME
            assert not (may_use and own.seal == RESUME), "what need not move is not moved"
        assert (decided.replica is None) == (decided.weights is not Weights.COPY)
        holds = {Own.START: own.start == RESUME, Own.END: own.end == RESUME}
        if decided.replica is not None:
            theirs = peers[decided.replica].tags
            holds |= {Own.REPLICA_START: theirs.start == RESUME, Own.REPLICA_END: theirs.end == RESUME}
        if decided.other is not None:
            holds[Own.GATE_AND_REPLICA] = own.gate == RESUME - 1 and peers[decided.other].tags.end == RESUME
        holds[Own.GATE_AND_UPDATE] = own.gate == RESUME - 1 and facts.alone
        assert holds[decided.own], (facts, decided)
        if decided.own in (Own.REPLICA_START, Own.REPLICA_END):
            assert own.end == own.gate == NONE, "a rank's own streams come first"
    reached = {key for key in seen if isinstance(key, tuple)}
    copies = (Own.START, Own.END, Own.REPLICA_START, Own.REPLICA_END, Own.GATE_AND_REPLICA)
    assert reached == {
        *((Weights.COPY, own) for own in copies),
        *((Weights.ADOPT, own) for own in (Own.START, Own.END, Own.GATE_AND_REPLICA, Own.GATE_AND_UPDATE)),
        *((Weights.MAKE, own) for own in (Own.START, Own.END, Own.GATE_AND_UPDATE)),
    }
    assert len(seen) - len(reached) == 6, sorted(map(str, seen))  # five refusals, and to wait


TWO = (Peer(1, Tags(RESUME)), Peer(2, Tags(RESUME, end=RESUME)))


@pytest.mark.parametrize(
    ("peers", "own", "wanted"),
    [
        (TWO, Tags(gate=RESUME - 1), Sources(Weights.COPY, Own.GATE_AND_REPLICA, 1, 2)),
        (TWO[::-1], Tags(gate=RESUME - 1), Sources(Weights.COPY, Own.GATE_AND_REPLICA, 2, 2)),
        (TWO, Tags(RESUME, gate=RESUME - 1), Sources(Weights.ADOPT, Own.GATE_AND_REPLICA, None, 2)),
        ((dataclasses.replace(TWO[0], refused="rank 1: no"), TWO[1]), Tags(end=RESUME), Sources(Weights.COPY, Own.END, 2)),
        ((Peer(1, Tags(end=RESUME)), TWO[1]), Tags(gate=RESUME - 1), Sources(Weights.COPY, Own.GATE_AND_REPLICA, 2, 2)),  # one for both
        (TWO[:1], Tags(gate=RESUME - 1), None),  # the other replica's slots come with its update
    ],
)
def test_the_next_replica_that_has_it_gives_it(peers: tuple[Peer, ...], own: Tags, wanted: Sources | None) -> None:
    assert plan(Evidence(RESUME, own, peers)) == wanted


def test_the_first_step_needs_no_update_before_it() -> None:
    decided = plan(Evidence(0, Tags(seal=0, gate=NONE)))
    assert isinstance(decided, Refusal) and "hold nothing for step 0" in decided.why
    assert plan(Evidence(0, Tags(seal=0, start=0))) == Sources(Weights.ADOPT, Own.START)
    for start in (NONE, 0):
        alone = Evidence(0, Tags(seal=NONE, start=start, gate=NONE), lonely="weight")
        assert isinstance(plan(alone), Refusal), "an empty slot is no gate of step -1"
    assert plan(Evidence(1, Tags(seal=0, gate=0), lonely="weight")) == Sources(Weights.MAKE, Own.GATE_AND_UPDATE)


def test_behind_its_end_slot_nothing_is_written_but_the_commit_mark() -> None:
    alone = Evidence(RESUME, Tags(seal=NONE, end=RESUME, gate=RESUME - 1), lonely="weight")
    assert plan(alone) == Sources(Weights.ADOPT, Own.END)
    assert isinstance(plan(dataclasses.replace(alone, on_gpu=True)), Refusal), "but by a kernel"


def test_one_kept_replica_is_waited_for() -> None:
    facts = Evidence(RESUME, Tags(), (Peer(1), Peer(2, kept=False)), waited=KEPT + 1)
    assert plan(facts) is None


def test_a_node_that_is_not_reached_is_waited_for_and_another_one_is_not_kept_waiting() -> None:
    silent, there = Peer(1, kept=False, pending=True), Peer(2, Tags(RESUME, RESUME))
    facts = Evidence(RESUME, Tags(), (silent,), waited=KEPT + 1)
    assert plan(facts) is None
    found = plan(dataclasses.replace(facts, peers=(silent, there)))
    assert isinstance(found, Sources) and found.replica == there.rank


@pytest.mark.parametrize("living", [True, False])
def test_memory_that_a_replacement_is_about_to_adopt_is_waited_for(living: bool) -> None:
    """It is on a GPU of another node: whole, and nobody reads it yet."""
    facts = Evidence(RESUME, Tags(), (Peer(1, Tags(RESUME), living=living, kept=False),), waited=KEPT + 1)
    assert plan(facts) is None
    assert isinstance(plan(dataclasses.replace(facts, waited=PEER + 1)), Refusal)


@pytest.mark.parametrize(
    ("changes", "words", "requeue"),
    [
        ({"lonely": "a.weight"}, "no other rank is known to hold the same values of a.weight", IF_A_PART),
        ({"lonely": ""}, "the same values of all its parameters at once", IF_A_PART),
        ({"lonely": "a.weight", "sharded": True}, "its shard of a.weight is no other rank's", True),
        ({"lonely": "a.weight", "differ": True}, "were seen to differ", IF_A_PART),
        ({"peers": (Peer(1, refused="rank 1: x"), Peer(2, refused="rank 2: y"))}, "rank 1: x; rank 2: y", IF_A_PART),
        ({"peers": (Peer(1, living=False),)}, "all of them died in its making", IF_A_PART),
        ({"peers": (Peer(1, kept=False),), "waited": KEPT + 1}, "no other rank's memory is kept", False),
        ({"peers": (Peer(1),), "waited": PEER + 1}, "no replica completed the update before step 3 within 60 s", False),
        ({"rollback": True, "has_slots": False}, "the fd store has no slots of this rank", False),
        ({"rollback": True, "last_writes": LastWrites.MISSED}, "may still run", False),
    ],
)
def test_a_refusal_says_why(changes: dict[str, Any], words: str, requeue: bool | None) -> None:
    decided = plan(Evidence(RESUME, Tags(), **changes))
    assert isinstance(decided, Refusal) and words in decided.why and decided.requeue is requeue


def test_everyone_goes_back_together() -> None:
    for last in (LastWrites.ENDED, LastWrites.CORRUPT):
        decided = plan(Evidence(RESUME, Tags(RESUME, RESUME), last_writes=last, rollback=True))
        assert decided == Sources(Weights.SNAPSHOT, Own.SNAPSHOT)


def test_who_completed_the_update_is_known_when_nobody_living_is_in_it() -> None:
    done, made, dead = Peer(1, Tags(RESUME, end=RESUME)), Peer(2, Tags(RESUME)), Peer(3, Tags(RESUME - 1), living=False)
    assert completed((done, made, dead), RESUME, 0) == ([1], True)
    for busy in (Peer(4, Tags(RESUME - 1)), Peer(4, Tags(RESUME, end=RESUME), kept=False)):
        assert completed((done, busy), RESUME, 0) is None
        assert completed((done, busy), RESUME, PEER + 1) == ([1], False)


def end(*updates: int, kept: bool = False, plain: bool = True) -> Any:
    return SimpleNamespace(updates=list(updates), kept=kept, plain=plain)


@pytest.mark.parametrize(
    ("began", "usual", "ends", "optimizers", "made"),
    [
        (0, [0], [end(0), end(0)], 1, [0]),
        (0, [], [end(0, 1)], 2, [0, 1]),  # the first update: nothing was left out
        (0, [], [end(0)], 2, None),  # it may have meant its second one, too
        (0, [0], [end(0)], 2, [0]),  # it never did
        (0, [0, 1], [end(0)], 2, None),
        (0, None, [end(0)], 1, None),  # its updates were not always the same
        (1, [0], [end(0)], 1, None),
        (None, [0], [end()], 1, []),
        (None, [0], [end(0)], 1, None),
        (0, [0], [end()], 1, None),
        (-1, [-1], [end(-1)], 1, None),  # nobody knows which one
        (0, [0], [end(0), end(0, 1)], 1, None),
        (0, [0], [end(0), end(0, kept=True)], 1, None),
        (0, [0], [end(0, plain=False)], 1, None),
        (0, [0], [end(0), end(0, plain=False)], 1, None),
        (0, [0, -1], [end(0, -1)], 1, None),
    ],
)
def test_which_update_a_rank_without_replica_lacks(
    began: int | None, usual: list[int] | None, ends: list[Any], optimizers: int, made: list[int] | None
) -> None:
    decided = missing_update(SimpleNamespace(began=began, usual=usual), ends, optimizers)  # type: ignore[arg-type]
    assert decided == made if made is not None else isinstance(decided, Refusal) and decided.requeue


def test_what_would_have_helped_is_said_unless_the_run_has_it() -> None:
    refusal = Refusal("it is lost", True, (SNAPSHOTS, "pray"))
    assert with_remedies(refusal, 4, "") is refusal
    assert with_remedies(refusal, NONE, "").why == f"it is lost; {SNAPSHOTS}, or pray"
    assert with_remedies(refusal, NONE, "rank 2 has none").why == "it is lost; rank 2 has none; pray"
