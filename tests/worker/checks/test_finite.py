"""Infinities and NaNs in gradients are found wherever they are, in every kind of gradient, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ftrun.worker.checks.finite_gradients import first_bad

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
