"""Log the values of `job.log`: their mean over all ranks, once for each committed step.

The call begins the sum, and the gate waits for it, so that of a step that is done again only the last try is logged. The values are
kept with the step: a replacement of rank 0 writes the line that its predecessor did not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ftrun.core.errors import UsageError
from ftrun.core.system import files

LOGGED = "job.log"  # its name in messages and slots


class LoggedValues:
    """The values that one rank's last step logged, its gate number (-1 before there is one), and its place: index, and epoch."""

    def __init__(self, path: Path | None = None) -> None:
        self._state: dict[str, Any] = {"number": -1, "place": {}, "values": {}}
        self.state_dict = self._state.copy  # not a method, for speed: each step calls it three times
        self._path = path  # rank 0 adds a line for each step here
        self._written: int | None = None  # the last gate number in the file; None: not looked at yet
        self.pending: list[tuple[list[str], torch.Tensor, Any]] = []

    def add(self, values: Mapping[str, Any]) -> None:
        """Begin the sums over all ranks.

        Raises:
            UsageError: If a value is no number.
        """
        numbers = []
        for name, value in values.items():
            try:
                number = torch.as_tensor(value).detach().to(torch.float64)
            except (TypeError, ValueError, RuntimeError):
                raise UsageError(f"job.log({name}=...): expected a number, got {type(value).__name__}") from None
            if number.numel() != 1:
                raise UsageError(f"job.log({name}=...): expected one number, got a tensor of shape {tuple(number.shape)}; log its mean")
            numbers.append(number.reshape(()))
        if not numbers:
            return
        device = next((number.device for number in numbers if number.device.type != "cpu"), numbers[0].device)
        total = torch.stack([number.to(device) for number in numbers])
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.pending.append((list(values), total, None if alone else dist.all_reduce(total, async_op=True)))

    def forget(self) -> None:
        """Drop the values of an earlier try, at the start of a body."""
        self.pending = []

    def gather(self, number: int, **place: int) -> None:
        """Take the step's values at its gate; wait for their sums."""
        pending, self.pending = self.pending, []
        if not pending:
            return
        values: dict[str, float] = {}
        for names, total, work in pending:
            if work is not None:
                work.wait()
                total /= dist.get_world_size()
            values.update(zip(names, total.tolist(), strict=True))
        self._state.update(number=number, place=place, values=values)

    def of(self, number: int) -> dict[str, float]:
        """Return the values that a step logged; an empty dict if it logged none."""
        return dict(self._state["values"]) if self._state["number"] == number else {}

    def write(self) -> None:
        """Append the line of the last step that logged, unless the file has it."""
        if self._path is None or self._state["number"] < 0:
            return
        if self._written is None:
            self._written = self._last()
        number = self._state["number"]
        if number > self._written:
            self._written = number
            line = json.dumps({**self._state["place"], **self._state["values"], "gate": number})
            files.append_private(self._path, line + "\n")

    def _last(self) -> int:
        """Return the last gate number in the file; remove a line that a dying worker left incomplete."""
        assert self._path is not None
        text = self._path.read_text() if self._path.exists() else ""
        whole, _, torn = text.rpartition("\n")
        if torn:
            files.write_private(self._path, whole + "\n" if whole else "")
        return int(json.loads(whole.rpartition("\n")[2])["gate"]) if whole else -1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state.update(number=state["number"], place=dict(state["place"]), values=dict(state["values"]))
