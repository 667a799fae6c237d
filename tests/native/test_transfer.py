"""The transfer engine between real processes: what arrives, and who is hurt when one of them dies or disagrees."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from ftrun import native
from ftrun.native import transfer
from ftrun.native.transfer import CHECK_BACK, CHECK_NONE, CHECK_READ, Facts, Terms, TransferError
from tests.native.conftest import Children, until

MIB = 1 << 20
COUNT = 4
TOTAL = 24 * MIB + 4321
OK, WRONG = 0, 77


def _anonymous(size: int) -> int:
    """Zeroed memory that forked children share; lives until the test process ends its mapping."""
    fd = os.memfd_create("ftrun-test")
    os.ftruncate(fd, size)
    address = native.map_fd(fd, size)
    os.close(fd)
    return address


@pytest.fixture
def shared() -> Iterator[Callable[[int], int]]:
    """shared(size): address of shared memory, unmapped after the test."""
    made: list[tuple[int, int]] = []

    def make(size: int) -> int:
        made.append((_anonymous(size), size))
        return made[-1][0]

    yield make
    for address, size in made:
        native.unmap(address, size)


@pytest.fixture
def state(shared: Callable[[int], int]) -> int:
    """Address of TOTAL random bytes."""
    address = shared(TOTAL)
    data = np.random.default_rng(5).integers(0, 256, TOTAL, dtype=np.uint8)
    native.copy(address, data.ctypes.data, TOTAL)
    return address


def same(a: int, b: int) -> bool:
    return ctypes.string_at(a, TOTAL) == ctypes.string_at(b, TOTAL)


class Exchange:
    """An exchange of `state` between COUNT children; each has memory of its own for what it receives."""

    def __init__(self, state: int, shared: Callable[[int], int], **facts: Any) -> None:
        self.state = state
        self.facts = replace(Facts(COUNT, MIB, TOTAL, generation=7, step=3, layout=99), **facts)
        self.ring = shared(self.facts.ring_bytes)
        self.facts.prepare(self.ring)
        self.targets = [shared(TOTAL) for _ in range(COUNT)]
        self.blamed = shared(4096)  # + 8 * participant: whom it blamed, plus 1

    def run(self, me: int, terms: Terms | None = None, facts: Facts | None = None) -> int:
        """In a child: 0, or the errno."""
        facts = facts or self.facts
        offset, size = facts.share(me)
        share = [(self.state + offset, size)] if size else []
        try:
            facts.run(self.ring, me, share, [(self.targets[me], TOTAL)], terms or Terms(timeout=30))
        except TransferError as error:
            native.store64(self.blamed + 8 * me, error.failed + 1)
            return int(error.errno or WRONG)
        return OK if same(self.targets[me], self.state) else WRONG

    def start(self, children: Children, who: int, terms: Terms | None = None) -> int:
        return children.fork(lambda: os._exit(self.run(who, terms)))

    def progress(self, who: int) -> transfer.Progress:
        return transfer.look(self.ring, who)


def codes(children: Children, pids: dict[int, int]) -> dict[int, int]:
    return {who: children.wait(pid) for who, pid in pids.items()}


# ---- what arrives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [-1, 0, 3])
def test_everybody_gets_the_whole(state: int, shared: Callable[[int], int], children: Children, source: int) -> None:
    exchange = Exchange(state, shared, source=source)
    pids = {who: exchange.start(children, who) for who in range(COUNT)}
    assert set(codes(children, pids).values()) == {OK}


def test_the_times_of_every_chunk_are_noted(state: int, shared: Callable[[int], int], children: Children) -> None:
    """Each chunk of one's own is loaded, then broadcast, then reloaded; a chunk of another is reloaded after its broadcast."""
    exchange, noted = Exchange(state, shared), shared(COUNT << 16)

    def take_part(me: int) -> None:
        begin = time.monotonic_ns()
        offset, size = exchange.facts.share(me)
        source, to = [(state + offset, size)], [(exchange.targets[me], TOTAL)]
        spans = exchange.facts.run(exchange.ring, me, source, to, Terms(timeout=30, spans=100)).spans
        assert all(begin <= s.begin <= s.end <= time.monotonic_ns() for s in spans)
        data = json.dumps([[s.stage, s.source, s.begin, s.end] for s in spans]).encode()
        ctypes.memmove(noted + (me << 16), data + b"\0", len(data) + 1)
        os._exit(OK)

    pids = {who: children.fork(partial(take_part, who)) for who in range(COUNT)}
    assert set(codes(children, pids).values()) == {OK}
    spans = [json.loads(ctypes.string_at(noted + (who << 16))) for who in range(COUNT)]
    chunks = [-(-exchange.facts.share(who)[1] // MIB) for who in range(COUNT)]
    broadcast = {}
    for me in range(COUNT):
        loads, sent = ([s for s in spans[me] if s[0] == stage] for stage in (transfer.LOAD, transfer.BROADCAST))
        assert len(loads) == len(sent) == chunks[me] and {s[1] for s in loads + sent} == {me}
        assert all(load[3] <= send[2] for load, send in zip(loads, sent, strict=True))
        broadcast[me] = sent
    for me in range(COUNT):
        for source in range(COUNT):
            taken = [s for s in spans[me] if s[0] == transfer.RELOAD and s[1] == source]
            assert len(taken) == chunks[source]
            assert all(send[3] <= take[2] for send, take in zip(broadcast[source], taken, strict=True))


def test_no_more_times_are_kept_than_wanted(state: int, shared: Callable[[int], int], children: Children) -> None:
    exchange = Exchange(state, shared)

    def take_part(me: int) -> None:
        offset, size = exchange.facts.share(me)
        to = [(exchange.targets[me], TOTAL)]
        done = exchange.facts.run(exchange.ring, me, [(state + offset, size)], to, Terms(timeout=30, spans=3))
        os._exit(OK if len(done.spans) == 3 and same(exchange.targets[me], state) else WRONG)

    pids = {who: children.fork(partial(take_part, who)) for who in range(COUNT)}
    assert set(codes(children, pids).values()) == {OK}


def test_shares_cover_the_whole_once() -> None:
    for total in (0, 1, 4096, 4097, TOTAL):
        for count in (1, 2, 3, 7):
            shares = [Facts(count, MIB, total).share(who) for who in range(count)]
            assert sum(size for _, size in shares) == total
            assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(shares))


@pytest.mark.parametrize("check", [CHECK_NONE, CHECK_READ, CHECK_BACK])
def test_a_copy_between_differently_cut_extents(state: int, shared: Callable[[int], int], check: int) -> None:
    target, moved = shared(TOTAL), shared(4096)
    cuts = [0, 1, 100, 5000, 5000, 9 * MIB + 3, TOTAL]
    rows = [(a, b - a) for a, b in itertools.pairwise(cuts)]
    done = transfer.copy(
        [(target + at, size) for at, size in rows], [(state, TOTAL)], Terms(chunk=MIB, check=check, moved=moved)
    )
    assert same(target, state)
    assert done.bytes == TOTAL == native.load64(moved) and done.chunks == -(-TOTAL // MIB)
    assert (done.checksum != 0) == (check != CHECK_NONE)


def test_chunks_are_chosen_by_size_and_room() -> None:
    assert transfer.chunk_size(64 << 30) == 256 * MIB
    assert transfer.chunk_size(600 * MIB) == 75 * MIB
    assert transfer.chunk_size(400 * MIB) == 64 * MIB
    assert transfer.chunk_size(40 * MIB) == 10 * MIB  # four, or the stages could not overlap
    assert transfer.chunk_size(64 << 30, room=48 * MIB) == 16 * MIB
    assert transfer.chunk_size(1) == MIB


# ---- deaths: at each stage, of each role -------------------------------------------------------------------------------

STAGES: dict[str, Callable[[transfer.Progress], bool]] = {
    "load": lambda p: p.state == 1,
    "broadcast": lambda p: p.produced >= 1,
    "reload": lambda p: p.consumed >= 2,
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_source_dies(state: int, shared: Callable[[int], int], children: Children, stage: str) -> None:
    """Nobody receives half a state unnoticed, all name the dead one, and the next source serves them."""
    exchange = Exchange(state, shared, source=1)
    source = exchange.start(children, 1)
    if stage == "load":  # nobody takes anything yet, so that it gets no further than its buffers
        until(lambda: STAGES[stage](exchange.progress(1)))
        children.kill(source)
        assert children.wait(source) == -signal.SIGKILL
    pids = {who: exchange.start(children, who) for who in (0, 2, 3)}
    if stage != "load":
        os.kill(pids[2], signal.SIGSTOP)  # holds the source at two chunks beyond what this one took
        until(lambda: STAGES[stage](exchange.progress(1)))
        children.kill(source)
        assert children.wait(source) == -signal.SIGKILL
        os.kill(pids[2], signal.SIGCONT)
    assert codes(children, pids) == {0: errno.EPIPE, 2: errno.EPIPE, 3: errno.EPIPE}
    assert [native.load64(exchange.blamed + 8 * who) for who in (0, 2, 3)] == [2, 2, 2]
    after = Exchange(state, shared, source=2, generation=8)
    again = {who: after.start(children, who) for who in range(COUNT)}
    assert set(codes(children, again).values()) == {OK}


@pytest.mark.parametrize("stage", ["load", "broadcast", "reload"])
def test_a_receiver_dies(state: int, shared: Callable[[int], int], children: Children, stage: str) -> None:
    """It hurts nobody else."""
    exchange = Exchange(state, shared, source=1)
    victim = exchange.start(children, 3)
    until(lambda: exchange.progress(3).state == 1)
    if stage == "load":
        children.kill(victim)
    else:
        os.kill(victim, signal.SIGSTOP)
    pids = {who: exchange.start(children, who) for who in (0, 1, 2)}
    if stage != "load":
        until(lambda: exchange.progress(1).produced >= (1 if stage == "broadcast" else 2))
        children.kill(victim)
    assert children.wait(victim) == -signal.SIGKILL
    assert codes(children, pids) == {0: OK, 1: OK, 2: OK}


@pytest.mark.parametrize("stage", STAGES)
def test_one_dies_in_a_reload_from_the_host(
    state: int, shared: Callable[[int], int], children: Children, stage: str
) -> None:
    """Everyone is a source there: the others cannot have its share, and say whose it is."""
    exchange = Exchange(state, shared)
    victim = exchange.start(children, 2)
    until(lambda: exchange.progress(2).state == 1)
    os.kill(victim, signal.SIGSTOP)
    pids = {who: exchange.start(children, who) for who in (0, 1, 3)}
    if stage != "load":
        until(lambda: exchange.progress(0).produced >= 2)
    if stage == "reload":
        os.kill(victim, signal.SIGCONT)
        until(lambda: STAGES[stage](exchange.progress(2)) or exchange.progress(2).state != 1)
    children.kill(victim)
    found = codes(children, pids)
    if stage == "reload" and children.wait(victim) == OK:
        assert set(found.values()) == {OK}  # it was quicker than the kill
        return
    assert set(found.values()) <= {errno.EPIPE, OK}
    assert stage == "reload" or set(found.values()) == {errno.EPIPE}
    assert all(native.load64(exchange.blamed + 8 * who) == 3 for who, code in found.items() if code)


def test_a_participant_that_never_comes(state: int, shared: Callable[[int], int], children: Children) -> None:
    exchange = Exchange(state, shared, source=1)
    pid = exchange.start(children, 0, Terms(timeout=0.2))
    assert children.wait(pid) == errno.ETIMEDOUT
    assert native.load64(exchange.blamed) == 2


def test_a_stopped_world_ends_it(state: int, shared: Callable[[int], int], children: Children) -> None:
    exchange = Exchange(state, shared, source=1)
    word = shared(4096)
    native.store64(word, 7 << 41)
    pid = exchange.start(children, 0, Terms(timeout=60, watch=(word, 41, 7)))
    until(lambda: exchange.progress(0).state == 1)
    native.store64(word, 8 << 41 | 5)
    assert children.wait(pid) == errno.ECANCELED


# ---- disagreement ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"layout": 98}, errno.EPROTO),
        ({"total": TOTAL - 1}, errno.EPROTO),
        ({"generation": 6}, errno.ESTALE),
        ({"step": 4}, errno.ESTALE),
    ],
)
def test_another_layout_or_world_is_refused(
    state: int, shared: Callable[[int], int], change: dict[str, Any], code: int
) -> None:
    exchange = Exchange(state, shared, source=1)
    assert exchange.run(0, facts=replace(exchange.facts, **change)) == code
    assert exchange.progress(0).state == 0


def test_two_in_one_place_are_refused(state: int, shared: Callable[[int], int], children: Children) -> None:
    exchange = Exchange(state, shared, source=1)
    first = exchange.start(children, 0)
    until(lambda: exchange.progress(0).state == 1)
    assert children.wait(exchange.start(children, 0)) == errno.EBUSY
    children.kill(first)
    assert children.wait(first) == -signal.SIGKILL


def test_different_sizes_are_refused(state: int, shared: Callable[[int], int]) -> None:
    with pytest.raises(TransferError) as caught:
        transfer.copy([(shared(4096), 4096)], [(state, 4095)])
    assert caught.value.errno == errno.EPROTO


def test_a_damaged_buffer_is_noticed(state: int, shared: Callable[[int], int], children: Children) -> None:
    """Somebody scribbles into the shared buffers before they are read: the checksum is that of what was read."""
    exchange = Exchange(state, shared, source=1)
    source = children.fork(lambda: os._exit(_send_only(exchange, 1)))
    until(
        lambda: exchange.progress(1).produced == 2
    )  # its buffers are full, and nobody is there to take what is in them
    first = exchange.ring + exchange.facts.control_bytes + transfer.BUFFERS * 1 * MIB
    native.store64(first + MIB // 2, native.load64(first + MIB // 2) ^ 1)
    for who in (0, 2, 3):
        assert children.wait(exchange.start(children, who)) == errno.EBADMSG
        assert native.load64(exchange.blamed + 8 * who) == 1 + 1
    # they take no more: the source ends without them
    assert children.wait(source) == OK


def _send_only(exchange: Exchange, me: int) -> int:
    try:
        exchange.facts.run(exchange.ring, me, [(exchange.state, TOTAL)], [], Terms(timeout=20))
    except TransferError as error:
        return int(error.errno or WRONG)
    return OK


def test_a_writer_that_was_not_fenced_is_noticed(state: int, shared: Callable[[int], int], children: Children) -> None:
    """Reading back finds what another process wrote over the copy meanwhile."""
    target, go = shared(TOTAL), shared(4096)

    def scribble() -> None:
        value = 0
        while True:
            for offset in range(0, TOTAL - 8, 4096):  # a word of every page
                native.store64(target + offset, value)
            value += 1
            native.store64(go, value)

    writer = children.fork(scribble)
    until(lambda: native.load64(go) > 1)

    def noticed() -> bool:
        try:
            transfer.copy([(target, TOTAL)], [(state, TOTAL)], Terms(chunk=MIB, check=CHECK_BACK))
        except TransferError as error:
            return error.errno == errno.EBADMSG
        return False

    until(noticed)  # on a busy machine the writer may not run at all during one copy
    children.kill(writer)
    assert children.wait(writer) == -signal.SIGKILL


def test_no_time_no_copy(state: int, shared: Callable[[int], int]) -> None:
    with pytest.raises(TransferError) as caught:
        transfer.copy([(shared(TOTAL), TOTAL)], [(state, TOTAL)], Terms(timeout=0))
    assert caught.value.errno == errno.ETIMEDOUT
