"""A slot holds plain values, the random streams among them; also when gradients make it large."""

from __future__ import annotations

import mmap
import random

import numpy as np
import pytest
import torch

from ftrun.core.errors import WorkerError
from ftrun.worker.memory import serialization
from ftrun.worker.repair import recovery_points
from ftrun.worker.repair.recovery_points import END, GATE, Slots
from ftrun.worker.state import rng

LOG = recovery_points._LOG * recovery_points._ROOM + mmap.PAGESIZE  # where its first record begins


@pytest.mark.parametrize("size", [0, 3 << 20])
def test_what_is_read_is_what_was_there_when_it_was_sealed(size: int) -> None:
    slots = Slots.create(0)
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    before = rng.capture()
    slots.write(END, 7, serialization.pack({"rng": before, "grads": b"g" * size}, ""))
    wanted = random.random(), float(np.random.rand()), float(torch.rand(()))
    assert rng.capture() != before
    saved = slots.read(END)
    assert slots.tag(END) == 7 and slots.tag(GATE) == -1
    assert saved == {"rng": before, "grads": b"g" * size}
    rng.apply(saved["rng"])
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == wanted


@pytest.mark.parametrize("size", [0, 3 << 20])
def test_a_slot_that_was_overwritten_is_noticed(size: int) -> None:
    slots = Slots.create(0)
    slots.write(END, 0, serialization.pack({"rng": rng.capture(), "grads": b"g" * size}, ""))
    slots.data(END)[-1] ^= 1
    with pytest.raises(WorkerError, match="overwritten"):
        slots.read(END)


@pytest.mark.parametrize("backwards", [False, True])
def test_the_state_tells_every_draw(backwards: bool) -> None:
    """A normal that was drawn before and is taken now moves no position; seeding anew moves all words."""
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    draws = [
        random.random,
        lambda: random.gauss(0, 1),  # draws two
        lambda: random.gauss(0, 1),  # takes the second
        np.random.rand,
        np.random.randn,  # draws two
        np.random.randn,  # takes the second
        lambda: torch.rand(()),
        lambda: torch.randn(()),  # draws two
        lambda: torch.randn(()),  # takes the second
        lambda: torch.rand(624 * 5),  # to the same position
        lambda: [random.getrandbits(32) for _ in range(624)],
        lambda: np.random.bytes(4 * 624),
        lambda: random.seed(6),
        lambda: np.random.seed(6),
        lambda: torch.manual_seed(6),
    ]
    seen = [rng.capture()]
    for draw in [*reversed(draws)] if backwards else draws:
        draw()
        seen.append(rng.capture())
        assert seen[-1] == rng.capture()
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


def test_a_normal_that_is_put_back_is_seen() -> None:
    """It is cached, taken, and cached again by `apply`, all at the same position of the generator."""
    np.random.seed(4)
    torch.manual_seed(5)
    np.random.randn()
    torch.randn(1, dtype=torch.float64)
    cached = rng.capture()
    wanted = np.random.randn()
    assert rng.capture() != cached
    rng.apply(cached)
    assert rng.capture() == cached
    assert np.random.randn() == wanted


def test_what_leaves_the_streams_alone_leaves_the_state() -> None:
    torch.manual_seed(5)
    before = rng.capture()
    with torch.random.fork_rng():
        torch.randn(3)
    torch.set_rng_state(torch.get_rng_state())
    assert rng.capture() == before


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "SFC64", "MT19937"])
def test_numpy_may_have_another_generator(kind: str) -> None:
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(5))
        np.random.randn()  # one of two: the other is kept
        slots = Slots.create(0)
        before = rng.capture()
        slots.write(END, 0, serialization.pack({"rng": before}, ""))
        wanted = [float(np.random.randn()), *np.random.rand(3).tolist()]
        assert rng.capture() != before
        rng.apply(slots.read(END)["rng"])
        assert [float(np.random.randn()), *np.random.rand(3).tolist()] == wanted
    finally:
        np.random.set_bit_generator(usual)


def _logged(*records: bytes) -> Slots:
    slots = Slots.create(0)
    for record in records:
        slots.log.append(serialization.plain(record))
    return slots


def test_a_log_grows_by_records() -> None:
    slots = _logged()
    assert slots.log.used == 0 and [*map(serialization.decode, slots.log.records())] == []
    slots = _logged(b"first", b"", b"s" * (3 << 20))
    assert [*map(serialization.decode, slots.log.records())] == [b"first", b"", b"s" * (3 << 20)]


def test_a_record_that_was_overwritten_is_noticed() -> None:
    slots = _logged(b"first", b"second")
    before = slots.log.used
    slots.log.append(serialization.plain(b"third"))
    records = map(serialization.decode, slots.log.records())
    assert next(records) == b"first"
    slots.segment.view(LOG + before - 1, 1)[0] ^= 1
    with pytest.raises(WorkerError, match="overwritten"):
        list(records)


def test_a_record_that_is_not_whole_does_not_count() -> None:
    """A rank that dies while it appends has changed only what lies behind the log's end."""
    slots = _logged(b"first")
    slots.segment.view(LOG + slots.log.used, 16)[:] = b"\xff" * 16
    assert [*map(serialization.decode, slots.log.records())] == [b"first"]
    slots.log.append(serialization.plain(b"second"))
    assert [*map(serialization.decode, slots.log.records())] == [b"first", b"second"]
