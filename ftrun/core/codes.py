"""The codes that error messages end with, as in `[ftrun explain F305]`, each with its page in docs/errors. Pure data.

A code is one kind of mistake or end, not one message. It is stable: a page may be renamed and a message reworded, a code stays,
and a code that is not used any more is not given to something else. Which code a message has is told by a piece of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """`page` is the name of a file in docs/errors; `says`: pieces of messages, each of which tells that this is meant."""

    name: str
    page: str
    says: tuple[str, ...] = ()


CODES = (
    # the command line and files
    Code("F101", "command-line"),
    Code("F102", "plan-or-configuration"),
    Code(
        "F103", "no-such-run",
        ("no live run", "no run named", "is not running:", "starts or ends just now", "ended just now", "ended before the fault",
         "so there is nothing left to show"),
    ),
    Code("F104", "several-runs", ("runs are live, so say which", "was not started in this folder", "add --yes")),
    Code(
        "F105", "script-not-usable",
        ("there is no script", "there is no module", "is a directory, not a", " is not Python ", "is a pipe or a device",
         "does not exist", "may not be executed", "is not on the PATH", "-m takes the name", "(permission denied)"),
    ),
    Code("F106", "name-or-port-in-use", ("is in use by process", "cannot be had (", "cannot listen on")),
    # the machine
    Code("F201", "machine-lacks", ("too few descriptors", "too large to start a process with")),
    Code("F202", "no-native-library", ("native library cannot be used",)),
    Code("F203", "private-folder", ("can be read by others", "is not a directory; remove it", "to a folder of yours")),
    Code("F204", "too-little-memory", ("the memory limit (cgroup)",)),
    Code("F205", "device"),
    # the script
    Code("F301", "refused"),
    Code("F302", "another-group", ("which cannot be rebuilt in place",)),
    Code("F303", "group-after-the-first-step", ("make process groups before the first step",)),
    Code("F304", "collective-outside-a-step", ("communicate in the body before optimizer.step(), or in job.call",)),
    Code("F305", "collective-after-the-gate", ("after the gate, at",)),
    Code("F306", "changed-between-two-steps", ("changed between the body of one step and the next",)),
    Code("F307", "parameters-between-two-steps", ("changed between two bodies",)),
    Code("F308", "written-unseen", ("changed between the start of the step and its gate",)),
    Code("F309", "other-memory", ("was given other memory",)),
    Code("F310", "made-after-protect", ("was made or replaced at",)),
    Code("F311", "ddp-after-protect", ("DistributedDataParallel of a model that is protected already",)),
    Code("F312", "unknown-optimizer", ("an optimizer that protect() was not given",)),
    Code("F313", "closure", ("calls the model several times",)),
    Code("F314", "communicating-optimizer", ("communicates in step()",)),
    Code("F315", "ddp-options", ("DDP communication hooks", "uses a communication hook")),
    Code("F316", "state-that-cannot-be-kept", ("which cannot be kept for a replacement",)),
    Code("F317", "with-step-skipped", ("but its `with step:` was skipped",)),
    Code("F318", "committed-inside", ("step.committed inside the body",)),
    Code("F319", "job-call-place", ("job.call outside an iteration's start", "job.call inside `with step`")),
    Code("F320", "no-global-variable", ("no global variable of this script",)),
    Code("F321", "loader-without-length", ("has no length, so the end is not known",)),
    Code("F360", "repair-stands-still", ("another worker is no help",)),
    Code("F361", "group-of-another-backend", ("a replacement would wait there for",)),
    Code("F370", "run-folder", ("has no room left for the run's own files", "was removed while the run needed it")),
    Code("F395", "resized-in-place", ("was resized in place, and the memory",)),
    Code("F396", "moved-between-two-forwards", ("moved between two forwards of one step",)),
    Code("F397", "join", ("torch.distributed.algorithms.Join lets",)),
    # how a run ended
    Code("F401", "too-many-replacements", ("died too often",)),
    Code("F402", "no-healthy-device", ("no healthy device is left", "this machine must be looked after")),
    Code("F403", "same-failure-again", ("failed a second time in the same way", "again after a retry; the run ends")),
    Code("F404", "cannot-be-restored", ("cannot be restored:", "cannot be replaced in place:")),
    Code("F405", "not-finite", ("is not finite",)),
    Code("F406", "not-known", ("uninterrupted run: not known",)),
    Code("F407", "result-no", ("uninterrupted run: no (",)),
    Code("F408", "inexact-repair", ("the run ends (--inexact stop)",)),
)  # fmt: skip

BY_NAME = {code.name: code for code in CODES}
# what no piece of a message tells, by the class of the error
_OTHERWISE = {
    "ConfigError": "F102",
    "UsageError": "F301",
    "PlatformError": "F201",
    "DeviceError": "F205",
    "NonFiniteError": "F405",
}


def of_message(message: str) -> str:
    """The code of a sentence, "" when it has none."""
    return next((code.name for code in CODES if any(piece in message for piece in code.says)), "")


def of_error(kind: str, message: str, usage: str = "F301") -> str:
    """The code of an error by its class's name and its message, "" for one that is not ours.

    `usage`: what a UsageError is that no piece of its message tells.
    """
    if kind not in _OTHERWISE:
        return of_message(message) if kind in ("NoRunError", "FtrunError") else ""
    known = "" if kind == "ConfigError" else of_message(message)
    return known or (usage if kind == "UsageError" else _OTHERWISE[kind])


def read_on(name: str) -> str:
    """What a message with that code ends with."""
    return f" [ftrun explain {name}]" if name else ""
