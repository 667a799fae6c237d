"""One rank's host snapshot: two halves, what is refused, and what counts as a rank's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ftrun.core.shared.board import Board, Head
from ftrun.core.shared.world import AllNodes, Place, World
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.arena import Arena
from ftrun.worker.memory.segment import Segment
from ftrun.worker.repair import snapshot
from ftrun.worker.repair.snapshot_store import BadSnapshot, Places, Store
from ftrun.worker.state.protected_state import ProtectedState

SIZE = 5000
FACTS = {"world_size": 4, "zone": 4 * SIZE, "zone_gpu": 40, "committed": 4 * SIZE, "committed_gpu": 40, "layout": 7}


@pytest.fixture
def memory() -> Iterator[Segment]:
    segment = Segment.create("test", 1 << 16)
    segment.view(0, SIZE)[:] = os.urandom(SIZE)
    yield segment
    segment.close()


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(Segment.create("snapshot-test", 1 << 24))
    yield made
    made.segment.close()


def write(store: Store, memory: Segment, step: int, common: int = -1) -> None:
    memory.view(0, 8)[:] = step.to_bytes(8, "little")
    share = Places(Arena(memory), [(0, 100), (100, SIZE - 100)])
    pieces = {"share": share, "buffers": Places(Arena(memory), []), "slot": b"slot of %d" % step}
    store.write(store.half_for(common), step, FACTS, pieces)


def test_the_older_half_is_written_over(store: Store, memory: Segment) -> None:
    for step in (0, 3, 6):
        write(store, memory, step)
    assert sorted(store.steps()) == [3, 6]
    for step in (3, 6):
        record = store.record(step)
        store.check(record)
        assert store.bytes(record.pieces["slot"]) == b"slot of %d" % step
        share = store.bytes(record.pieces["share"])
        assert len(share) == SIZE and int.from_bytes(share[:8], "little") == step
        assert record.agrees == (4, 4 * SIZE, 40, 7)
    with pytest.raises(BadSnapshot, match="no snapshot of step 0"):
        store.record(0)


def test_what_all_ranks_have_is_never_written_over(store: Store, memory: Segment) -> None:
    """Also when it is the older one, for as long as another rank keeps no newer one."""
    for step in (0, 3, 6, 9):
        write(store, memory, step, common=0)
        assert sorted(store.steps()) == sorted({0, step})
    write(store, memory, 12, common=9)
    assert sorted(store.steps()) == [9, 12]
    store.discard(store.steps()[12])
    assert sorted(store.steps()) == [9] and store.used() == SIZE + len("slot of 9")
    write(store, memory, 12, common=9)
    assert sorted(store.steps()) == [9, 12]


def test_a_half_that_was_not_finished_does_not_count(store: Store, memory: Segment) -> None:
    write(store, memory, 0)
    write(store, memory, 3)
    half = store.steps()[0]
    store.segment.store(half * (store.segment.length // 2), 0)  # as at the first word of the next one
    assert list(store.steps()) == [3]
    write(store, memory, 6)
    assert sorted(store.steps()) == [3, 6]


@pytest.mark.parametrize("piece", ["share", "slot"])
def test_damage_is_found(store: Store, memory: Segment, piece: str) -> None:
    write(store, memory, 3)
    record = store.record(3)
    store.segment.view(record.pieces[piece].offset, 1)[0] ^= 1
    with pytest.raises(BadSnapshot, match=f"{piece} in the snapshot of step 3"):
        store.check(record)


def test_damaged_facts_are_found(store: Store, memory: Segment) -> None:
    write(store, memory, 3)
    store.segment.view(store.steps()[3] * (store.segment.length // 2) + 4096 + 3, 1)[0] ^= 1
    with pytest.raises(BadSnapshot, match="what describes the snapshot"):
        store.record(3)


def test_all_of_a_model_without_ddp_is_the_rank_s_own() -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = ProtectedState([model], [optimizer], {})
    arena = Arena.create(0, state.bytes_now())
    state.move_in(arena)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    state.absorb()
    places = snapshot.own_places(state, state.manifest, 4, on_gpu=False)
    assert sum(size for _, size in places) == 2 * 4 * (8 * 4 + 4)  # weights and their momentum
    assert len({at for at, _ in places}) == len(places) == 4
    assert snapshot.own_places(state, state.manifest, 4, on_gpu=True) == []


def test_what_lies_behind_a_tensor_of_no_elements_is_the_rank_s_own_all_the_same() -> None:
    class Hollow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = torch.nn.Parameter(torch.empty(0, 4))

    first, second = Hollow(), torch.nn.Linear(8, 4, bias=False)
    state = ProtectedState([first, second], [torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)], {})
    arena = Arena.create(0, state.bytes_now())
    state.move_in(arena)
    hollow, weight = state.manifest.entries
    assert (hollow.block, hollow.offset) == (0, weight.offset)
    state.replicated = lambda manifest, ranks: iter([hollow])  # type: ignore[method-assign]
    assert snapshot.own_places(state, state.manifest, 4, on_gpu=False) == [(weight.offset, weight.block)]


@pytest.mark.parametrize(("mirrored", "copied", "takes"), [(True, 4, True), (True, 2, False), (True, -1, False), (False, -1, True)])
def test_no_snapshot_is_taken_while_the_last_one_of_all_ranks_is_copied(
    mirrored: bool, copied: int, takes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would overwrite what is read, or the only one that has copies."""
    Board.create(tmp_path / "board", 2)
    context = Context(tmp_path, 0)
    span = AllNodes(2, (0, 1), 0, ("127.0.0.1", "127.0.0.1"), "round/0", mirrored=mirrored)
    context.world, context.snapshot_every = World(1, 0, (Place(0, 0, 0),), "", 0, span=span), 2
    context.board[Head.SNAPSHOT], context.board[Head.COPIED] = 4 + 1, copied + 1
    nothing: Any = None
    snapshots, taken = snapshot.Snapshots(context, nothing, nothing), []
    monkeypatch.setattr(snapshots, "_take", taken.append)
    snapshots.take_if_due(6)
    snapshots.take_if_due(7)
    assert taken == [6] * takes
