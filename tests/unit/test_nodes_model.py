"""A model of the gate over several nodes: every interleaving in small worlds, and what must not be left out.

Within a node the gate is that of test_gate_exhaustive.py, taken as right here: one word, which opens and closes in one move. New are the
moves between nodes. Gradients, slots and parts of the proof arrive at each by themselves, or never, once they were sent. Records are
created once, and each node looks at them when it comes to it. Ranks and nodes die at any point. A node may be cut off from the
records: its ranks go on, it is counted as lost, and it comes back, in time or to find its place taken by a spare node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest

OPEN = -1  # the arena is being written
# where a rank is; DEAD: its node does not know yet; VACANT: it waits for a worker with its memory; LOST: for one with the mirror
BODY, SENT, READY, UPDATE, STOPPED, END, DEAD, VACANT, LOST = range(9)
GRADIENTS, SLOTS, PART = range(3)  # what is sent
REACHED, CUT, DOUBTED = range(3)  # does a node reach the records? DOUBTED: again, and others may still act on what they saw
EMPTY, TORN, TAKEN = -2, -3, -4  # a mirror without slots: of a node before its first gate, half written, of a node that took a place

NOWHERE = "a rank's own state of the step to go on with is nowhere"
BEHIND = "a rank is to go on behind an update that it has no gradients for"
TWICE = "a step is applied twice"
# why all ranks restart
BOTH, EARLY, HALF = "a node and the next one were lost", "a node was lost before the first gate", "a mirror was being written"
ALL, NO_SPARE, NO_COPY = "no node is left", "no spare node is left", "nobody has the weights"
_WITHOUT_SLOTS = {TAKEN: BOTH, EMPTY: EARLY, TORN: HALF}


class Rank(NamedTuple):
    """`incident`: after which it goes on. `seal`: commit mark of its weights. `slot`: newest gate of its slots on its node."""

    node: int
    shard: int
    pc: int = BODY
    incident: int = 0
    step: int = 0
    seal: int = 0
    slot: int = -1


class Node(NamedTuple):
    """A launcher, and the word of its node: `incident`, `closed`, `last`. `plan`: the record that it is about to create as the leader.

    `seated`: incident in which another one took its place, 0 = it has it.
    """

    place: int
    incident: int = 0  # newest one for which the word was closed
    closed: bool = False
    last: int = -1
    answer: tuple[int, int] = (0, -1)  # incident and last gate, as its record has them
    decided: int = 0  # newest incident whose decision the word has
    mirror: tuple[int, int] = (0, EMPTY)  # incident and gate in which it stored the slots of the node before it
    plan: tuple[int, int | None] | None = None
    link: int = REACHED
    dead: bool = False
    seated: int = 0


class Model(NamedTuple):
    """`nodes`: one for each place of the table, then those that lost their places and do not know it."""

    nodes: tuple[Node, ...]
    ranks: tuple[Rank, ...]
    places: int
    stops: int = 0  # how many records `stop` there are
    records: frozenset[tuple[int, int | None]] = frozenset()  # `go`: incident, resume; `open`: incident, None
    wire: frozenset[tuple[int, int, int, int]] = frozenset()  # what was ever sent: kind, incident, gate, which
    spares: int = 1
    rank_deaths: int = 0  # that may still happen
    node_deaths: int = 0
    cuts: int = 0


@dataclass(frozen=True)
class Rules:
    """The protocol, or one that leaves something out. `mirror`: what waits for it: "proof", "pass" or nothing."""

    gates: int
    proof: bool = True
    answered: bool = True
    mirror: str = "proof"
    own_group: bool = True  # each incident has a group of its own: no part given in an earlier one counts in it


class Wrong(Exception):
    """An invariant does not hold."""


def start(shards: tuple[tuple[int, ...], ...], rank_deaths: int = 0, node_deaths: int = 0, cuts: int = 0, spares: int = 1) -> Model:
    """`shards`: for each node what its ranks hold."""
    ranks = tuple(Rank(node, shard) for node, held in enumerate(shards) for shard in held)
    nodes = tuple(map(Node, range(len(shards))))
    return Model(nodes, ranks, len(shards), spares=spares, rank_deaths=rank_deaths, node_deaths=node_deaths, cuts=cuts)


def _rank(model: Model, at: int, **changes: object) -> Model:
    return model._replace(ranks=(*model.ranks[:at], model.ranks[at]._replace(**changes), *model.ranks[at + 1 :]))  # type: ignore[arg-type]


def _world(model: Model) -> list[Rank]:
    """Return the ranks of the nodes that have a place."""
    return [rank for rank in model.ranks if rank.node < model.places]


def _node(model: Model, at: int, **changes: object) -> Model:
    return model._replace(nodes=(*model.nodes[:at], model.nodes[at]._replace(**changes), *model.nodes[at + 1 :]))  # type: ignore[arg-type]


def moves(rules: Rules, model: Model) -> Iterator[Model]:
    """Every model that one move of one process, one arrival of a message, one loss or one look at the records leads to."""
    yield from _losses(model)
    yield from _seats(model)
    for at, rank in enumerate(model.ranks):
        if not model.nodes[rank.node].dead:
            yield from _rank_moves(rules, model, at, rank)
    for at, node in enumerate(model.nodes):
        if not node.dead:
            yield from _gate_moves(rules, model, at, node)
            yield from _notices(model, at, node)
            yield from _looks(rules, model, at, node) if node.link != CUT else (_node(model, at, link=DOUBTED),)


# ---- losses, and who takes a place -----------------------------------------------------------------------------------


def _losses(model: Model) -> Iterator[Model]:
    if all(r.pc == END for r in _world(model)):
        return
    if model.rank_deaths:
        for at, rank in enumerate(model.ranks):
            if rank.pc not in (DEAD, VACANT, LOST, END) and rank.node < model.places:
                yield _rank(model, at, pc=DEAD)._replace(rank_deaths=model.rank_deaths - 1)
    for at, node in enumerate(model.nodes[: model.places]):
        if not node.dead and model.node_deaths:
            gone = tuple(r._replace(pc=LOST, seal=OPEN, slot=-2) if r.node == at else r for r in model.ranks)
            yield _node(model, at, dead=True, plan=None)._replace(ranks=gone, node_deaths=model.node_deaths - 1)
        if not node.dead and node.link == REACHED and model.cuts:
            yield _node(model, at, link=CUT)._replace(cuts=model.cuts - 1)


def _seats(model: Model) -> Iterator[Model]:
    """Whoever sees a record stand still, and all records `stop`, creates the next one, which names the spare's seat."""
    seen = any(not n.dead and n.link != CUT and n.incident >= model.stops for n in model.nodes[: model.places])
    for at, node in enumerate(model.nodes[: model.places]):
        if not seen or not model.spares or not (node.dead or node.link != REACHED):
            continue
        incident = model.stops + 1
        seated = Node(at, incident, True, mirror=(0, TAKEN))
        nodes, frozen = (*model.nodes[:at], seated, *model.nodes[at + 1 :]), ()
        if not node.dead:
            nodes = (*nodes, node._replace(seated=incident))
            frozen = tuple(r._replace(node=len(model.nodes)) for r in model.ranks if r.node == at)
        ranks = tuple(Rank(at, r.shard, LOST, 0, 0, OPEN, -2) if r.node == at else r for r in model.ranks)
        yield model._replace(nodes=nodes, ranks=ranks + frozen, stops=incident, spares=model.spares - 1)


