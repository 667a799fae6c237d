"""Copies the host snapshots of the node before this one into memory of this node, so that they outlive that node.

Theory of operation. A thread of the fd store waits until the board shows a snapshot that all ranks of all nodes have (Head.SNAPSHOT), and
reads it, rank by rank, from the memory server of the node before (`ftrun.core.shared.far`). The copy goes into a segment with two halves,
like the rank's own, and never over the newest of which all ranks' copies are whole. The fd store keeps it under the rank's name, as if the
rank were of this node. Then Head.COPIES shows of which steps this node has the copies of all ranks, for the answer to an incident
(ftrun/host/nodes/membership/together.py).

Nobody waits for that. But no rank takes another snapshot before all nodes have copied the last one that all have (Head.COPIED), or have
given up: what is read is not overwritten then, and of the two snapshots of a rank one has copies everywhere. If a copy fails, for lack of
room say, this node says why, holds nobody up, and tries again. Whoever goes back to a copy checks it as it checks a snapshot.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ftrun import native
from ftrun.core.amounts import size
from ftrun.core.shared import far
from ftrun.core.shared import snapshot_layout as layout
from ftrun.core.shared.board import Board, Head
from ftrun.core.system.cgroup import memory_left

_AGAIN = 5.0  # seconds after which a copy that failed is tried again, and between two looks when no bell rings
_NICE = 10  # of the thread: training goes first


@dataclass(frozen=True)
class NodeBefore:
    """The node whose snapshots are copied: its index, where it serves its memory (`port` 0: it does not), its ranks."""

    node: int
    address: str
    port: int
    secret: str = field(repr=False)
    ranks: range


@dataclass(frozen=True)
class Shelf:
    """What the fd store keeps. `borrow(rank)` gives a new descriptor, None = it has no snapshots of that rank; `keep(rank, fd)` takes over
    a new segment."""

    borrow: Callable[[int], int | None]
    keep: Callable[[int, int], None]


class Copies:
    """One per fd store. `tell` hears why there are no copies, once until there are again."""

    def __init__(self, board: Board, held: Shelf, tell: Callable[[str], None]) -> None:
        self._board = board
        self._held = held
        self._tell = tell
        self._source: NodeBefore | None = None
        self._lock = threading.Lock()  # around the next two, the words of the board, and what is kept
        self._times = 0  # how often the fd store dropped everything
        self._thread: threading.Thread | None = None
        self._told = False

    def follow(self, source: NodeBefore) -> None:
        """Copy the snapshots of this node's ranks from now on. The copies that there are stay: a spare node takes a lost one's place."""
        with self._lock:
            self._source = source
        self._show()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ftrun-copies", daemon=True)
            self._thread.start()
        self._board.copies_bell.ring()

    def dropped(self) -> None:
        """Hear that the fd store dropped all that it held."""
        with self._lock:
            self._times += 1
            self._board[Head.COPIES_AT] = 0
        self._show()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        done: tuple[NodeBefore, int, int] | None = None
        while True:
            seen = self._board.copies_bell.count()
            with self._lock:
                source, times = self._source, self._times  # before the look at the board: a drop comes after the end of its snapshots
            shown = self._board[Head.SNAPSHOT]
            if source is None or not source.port:
                self._over(times, shown)  # nobody waits for copies that nobody makes
            if source is None or not source.port or not shown or done == (source, times, shown):
                self._board.copies_bell.wait(seen, _AGAIN)
                continue
            try:
                self._copy_all(source, times, shown)
                self._over(times, shown)
                done, self._told = (source, times, shown), False
            except (OSError, ValueError) as error:
                self._over(times, shown)
                self._failed(source, error)
                self._board.copies_bell.wait(seen, _AGAIN)

    def _over(self, times: int, shown: int) -> None:
        """Let the ranks take the next snapshots."""
        with self._lock:
            if self._times == times:
                self._board[Head.COPIES_AT] = shown

    def _failed(self, source: NodeBefore, error: Exception) -> None:
        if self._source == source and not self._told:
            self._told = True
            self._tell(f"node {source.node}'s host snapshots are not copied, and would be lost with it: {error}")

    def _copy_all(self, source: NodeBefore, times: int, shown: int) -> None:
        """Make the copies of a step whole, and forget those of later steps, from which all ranks went back."""
        found = {rank: self._held.borrow(rank) for rank in source.ranks}
        fresh: dict[int, int] = {}
        try:
            for fd in found.values():
                for half, head in heads(fd).items() if fd is not None else ():
                    if head.seal > shown:
                        os.pwrite(fd, bytes(8), half)  # type: ignore[arg-type]
            kept = max(self._show(), default=0)
            missing = [rank for rank, fd in found.items() if fd is None or shown not in (head.seal for head in heads(fd).values())]
            if missing:
                with contextlib.closing(far.FarLine((source.address, source.port), source.secret)) as line:
                    for rank in missing:
                        made = _copy(line, rank, shown, found[rank], kept)
                        if made is not None:
                            fresh[rank] = made
            with self._lock:
                while fresh and self._times == times:  # else they are of an earlier world
                    self._held.keep(*fresh.popitem())
        finally:
            for fd in (*found.values(), *fresh.values()):
                if fd is not None:
                    os.close(fd)
        self._show()

    def _show(self) -> list[int]:
        """Show of which steps there are copies of all ranks of the node before; return their seals."""
        with self._lock:
            each = []
            for rank in self._source.ranks if self._source is not None else ():
                fd = self._held.borrow(rank)
                each.append({head.seal for head in heads(fd).values()} - {0} if fd is not None else set())
                if fd is not None:
                    os.close(fd)
            whole = sorted(set.intersection(*each)) if each else []
            for at, seal in enumerate([*whole, 0, 0][: len(layout.HALVES)]):
                self._board[Head.COPIES + at] = seal
            return whole


def heads(fd: int) -> dict[int, layout.HalfHead]:
    """Return the heads of the two halves of a segment, by the places of the halves."""
    places = (half * (os.fstat(fd).st_size // 2) for half in layout.HALVES)
    return {at: layout.head(os.pread(fd, layout.HEAD_BYTES, at)) for at in places}


def _copy(line: far.FarLine, rank: int, seal: int, into: int | None, kept: int) -> int | None:
    """Copy one rank's snapshot into a segment, not over the one with the seal `kept`; or into a new one, which is returned, if that
    does not fit.

    Raises:
        OSError
        ValueError: What came is no snapshot.
    """
    length = line.size(rank, layout.NAME)
    if length is None:
        raise OSError(f"it has none of rank {rank}")
    room = bytearray(far.CHUNK)

    def read(at: int, size: int) -> bytearray:
        data = bytearray(size)
        line.read(rank, layout.NAME, [(at, size)], lambda place, part: memoryview(data)[place - at : place - at + part])
        return data

    theirs = {at: _head(read, at) for at in (0, length // 2)}
    begin = next((at for at, head in theirs.items() if head.seal == seal), None)
    if begin is None:
        raise OSError(f"it has none of step {seal - 1} of rank {rank} any more")
    head = theirs[begin]
    if head.length > layout.PIECES_AT - layout.FACTS_AT:
        raise ValueError(f"rank {rank} sent what is no host snapshot")
    facts = read(begin + layout.FACTS_AT, head.length)
    if native.checksum(ctypes.addressof(ctypes.c_char.from_buffer(facts)), len(facts)) != head.sum:
        raise ValueError(f"what describes rank {rank}'s does not match its checksum")
    pieces = layout.pieces(facts, length // 2)
    fits = into is not None and os.fstat(into).st_size == length
    fd = into if into is not None and fits else os.memfd_create(f"ftrun-snapshot-{rank}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, length)
        _check_room(2 * sum(size for _, size in pieces) - os.fstat(fd).st_blocks * 512)
        to = min((head.seal, at) for at, head in heads(fd).items() if not kept or head.seal != kept)[1]  # an empty one, or the older one
        os.pwrite(fd, bytes(8), to)
        places = [(begin + at, size) for at, size in pieces]
        line.read(rank, layout.NAME, places, lambda _, size: memoryview(room)[:size], lambda at, part: _write(fd, part, at - begin + to))
        _write(fd, facts, to + layout.FACTS_AT)
        if _head(read, begin) != head:
            raise OSError(f"rank {rank} took another one meanwhile")
        _write(fd, head.pack()[8:], to + 8)
        _write(fd, head.pack()[:8], to)
    except BaseException:
        if not fits:
            os.close(fd)
        raise
    return None if fits else fd


def _head(read: Callable[[int, int], bytearray], at: int) -> layout.HalfHead:
    return layout.head(read(at, layout.HEAD_BYTES))


def _write(fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def _check_room(needed: int) -> None:
    """Raise OSError if there is no room for so many more bytes."""
    left = memory_left()
    if left is not None and left < needed:
        raise OSError(f"the copies of a rank need {size(needed)} more of shared memory, and the memory limit (cgroup) leaves {size(left)}")
