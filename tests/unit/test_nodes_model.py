"""A model of the gate over several nodes, before there is code: every interleaving in small worlds, and what must not be left out.

Within a node the gate is that of test_gate_exhaustive.py, taken as right here: one word, which opens and closes in one move. New are the
moves between nodes. Gradients and the proof arrive at each rank and node by themselves, or never, once all have sent; a closed node answers
the leader; slots reach a buddy node; ranks, nodes and leaders die at any point, and a leader may lose its lease and not know it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest

OPEN = -1  # the arena is being written
# where a rank is; DEAD: nobody knows yet; VACANT: it waits for a worker on its node; LOST: for one on another node
BODY, SENT, READY, UPDATE, STOPPED, END, DEAD, VACANT, LOST = range(9)
# where a leader is
QUIET, CLOSE, DECIDE, PUBLISH, GATHER, REOPEN = range(6)

NOWHERE = "a rank's own state of the step to go on with is nowhere"


class Rank(NamedTuple):
    """`sent`: (generation, gate) of the gradients that it gave away last. `slot`, `buddy`: newest gate of its slots here, and there."""

    node: int
    shard: int
    pc: int = BODY
    generation: int = 1
    step: int = 0
    seal: int = 0
    sent: tuple[int, int] = (0, -1)
    slot: int = -1
    buddy: int = -1


class Node(NamedTuple):
    """`posted`: (generation, gate) of its part of the proof. `dead`: 0 = alive, 1 = nobody knows yet, 2 = a spare node is to come."""

    generation: int = 1
    closed: bool = False
    last: int = -1
    posted: tuple[int, int] = (0, -1)
    decided: int = 1  # newest generation whose decision it has
    dead: int = 0


class Leader(NamedTuple):
    """`answers`: of each node its `last` as it was told, None = not yet. `leads`: it has the lease; else it only believes so."""

    node: int
    pc: int = QUIET
    generation: int = 1
    answers: tuple[int | None, ...] = ()
    resume: int = 0
    leads: bool = True


class Model(NamedTuple):
    nodes: tuple[Node, ...]
    ranks: tuple[Rank, ...]
    leaders: tuple[Leader, ...]
    newest: int = 1  # generation that somebody began: a record, created once
    resumes: tuple[tuple[int, int], ...] = ()  # decisions: records, created once
    died: frozenset[int] = frozenset()  # nodes that died
    rank_deaths: int = 0  # that may still happen
    node_deaths: int = 0
    lease_losses: int = 0


@dataclass(frozen=True)
class Rules:
    """The protocol, or one that leaves something out. `receipt`: what waits for the buddy's: "proof", "pass" or nothing."""

    gates: int
    proof: bool = True
    acknowledged: bool = True
    receipt: str = "proof"


class Wrong(Exception):
    """An invariant does not hold."""


def start(shards: tuple[tuple[int, ...], ...], rank_deaths: int = 0, node_deaths: int = 0, lease_losses: int = 0) -> Model:
    """`shards`: for each node what its ranks hold."""
    ranks = tuple(Rank(node, shard) for node, held in enumerate(shards) for shard in held)
    nodes = (Node(),) * len(shards)
    return Model(nodes, ranks, (Leader(0),), rank_deaths=rank_deaths, node_deaths=node_deaths, lease_losses=lease_losses)


def _rank(model: Model, at: int, **changes: object) -> Model:
    return model._replace(ranks=(*model.ranks[:at], model.ranks[at]._replace(**changes), *model.ranks[at + 1 :]))  # type: ignore[arg-type]


def _node(model: Model, at: int, **changes: object) -> Model:
    return model._replace(nodes=(*model.nodes[:at], model.nodes[at]._replace(**changes), *model.nodes[at + 1 :]))  # type: ignore[arg-type]


def _leader(model: Model, at: int, **changes: object) -> Model:
    changed = model.leaders[at]._replace(**changes)  # type: ignore[arg-type]
    return model._replace(leaders=(*model.leaders[:at], changed, *model.leaders[at + 1 :]))


def moves(rules: Rules, model: Model) -> Iterator[Model]:
    """Every model that one move of one process, one arrival of a message or one death leads to."""
    yield from _deaths(model)
    for at, rank in enumerate(model.ranks):
        yield from _rank_moves(rules, model, at, rank)
    for at, node in enumerate(model.nodes):
        if not node.dead:
            yield from _node_moves(rules, model, at, node)
    for at, leader in enumerate(model.leaders):
        if not model.nodes[leader.node].dead:
            yield from _leader_moves(rules, model, at, leader)


