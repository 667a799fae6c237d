"""Results of the collectives that a rank called before its first step: its replacement is handed them again.

A replacement runs the script from the top while its peers are long past it; what it asks them for there (a broadcast
configuration, a barrier) is read from this record. DDP's constructor is left out: its effects are restored otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ftrun.core.errors import WorkerError
from ftrun.worker.runtime import torch_private

CAP_BYTES = 64 << 20


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists and tuples, in order."""
    if type(value) is list and len(value) == 1 and type(value[0]) is torch.Tensor:
        return value  # what most collectives are given
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    return []


def _size(tensor: torch.Tensor) -> int:
    if not tensor.is_sparse:
        return tensor.numel() * tensor.element_size()
    indices, values = torch_private.parts_of_sparse(tensor)
    return indices.numel() * indices.element_size() + values.numel() * values.element_size()


def _flat(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy())


def _packed(tensor: torch.Tensor) -> bytes:
    """Its elements; of a sparse one how many there are, then their places, then the values."""
    if not tensor.is_sparse:
        return _flat(tensor)
    indices, values = torch_private.parts_of_sparse(tensor)
    return len(values).to_bytes(8, "little") + _flat(indices) + _flat(values)


def _unpacked(blob: bytes, like: torch.Tensor) -> torch.Tensor:
    """What `_packed` made of a tensor with the type, the shape and the device of `like`."""
    flat = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    if not like.is_sparse:
        return flat.view(like.dtype).view(like.shape).to(like.device)
    count, dims = int.from_bytes(blob[:8], "little"), like.sparse_dim()
    end = 8 + 8 * count * dims
    indices = flat[8:end].view(torch.int64).view(dims, count)
    values = flat[end:].clone().view(like.dtype).view(count, *like.shape[dims:])
    return torch.sparse_coo_tensor(indices, values, like.shape).to(like.device)


class Recorder:
    """Collects while the script prepares; `dump` gives what the slots segment keeps; `load` makes it replay."""

    def __init__(self) -> None:
        self.replaying = False
        self.overflow = False
        self.groups = 0  # that the replaced rank made
        self._entries: list[tuple[str, list[bytes]]] = []
        self._bytes = 0
        self._next = 0

    def reserve(self, name: str, outputs: list[torch.Tensor]) -> Callable[[], None]:
        """Note a collective now, its results when the returned function is called."""
        slot: list[bytes] = []
        self._entries.append((name, slot))

        def store() -> None:
            size = sum(_size(t) for t in outputs)
            self._bytes += size
            if self._bytes > CAP_BYTES:
                self.overflow = True
            if not self.overflow:
                slot.extend(_packed(t.detach()) for t in outputs)

        return store

    def dump(self, groups: int) -> tuple[dict[str, Any], list[bytes]]:
        """(JSON header, blobs). `groups`: how many process groups the script made."""
        if self.overflow:
            return {"overflow": True, "entries": []}, []
        entries = [[n, [len(b) for b in blobs]] for n, blobs in self._entries]
        header = {"overflow": False, "groups": groups, "entries": entries}
        return header, [b for _, blobs in self._entries for b in blobs]

    def load(self, header: dict[str, Any], data: memoryview) -> None:
        """Take over a dead rank's record. Errors: WorkerError when it had outgrown its cap."""
        if header["overflow"]:
            raise WorkerError(f"the collectives before the first step moved more than {CAP_BYTES >> 20} MiB")
        offset = 0
        self.groups = header["groups"]
        self._entries = []
        for name, sizes in header["entries"]:
            blobs = []
            for size in sizes:
                blobs.append(bytes(data[offset : offset + size]))
                offset += size
            self._entries.append((name, blobs))
        self._next = 0

    def replay(self, name: str, outputs: list[torch.Tensor]) -> None:
        """Give the next recorded result. Errors: WorkerError when the script asks for something else."""
        if self._next >= len(self._entries):
            raise WorkerError(f"collective {name} was not called by the rank that this worker replaces")
        recorded, blobs = self._entries[self._next]
        if recorded != name or len(blobs) != len(outputs):
            raise WorkerError(f"collective {name} where the replaced rank called {recorded}")
        self._next += 1
        for output, blob in zip(outputs, blobs, strict=True):
            if blob:
                output.copy_(_unpacked(blob, output))


__all__ = ["CAP_BYTES", "Recorder", "tensors_of"]
