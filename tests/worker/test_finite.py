"""The quick look at all gradients before an update: it takes plain ones, and leaves every other kind to the slow one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from ftrun.worker.vigil import Vigil

SHAPE = (4, 5)


def quick(grads: list[torch.Tensor]) -> bool:
    vigil = Vigil.__new__(Vigil)
    vigil._engine = SimpleNamespace(state=SimpleNamespace(tensors=[torch.zeros(SHAPE)]))  # type: ignore[assignment]
    return vigil._all_plain_and_finite(grads)


def test_plain_and_finite_ones_pass() -> None:
    assert quick([torch.ones(SHAPE), torch.full((3,), -1e38)]) and quick([])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_last_number_of_the_last_one_counts(bad: float) -> None:
    last = torch.ones(SHAPE)
    last[-1, -1] = bad
    assert not quick([torch.ones(SHAPE), last])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda t: t.to_sparse(), id="COO"),
        pytest.param(lambda t: t.to_sparse_csr(), id="CSR"),
        pytest.param(lambda t: t.t(), id="transposed"),
        pytest.param(lambda t: t.bfloat16(), id="another format"),
        pytest.param(lambda t: t.to_mkldnn(), id="mkldnn"),
        pytest.param(lambda t: t.to("meta"), id="without storage"),
        pytest.param(lambda t: torch.nn.Parameter(t), id="a subclass"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_other_kinds_are_left_to_the_slow_look(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not quick([torch.ones(SHAPE), other(torch.ones(SHAPE))])