# ---- deaths, and who hears of them -----------------------------------------------------------------------------------


def _deaths(model: Model) -> Iterator[Model]:
    if model.rank_deaths:
        for at, rank in enumerate(model.ranks):
            if rank.pc not in (DEAD, VACANT, LOST, END):
                yield _rank(model, at, pc=DEAD)._replace(rank_deaths=model.rank_deaths - 1)
    if model.node_deaths:
        for at, node in enumerate(model.nodes):
            if not node.dead and not all(r.pc == END for r in model.ranks):
                gone = _node(model, at, dead=1)._replace(node_deaths=model.node_deaths - 1, died=model.died | {at})
                for number, rank in enumerate(gone.ranks):
                    if rank.node == at:
                        gone = _rank(gone, number, pc=DEAD, seal=OPEN, slot=-2)
                    elif _buddy(gone, rank.node) == at:
                        gone = _rank(gone, number, buddy=-2)
                yield gone
    leads = [leader for leader in model.leaders if leader.leads and not model.nodes[leader.node].dead]
    if not leads or model.lease_losses:
        for at, node in enumerate(model.nodes):
            if not node.dead and all(leader.node != at for leader in leads):
                # it begins where the records are: whatever was begun before is closed once more
                old = tuple(one._replace(leads=False) for one in model.leaders if one.node != at and not model.nodes[one.node].dead)
                new = Leader(at, CLOSE, model.newest + 1, (None,) * len(model.nodes))
                left = model.lease_losses - bool(leads)
                yield _noticed(model)._replace(leaders=(*old, new), newest=model.newest + 1, lease_losses=left)


def _buddy(model: Model, node: int) -> int:
    return (node + 1) % len(model.nodes)


def _noticed(model: Model) -> Model:
    """Every death so far is known."""
    for at, rank in enumerate(model.ranks):
        if rank.pc == DEAD:
            model = _rank(model, at, pc=LOST if model.nodes[rank.node].dead else VACANT)
    for at, node in enumerate(model.nodes):
        if node.dead == 1:
            model = _node(model, at, dead=2)
    return model


# ---- a rank ----------------------------------------------------------------------------------------------------------


def _rank_moves(rules: Rules, model: Model, at: int, rank: Rank) -> Iterator[Model]:
    node = model.nodes[rank.node]
    mine = (rank.generation, rank.step)
    stopped = node.generation > rank.generation
    if rank.pc in (BODY, SENT) and stopped:
        yield _rank(model, at, pc=STOPPED)
    if rank.pc == BODY and not stopped:
        yield _rank(model, at, pc=SENT, sent=mine)
    elif rank.pc == SENT and all(other.sent == mine for other in model.ranks):
        yield _rank(model, at, pc=READY, slot=rank.step)
    elif rank.pc == READY:
        if rank.buddy < rank.step and not model.nodes[_buddy(model, rank.node)].dead:
            yield _rank(model, at, buddy=rank.step)  # the buddy's receipt has come
        if node.last >= rank.step and (rules.receipt != "pass" or rank.buddy >= rank.step or stopped):
            yield _rank(model, at, pc=UPDATE, seal=OPEN)
        elif node.last < rank.step and node.decided == node.generation > rank.generation:
            yield _rank(model, at, pc=STOPPED)
    elif rank.pc == UPDATE:
        done = rank.step + 1
        yield _rank(model, at, pc=END if done == rules.gates else BODY, step=done, seal=done)
    elif rank.pc in (STOPPED, END, VACANT, LOST) and node.decided == node.generation > rank.generation and not node.dead:
        yield from _join(rules, model, at, rank, node.last + 1)


