"""Which of its script's values a run keeps with each step, and which it does not, in lines: of a live run, or from a journal."""

from __future__ import annotations

from ftrun.core.shape import typed
from ftrun.core.shared import kept, left_out, notes
from ftrun.core.shared.notes import KeptNote
from ftrun.view.find import Found
from ftrun.view.finished import read


def lines(found: Found) -> list[str]:
    """Nothing where nobody has told anything: no rank has made some steps, or the script calls no protect().

    Raises:
        OSError
    """
    if found.live is not None:
        return kept.listing(notes.read(KeptNote, found.live.path), left_out.reasons(found.live.path))
    noted = read(found).kept
    return kept.listing(typed(KeptNote, noted), noted["not_kept"])
