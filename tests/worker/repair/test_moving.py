"""Transfers as a worker sees them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ftrun import native
from ftrun.core.shared.board import Board, F
from ftrun.native.transfer import TransferError
from ftrun.view import fold
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.segment import Segment
from ftrun.worker.repair import transfer


@pytest.fixture
def context(tmp_path: Path) -> Context:
    Board.create(tmp_path / "board", 2)
    return Context(tmp_path, 1)


def test_progress_is_on_the_board_while_it_goes_on(context: Context) -> None:
    with transfer.progress(context, 100) as moved:
        native.store64(moved, 40)
        assert fold.moved(context.board, 2) == (40, 100)
        assert 0 <= time.monotonic_ns() - context.cell[F.MOVE_SINCE] < 60e9
    assert fold.moved(context.board, 2) == (0, 0)


def test_progress_ends_with_a_transfer_that_fails(context: Context) -> None:
    with pytest.raises(TransferError):
        transfer.peer_copy(context, [(1, 8)], [(1, 9)])  # sizes differ: nothing is touched
    assert context.cell[F.MOVE_TOTAL] == 0


def test_a_peer_copy_counts_what_arrived(context: Context) -> None:
    size = 3 << 20
    source, to = Segment.create("a", size), Segment.create("b", size)
    source.view(0, size)[:] = os.urandom(size)
    done = transfer.peer_copy(context, [(to.address, size)], [(source.address, size)])
    assert bytes(to.view(0, size)) == bytes(source.view(0, size))
    assert done.bytes == context.cell[F.MOVED] == size
    for segment in (source, to):
        segment.close()
