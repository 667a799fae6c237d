"""Convert nested Python values to bytes and back, without pickle: scalars, lists, tuples, dicts, bytes, tensors, arrays.

Values are copied deeply: the result shares no memory with the input. Plain values take a fast way (marshal, which
runs no code and knows no classes; one interpreter writes and reads it); values with tensors or arrays take JSON with
blobs. Equal values give equal bytes.
"""

from __future__ import annotations

import ctypes
import json
import marshal
import struct
from typing import Any

import numpy as np
import torch

from ftrun.core.errors import UsageError
from ftrun.worker.memory import composed
from ftrun.worker.torch_compat.torch_private import parts_of_sparse

_HEAD = struct.Struct("<QQ")  # length of the JSON part (or _PLAIN), number of blobs (or bytes)
_PLAIN = (1 << 64) - 1
_ALIGN = 16  # alignment of the first blob, bytes
_ATOMS = frozenset((int, bool, str, float, bytes, type(None)))
_KEYS = frozenset((int, str))
_MARSHAL_VERSION = 2  # later ones write back-references, whose bytes depend on reference counts


def encode(value: Any, name: str) -> list[bytes | memoryview]:
    """Return pieces whose concatenation `decode` reads.

    Raises:
        UsageError: If a value cannot be kept; the message names its key.
    """
    if _is_plain(value):
        return [plain(value)]
    blobs: list[memoryview] = []
    tree = json.dumps(_pack(value, name, blobs), separators=(",", ":")).encode()
    tree += b" " * (-(len(tree) + _HEAD.size + 8 * len(blobs)) % _ALIGN)
    sizes = struct.pack(f"<{len(blobs)}Q", *(b.nbytes for b in blobs))
    return [_HEAD.pack(len(tree), len(blobs)), sizes, tree, *blobs]


def plain(value: Any) -> bytes:
    """Pack values that are known to be plain: exact bool, int, float, str, bytes, None in lists, tuples and dicts."""
    data = marshal.dumps(value, _MARSHAL_VERSION)
    return _HEAD.pack(_PLAIN, len(data)) + data


def _is_plain(value: Any) -> bool:
    # marshal would accept an array as bytes. No recursion, for speed: a step packs a few of these
    left = [value]
    while left:
        one = left.pop()
        kind = type(one)
        if kind is list or kind is tuple:
            left += one
        elif kind is dict:
            if not _KEYS.issuperset(map(type, one)):
                return False
            left += one.values()
        elif kind not in _ATOMS:
            return False
    return True


def takes(tensor: torch.Tensor) -> bool:
    """Does `encode` know how this kind of tensor holds its values?"""
    return composed.is_plain(tensor) and tensor.layout in (torch.strided, torch.sparse_coo) and not tensor.is_quantized


def pack(value: Any, name: str) -> bytes:
    """Encode a value as one piece of bytes; see `encode`."""
    return b"".join(encode(value, name))


def decode(data: memoryview | bytes) -> Any:
    """Decode the bytes of `encode`; every tensor and array is a fresh copy."""
    data = memoryview(data)
    tree_length, count = _HEAD.unpack_from(data, 0)
    if tree_length == _PLAIN:
        return marshal.loads(data[_HEAD.size : _HEAD.size + count])  # noqa: S302 - private memory, our own writing
    sizes = struct.unpack_from(f"<{count}Q", data, _HEAD.size)
    at = _HEAD.size + 8 * count
    tree = json.loads(bytes(data[at : at + tree_length]))
    at += tree_length
    blobs = []
    for size in sizes:
        blobs.append(data[at : at + size])
        at += size
    return _unpack(tree, blobs)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """View a tensor's bytes without a copy, and without numpy(), which would fix the size of the script's memory against `resize_`."""
    found = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    found.holds = flat  # the view holds this, and this the memory
    return memoryview(found).cast("B")


def _pack(value: Any, name: str, blobs: list[memoryview]) -> Any:
    kind = type(value)
    if kind in (int, bool, str) or value is None:
        return value
    if kind is float:
        return value if value == value and abs(value) != float("inf") else {"~": "f", "v": repr(value)}
    if kind is list:
        return [_pack(v, name, blobs) for v in value]
    if kind is dict or (isinstance(value, dict) and kind.__name__ in ("OrderedDict", "defaultdict", "Counter")):
        return {"~": "d", "v": [[_key(k, name), _pack(v, f"{name}.{k}", blobs)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"~": "t", "v": [_pack(v, name, blobs) for v in value]}
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        parts = [_pack(part.detach(), name, blobs) for part in parts_of_sparse(value)]
        return {"~": "S", "v": parts, "s": list(value.shape), "c": value.is_coalesced()}
    if isinstance(value, torch.Tensor):
        flat = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) if value.numel() else None
        blobs.append(_bytes_of(flat) if flat is not None else memoryview(b""))
        return {
            "~": "T",
            "d": str(value.dtype)[6:],
            "s": list(value.shape),
            "b": len(blobs) - 1,
            "c": str(value.device),
        }
    if isinstance(value, np.generic):
        value = np.asarray(value)
        kind = np.ndarray
        scalar = True
    else:
        scalar = False
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        blobs.append(memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8)))
        return {"~": "n" if scalar else "N", "d": value.dtype.str, "s": list(value.shape), "b": len(blobs) - 1}
    if kind in (bytes, bytearray):
        blobs.append(memoryview(bytes(value)))
        return {"~": "B", "b": len(blobs) - 1}
    if isinstance(value, (int, float, str)):  # IntEnum and friends: keep the plain value
        return _pack(
            value.__float__()
            if isinstance(value, float)
            else value.__str__()
            if isinstance(value, str)
            else int(value),
            name,
            blobs,
        )
    raise UsageError(
        f"{_shown(name)} holds a {kind.__module__}.{kind.__qualname__}, which cannot be kept for a replacement; "
        "state given to protect() may hold numbers, strings, None, lists, tuples, dicts, tensors and arrays",
        explain="F316",
    )


def _key(key: Any, name: str) -> Any:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise UsageError(f"{_shown(name)} has the key {key!r}; keys of state given to protect() are strings or integers")


def _shown(name: str) -> str:
    """Return the name as the script knows it: a keyword of protect() and the keys under it."""
    return name.removeprefix("protect().py.")


def _unpack(tree: Any, blobs: list[memoryview]) -> Any:
    if type(tree) is list:
        return [_unpack(v, blobs) for v in tree]
    if type(tree) is not dict:
        return tree
    kind = tree["~"]
    if kind == "d":
        return {k: _unpack(v, blobs) for k, v in tree["v"]}
    if kind == "t":
        return tuple(_unpack(v, blobs) for v in tree["v"])
    if kind == "f":
        return float(tree["v"])
    if kind == "S":
        places, values = (_unpack(part, blobs) for part in tree["v"])
        return torch.sparse_coo_tensor(places, values, tree["s"], is_coalesced=tree["c"], check_invariants=False)
    data = bytearray(blobs[tree["b"]])
    if kind == "B":
        return bytes(data)
    if kind == "T":
        dtype = getattr(torch, tree["d"])
        flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
        return flat.view(tree["s"]).to(tree["c"])
    array = np.frombuffer(data, dtype=np.dtype(tree["d"])).reshape(tree["s"])
    return array[()] if kind == "n" else array
