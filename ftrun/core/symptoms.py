"""Infers the fault, the guilty party and a sentence of evidence from an exception or an exit code. Pure; launcher and workers use it."""

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
    """A row of the table of blame: it matches an exception of one of `kinds` (() = any) whose text matches all patterns in `words`.

    `peer`: the exception reports only that another process is gone; the rank that raised it is not guilty. `wait`: seconds for which
    a rank outside a loop holds the exception back, until a stop explains it.
    """

    fault: Fault
    kinds: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()
    peer: bool = False
    wait: float = 0.0


_NO_SPACE = r"no space left on device|disk quota exceeded|insufficient shared memory|^\[Errno (28|122)\]"
_SHARED_MEMORY = r"/dev/shm|shared memory|</?torch_|(?s:bus error.*shm)"
# After such an error every later CUDA call of the process fails as well: only a new process helps. Out of memory is not such an error.
_STICKY_CUDA = (
    r"CUDA (driver )?error: (?!.*out of memory)|cudaError(?!MemoryAllocation)[A-Z]\w+|CUDA_ERROR_(?!OUT_OF_MEMORY)\w+"
    r"|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)|CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
    r"|device-side assert triggered|an illegal memory access was encountered|unspecified launch failure"
)
# Messages of torch, Gloo, NCCL and the store about a connection that ended in the middle of a collective, and about an absent peer.
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
    Symptom(Fault.CUDA, frozenset({"RuntimeError"}), (_STICKY_CUDA,), wait=grace.OUTSIDE),  # a peer's memory may be gone
    # if a peer had died, its death would have stopped this rank first: the link is the suspect
    Symptom(Fault.LINK, _LOST, (_CUT_OFF,), peer=True, wait=grace.OUTSIDE),
    Symptom(Fault.EXCEPTION, frozenset({"DistBackendError"}), (_NOT_THERE,), peer=True, wait=grace.OUTSIDE),
    Symptom(Fault.EXCEPTION, _LOST, (_NOT_THERE,), peer=True),
    Symptom(Fault.EXCEPTION, frozenset({"DistBackendError"}), wait=grace.OUTSIDE),
    Symptom(Fault.EXCEPTION),
)
"""The first row that matches an exception decides."""

_MESSAGE = 240


def message(error: BaseException) -> str:
    """Return the text of an exception, also if a script's own class raises in `__str__`."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its text could not be had: {type(failure).__name__}>"


def of_exception(error: BaseException) -> Symptom:
    """Return the row that matches an exception of the script."""
    return named((cls.__name__ for cls in type(error).__mro__), message(error))


def named(kinds: Iterable[str], text: str) -> Symptom:
    """Return the row that matches an exception, given the names of its classes (or of its own class only) and its text."""
    names = frozenset(kinds)

    def fits(row: Symptom) -> bool:
        return (not row.kinds or bool(row.kinds & names)) and all(re.search(w, text, re.IGNORECASE) for w in row.words)

    return next(filter(fits, TABLE))


def exception_evidence(kind: str, message: str, where: str = "") -> str:
    """Describe an exception in one line; `where` is FILE:LINE."""
    first = message.strip().split("\n")[0][:_MESSAGE]
    if not where:
        return f"{kind}: {first}" if first else kind
    return f"{kind}: {first} (at {where})" if first else f"{kind} at {where}"


def cause_of(code: int | None) -> str:
    """Name the cause of a death: `SIGKILL`, `exit 3`, or `died` for an unknown exit code."""
    if code is None:
        return "died"
    if code > EXIT_SIGNAL:
        with contextlib.suppress(ValueError):
            return signal.Signals(code - EXIT_SIGNAL).name
    return f"exit {code}"


def of_code(code: int | None) -> tuple[Fault, str]:
    """Return the fault behind an exit code (128 + n = signal n, None = not known yet), and the evidence."""
    if code is None:
        return Fault.SIGNAL, "the lock that its threads hold while they live was lost"
    name = cause_of(code)
    if name.startswith("exit "):
        return Fault.EXIT, f"the process left with exit code {code}"
    return Fault.SIGNAL, f"the process was ended by {name}"
