"""Summarize an ended run from its journal."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from ftrun.core.amounts import count
from ftrun.core.journal import Tail
from ftrun.core.shape import typed
from ftrun.core.shared.notes import KeptNote
from ftrun.view import text
from ftrun.view.find import Found
from ftrun.view.journal import History
from ftrun.view.snapshot import SCHEMA
from ftrun.view.state import ENDED


def read(found: Found) -> History:
    """Read a whole journal.

    Raises:
        OSError: The journal cannot be read.
    """
    history, tail = History(), Tail(found.journal)
    try:
        history.add_all(tail.read())
    finally:
        tail.close()
    return history


def ended_picture(found: Found) -> dict[str, Any]:
    """Return the summary that `status --json` prints.

    Raises:
        OSError: The journal cannot be read.
    """
    history = read(found)
    account, summary, told = history.account, history.summary or {}, typed(KeptNote, history.kept)
    return {
        "schema": SCHEMA,
        "run": found.run_id,
        "state": ENDED,
        "exit_code": account.exit_code,
        "seconds": round((account.ended or history.latest) - account.began, 3),
        "incidents_total": len(account.incidents),
        "lost_seconds": round(account.lost(account.ended or history.latest), 3),
        "effective_training_time": account.effective(history.latest),
        "exact": summary.get("exact"),
        "kept": asdict(told) if told else None,
        "not_kept": history.kept["not_kept"],
        "journal": str(found.journal),
    }


def ended_text(picture: dict[str, Any]) -> str:
    how = "was cut off" if picture["exit_code"] is None else f"ended with exit code {picture['exit_code']}"
    parts = [f"run {picture['run']} {how} after {text.duration(picture['seconds'])}"]
    if picture["incidents_total"]:
        lost = f"{picture['lost_seconds']:.2f} s lost"
        parts.append(f"{count(picture['incidents_total'], 'incident')}, {lost}: ftrun timeline {picture['run']}")
    return "; ".join(parts) + f"\njournal: {os.path.abspath(picture['journal'])}"