# ---- a rank ----------------------------------------------------------------------------------------------------------


def _rank_moves(rules: Rules, model: Model, at: int, rank: Rank) -> Iterator[Model]:
    node = model.nodes[rank.node]
    stopped = node.incident > rank.incident
    decided = node.decided == node.incident
    if rank.pc in (BODY, SENT) and stopped:
        yield _rank(model, at, pc=STOPPED)
    if rank.pc == BODY and not node.closed:
        yield _rank(_sent(model, GRADIENTS, rank.incident, rank.step, _sendings(model, rank)), at, pc=SENT)
    elif rank.pc == SENT and _sendings(model, rank) == len(_world(model)):
        ready = _rank(model, at, pc=READY, slot=rank.step)
        beside = all(r.pc == READY for r in ready.ranks if r.node == rank.node)
        yield _sent(ready, SLOTS, rank.incident, rank.step, node.place) if beside and rules.mirror else ready
    elif rank.pc == READY:
        kept = model.nodes[(node.place + 1) % model.places].mirror[1] >= rank.step
        if node.last >= rank.step and (rules.mirror != "pass" or kept or stopped):
            yield _rank(model, at, pc=UPDATE, seal=OPEN)
        elif node.last < rank.step and decided and stopped:
            yield _rank(model, at, pc=STOPPED)
    elif rank.pc == UPDATE:
        done = rank.step + 1
        yield _rank(model, at, pc=END if done == rules.gates else BODY, step=done, seal=done)
    elif rank.pc in (STOPPED, END, VACANT, LOST) and decided and stopped:
        yield from _join(rules, model, at, rank, node)


