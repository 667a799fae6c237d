"""Wrap memory that torch did not allocate in tensors, through DLPack and without a link to libtorch."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any

import torch

from ftrun.worker.torch_compat.torch_private import capsule

_CPU, _CUDA = 1, 2
_UNSIGNED = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
        ("context", c_void_p),
        ("deleter", c_void_p),
    )


_kept: list[Any] = []  # torch reads these descriptions as long as their tensors live; each takes a few dozen bytes


def tensor(address: int, size: int, gpu: int | None) -> torch.Tensor:
    """Make a uint8 tensor over `size` bytes at `address` on that GPU (None = the CPU). The memory must outlive it."""
    shape = (c_int64 * 1)(size)
    described = _Tensor(
        address, _CPU if gpu is None else _CUDA, gpu or 0, 1, _UNSIGNED, 8, 1, shape, None, 0, None, None
    )
    _kept.append((described, shape))
    return torch.utils.dlpack.from_dlpack(capsule(ctypes.addressof(described), b"dltensor"))


assert ctypes.sizeof(c_size_t) == 8, "DLPack's layout is written down for 64-bit systems"
