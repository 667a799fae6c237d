"""Writes docs/convert.md: what changes in a program for ftrun, by kind of program. `python -m tests.programs.convert`."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PATH = FOLDER.parents[1] / "docs" / "convert.md"
KINDS = ("loop", "resume", "epochs", "prefetch", "trainer", "accelerate_loop")
_TITLES = {
    "loop": "A plain loop",
    "resume": "A loop that writes checkpoints and goes on from them",
    "epochs": "Epochs, an evaluation, a checkpoint",
    "prefetch": "Variables that live from step to step",
    "trainer": "A Trainer class",
    "accelerate_loop": "accelerate",
}
_NOTES = {
    "loop": "The scheduler goes to `protect`, since it must be put back when a step is done again.",
    "resume": "What stands between `for` and `with` runs again with its step, so a rank that dies in its checkpoint writes it again. "
    "A replacement finds a newer checkpoint than its rank began with: `start` stays what the rank began with.",
    "epochs": 'A replacement begins in the epoch that runs. `job.state("best")` keeps the global variable, so that a replacement '
    "of rank 0 writes the right one; a function's own variable is kept by `kept = job.state(best=best)` and used as "
    "`kept.best`. `job.call` makes the evaluation again, on all ranks, when one dies in it. What follows runs at least once on each rank.",
    "prefetch": "The batch that was fetched ahead, the counter and the lowest loss are global variables: `job.state` keeps them with "
    "the step.",
    "accelerate_loop": "The process group is made before accelerate makes its own. `rng_types=[]`: a prepared loader would "
    "broadcast random numbers whenever it begins, which a replacement cannot do alone; with the same seed on all ranks the order "
    "is the same without. `make compat` runs these two.",
    "trainer": "`protect` stands behind `DDP(...)`. The snapshot is loaded and saved by the class as before.",
}
_HEAD = """# What changes in a program

`ftrun train.py` runs a program as it is, as torchrun does; after a failure all its workers start again. For repair in place it is
converted, in about six lines. Each of these programs (`tests/programs`) is run by the tests: as it is, under torchrun; and
converted, under ftrun, with kills in steps, in evaluations and around checkpoints, and where it writes a checkpoint, a clean
restart from it. Weights, optimizer, random numbers and checkpoints are the same. Converted programs run under torchrun, too.

The lines show what is added and taken away; lines that are only moved to the right are left out.

"""


def changes(kind: str) -> list[str]:
    """Lines of a diff that ignores indentation, and blank lines."""
    before, after = (
        [line for line in (FOLDER / f"{kind}{tail}.py").read_text().splitlines() if line] for tail in ("", "_converted")
    )
    matcher = difflib.SequenceMatcher(None, [line.strip() for line in before], [line.strip() for line in after], False)
    lines: list[str] = []
    for what, a, b, c, d in matcher.get_opcodes():
        if what != "equal":
            if lines:
                lines.append("")
            lines += [f"- {line}".rstrip() for line in before[a:b]] + [f"+ {line}".rstrip() for line in after[c:d]]
    return lines


def added(kind: str) -> int:
    """Lines of the converted program that are not in the other one."""
    return sum(line.startswith("+") for line in changes(kind))


def text() -> str:
    """The page."""
    parts = [_HEAD]
    for kind in KINDS:
        said = ast.get_docstring(ast.parse((FOLDER / f"{kind}.py").read_text()))
        diff = "\n".join(changes(kind))
        parts.append(f"## {_TITLES[kind]}\n\n{said} {added(kind)} lines:\n\n```diff\n{diff}\n```\n\n{_NOTES[kind]}\n\n")
    return "".join(parts).rstrip("\n") + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