def _sent(model: Model, kind: int, incident: int, gate: int, which: int) -> Model:
    return model._replace(wire=model.wire | {(kind, incident, gate, which)})


def _sendings(model: Model, rank: Rank) -> int:
    """Count the ranks that gave their gradients away for this rank's step."""
    return sum(sent[:3] == (GRADIENTS, rank.incident, rank.step) for sent in model.wire)


def _join(rules: Rules, model: Model, at: int, rank: Rank, node: Node) -> Iterator[Model]:
    resume = node.last + 1
    joined = {"pc": END if resume == rules.gates else BODY, "incident": node.incident, "step": resume, "seal": resume}
    if rank.pc in (STOPPED, END):
        if rank.seal > resume:
            raise Wrong(TWICE)
        if rank.seal < resume:
            raise Wrong(BEHIND)
        yield _rank(model, at, **joined)
    elif rank.pc == VACANT and rank.slot < resume - 1:
        raise Wrong(NOWHERE)
    elif rank.pc == VACANT and rank.seal == resume:
        yield _rank(model, at, **joined)
    elif rank.pc == VACANT or not _without_slots(model, node):
        there = [r for r in _world(model) if r.incident == node.incident]
        if resume == 0 or any(r.shard == rank.shard and r.seal == resume for r in there):
            yield _rank(model, at, slot=max(rank.slot, resume - 1), **joined)


def _without_slots(model: Model, node: Node) -> str:
    """Say why the slots that the ranks of `node` are to go on with are lost, "" = the next node has them.

    Raises:
        Wrong: They should be there.
    """
    after = model.nodes[(node.place + 1) % model.places]
    gate, resume = after.mirror[1], node.last + 1
    if after.dead:
        return BOTH
    if gate in (resume - 1, resume):  # its GATE slot, or its START slot
        return ""
    if gate >= 0 or (gate == EMPTY and resume > 0):
        raise Wrong(NOWHERE)
    return _WITHOUT_SLOTS[gate]


# ---- a node: its gate, by the rank that speaks for it -----------------------------------------------------------------


def _gate_moves(rules: Rules, model: Model, at: int, node: Node) -> Iterator[Model]:
    mine = [rank for rank in model.ranks if rank.node == at]
    writers = _writers(mine, node)
    if writers:
        yield _node(model, at, mirror=(node.mirror[0], writers[0].step))
    first = mine[0]
    if any(r.pc != READY or (r.incident, r.step) != (first.incident, first.step) for r in mine):
        return
    if node.closed and node.answer[0] == node.incident:
        return  # it has told the others that it stands still
    incident, gate = first.incident, first.step
    if (SLOTS, incident, gate, (node.place - 1) % model.places) in model.wire and node.mirror < (incident, gate) and not writers:
        yield _node(model, at, mirror=(incident, TORN))
    group = incident if rules.own_group else 0
    part = (PART, group, gate, node.place)
    if gate > node.last and part not in model.wire and (rules.mirror != "proof" or node.mirror == (incident, gate)):
        yield _sent(model, *part)
    proof = all((PART, group, gate, place) in model.wire for place in range(model.places))
    if gate == node.last + 1 and not node.closed and (proof or not rules.proof):
        if at >= model.places and gate > 1 + max(n.last for n in model.nodes[: model.places]):
            raise Wrong("a node without a place opens a gate ahead of the world")
        yield _node(model, at, last=gate)


def _writers(mine: list[Rank], node: Node) -> list[Rank]:
    """Return the ranks of a node that may be about to write what it got from the one before."""
    return [rank for rank in mine if rank.pc == READY and node.mirror == (rank.incident, TORN)]


def _still(model: Model, at: int) -> bool:
    """Does no rank of a closed node move any more, nor write a mirror?"""
    node, mine = model.nodes[at], [rank for rank in model.ranks if rank.node == at]
    moving = any(r.pc in (BODY, SENT, UPDATE, DEAD) or (r.pc == READY and r.step <= node.last) for r in mine)
    return not moving and not _writers(mine, node)


# ---- a node: its launcher --------------------------------------------------------------------------------------------


