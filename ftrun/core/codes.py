"""Lists the codes that error messages end with, as in `[ftrun explain F305]`, each with its page in docs/errors. Pure data.

A code stands for one kind of mistake or end, not for one message. A code is stable: pages may be renamed and messages reworded, but a
code stays, and a retired code is never reused. The code that raises an error names its code.
"""

from __future__ import annotations

from typing import NamedTuple


class Code(NamedTuple):
    """`page` is the name of a file in docs/errors."""

    name: str
    page: str


CODES = (
    # the command line and files
    Code("F101", "command-line"),
    Code("F102", "plan-or-configuration"),
    Code("F103", "no-such-run"),
    Code("F104", "several-runs"),
    Code("F105", "script-not-usable"),
    Code("F106", "name-or-port-in-use"),
    # the machine
    Code("F201", "machine-lacks"),
    Code("F202", "no-native-library"),
    Code("F203", "private-folder"),
    Code("F204", "too-little-memory"),
    Code("F205", "device"),
    # the script
    Code("F301", "refused"),
    Code("F302", "another-group"),
    Code("F303", "group-after-the-first-step"),
    Code("F304", "collective-outside-a-step"),
    Code("F305", "collective-after-the-gate"),
    Code("F306", "changed-between-two-steps"),
    Code("F307", "parameters-between-two-steps"),
    Code("F308", "written-unseen"),
    Code("F309", "other-memory"),
    Code("F310", "made-after-protect"),
    Code("F311", "ddp-after-protect"),
    Code("F312", "unknown-optimizer"),
    Code("F313", "closure"),
    Code("F314", "communicating-optimizer"),
    Code("F315", "ddp-options"),
    Code("F316", "state-that-cannot-be-kept"),
    Code("F317", "with-step-skipped"),
    Code("F318", "committed-inside"),
    Code("F319", "job-call-place"),
    Code("F320", "no-global-variable"),
    Code("F321", "loader-without-length"),
    Code("F360", "repair-stands-still"),
    Code("F361", "group-of-another-backend"),
    Code("F370", "run-folder"),
    Code("F395", "resized-in-place"),
    Code("F396", "moved-between-two-forwards"),
    Code("F397", "join"),
    # how a run ended
    Code("F401", "too-many-replacements"),
    Code("F402", "no-healthy-device"),
    Code("F403", "same-failure-again"),
    Code("F404", "cannot-be-restored"),
    Code("F405", "not-finite"),
    Code("F406", "not-known"),
    Code("F407", "result-no"),
    Code("F408", "inexact-repair"),
)

BY_NAME = {code.name: code for code in CODES}


def read_on(name: str) -> str:
    """Return the suffix of a message with that code, "" without a code."""
    return f" [ftrun explain {name}]" if name else ""
