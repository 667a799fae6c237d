"""Reads in the notes of the workers which values of the script are kept; tells the person and journals it. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ftrun.core.shared import left_out, notes
from ftrun.core.shared.notes import KeptNote
from ftrun.host.account import messages

_LOOKED = 3  # bodies that a worker must have examined before the line is printed


class KeptRecord:
    """One per run. `note` writes to the journal, `log` tells the person a sentence."""

    def __init__(self, run_dir: Path, note: Callable[..., None], log: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._note = note
        self._log = log
        self._is_told = False
        self._noted: dict[str, Any] = {"not_kept": {}}

    def look(self) -> None:
        """Report the kept values once a worker has examined its first bodies. The launcher calls this when a worker rings."""
        found = None if self._is_told else notes.read(KeptNote, self._run_dir)
        if found is None or found.looked < _LOOKED:
            return
        self._is_told = True
        not_kept = left_out.reasons(self._run_dir)
        if found.values and found.rank == 0:
            self._log(messages.kept(found, len(not_kept)))
        self.note()

    def note(self) -> None:
        """Journal what the notes say by now, unless the journal has it."""
        found = notes.read(KeptNote, self._run_dir)
        facts = {**(asdict(found) if found else {}), "not_kept": left_out.reasons(self._run_dir)}
        if facts != self._noted:
            self._noted = facts
            self._note("kept", **facts)