def _notices(model: Model, at: int, node: Node) -> Iterator[Model]:
    """Notice that a rank died: close the word for the next incident, unless it is closed and the node has not answered yet."""
    if any(r.node == at and r.pc == DEAD for r in model.ranks):
        ranks = tuple(r._replace(pc=VACANT) if r.node == at and r.pc == DEAD else r for r in model.ranks)
        if node.closed and node.answer[0] < node.incident:
            yield model._replace(ranks=ranks)
        elif node.incident <= model.stops:
            yield _node(model, at, incident=node.incident + 1, closed=True)._replace(ranks=ranks)


def _looks(rules: Rules, model: Model, at: int, node: Node) -> Iterator[Model]:
    if node.plan is not None:
        known = {(incident, resume is None) for incident, resume in model.records}
        news = set() if (node.plan[0], node.plan[1] is None) in known else {node.plan}
        yield _node(model._replace(records=model.records | news), at, plan=None)
    elif at == 0:
        yield from _lead(rules, model, node)
    if at >= model.places:
        # it sees who has its place, ends its workers, and waits as a spare
        ranks = tuple(rank for rank in model.ranks if rank.node != at)
        yield _node(model, at, dead=True, plan=None)._replace(ranks=ranks, spares=model.spares + 1)
    elif node.incident > model.stops:
        yield model._replace(stops=node.incident)
    elif node.incident < model.stops:
        yield _node(model, at, incident=model.stops, closed=True)
    if node.closed and node.answer[0] < node.incident and _still(model, at):
        yield _node(model, at, answer=(node.incident, node.last))
    told = node.answer[0] == node.incident or not rules.answered
    for incident, resume in model.records:
        if incident != node.incident or not node.closed or 0 < node.seated <= incident:
            continue
        if resume is not None and told and node.decided < incident:
            yield _node(model, at, last=resume - 1, decided=incident)
        elif resume is None and node.decided == incident:
            yield _node(model, at, closed=False)


def _lead(rules: Rules, model: Model, node: Node) -> Iterator[Model]:
    """See that all have answered, or restored their ranks: the record that follows is created later."""
    places, now = model.nodes[: model.places], node.incident
    known = {resume is None for incident, resume in model.records if incident == now}
    if not known and now:
        if all(n.answer[0] == now for n in places):
            yield _node(model, 0, plan=(now, 1 + max(n.answer[1] for n in places)))
        elif not rules.answered:
            yield _node(model, 0, plan=(now, 1 + max(n.last for n in places if not n.dead)))
    elif known == {False} and all(r.incident == now for r in _world(model)):
        yield _node(model, 0, plan=(now, None))


# ---- all interleavings -----------------------------------------------------------------------------------------------


def check_end(rules: Rules, model: Model) -> str:
    """What a model without moves is: "done", or why all ranks restart.

    Raises:
        Wrong
    """
    ranks = _world(model)
    if all(r.pc == END for r in ranks):
        if any(r.seal != rules.gates for r in ranks):
            raise Wrong("ranks end at different steps")
        return "done"
    dead = [node.dead for node in model.nodes[: model.places]]
    if any(dead):
        return ALL if all(dead) else NO_SPARE
    for rank in ranks:
        node = model.nodes[rank.node]
        if rank.pc in (VACANT, LOST) and node.decided == node.incident:
            why = _without_slots(model, node) if rank.pc == LOST else ""
            if why or not any(r.shard == rank.shard and r.seal == node.last + 1 for r in ranks if r is not rank):
                return why or NO_COPY
    raise Wrong("stuck")


def _alike(rules: Rules, model: Model) -> Model:
    """Return the model without what makes no difference: the order of ranks of one node and shard, and what nobody waits for."""
    living = [node for node in model.nodes if not node.dead]
    oldest = min((n.plan[0] if n.plan else n.incident for n in living), default=0)
    underway = [rank for rank in model.ranks if rank.pc in (BODY, SENT, UPDATE, READY)]

    def matters(kind: int, incident: int, gate: int, _: int) -> bool:
        if kind == PART:
            return any((n.incident == incident or not rules.own_group or n.answer[0] < n.incident) and n.last < gate for n in living)
        return any(r.incident == incident and r.step <= gate for r in underway)

    nodes = model.nodes
    while len(nodes) > model.places and nodes[-1].dead:
        nodes = nodes[:-1]
    wire = frozenset(sent for sent in model.wire if matters(*sent))
    records = frozenset(record for record in model.records if record[0] >= oldest)
    return model._replace(nodes=nodes, ranks=tuple(sorted(model.ranks)), wire=wire, records=records)


