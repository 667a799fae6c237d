"""Every interleaving of the gate in small worlds: arrive, open, pass, stop, decide, replace, open again, death anywhere.

The model moves the gate word with the functions of ftrun/core/shared/gate.py and nothing else; a compare-and-swap is a read
and, any number of other moves later, a swap that fails when the word changed. Two near misses of the design and one
of several nodes are given to the same explorer, which must find what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from ftrun.core.shared import gate

OPEN = -1  # arena being written
# where a rank is
BODY, ARRIVED, PEEKED, PROVEN, UPDATE, STOPPED, END, DEAD, VACANT, FRESH, COPY = range(11)
# where the agent is
QUIET, READ, CLOSE, DECIDE, WRITE, PUBLISH, GATHER, REOPEN = range(8)


class Rank(NamedTuple):
    """One rank of the model. `cells`: arrival field of each incarnation; `worlds`: (generation, incarnation in it)."""

    node: int
    pc: int
    generation: int
    step: int
    applied: tuple[int, ...]  # updates in its arena, in order
    seal: int  # arena complete as of the start of this step, or OPEN
    raw: int  # the gate word it read last, while it tries to open
    joined: int  # newest generation it is ready for
    cells: tuple[int, ...]
    worlds: tuple[tuple[int, int], ...]
    lost: tuple[tuple[int, ...], int] | None  # arena (applied, seal) of the dead holder


class Agent(NamedTuple):
    pc: int
    generation: int
    published: int
    resume: int
    node: int  # the word it works on
    raw: int


class Model(NamedTuple):
    words: tuple[int, ...]
    ranks: tuple[Rank, ...]
    agent: Agent
    deaths: int  # how many may still happen


@dataclass(frozen=True)
class Rules:
    """The protocol, or a near miss of it."""

    gates: int  # the last one is the virtual gate at the end of the loop
    decide_from_cells: bool = False  # resume from "last gate passed" of each rank instead of the gate word
    plain_store: bool = False  # close the gate with a store instead of a compare-and-swap
    leave_undecided: bool = False  # leave a gate on a closed word before the decision was written back


class Wrong(Exception):
    """An invariant does not hold."""


def start(nodes: tuple[int, ...], deaths: int) -> Model:
    word = gate.pack(gate.GateWord(1, False, -1))
    ranks = tuple(Rank(n, BODY, 1, 0, (), 0, 0, 1, (0,), ((1, 0),), None) for n in nodes)
    return Model((word,) * (max(nodes) + 1), ranks, Agent(QUIET, 1, 1, 0, 0, 0), deaths)


def moves(rules: Rules, model: Model) -> Iterator[Model]:
    """Every model that one atomic move of one process, or one death, leads to."""
    for index, rank in enumerate(model.ranks):
        if model.deaths and rank.pc not in (END, DEAD, VACANT):
            lost = rank.lost if rank.pc in (FRESH, COPY) else (rank.applied, rank.seal)
            dead = rank._replace(pc=DEAD, lost=lost, raw=0)
            yield _put(model, index, dead)._replace(deaths=model.deaths - 1)
        if rank.pc == DEAD:  # the agent hears of it, whatever it is doing
            agent = Agent(READ, model.agent.generation + 1, model.agent.published, model.agent.resume, 0, 0)
            yield _put(model, index, rank._replace(pc=VACANT))._replace(agent=agent)
        yield from _rank_moves(rules, model, index, rank)
    yield from _agent_moves(rules, model)


def _put(model: Model, index: int, rank: Rank, word: int | None = None) -> Model:
    ranks = (*model.ranks[:index], rank, *model.ranks[index + 1 :])
    if word is None:
        return model._replace(ranks=ranks)
    return model._replace(ranks=ranks, words=_set(model.words, rank.node, word))


def _set(words: tuple[int, ...], node: int, word: int) -> tuple[int, ...]:
    if gate.unpack(word).generation < gate.unpack(words[node]).generation:
        raise Wrong("generation shrank")
    return (*words[:node], word, *words[node + 1 :])


def _rank_moves(rules: Rules, model: Model, index: int, rank: Rank) -> Iterator[Model]:
    word = model.words[rank.node]
    if rank.pc == BODY:
        cells = (*rank.cells[:-1], gate.arrival(rank.generation, rank.step))
        yield _put(model, index, rank._replace(pc=ARRIVED, cells=cells))
        if gate.unpack(word).generation != rank.generation:
            yield _put(model, index, rank._replace(pc=STOPPED))
    elif rank.pc == ARRIVED:
        verdict = gate.verdict(word, rank.generation, rank.step)
        if verdict == gate.PASS:
            if rank.step == rules.gates - 1:
                yield _put(model, index, rank._replace(pc=END, step=rules.gates, seal=rules.gates))
            else:
                yield _put(model, index, rank._replace(pc=UPDATE, seal=OPEN))
        elif verdict == gate.WAIT:
            yield _put(model, index, rank._replace(pc=PEEKED, raw=word))
        else:
            yield _put(model, index, rank._replace(pc=STOPPED))
    elif rank.pc == PEEKED:
        swapped = gate.opened(rank.raw, rank.generation, rank.step, _arrivals(model, rank.generation))
        if swapped is not None:
            yield _put(model, index, rank._replace(pc=PROVEN))
        elif word != rank.raw:
            yield _put(model, index, rank._replace(pc=ARRIVED, raw=0))
    elif rank.pc == PROVEN:
        # The arrivals were read before; what matters now is the word as it was read before them.
        desired = gate.opened(rank.raw, rank.generation, rank.step, ())
        yield _put(model, index, rank._replace(pc=ARRIVED, raw=0), desired if word == rank.raw else None)
    elif rank.pc == UPDATE:
        done = rank.step + 1
        yield _put(model, index, rank._replace(pc=BODY, step=done, seal=done, applied=(*rank.applied, rank.step)))
    elif rank.pc in (STOPPED, END) and model.agent.published > rank.generation:
        yield _put(model, index, _join(rules, model, rank))
    elif rank.pc in (FRESH, COPY):
        yield from _restore(rules, model, index, rank)


def _arrivals(model: Model, generation: int) -> list[int]:
    """The arrival fields of the incarnations that made up `generation`."""
    return [r.cells[dict(r.worlds)[generation]] for r in model.ranks]


def _join(rules: Rules, model: Model, rank: Rank) -> Rank:
    """A rank with a complete arena takes part in the published generation."""
    generation, resume = model.agent.published, model.agent.resume
    if rank.seal > resume:
        raise Wrong("a step is applied twice")
    if rank.seal < resume:
        raise Wrong("a step is lost")
    pc = END if resume == rules.gates else BODY
    return rank._replace(pc=pc, generation=generation, step=resume, joined=generation, lost=None)


def _restore(rules: Rules, model: Model, index: int, rank: Rank) -> Iterator[Model]:
    published, resume = model.agent.published, model.agent.resume
    if rank.generation != published:
        yield _put(model, index, rank._replace(pc=FRESH, generation=published))
        return
    assert rank.lost is not None
    applied, seal = rank.lost
    if seal == resume:
        yield _put(model, index, _join(rules, model, rank._replace(applied=applied, seal=seal)))
    elif rank.pc == FRESH:
        yield _put(model, index, rank._replace(pc=COPY, applied=(), seal=OPEN))
    else:
        for source in model.ranks:
            if source.joined == published and source.seal == resume and source.pc not in (DEAD, VACANT):
                yield _put(model, index, _join(rules, model, rank._replace(applied=source.applied, seal=resume)))


def _agent_moves(rules: Rules, model: Model) -> Iterator[Model]:
    agent = model.agent
    word = model.words[agent.node]
    after = agent.node + 1 < len(model.words)
    if agent.pc == READ:
        yield model._replace(agent=agent._replace(pc=CLOSE, raw=word))
    elif agent.pc == CLOSE:
        closed = gate.closed(agent.raw, agent.generation, undecided=len(model.words) > 1 and not rules.leave_undecided)
        assert closed is not None
        if word == agent.raw or rules.plain_store:
            pc, node = (READ, agent.node + 1) if after else (DECIDE, 0)
            words = _set(model.words, agent.node, closed)
            yield model._replace(words=words, agent=agent._replace(pc=pc, node=node, raw=0))
        else:
            yield model._replace(agent=agent._replace(pc=READ, raw=0))
    elif agent.pc == DECIDE:
        resume = 1 + max(gate.unpack(raw).last for raw in model.words)
        if rules.decide_from_cells:
            resume = max(r.step + (r.pc == UPDATE) for r in model.ranks)
        yield model._replace(agent=agent._replace(pc=WRITE, resume=resume))
    elif agent.pc == WRITE:
        words = _set(model.words, agent.node, gate.decided(word, agent.resume))
        pc, node = (WRITE, agent.node + 1) if after else (PUBLISH, 0)
        yield model._replace(words=words, agent=agent._replace(pc=pc, node=node))
    elif agent.pc == PUBLISH:
        yield model._replace(
            ranks=tuple(_published(r, agent.generation) for r in model.ranks),
            agent=agent._replace(pc=GATHER, published=agent.generation),
        )
    elif agent.pc == GATHER:
        if all(r.joined == agent.generation for r in model.ranks):
            yield model._replace(agent=agent._replace(pc=REOPEN, node=0, raw=word))
    elif agent.pc == REOPEN:
        opened = gate.reopened(agent.raw, agent.generation)
        assert opened is not None
        assert word == agent.raw, "somebody moved a closed word"
        words = _set(model.words, agent.node, opened)
        if after:
            following = agent._replace(node=agent.node + 1, raw=words[agent.node + 1])
        else:
            following = agent._replace(pc=QUIET, node=0, raw=0)
        yield model._replace(words=words, agent=following)


def _published(rank: Rank, generation: int) -> Rank:
    if rank.pc == VACANT:
        cells = (*rank.cells, 0)
        rank = rank._replace(pc=FRESH, generation=generation, step=0, applied=(), seal=OPEN, cells=cells)
    return rank._replace(worlds=(*rank.worlds, (generation, len(rank.cells) - 1)))


def check_end(rules: Rules, model: Model) -> str:
    """What a model without moves is: "done", or "restart" when no arena can be continued from.

    Raises:
        Wrong
    """
    if all(r.pc == END for r in model.ranks):
        if any(r.applied != tuple(range(rules.gates - 1)) for r in model.ranks):
            raise Wrong("the end is not the sum of all steps")
        if len({r.step for r in model.ranks}) != 1:
            raise Wrong("ranks end at different steps")
        return "done"
    if all(r.pc == COPY for r in model.ranks):
        return "restart"
    raise Wrong("stuck")


@dataclass
class Explored:
    models: int
    ends: dict[str, int]
    wrong: set[str]


def explore(rules: Rules, first: Model) -> Explored:
    """Depth-first over all interleavings, equal models once. Finds cycles too, so that "no Wrong" means: it ends."""
    ends: dict[str, int] = {}
    wrong: set[str] = set()
    on_path: set[Model] = set()
    known: set[Model] = set()
    stack: list[tuple[Model, Iterator[Model]]] = []

    def enter(model: Model) -> None:
        known.add(model)
        on_path.add(model)
        stack.append((model, moves(rules, model)))

    def leaf(model: Model) -> None:
        try:
            kind = check_end(rules, model)
            ends[kind] = ends.get(kind, 0) + 1
        except Wrong as found:
            wrong.add(str(found))

    moved = {first}
    enter(first)
    while stack:
        model, rest = stack[-1]
        try:
            following = next(rest, None)
        except Wrong as found:
            wrong.add(str(found))
            moved.add(model)
            following = None
        if following is None:
            stack.pop()
            on_path.discard(model)
            if model not in moved:
                leaf(model)
            moved.discard(model)
            continue
        moved.add(model)
        # Ranks of one node are alike: one order of them stands for all.
        following = following._replace(ranks=tuple(sorted(following.ranks, key=_order)))
        if following in on_path:
            wrong.add("does not end")
        elif following not in known:
            enter(following)
    return Explored(len(known), ends, wrong)


def _order(rank: Rank) -> tuple[object, ...]:
    return (*rank[:-1], rank.lost or ())


@pytest.mark.parametrize(
    ("nodes", "gates", "deaths"),
    [
        ((0, 0), 4, 1),
        ((0, 0), 4, 2),
        ((0, 0, 0), 4, 1),
        ((0, 0, 0), 2, 2),
        ((0, 1), 3, 2),
        ((0, 0, 1), 3, 1),
        pytest.param((0, 0, 0), 3, 2, marks=pytest.mark.slow),
        pytest.param((0, 1), 4, 2, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_no_interleaving_loses_or_repeats_a_step(nodes: tuple[int, ...], gates: int, deaths: int) -> None:
    explored = explore(Rules(gates), start(nodes, deaths))
    print(nodes, gates, deaths, explored)
    assert explored.wrong == set()
    assert explored.ends["done"] > 0
    # With fewer deaths than ranks somebody always has a complete arena.
    assert ("restart" in explored.ends) == (deaths >= len(nodes))


@pytest.mark.parametrize("nodes", [(0, 0), (0, 0, 0)], ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Rules(4, decide_from_cells=True), "a step is applied twice"),
        (Rules(4, plain_store=True), "a step is applied twice"),
    ],
    ids=["resume from last-passed cells", "close with a plain store"],
)
def test_the_near_misses_are_found(rules: Rules, expected: str, nodes: tuple[int, ...]) -> None:
    explored = explore(rules, start(nodes, 1))
    assert expected in explored.wrong


def test_leaving_before_the_decision_loses_a_step_on_two_nodes() -> None:
    """On one node a closed word is the decision; on two, another word may have opened one gate further."""
    hasty = Rules(3, leave_undecided=True)
    assert explore(hasty, start((0, 0), 1)).wrong == set()
    assert "a step is lost" in explore(hasty, start((0, 1), 1)).wrong


def test_without_a_death_there_is_one_end() -> None:
    explored = explore(Rules(4), start((0, 0, 0), 0))
    assert explored.ends == {"done": 1}
    assert explored.wrong == set()
