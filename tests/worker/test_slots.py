"""A slot holds plain values and, behind them, what generators keep in memory; also when gradients make it large."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ftrun.core.errors import WorkerError
from ftrun.worker import codec, rng
from ftrun.worker.ledger import read_state
from ftrun.worker.slots import END, GATE, Slots


@pytest.mark.parametrize("size", [0, 3 << 20])
def test_what_is_read_is_what_was_there_when_it_was_sealed(size: int) -> None:
    slots = Slots.create(0)
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    before = rng.capture()
    mark, ranges = rng.look()
    assert mark == rng.mark_of(before)
    slots.write(END, 7, codec.plain({"rng": mark[1], "grads": b"g" * size}), ranges)
    wanted = random.random(), float(np.random.rand()), float(torch.rand(()))
    assert rng.look()[0] != mark
    saved = read_state(slots, END)
    assert slots.tag(END) == 7 and slots.tag(GATE) == -1
    assert saved == {"rng": before, "grads": b"g" * size}
    rng.apply(saved["rng"])
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == wanted


def test_a_slot_that_was_overwritten_is_noticed() -> None:
    slots = Slots.create(0)
    mark, ranges = rng.look()
    slots.write(END, 0, codec.plain({"rng": mark[1]}), ranges)
    slots.data(END)[-1] ^= 1
    with pytest.raises(WorkerError, match="overwritten"):
        read_state(slots, END)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_mark_tells_every_draw(backwards: bool) -> None:
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
    seen = [rng.look()[0]]
    for draw in [*reversed(draws)] if backwards else draws:
        draw()
        seen.append(rng.look()[0])
        assert seen[-1] == rng.look()[0] == rng.mark_of(rng.capture())
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


def test_a_normal_that_is_put_back_is_seen() -> None:
    """It is cached, taken, and cached again by `apply`, all at the same position of the generator."""
    np.random.seed(4)
    torch.manual_seed(5)
    np.random.randn()
    torch.randn(1, dtype=torch.float64)
    cached = rng.capture()
    mark = rng.look()[0]
    wanted = np.random.randn()
    assert rng.look()[0] != mark
    rng.apply(cached)
    assert rng.look()[0] == mark == rng.mark_of(rng.capture())
    assert rng.capture()["numpy_normal"] == cached["numpy_normal"]
    assert np.random.randn() == wanted


def test_what_leaves_the_streams_alone_leaves_the_mark() -> None:
    torch.manual_seed(5)
    mark = rng.look()[0]
    with torch.random.fork_rng():
        torch.randn(3)
    torch.set_rng_state(torch.get_rng_state())
    assert rng.look()[0] == mark == rng.mark_of(rng.capture())


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "SFC64", "MT19937"])
def test_numpy_may_have_another_generator(kind: str) -> None:
    usual = np.random.mtrand._rand._bit_generator
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(5))
        np.random.randn()  # one of two: the other is kept
        slots = Slots.create(0)
        mark, ranges = rng.look()
        slots.write(END, 0, codec.plain({"rng": mark[1]}), ranges)
        wanted = [float(np.random.randn()), *np.random.rand(3).tolist()]
        assert rng.look()[0] != mark
        rng.apply(read_state(slots, END)["rng"])
        assert [float(np.random.randn()), *np.random.rand(3).tolist()] == wanted
    finally:
        np.random.set_bit_generator(usual)
