"""Results of the collectives that a rank called before its first step and between its loops: its replacement is handed them.

A replacement runs the script from the top while its peers are long past it; what it asks them for there (a broadcast
configuration, a barrier, the accuracy after an epoch) is read from this record. DDP's constructor is left out: its effects are
restored otherwise.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ftrun.core.errors import WorkerError
from ftrun.worker.torch_compat import torch_private

CAP_BYTES = 64 << 20
_LOST = "ftrun: not kept"  # in place of an error: the results had no room


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
    # of a copy: numpy() would fix the size of the script's memory
    return bytes(tensor.cpu().resolve_conj().resolve_neg().contiguous().clone().view(-1).view(torch.uint8).numpy())


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


class ReplayEntry:
    """One collective outside the loops: what it gave, or how it failed; neither while nobody has waited for it."""

    def __init__(self, number: int, name: str, recorder: Recorder) -> None:
        self.number = number
        self.name = name
        self._recorder = recorder
        self.results: list[bytes] | None = None
        self.error = ""

    def store(self, outputs: list[torch.Tensor]) -> None:
        """It is over: keep what it gave."""
        self.results = []
        if self._recorder.has_room(outputs):
            self.results = [_packed(t.detach()) for t in outputs]
        else:
            self.error = _LOST

    def fail(self, error: BaseException) -> None:
        """A replacement's script is told the same, as torch tells most things: by a RuntimeError."""
        self.error = str(error) or type(error).__name__

    def record(self) -> dict[str, Any]:
        """For the log in the slots segment."""
        return {"number": self.number, "name": self.name, "error": self.error, "results": self.results}


class Recorder:
    """Collects what collectives outside the loops give, for the log in the slots segment; `load` makes it replay a log."""

    def __init__(self) -> None:
        self.replaying = False
        self.groups: list[str] = []  # keys of those that the replaced rank had when its first step began
        self.marks: list[dict[str, Any]] = []  # where loops and epochs began, which the log has between the collectives
        self._entries: list[ReplayEntry] = []
        self._unsaved: list[ReplayEntry] = []  # of which the log has nothing yet
        self._bytes = 0
        self._next = 0

    def reserve(self, name: str) -> ReplayEntry:
        """Note a collective that begins now; its end goes into the entry, by `Entry.store` or `Entry.fail`."""
        entry = ReplayEntry(len(self._entries), name, self)
        self._entries.append(entry)
        self._unsaved.append(entry)
        return entry

    def has_room(self, outputs: list[torch.Tensor]) -> bool:
        """Count these results. False: they are too many, and not kept; a replacement is given the others."""
        size = sum(_size(t) for t in outputs)
        if self._bytes + size > CAP_BYTES:
            return False
        self._bytes += size
        return True

    @property
    def begun(self) -> int:
        """Collectives outside the loops until here."""
        return self._next if self.replaying else len(self._entries)

    def skip_to(self, begun: int) -> None:
        """A replacement does not run the code that called the first `begun` collectives."""
        self._next = begun

    def end_replay(self) -> list[dict[str, Any]]:
        """From here on collectives take place. Records for the log: what the rank called beyond this, a snapshot has undone."""
        replaying, self.replaying = self.replaying, False
        return self.undo(self._next) if replaying else []

    def undo(self, begun: int) -> list[dict[str, Any]]:
        """Forget all but the first `begun` collectives. Records for the log."""
        undone = self._entries[begun:]
        del self._entries[begun:]
        self._unsaved = [entry for entry in self._unsaved if entry not in undone]
        return [{"undone_from": begun}] if undone else []

    def unsaved(self) -> list[dict[str, Any]]:
        """Records of the collectives that succeeded since the last call: a failure may be a peer's death, and be forgotten with it."""
        ready = [entry for entry in self._unsaved if entry.results is not None]
        self._unsaved = [entry for entry in self._unsaved if entry.results is None]
        return self._records(ready)

    def settled(self) -> list[dict[str, Any]]:
        """Records of the rest too, once the script has gone on: it got over those that failed, and waits for no other."""
        rest, self._unsaved = self._unsaved, []
        return self._records(rest)

    def opening(self, groups: list[str]) -> list[dict[str, Any]]:
        """The first records of a log, with everything before the first step. `groups`: keys of those there are."""
        self._unsaved = []
        return [*self._records(self._entries), {"groups": groups}, *self.marks]

    def _records(self, entries: list[ReplayEntry]) -> list[dict[str, Any]]:
        return [entry.record() for entry in entries]

    def load(self, log: list[dict[str, Any]]) -> None:
        """Take over a dead rank's log.

        Raises:
            WorkerError: When the rank had no first step.
        """
        groups = [record["groups"] for record in log if "groups" in record]
        if not groups:
            raise WorkerError(
                "the replaced rank died before its first step, so what its collectives gave is not recorded"
            )
        self.groups = groups[0]
        known: dict[int, dict[str, Any]] = {}
        for record in log:
            if "undone_from" in record:
                known = {number: old for number, old in known.items() if number < record["undone_from"]}
            elif "number" in record:
                known[record["number"]] = record
        for number in itertools.takewhile(known.__contains__, itertools.count()):  # what comes after a gap is not known
            entry = self.reserve(known[number]["name"])
            entry.error, entry.results = known[number]["error"], known[number]["results"]
        self._unsaved = []
        self.marks = [record for record in log if "base" in record]

    def replay(self, name: str, outputs: list[torch.Tensor]) -> None:
        """Give the next recorded result.

        Raises:
            RuntimeError: Of a collective that failed.
            WorkerError: When the script asks otherwise.
        """
        if self._next >= len(self._entries):
            raise WorkerError(
                f"what collective {name} gave the rank that this worker replaces is not known: it died between two loops with this "
                "collective still to come, or its script did not call it; communicate in job.call(fn), which is done again by all ranks"
            )
        entry = self._entries[self._next]
        results = [b""] * len(outputs) if entry.results is None or entry.error else entry.results
        if entry.name != name or len(results) != len(outputs):
            raise WorkerError(f"collective {name} where the replaced rank called {entry.name}")
        if entry.error == _LOST:
            raise WorkerError(
                f"the collectives outside the loops gave the rank that this worker replaces more than {CAP_BYTES >> 20} MiB, and what "
                f"{name} gave is not kept; gather less there, or use job.epochs, so that no code of past epochs runs again"
            )
        self._next += 1
        if entry.error:
            raise RuntimeError(entry.error)
        for output, blob in zip(outputs, results, strict=True):
            if blob:
                output.copy_(_unpacked(blob, output))


__all__ = ["CAP_BYTES", "Recorder", "tensors_of"]
