"""Whose doing an exception is, what fault it is evidence of, and how long its rank waits for the cause."""

from __future__ import annotations

import errno

import pytest

from ftrun.core import grace, symptoms
from ftrun.core.errors import NonFiniteError
from ftrun.core.faults import Fault


class DistBackendError(RuntimeError):
    """As torch's: known by the names of its classes."""


RANK, PEER = False, True  # whose doing it is: `Symptom.peer`
CUDA = RuntimeError("CUDA error: an illegal memory access was encountered")
ROWS: list[tuple[BaseException, Fault, bool, float]] = [
    (NonFiniteError("the gradient of a is not finite"), Fault.NONFINITE, RANK, 0.0),
    (OSError(errno.ENOSPC, "No space left on device"), Fault.DISK_FULL, RANK, 0.0),
    (OSError(errno.EDQUOT, "kein Platz"), Fault.DISK_FULL, RANK, 0.0),
    (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/torch_1"), Fault.MEMORY_FULL, RANK, 0.0),
    (ValueError("the data say [Errno 28] somewhere"), Fault.EXCEPTION, RANK, 0.0),
    (RuntimeError("unable to write, no space left on device: bus error\nin shm"), Fault.MEMORY_FULL, RANK, 0.0),
    (RuntimeError("insufficient shared memory (shm)"), Fault.MEMORY_FULL, RANK, 0.0),
    (CUDA, Fault.CUDA, RANK, grace.OUTSIDE),
    (DistBackendError("NCCL error: CUDA_ERROR_ILLEGAL_ADDRESS"), Fault.CUDA, RANK, grace.OUTSIDE),
    (RuntimeError("CUDA error: out of memory"), Fault.EXCEPTION, RANK, 0.0),
    (ValueError(str(CUDA)), Fault.EXCEPTION, RANK, 0.0),
    (RuntimeError("Connection closed by peer [127.0.0.1]:5"), Fault.LINK, PEER, grace.OUTSIDE),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), Fault.LINK, PEER, grace.OUTSIDE),
    (DistBackendError("NCCL error: remote process exited"), Fault.LINK, PEER, grace.OUTSIDE),
    (ValueError("Connection closed by peer"), Fault.EXCEPTION, RANK, 0.0),
    (RuntimeError("Timed out waiting 30000ms for recv operation"), Fault.EXCEPTION, PEER, 0.0),
    (TimeoutError("wait timeout after 300000ms"), Fault.EXCEPTION, PEER, 0.0),
    (DistBackendError("NCCL communicator was aborted on rank 1"), Fault.EXCEPTION, PEER, grace.OUTSIDE),
    (DistBackendError("NCCL error: unhandled system error"), Fault.EXCEPTION, RANK, grace.OUTSIDE),
    (RuntimeError("shape '[2, 3]' is invalid for input of size 5"), Fault.EXCEPTION, RANK, 0.0),
    (KeyError("loss"), Fault.EXCEPTION, RANK, 0.0),
]


@pytest.mark.parametrize(("error", "fault", "peer", "wait"), ROWS, ids=[f"{type(r[0]).__name__}: {r[0]}"[:50] for r in ROWS])
def test_the_table_of_blame(error: BaseException, fault: Fault, peer: bool, wait: float) -> None:
    row = symptoms.of_exception(error)
    assert (row.fault, row.peer, row.wait) == (fault, peer, wait)
    assert symptoms.named([cls.__name__ for cls in type(error).__mro__], str(error)) is row


def test_every_row_is_met() -> None:
    assert {id(symptoms.of_exception(r[0])) for r in ROWS} == {id(row) for row in symptoms.TABLE}


def test_the_launcher_speaks_before_the_ranks() -> None:
    ranks = (grace.COLLECTIVE, grace.OUTSIDE, grace.CONNECTING)
    assert grace.PEERS_DEATH < grace.EXIT_CODE < grace.EXIT_CODE + grace.PEERS_DEATH < min(ranks)


@pytest.mark.parametrize(
    ("code", "fault", "name"),
    [(None, Fault.SIGNAL, "died"), (3, Fault.EXIT, "exit 3"), (137, Fault.SIGNAL, "SIGKILL"), (255, Fault.EXIT, "exit 255")],
)
def test_an_exit_code(code: int | None, fault: Fault, name: str) -> None:
    assert symptoms.cause_of(code) == name and symptoms.of_code(code)[0] is fault
