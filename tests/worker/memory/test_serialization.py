"""Kinds of tensors whose values do not lie in their own memory as they are."""

from __future__ import annotations

import pytest
import torch

from ftrun.worker.memory import serialization


def test_a_sparse_tensor_keeps_its_parts() -> None:
    """Also where one place has two values, which are added up in an order."""
    places, values = torch.tensor([[1, 1, 4]]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    loose = torch.sparse_coo_tensor(places, values, (6, 2), check_invariants=False)
    for whole in (loose, loose.coalesce()):
        (made,) = serialization.decode(serialization.pack([whole], "gradients"))
        assert made.is_coalesced() == whole.is_coalesced() and made._nnz() == whole._nnz()
        assert torch.equal(made.to_dense(), whole.to_dense())


def test_lazy_complex_tensors_keep_their_values() -> None:
    whole = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (whole.conj(), whole.conj().imag):
        (made,) = serialization.decode(serialization.pack([lazy], "gradients"))
        assert torch.equal(made, lazy.resolve_conj().resolve_neg())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_other_layouts_are_not_taken() -> None:
    assert serialization.takes(torch.ones(2)) and serialization.takes(torch.ones(2).to_sparse())
    assert not serialization.takes(torch.eye(2).to_sparse_csr())


def test_a_tensor_that_was_packed_can_still_be_resized() -> None:
    tensor = torch.ones(3)
    data = serialization.pack([tensor, tensor[1:]], "x")
    assert tensor.resize_(1000).numel() == 1000
    assert [part.tolist() for part in serialization.decode(data)] == [[1.0] * 3, [1.0] * 2]
