"""Infers the fault from an exception or an exit code, and whose doing it is, with one sentence of evidence. Pure; all sides use it."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from ftrun.core import grace
from ftrun.core.errors import EXIT_SIGNAL
from ftrun.core.faults import Fault


@dataclass(frozen=True)
class Symptom:
    """A row of the table of blame: an exception of one of `kinds` (of any, if there are none) whose text has all of `words`.

    `peer`: not the rank that raised it is guilty, it says no more than that another process is gone. `wait`: seconds that it is
    held back outside of a loop for a stop that would explain it.
    """

    fault: Fault
    kinds: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()
    peer: bool = False
    wait: float = 0.0


_NO_SPACE = r"no space left on device|disk quota exceeded|insufficient shared memory|^\[Errno (28|122)\]"
_SHARED_MEMORY = r"/dev/shm|shared memory|</?torch_|(?s:bus error.*shm)"
# After one of these every later CUDA call of the process fails as well: only a new process helps. Out of memory is
# not among them.
_STICKY_CUDA = (
    r"CUDA (driver )?error: (?!.*out of memory)|cudaError(?!MemoryAllocation)[A-Z]\w+|CUDA_ERROR_(?!OUT_OF_MEMORY)\w+"
    r"|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)|CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
    r"|device-side assert triggered|an illegal memory access was encountered|unspecified launch failure"
)
# What torch, Gloo, NCCL and the store say of a connection that ended in the middle of a collective, and of a peer that is not there.
_CUT_OFF = r"closed by peer|reset by peer|broken pipe|remote process exited|ncclRemoteError"
_NOT_THERE = (
    r"connection refused|connection was (likely )?closed|socket closed|communicator was aborted|collective operation timeout"
    r"|timed out waiting \d+ ?ms|got 0 bytes|sendBytes failed|recvBytes failed|socket timeout|wait timeout"
)
_LOST = frozenset(
    {"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "TimeoutError"}
    | {"ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError"}
)

TABLE = (
    Symptom(Fault.NONFINITE, frozenset({"NonFiniteError"})),
    Symptom(Fault.MEMORY_FULL, words=(_NO_SPACE, _SHARED_MEMORY)),
    Symptom(Fault.DISK_FULL, words=(_NO_SPACE,)),
    Symptom(Fault.CUDA, frozenset({"RuntimeError"}), (_STICKY_CUDA,), wait=grace.OUTSIDE),  # maybe a peer's memory is gone
    # had a peer died, its death would have come first and stopped this rank: the link is the suspect
    Symptom(Fault.LINK, _LOST, (_CUT_OFF,), peer=True, wait=grace.OUTSIDE),
    Symptom(Fault.EXCEPTION, frozenset({"DistBackendError"}), (_NOT_THERE,), peer=True, wait=grace.OUTSIDE),
    Symptom(Fault.EXCEPTION, _LOST, (_NOT_THERE,), peer=True),
    Symptom(Fault.EXCEPTION, frozenset({"DistBackendError"}), wait=grace.OUTSIDE),
    Symptom(Fault.EXCEPTION),
)
"""The first row that fits counts."""

_MESSAGE = 240


def message(error: BaseException) -> str:
    """The text of an exception; a script's own class may fail even at that."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its text could not be had: {type(failure).__name__}>"


def of_exception(error: BaseException) -> Symptom:
    """The row of an exception that a script raised."""
    return named((cls.__name__ for cls in type(error).__mro__), message(error))


def named(kinds: Iterable[str], text: str) -> Symptom:
    """The same of one that is known by the names of its classes, or of its own class."""
    names = frozenset(kinds)

    def fits(row: Symptom) -> bool:
        return (not row.kinds or bool(row.kinds & names)) and all(re.search(w, text, re.IGNORECASE) for w in row.words)

    return next(filter(fits, TABLE))


def exception_evidence(kind: str, message: str, where: str = "") -> str:
    """One line that names an exception; `where` is FILE:LINE."""
    first = message.strip().split("\n")[0][:_MESSAGE]
    if not where:
        return f"{kind}: {first}" if first else kind
    return f"{kind}: {first} (at {where})" if first else f"{kind} at {where}"


def cause_of(code: int | None) -> str:
    """The name of a death: `SIGKILL`, `exit 3`, or `died` while nothing is known."""
    if code is None:
        return "died"
    if code > EXIT_SIGNAL:
        with contextlib.suppress(ValueError):
            return signal.Signals(code - EXIT_SIGNAL).name
    return f"exit {code}"


def of_code(code: int | None) -> tuple[Fault, str]:
    """The fault behind an exit code (128 + n: signal n; None: not known yet)."""
    if code is None:
        return Fault.SIGNAL, "the lock that its threads hold while they live was lost"
    name = cause_of(code)
    if name.startswith("exit "):
        return Fault.EXIT, f"the process left with exit code {code}"
    return Fault.SIGNAL, f"the process was ended by {name}"
