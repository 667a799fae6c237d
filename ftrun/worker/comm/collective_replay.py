"""Record the results of the collectives that a rank called before its first step and between its loops, for its replacement.

A replacement runs the script from the top while its peers are long past it; it reads the results of its collectives there (a broadcast
configuration, a barrier, the accuracy after an epoch) from this record. DDP's constructor is left out: its effects are
restored otherwise.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ftrun.core.errors import WorkerError
from ftrun.worker.torch_compat import torch_private

CAP_BYTES = 64 << 20
_LOST = "ftrun: not kept"  # in place of an error: there was no room for the results


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return every tensor in nested lists and tuples, in order."""
    if type(value) is list and len(value) == 1 and type(value[0]) is torch.Tensor:
        return value  # the usual argument of a collective
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
    # copies first, since numpy() would fix the size of the script's memory
    return bytes(tensor.cpu().resolve_conj().resolve_neg().contiguous().clone().view(-1).view(torch.uint8).numpy())


def _packed(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements as bytes; of a sparse one their number, then their indices, then the values."""
    if not tensor.is_sparse:
        return _flat(tensor)
    indices, values = torch_private.parts_of_sparse(tensor)
    return len(values).to_bytes(8, "little") + _flat(indices) + _flat(values)


def _unpacked(blob: bytes, like: torch.Tensor) -> torch.Tensor:
    """Make a tensor of the bytes of `_packed`, with the type, the shape and the device of `like`."""
    flat = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    if not like.is_sparse:
        return flat.view(like.dtype).view(like.shape).to(like.device)
    count, dims = int.from_bytes(blob[:8], "little"), like.sparse_dim()
    end = 8 + 8 * count * dims
    indices = flat[8:end].view(torch.int64).view(dims, count)
    values = flat[end:].clone().view(like.dtype).view(count, *like.shape[dims:])
    return torch.sparse_coo_tensor(indices, values, like.shape).to(like.device)


class ReplayEntry:
    """One collective outside the loops: its results or its error; neither until its end is known."""

    def __init__(self, number: int, name: str, recorder: Recorder) -> None:
        self.number = number
        self.name = name
        self._recorder = recorder
        self.results: list[bytes] | None = None
        self.error = ""

    def store(self, outputs: list[torch.Tensor]) -> None:
        """Keep the results of the finished collective."""
        self.results = []
        if self._recorder.has_room(outputs):
            self.results = [_packed(t.detach()) for t in outputs]
        else:
            self.error = _LOST

    def fail(self, error: BaseException) -> None:
        """Keep the error; `replay` raises it in a replacement's script as a RuntimeError, torch's usual error."""
        self.error = str(error) or type(error).__name__

    def record(self) -> dict[str, Any]:
        """Return the record for the log in the slots segment."""
        return {"number": self.number, "name": self.name, "error": self.error, "results": self.results}


class Recorder:
    """Collects the results of collectives outside the loops, for the log in the slots segment; `load` makes it replay a log."""

    def __init__(self) -> None:
        self.replaying = False
        self.groups: list[str] = []  # keys of the groups that the replaced rank had when its first step began
        self.marks: list[dict[str, Any]] = []  # records of where loops and epochs began, between those of collectives
        self._entries: list[ReplayEntry] = []
        self._unsaved: list[ReplayEntry] = []  # entries that the log lacks so far
        self._bytes = 0
        self._next = 0

    def reserve(self, name: str) -> ReplayEntry:
        """Note a collective that begins now; `ReplayEntry.store` or `ReplayEntry.fail` adds its end."""
        entry = ReplayEntry(len(self._entries), name, self)
        self._entries.append(entry)
        self._unsaved.append(entry)
        return entry

    def has_room(self, outputs: list[torch.Tensor]) -> bool:
        """Count these results; return False if they exceed the cap, and are not kept."""
        size = sum(_size(t) for t in outputs)
        if self._bytes + size > CAP_BYTES:
            return False
        self._bytes += size
        return True

    @property
    def begun(self) -> int:
        """The number of collectives outside the loops so far."""
        return self._next if self.replaying else len(self._entries)

    def skip_to(self, begun: int) -> None:
        """Skip the first `begun` collectives, whose code a replacement does not run."""
        self._next = begun

    def end_replay(self) -> list[dict[str, Any]]:
        """Stop replaying; return records for the log that undo later collectives, which a return to a snapshot has undone."""
        replaying, self.replaying = self.replaying, False
        return self.undo(self._next) if replaying else []

    def undo(self, begun: int) -> list[dict[str, Any]]:
        """Forget all but the first `begun` collectives; return records of that for the log."""
        undone = self._entries[begun:]
        del self._entries[begun:]
        self._unsaved = [entry for entry in self._unsaved if entry not in undone]
        return [{"undone_from": begun}] if undone else []

    def unsaved(self) -> list[dict[str, Any]]:
        """Return records of the collectives that succeeded since the last call; a failure may come from a peer's death, and not count."""
        ready = [entry for entry in self._unsaved if entry.results is not None]
        self._unsaved = [entry for entry in self._unsaved if entry.results is None]
        return self._records(ready)

    def settled(self) -> list[dict[str, Any]]:
        """Return records of the rest once the script has gone on: it survived those that failed, and waits for no other."""
        rest, self._unsaved = self._unsaved, []
        return self._records(rest)

    def opening(self, groups: list[str]) -> list[dict[str, Any]]:
        """Return the first records of a log, with everything before the first step. `groups`: keys of the present groups."""
        self._unsaved = []
        return [*self._records(self._entries), {"groups": groups}, *self.marks]

    def _records(self, entries: list[ReplayEntry]) -> list[dict[str, Any]]:
        return [entry.record() for entry in entries]

    def load(self, log: list[dict[str, Any]]) -> None:
        """Take over a dead rank's log.

        Raises:
            WorkerError: If the rank had no first step.
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
        for number in itertools.takewhile(known.__contains__, itertools.count()):  # entries after a gap are of no use
            entry = self.reserve(known[number]["name"])
            entry.error, entry.results = known[number]["error"], known[number]["results"]
        self._unsaved = []
        self.marks = [record for record in log if "base" in record]

    def replay(self, name: str, outputs: list[torch.Tensor]) -> None:
        """Write the next recorded result into `outputs`.

        Raises:
            RuntimeError: If the recorded collective failed.
            WorkerError: If the record lacks the result, or the script calls another collective.
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
