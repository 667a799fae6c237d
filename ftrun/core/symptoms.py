"""Infers the fault from an exception or an exit code, with one sentence of evidence. Pure; both sides use it."""

from __future__ import annotations

import contextlib
import errno
import re
import signal

from ftrun.core.errors import EXIT_SIGNAL, NonFiniteError
from ftrun.core.faults import Fault

# After one of these every later CUDA call of the process fails as well: only a new process helps. Out of memory is
# not among them.
_STICKY_CUDA = re.compile(
    r"CUDA (driver )?error: (?!.*out of memory)|cudaError(?!MemoryAllocation)[A-Z]\w+|CUDA_ERROR_(?!OUT_OF_MEMORY)\w+"
    r"|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)|CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
    r"|device-side assert triggered|an illegal memory access was encountered|unspecified launch failure",
    re.IGNORECASE,
)
_SHARED_MEMORY = re.compile(
    r"/dev/shm|shared memory|</?torch_|insufficient shared memory|bus error.*shm", re.IGNORECASE | re.DOTALL
)
_NO_SPACE = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
# what Gloo and NCCL say of a connection that ended in the middle of a collective
_CUT_OFF = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|remote process exited|ncclRemoteError",
    re.IGNORECASE,
)
_MESSAGE = 240


def message(error: BaseException) -> str:
    """The text of an exception; a script's own class may fail even at that."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its text could not be had: {type(failure).__name__}>"


def of_exception(error: BaseException) -> Fault:
    """The fault behind an exception that a script raised."""
    if isinstance(error, NonFiniteError):
        return Fault.NONFINITE
    text = message(error)
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT) or _NO_SPACE.search(text) or "insufficient shared memory" in text:
        return Fault.MEMORY_FULL if _SHARED_MEMORY.search(text) else Fault.DISK_FULL
    if isinstance(error, RuntimeError) and _STICKY_CUDA.search(text):
        return Fault.CUDA
    if isinstance(error, (RuntimeError, ConnectionError)) and _CUT_OFF.search(text):
        return Fault.LINK  # had a peer died, its death would have come first and stopped this rank
    return Fault.EXCEPTION


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
