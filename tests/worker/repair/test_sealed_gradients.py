"""Gradients that are sealed by one copy are read as those that were encoded."""

from __future__ import annotations

import pytest
import torch

from ftrun.core.errors import WorkerError
from ftrun.worker.memory import serialization
from ftrun.worker.repair.recovery_points import SEALED, Slots
from ftrun.worker.repair.sealed_gradients import SealedGradients

SHAPES = [(3, 4), (5,), (), (2, 3, 4, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


def grads(seed: int, missing: int = -1) -> list[torch.Tensor | None]:
    torch.manual_seed(seed)
    made: list[torch.Tensor | None] = [torch.randn(s).to(d) for s, d in zip(SHAPES, DTYPES, strict=True)]
    made[3] = torch.randn(2, 3, 4, 5).to(torch.float16).to(memory_format=torch.channels_last)
    if missing >= 0:
        made[missing] = None
    return made


def read(slots: Slots) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = serialization.decode(slots.sound(SEALED))
    return found


def same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return len(a) == len(b) and all(
        (x is None and y is None) or (x is not None and y is not None and x.dtype is y.dtype and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def test_each_seal_is_read_whole() -> None:
    slots, sealed = Slots.create(0), SealedGradients()
    turns = [(1, -1), (2, -1), (3, 1), (4, 1), (5, -1), (6, -1)]  # seed, and which is not there
    for step, (seed, missing) in enumerate(turns):
        wanted = grads(seed, missing)
        sealed.write(slots, step, wanted)
        assert slots.tag(SEALED) == step
        assert same(read(slots), wanted)
    other = Slots.create(0)  # as after a loss of the slots
    sealed.write(other, 9, grads(7))
    assert slots.tag(SEALED) == 5 and same(read(other), grads(7))


def test_a_sparse_gradient_may_have_another_size_each_time() -> None:
    slots, sealed = Slots.create(0), SealedGradients()
    for step, rows in enumerate([[0], [1, 2], [0, 1, 3]]):
        grad = torch.sparse_coo_tensor(torch.tensor([rows]), torch.ones(len(rows), 2) * step, (4, 2))
        sealed.write(slots, step, [grad, torch.full((2,), float(step))])
        found = read(slots)
        assert found[0] is not None and torch.equal(found[0].to_dense(), grad.to_dense())
        assert found[1] is not None and found[1].tolist() == [step, step]


def test_what_was_overwritten_is_noticed_after_a_copy_too() -> None:
    slots, sealed = Slots.create(0), SealedGradients()
    for step in range(2):
        sealed.write(slots, step, grads(step))
    slots.data(SEALED)[-1] ^= 1
    with pytest.raises(WorkerError, match="overwritten"):
        read(slots)