@dataclass
class Explored:
    models: int
    ends: set[str]
    wrong: set[str]


def explore(rules: Rules, first: Model, until: str = "") -> Explored:
    """`until`: what is enough to have found wrong."""
    known = {first}
    ends: set[str] = set()
    wrong: set[str] = set()
    stack = [first]
    while stack and until not in wrong:
        model = stack.pop()
        moved = False
        try:
            for following in moves(rules, model):
                following = _alike(rules, following)
                moved = moved or following != model
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
    ("shards", "gates", "losses", "restarts"),
    [
        (DDP2, 2, (1, 0, 0), set()),
        (DDP2, 2, (0, 1, 0), {EARLY}),
        (DDP2, 2, (0, 0, 1), {EARLY}),
        (DDP2, 1, (1, 1, 0), {EARLY, HALF, NO_COPY}),
        (DDP2, 2, (0, 2, 0, 2), {EARLY, BOTH, ALL}),
        (DDP2, 1, (0, 1, 1), {EARLY, BOTH}),
        (FSDP, 2, (1, 0, 0), {NO_COPY}),  # in its update, without a copy
        (FSDP, 2, (0, 1, 0), {EARLY, NO_COPY}),
        (DDP21, 2, (1, 0, 0), set()),
        (DDP21, 2, (0, 1, 0), {EARLY}),
        (INSIDE, 2, (0, 1, 0), {EARLY, NO_COPY}),
        (HSDP, 2, (0, 1, 0), {EARLY}),
        (DDP3, 1, (1, 0, 0), set()),
        (DDP3, 1, (0, 1, 0), {EARLY}),
        pytest.param(DDP2, 1, (1, 0, 1), {EARLY, HALF, NO_COPY}, marks=pytest.mark.slow),
        pytest.param(DDP2, 2, (0, 1, 1), {EARLY, BOTH}, marks=pytest.mark.slow),
        pytest.param(INSIDE, 1, (0, 0, 1), {EARLY, NO_COPY}, marks=pytest.mark.slow),
        pytest.param(HSDP, 1, (0, 0, 1), {EARLY}, marks=pytest.mark.slow),
        pytest.param(HSDP, 2, (1, 0, 0), set(), marks=pytest.mark.slow),
        pytest.param(DDP3, 1, (0, 2, 0), {NO_SPARE}, marks=pytest.mark.slow),
        pytest.param(DDP3, 1, (0, 2, 0, 2), {EARLY, BOTH}, marks=pytest.mark.slow),
        pytest.param(DDP3, 1, (1, 1, 0), {EARLY, HALF}, marks=pytest.mark.slow),
        pytest.param(DDP3, 1, (0, 0, 1), {EARLY}, marks=pytest.mark.slow),
    ],
    ids=lambda value: f"{len(value)}reasons" if isinstance(value, set) else str(value).replace(" ", ""),
)
def test_no_interleaving_loses_or_repeats_a_step(
    shards: tuple[tuple[int, ...], ...], gates: int, losses: tuple[int, ...], restarts: set[str]
) -> None:
    """`losses`: of ranks, of nodes, and how often a node is cut off; then the spare nodes, one unless it says more."""
    explored = explore(Rules(gates), start(shards, *losses))
    print(explored)
    assert explored.wrong == set()
    assert explored.ends - restarts == {"done"}
    assert restarts <= explored.ends


@pytest.mark.parametrize(
    ("rules", "losses", "expected"),
    [
        (Rules(2, proof=False), (1, 0, 0), BEHIND),
        (Rules(2, answered=False), (1, 0, 0), TWICE),
        (Rules(2, answered=False), (0, 1, 0), TWICE),
        (Rules(2, mirror=""), (0, 1, 0), NOWHERE),
        (Rules(2, mirror="pass"), (0, 1, 0), NOWHERE),  # each rank waits for its own, which says nothing of the others'
        (Rules(1, own_group=False), (1, 0, 1), BEHIND),  # a frozen node's part counts for the spare one that has its place
    ],
    ids=["no proof", "no answer", "no answer, a node", "no mirror", "a mirror too late", "an old part counts"],
)
def test_what_may_not_be_left_out(rules: Rules, losses: tuple[int, ...], expected: str) -> None:
    explored = explore(rules, start(DDP2, *losses), until=expected)
    print(explored)
    assert expected in explored.wrong
