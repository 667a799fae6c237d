"""Defines ftrun's errors, one class for each party that must act, and the exit codes of a run. This file never imports torch."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_RUNNING, EXIT_NO_RUN = 3, 4  # of commands that inspect or control a run
EXIT_STALLED = 70  # EX_SOFTWARE: a repair stalled twice
EXIT_UNAVAILABLE = 69  # EX_UNAVAILABLE: this machine or installation lacks something that every run needs
EXIT_REQUEUE = 75  # EX_TEMPFAIL: no healthy device left, or too many replacements
EXIT_CONFIG = 78  # EX_CONFIG: bad fault plan or configuration
EXIT_SIGNAL = 128


class FtrunError(Exception):
    """Base of every error that ftrun raises on purpose.

    Attributes:
        code: The exit code of a command that the error ends.
        explain: The code of the error's page, as in `ftrun explain F305`; "" = none, and the caller may choose a general one.
    """

    code = EXIT_FAILED
    explain = ""

    def __init__(self, message: str = "", *, explain: str = "") -> None:
        super().__init__(message)
        self.explain = explain or self.explain


class UsageError(FtrunError):
    """The training script or the command line must change."""

    code = EXIT_USAGE


class ConfigError(FtrunError):
    """A plan or configuration file must change."""

    code = EXIT_CONFIG
    explain = "F102"


class WorkerError(FtrunError):
    """A worker failed; the message names its rank and step."""


class NonFiniteError(FtrunError):
    """Gradients or loss are not finite before the update; the message names rank and parameter.

    `final`: the error ends the run; otherwise all ranks first redo the step.
    """

    explain = "F405"
    final = False


class DeviceError(FtrunError):
    """A device failed or has no room; the machine's owner must act."""

    explain = "F205"


class PlatformError(FtrunError):
    """This operating system, container or installation lacks something; the message says what."""

    code = EXIT_UNAVAILABLE
    explain = "F201"


class NoRunError(FtrunError):
    """A command names no live run. `code`: EXIT_NO_RUN, or EXIT_NOT_RUNNING for a run that ended or has not begun."""

    explain = "F103"

    def __init__(self, message: str, code: int = EXIT_NO_RUN) -> None:
        super().__init__(message)
        self.code = code
