"""`ftrun explain`: the page of an error's code, as the documentation has it; it lies in the package, so no network is needed.

Of a run it names the script's values that are kept with each step, and those that are not. Exit code 0, 2 no such code, 4 no such run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ftrun.cli.main import app
from ftrun.core.errors import PlatformError, UsageError
from ftrun.core.text import page

if TYPE_CHECKING:
    from ftrun.view.find import Found

_PACKAGE = Path(__file__).resolve().parents[2]
_PLACES = (_PACKAGE / "errors", _PACKAGE.parent / "docs" / "errors")  # in a wheel, in a checkout
_OF_A_RUN = ("F406", "F407")  # which values were kept belongs to the answer


@app.command(
    "explain",
    help="Explain the code that a message of ftrun ended with: what happened, why, and what to do. Without CODE: all of them. Of a RUN: "
    "which of its script's values are kept with each step, and which are not, and why.",
    epilog="Exit codes: 0, 2 no such code, 4 no such run.\n\nExamples: ftrun explain F305; ftrun explain brave-otter",
)
def explain(
    what: str = typer.Argument(
        None, metavar="CODE|RUN", help="A code as the message had it, such as F305, or a run's name, or the folder of its logs."
    ),
) -> int:
    from ftrun.core.codes import BY_NAME, CODES
    from ftrun.view.find import find, newest_here, require

    if what is None:
        print(page("\n".join(_text(each.page).partition("\n")[0].removeprefix("# ") for each in CODES)))
        return 0
    code = BY_NAME.get(what.upper()) or BY_NAME.get(f"F{what}")
    if code is None:
        if re.fullmatch(r"[Ff]?\d+", what) and find(what) is None:
            raise UsageError(f"there is no code {what}; all of them: ftrun explain")
        run = require(what)
        unknown = f"run {run.run_id}: no rank has told of values, which takes protect(), and three steps or the end of a loop"
        print(page("\n".join(_values(run) or [unknown])))
        return 0
    lines = [_text(code.page).rstrip()]
    newest = newest_here() if code.name in _OF_A_RUN else None
    if newest is not None and (values := _values(newest)):
        lines += ["", f"In run {newest.run_id}, the newest of this folder (of another one: ftrun explain RUN):", "", *values]
    print(page("\n".join(lines)))
    return 0


def _values(run: Found) -> list[str]:
    """Lines, none where no rank has told of any. Raises PlatformError for a journal that cannot be read."""
    from ftrun.core.shape import typed
    from ftrun.core.shared import kept, left_out, notes
    from ftrun.core.shared.notes import KeptNote
    from ftrun.view.finished import read

    try:
        if run.live is not None:
            return kept.listing(notes.read(KeptNote, run.live.path), left_out.reasons(run.live.path))
        noted = read(run).kept
        return kept.listing(typed(KeptNote, noted), noted["not_kept"])
    except OSError as error:
        raise PlatformError(f"cannot read {run.journal}: {error.strerror}") from None


def _text(name: str) -> str:
    for place in _PLACES:
        if (place / f"{name}.md").is_file():
            return (place / f"{name}.md").read_text(encoding="utf-8")
    raise PlatformError(f"the page {name} is not in this installation; reinstall ftrun")
