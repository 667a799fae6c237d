"""Infinities and NaNs in gradients are found wherever they are, in every kind of gradient, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftrun.core.shared.board import F, Phase
from ftrun.worker.checks.finite_gradients import FiniteGradients, first_bad

SHAPE = (4, 5)
FORMATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_first_one_is_named(dtype: torch.dtype, bad: float) -> None:
    for size in (1, 7, 4097):
        for at in {0, size // 2, size - 1}:
            last = torch.randn(size).to(dtype)
            assert first_bad([("w", torch.ones(SHAPE)), ("b", last)]) is None
            last[at] = bad
            last[-1] = bad
            assert first_bad([("w", torch.ones(SHAPE)), ("b", last)]) == ("b", at)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_largest_and_smallest_numbers_are_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    numbers = [info.max, info.max, info.tiny, 0.0, -0.0]
    assert first_bad([("w", torch.tensor(numbers, dtype=dtype))]) is None, "their sum is not"
    assert first_bad([("w", torch.tensor([*numbers, -float("inf")], dtype=dtype))]) == ("w", 5)


def test_infinities_of_both_signs_do_not_cancel() -> None:
    assert first_bad([("w", torch.tensor([1.0, float("inf"), -float("inf")]))]) == ("w", 1)


def test_what_has_no_infinities_is_left_alone() -> None:
    assert first_bad([]) is None
    assert first_bad([("i", torch.ones(3, dtype=torch.int64)), ("e", torch.empty(0))]) is None


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        pytest.param(lambda t: t.to_sparse(), 19, id="COO"),
        pytest.param(lambda t: t.to_sparse_csr(), 19, id="CSR"),
        pytest.param(lambda t: t.t(), 19, id="transposed"),
        pytest.param(lambda t: t[:, ::2], 11, id="with gaps"),
        pytest.param(lambda t: t.to_mkldnn(), 19, id="mkldnn"),
        pytest.param(lambda t: torch.nn.Parameter(t), 19, id="a subclass"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_every_kind_of_gradient_is_looked_at(kind: Callable[[torch.Tensor], torch.Tensor], at: int) -> None:
    grad = torch.ones(SHAPE)
    assert first_bad([("w", kind(grad))]) is None
    grad[-1, -1] = float("nan")
    assert first_bad([("w", kind(grad))]) == ("w", at)


class Looked(SimpleNamespace):
    """What a check in a body that nothing looks at as a whole sees of the others."""

    def spent(self, since: int) -> None: ...


def check(step_ns: int) -> tuple[FiniteGradients, Looked]:
    """A check whose budget is that of steps of this length, ns; in the first body everything is read."""
    words: dict[int, int] = {F.PHASE: Phase.BACKWARD}
    context: Any = SimpleNamespace(cell=SimpleNamespace(words=lambda: words), position=SimpleNamespace(attempt=0))
    looks = Looked(on=True, bodies=1, step_ns=step_ns)
    found = FiniteGradients(context, SimpleNamespace(few=[], params=[]), looks, "redo")  # type: ignore[arg-type]
    return found, looks


def sees(found: FiniteGradients, looks: Looked, bucket: torch.Tensor) -> bool:
    """Is a body's exchange of `bucket` found not to be finite?"""
    found.body_started()
    found.collective_started("allreduce", ([bucket],), [bucket])
    looks.on, looks.bodies = False, looks.bodies + 1
    return found._poisoned


def test_of_a_large_exchange_in_short_steps_a_part_is_read_another_one_each_time() -> None:
    found, looks = check(step_ns=1_000)  # pays for nothing: the least is read
    bucket = torch.ones(1 << 20)
    assert not sees(found, looks, bucket), "all of it was read"
    looks.on = True  # the next body knows what that took
    assert not sees(found, looks, bucket)
    bucket[777_777] = float("nan")
    turns = [sees(found, looks, bucket) for _ in range(2 * 16)]
    assert turns.count(True) == 2, "each part once in 16 turns"
    assert sees(found, looks, torch.full_like(bucket, float("inf"))), "a loss that is not finite is in every part"


def test_in_long_steps_all_of_it_is_read() -> None:
    found, looks = check(step_ns=60_000_000_000)
    bucket = torch.ones(1 << 20)
    assert not sees(found, looks, bucket)
    looks.on = True
    assert not sees(found, looks, bucket)
    bucket[777_777] = float("nan")
    assert all(sees(found, looks, bucket) for _ in range(5))
