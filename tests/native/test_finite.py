"""Infinities and NaNs are found wherever they are, in every format, and nothing else is taken for one."""

from __future__ import annotations

from array import array

import pytest
import torch

from ftrun import native

SIZES = (0, 1, 7, 4096, 4097, 12_345)


@pytest.mark.parametrize("name", native.FLOAT_FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_one_is_found(name: str, value: float) -> None:
    dtype = getattr(torch, name)
    for size in SIZES:
        numbers = torch.randn(size).to(dtype)
        assert native.find_nonfinite(numbers.data_ptr(), size, name) == -1
        for at in {0, size // 2, size - 1} if size else ():
            bad = numbers.clone()
            bad[at] = value
            bad[size - 1] = value
            assert native.find_nonfinite(bad.data_ptr(), size, name) == at


@pytest.mark.parametrize("name", native.FLOAT_FORMATS)
def test_the_largest_and_smallest_numbers_are_finite(name: str) -> None:
    info = torch.finfo(getattr(torch, name))
    numbers = torch.tensor([info.max, info.min, info.tiny, 0.0, -0.0], dtype=getattr(torch, name))
    assert native.find_nonfinite(numbers.data_ptr(), numbers.numel(), name) == -1


def test_the_array_is_named_that_holds_one() -> None:
    tensors = [torch.randn(n) for n in (5, 4096, 0, 9000)]

    def look() -> int:
        addresses = array("Q", [t.data_ptr() for t in tensors])
        return native.find_nonfinite_each(addresses, array("Q", [t.numel() for t in tensors]), "float32")

    assert look() == -1
    tensors[3][8999] = float("nan")
    assert look() == 3
    tensors[1][0] = float("inf")
    assert look() == 1


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(KeyError):
        native.find_nonfinite(0, 0, "int8")