def _join(rules: Rules, model: Model, at: int, rank: Rank, resume: int) -> Iterator[Model]:
    generation = model.nodes[rank.node].generation
    joined = {"pc": END if resume == rules.gates else BODY, "generation": generation, "step": resume, "seal": resume}
    if rank.pc in (STOPPED, END):
        if rank.seal > resume:
            raise Wrong("a step is applied twice")
        if rank.seal < resume:
            raise Wrong("a rank is to go on behind an update that it has no gradients for")
        yield _rank(model, at, **joined)
        return
    slots = rank.slot if rank.pc == VACANT else rank.buddy
    if slots < resume - 1:
        if rank.pc == LOST and _buddy(model, rank.node) in model.died:
            return  # both copies are gone
        raise Wrong(NOWHERE)
    if rank.pc == VACANT and rank.seal == resume:
        yield _rank(model, at, **joined)
        return
    joined_ranks = [other for other in model.ranks if other is not rank and other.generation == generation]
    if resume == 0 or any(other.shard == rank.shard and other.seal == resume for other in joined_ranks):
        yield _rank(model, at, slot=max(slots, resume - 1), **joined)


# ---- a node ----------------------------------------------------------------------------------------------------------


def _node_moves(rules: Rules, model: Model, at: int, node: Node) -> Iterator[Model]:
    if node.closed:
        return
    gate = node.last + 1
    mine = [rank for rank in model.ranks if rank.node == at]
    ready = all(r.pc == READY and r.step == gate and r.generation == node.generation for r in mine)
    told = all(r.buddy >= gate for r in mine) or rules.receipt != "proof"
    if ready and told and node.posted != (node.generation, gate):
        yield _node(model, at, posted=(node.generation, gate))
    if ready and (all(n.posted == (node.generation, gate) for n in model.nodes) if rules.proof else True):
        yield _node(model, at, last=gate)


def _still(model: Model, at: int) -> bool:
    """Has each living rank of a closed node stopped, or finished its update?"""
    last = model.nodes[at].last
    moving = (BODY, SENT, UPDATE)
    return not any(r.node == at and (r.pc in moving or (r.pc == READY and r.step <= last)) for r in model.ranks)


# ---- a leader --------------------------------------------------------------------------------------------------------


def _leader_moves(rules: Rules, model: Model, at: int, leader: Leader) -> Iterator[Model]:
    if leader.leads and (any(r.pc == DEAD for r in model.ranks) or any(n.dead == 1 for n in model.nodes)):
        again = _noticed(model)._replace(newest=model.newest + 1)
        yield _leader(again, at, pc=CLOSE, generation=again.newest, answers=(None,) * len(model.nodes))
    if leader.pc == CLOSE:
        for number, node in enumerate(model.nodes):
            if node.dead:
                continue
            if node.generation < leader.generation:
                yield _node(model, number, generation=leader.generation, closed=True)
            closed = node.generation == leader.generation and node.closed and _still(model, number)
            if leader.answers[number] is None and (closed or not rules.acknowledged):
                answers = (*leader.answers[:number], node.last, *leader.answers[number + 1 :])
                yield _leader(model, at, answers=answers)
        alive = [answer for answer, node in zip(leader.answers, model.nodes, strict=True) if not node.dead]
        if None not in alive and all(n.dead != 1 for n in model.nodes):
            yield _leader(model, at, pc=DECIDE, resume=1 + max(answer for answer in alive if answer is not None))
    elif leader.pc == DECIDE:
        if leader.generation not in dict(model.resumes):
            records = (*model.resumes, (leader.generation, leader.resume))
            yield _leader(model._replace(resumes=records), at, pc=PUBLISH)
    elif leader.pc == PUBLISH:
        waiting = False
        for number, node in enumerate(model.nodes):
            if node.dead == 2:
                seated = Node(leader.generation, True, leader.resume - 1, decided=leader.generation)
                yield model._replace(nodes=(*model.nodes[:number], seated, *model.nodes[number + 1 :]))
                waiting = True
            elif node.generation <= leader.generation and node.decided < leader.generation and not node.dead:
                waiting = True
                if node.generation == leader.generation:
                    yield _node(model, number, last=leader.resume - 1, decided=leader.generation)
                elif not rules.acknowledged:  # nobody waited until it was closed
                    yield _node(model, number, generation=leader.generation, closed=True)
        if not waiting:
            yield _leader(model, at, pc=GATHER)
    elif leader.pc == GATHER:
        if all(r.generation == leader.generation for r in model.ranks):
            yield _leader(model, at, pc=REOPEN)
    elif leader.pc == REOPEN:
        shut = [number for number, n in enumerate(model.nodes) if n.generation == leader.generation and n.closed and not n.dead]
        for number in shut:
            yield _node(model, number, closed=False)
        if not shut:
            yield _leader(model, at, pc=QUIET)


