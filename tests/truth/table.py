"""Writes docs/truth.md: what ftrun answers for each pattern. `python -m tests.truth.table`."""

from __future__ import annotations

from pathlib import Path

from tests.truth.patterns import PATTERNS

PATH = Path(__file__).resolve().parents[2] / "docs" / "truth.md"
_HEAD = """# What ftrun says of a repaired run

`tests/truth` runs each of these scripts three times: under ftrun without a fault, under ftrun with a kill, and on stock torch,
and compares everything that the four ranks hold at the end. The closing line of a run is one of three answers:

- **yes**: everything that `protect` was given is equal on all replicas (compared), every step that was done again got the
  inputs of its first try (compared), and what the loop changes was kept.
- **not known**: nothing was seen to differ; the line names what could not be kept or was lost, and what it feeds may differ. Here that
  stands behind the answer.
- **no**: the line says what differs, and since which step.

The others end the run: *lost* (nobody has the rank's state; the message names the option that would have helped, exit 1),
*refused* (exit 2, in the step in which it happens, in a clean run as well), *error* (the script's own, as under torchrun).

| pattern | killed at | answer |
|---|---|---|
"""


def text() -> str:
    rows = [f"| {p.what} | {p.kill[0] or 'nowhere'} | {p.answer}{f': `{p.named}`' if p.named else ''} |" for p in PATTERNS.values()]
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
