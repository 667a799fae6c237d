"""Walk over nested values, and hash the values of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ftrun import native

_WHOLE = 1 << 18  # numbers up to which `sketch` reads all
_PIECE, _PIECES = 2048, 32  # numbers of a piece, and pieces, of larger tensors


def leaves(value: Any) -> Iterator[Any]:
    """Yield everything in nested mappings, lists and tuples that is none of these."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif hasattr(value, "data") and isinstance(value.data, Mapping):  # UserDict and its subclasses
        yield from leaves(value.data)
    else:
        yield value


def checksum(tensor: torch.Tensor, seed: int = 0) -> int | None:
    """Hash the bytes of a dense tensor on the host to 64 bits; None for any other. `seed` chains several."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    data = tensor.detach().contiguous()
    size = data.numel() * data.element_size()
    return native.checksum(data.data_ptr(), size, seed) if size else seed


def sketch(tensor: torch.Tensor, seed: int = 0) -> int | None:
    """Hash as `checksum` does, but only pieces spread over a large tensor: detects another batch, not every changed number."""
    size = tensor.numel()
    if size <= _WHOLE or not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return checksum(tensor, seed)
    pieces = tensor.detach().view(-1).unfold(0, _PIECE, (size - _PIECE) // (_PIECES - 1))
    return checksum(pieces, seed)


def content(tensor: torch.Tensor | None, seed: int = 0) -> int | None:
    """Hash the values of a tensor on any device and in any layout to 64 bits; None for None. `seed` chains several."""
    if tensor is None:
        return None
    whole = tensor.detach()
    return checksum((whole if whole.layout is torch.strided else whole.to_dense()).cpu(), seed)
