"""`ftrun explain`: the page of an error's code, as the documentation has it; it lies in the package, so no network is needed."""

from __future__ import annotations

from pathlib import Path

import typer

from ftrun.cli.main import app
from ftrun.core.errors import PlatformError, UsageError
from ftrun.core.text import page

_PACKAGE = Path(__file__).resolve().parents[2]
_PLACES = (_PACKAGE / "errors", _PACKAGE.parent / "docs" / "errors")  # in a wheel, in a checkout


@app.command(
    "explain",
    help="Explain the code that a message of ftrun ended with: what happened, why, and what to do. Without CODE: all of them.",
    epilog="Exit codes: 0, 2 no such code.\n\nExample: ftrun explain F305",
)
def explain(code: str = typer.Argument(None, metavar="CODE", help="As the message had it, such as F305.")) -> int:
    from ftrun.core.codes import BY_NAME, CODES

    if code is None:
        print(page("\n".join(_text(each.page).partition("\n")[0].removeprefix("# ") for each in CODES)))
        return 0
    found = BY_NAME.get(code.upper()) or BY_NAME.get(f"F{code}")
    if found is None:
        raise UsageError(f"there is no code {code}; all of them: ftrun explain")
    print(page(_text(found.page).rstrip()))
    return 0


def _text(name: str) -> str:
    for place in _PLACES:
        if (place / f"{name}.md").is_file():
            return (place / f"{name}.md").read_text(encoding="utf-8")
    raise PlatformError(f"the page {name} is not in this installation; reinstall ftrun")
