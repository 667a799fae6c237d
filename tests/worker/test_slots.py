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