# ---- all interleavings -----------------------------------------------------------------------------------------------


def check_end(rules: Rules, model: Model) -> str:
    """What a model without moves is: "done", or "restart" when nobody has a shard, or a rank's slots, any more.

    Raises:
        Wrong
    """
    if all(r.pc == END for r in model.ranks):
        if any(r.seal != rules.gates for r in model.ranks):
            raise Wrong("ranks end at different steps")
        return "done"
    for rank in model.ranks:
        if rank.pc in (VACANT, LOST):
            resume = model.nodes[rank.node].last + 1
            copies = [r for r in model.ranks if r is not rank and r.shard == rank.shard and r.seal == resume]
            both = rank.pc == LOST and rank.buddy < resume - 1 and _buddy(model, rank.node) in model.died
            if both or not copies:
                return "restart"
    raise Wrong("stuck")


@dataclass
class Explored:
    models: int
    ends: set[str]
    wrong: set[str]


def explore(rules: Rules, first: Model) -> Explored:
    known = {first}
    ends: set[str] = set()
    wrong: set[str] = set()
    stack = [first]
    while stack:
        model = stack.pop()
        moved = False
        try:
            for following in moves(rules, model):
                moved = True
                following = following._replace(ranks=tuple(sorted(following.ranks)))  # ranks of one node and shard are alike
                if following not in known:
                    known.add(following)
                    stack.append(following)
            if not moved:
                ends.add(check_end(rules, model))
        except Wrong as found:
            wrong.add(str(found))
    return Explored(len(known), ends, wrong)


# for each node what its ranks hold
DDP2, DDP3, DDP21 = ((0,), (0,)), ((0,), (0,), (0,)), ((0, 0), (0,))
HSDP, FSDP, INSIDE = ((0, 1), (0, 1)), ((0,), (1,)), ((0, 0), (1, 1))  # INSIDE: all copies of a shard lie on one node


@pytest.mark.parametrize(
    ("shards", "gates", "deaths", "may_restart"),
    [
        (DDP2, 2, (1, 0, 0), False),
        (DDP2, 2, (0, 1, 0), False),
        (FSDP, 2, (1, 0, 0), True),  # in its update, without a copy
        (FSDP, 2, (0, 1, 0), True),
        (DDP21, 1, (1, 0, 0), False),
        (DDP21, 1, (0, 1, 0), False),
        (INSIDE, 1, (0, 1, 0), True),
        (DDP3, 1, (1, 0, 0), False),
        (DDP3, 1, (0, 1, 0), False),
        (HSDP, 1, (0, 1, 0), False),
        pytest.param(DDP2, 2, (1, 1, 0), True, marks=pytest.mark.slow),  # all of them
        pytest.param(DDP2, 2, (1, 0, 1), False, marks=pytest.mark.slow),
        pytest.param(DDP2, 2, (0, 1, 1), False, marks=pytest.mark.slow),
        pytest.param(DDP3, 1, (0, 2, 0), True, marks=pytest.mark.slow),  # a node and its buddy
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_no_interleaving_loses_or_repeats_a_step(
    shards: tuple[tuple[int, ...], ...], gates: int, deaths: tuple[int, int, int], may_restart: bool
) -> None:
    """`deaths`: of ranks, of nodes, and how often a leader's lease goes to another one while it goes on."""
    explored = explore(Rules(gates), start(shards, *deaths))
    print(explored)
    assert explored.wrong == set()
    assert explored.ends == ({"done", "restart"} if may_restart else {"done"})


@pytest.mark.parametrize(
    ("rules", "deaths", "expected"),
    [
        (Rules(2, proof=False), (1, 0), "a rank is to go on behind an update that it has no gradients for"),
        (Rules(2, acknowledged=False), (1, 0), "a step is applied twice"),
        (Rules(2, acknowledged=False), (0, 1), "a step is applied twice"),
        (Rules(2, receipt=""), (0, 1), NOWHERE),
        (Rules(2, receipt="pass"), (0, 1), NOWHERE),  # each rank waits for its own, which says nothing of the others'
    ],
    ids=["no proof", "no answer", "no answer, a node", "no receipt", "a receipt too late"],
)
def test_what_may_not_be_left_out(rules: Rules, deaths: tuple[int, int], expected: str) -> None:
    assert expected in explore(rules, start(DDP2, *deaths)).wrong
