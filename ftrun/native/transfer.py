"""This module binds the transfer engine with ctypes; it mirrors native/include/ftrun_transfer.h.

Addresses are ints in this process; the caller keeps the memory mapped during the call. Every call releases the GIL and ends
by its deadline, when the word it watches moves on, or when a participant it needs dies.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import NamedTuple

from ftrun.native import _bind, _releasing

Extent = tuple[int, int]
"""(address, bytes)"""

LOAD, BROADCAST, RELOAD = 0, 1, 2  # stages of an exchange
CHECK_NONE, CHECK_READ, CHECK_BACK = 0, 1, 2
PAGE = 4096
BUFFERS = 2  # shared buffers of a source


class _Extent(ctypes.Structure):
    _fields_ = (("address", c_uint64), ("bytes", c_uint64))


class _Span(ctypes.Structure):
    _fields_ = (("begin", c_uint64), ("end", c_uint64), ("stage", c_uint32), ("source", c_uint32))


class _Log(ctypes.Structure):
    _fields_ = (("spans", POINTER(_Span)), ("room", c_uint64), ("count", c_uint64))


class _Terms(ctypes.Structure):
    _fields_ = (
        ("chunk", c_uint64),
        ("threads", c_int32),
        ("check", c_int32),
        ("timeout", c_double),
        ("watch", c_void_p),
        ("watch_shift", c_uint64),
        ("watch_value", c_uint64),
        ("moved", c_void_p),
        ("log", POINTER(_Log)),
    )


class _Result(ctypes.Structure):
    _fields_ = (
        ("bytes", c_uint64),
        ("copied", c_uint64),
        ("checksum", c_uint64),
        ("chunks", c_uint64),
        ("nanoseconds", c_uint64),
        ("failed", c_int64),
    )


class _Facts(ctypes.Structure):
    _fields_ = (
        ("participants", c_uint32),
        ("source", c_int32),
        ("chunk", c_uint64),
        ("total", c_uint64),
        ("generation", c_uint64),
        ("step", c_uint64),
        ("layout", c_uint64),
    )


_FACTS = ("participants", "chunk", "total", "source", "generation", "step", "layout")


class _Progress(ctypes.Structure):
    _fields_ = (("state", c_uint64), ("produced", c_uint64), ("consumed", c_uint64))


_chunk = _bind(_releasing, "transfer_chunk", c_uint64, c_uint64, c_uint64)
_COPIED = (c_void_p, c_size_t, c_void_p, c_size_t, POINTER(_Terms), POINTER(_Result))
_copy = _bind(_releasing, "transfer_copy", c_int, *_COPIED)
_copy_gpu = _bind(_releasing, "cuda_transfer_copy", c_int, c_int, *_COPIED)
_exchange_size = _bind(_releasing, "exchange_size", c_uint64, c_uint32)
_exchange_share = _bind(_releasing, "exchange_share", c_uint64, POINTER(_Facts), c_uint32, POINTER(c_uint64))
_exchange_init = _bind(_releasing, "exchange_init", c_int, c_void_p, POINTER(_Facts))
_exchange_read = _bind(_releasing, "exchange_read", c_int, c_void_p, POINTER(_Facts))
_EXCHANGED = (
    c_void_p,
    c_uint32,
    POINTER(_Facts),
    c_void_p,
    c_size_t,
    c_void_p,
    c_size_t,
    c_void_p,
    POINTER(_Terms),
    POINTER(_Result),
)
_exchange_run = _bind(_releasing, "exchange_run", c_int, *_EXCHANGED)
_exchange_run_gpu = _bind(_releasing, "cuda_exchange_run", c_int, c_int, *_EXCHANGED)
_exchange_look = _bind(_releasing, "exchange_look", c_int, c_void_p, c_uint32, POINTER(_Progress))

_WORDS = {
    errno.ETIMEDOUT: "it did not end in time",
    errno.ECANCELED: "the world was stopped",
    errno.EPIPE: "a source died or failed",
    errno.EBADMSG: "the checksum of what arrived is not that of what was sent",
    errno.EPROTO: "the two sides have another layout",
    errno.ESTALE: "the two sides are of another generation or step",
    errno.EIO: "the device failed",
    errno.ENOMEM: "there was no memory for its buffers",
}


class TransferError(OSError):
    """A transfer did not complete; `errno` says why, `failed` names the participant at fault (-1 = unknown).

    The contents of the destination are then undefined.
    """

    def __init__(self, code: int, failed: int) -> None:
        super().__init__(code, _WORDS.get(code, os.strerror(code)))
        self.failed = failed


@dataclass(frozen=True)
class Terms:
    """Terms set the options of a transfer. `watch` = (address of a word, shift, value): it aborts once word >> shift differs.

    `chunk` bytes (0 = chosen), `threads` of one copy (0 = chosen), `timeout` in seconds, `moved`: address of a word to which
    arriving bytes are added, 0 = none. `spans`: of how many pieces of an exchange's work the times are wanted.
    """

    chunk: int = 0
    threads: int = 0
    check: int = CHECK_READ
    timeout: float = 60.0
    watch: tuple[int, int, int] | None = None
    moved: int = 0
    spans: int = 0

    def _native(self, log: _Log | None = None) -> _Terms:
        word, shift, value = self.watch or (None, 0, 0)
        kept = None if log is None else ctypes.pointer(log)
        return _Terms(self.chunk, self.threads, self.check, self.timeout, word, shift, value, self.moved or None, kept)


@dataclass(frozen=True)
class Span:
    """A span times one step of a participant with one chunk of `source`: LOAD, BROADCAST or RELOAD. Times in ns, monotonic."""

    stage: int
    source: int
    begin: int
    end: int


@dataclass(frozen=True)
class Moved:
    """The result of a transfer: bytes that arrived, all bytes written (staging included), checksum, chunks, seconds."""

    bytes: int
    copied: int
    checksum: int
    chunks: int
    seconds: float
    spans: tuple[Span, ...] = ()


def chunk_size(size: int, room: int = 0) -> int:
    """Return the bytes per chunk for a source that sends `size` bytes with `room` bytes for its buffers (0 = no limit)."""
    return int(_chunk(size, room))


def copy(to: Sequence[Extent], source: Sequence[Extent], terms: Terms | None = None, gpu: int | None = None) -> Moved:
    """Peer copy between two lists of extents of the same total size.

    Raises:
        TransferError

    `gpu`: by streams of that device, between memory that its kernels can reach.
    """
    result = _Result()
    native = (terms or Terms())._native()
    lists = _array(to), len(to), _array(source), len(source), ctypes.byref(native), ctypes.byref(result)
    if gpu is None:
        return _moved(_copy(*lists), result)
    return _moved(_copy_gpu(gpu, *lists), result)


class OnGpu(NamedTuple):
    """Where an exchange between GPUs goes: the one used here, and every participant's BUFFERS buffers as mapped for it."""

    ordinal: int
    buffers: Sequence[int]


@dataclass(frozen=True)
class Facts:
    """What all participants of an exchange must agree on. `source` -1: each sends its share; else the only source."""

    participants: int
    chunk: int
    total: int
    source: int = -1
    generation: int = 0
    step: int = 0
    layout: int = 0
    _native: _Facts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        layout = self.layout & (1 << 64) - 1
        native = _Facts(self.participants, self.source, self.chunk, self.total, self.generation, self.step, layout)
        object.__setattr__(self, "_native", native)

    @property
    def control_bytes(self) -> int:
        return int(_exchange_size(self.participants))

    @property
    def ring_bytes(self) -> int:
        """Return the size of the control block and of every source's shared buffers behind it."""
        return self.control_bytes + BUFFERS * self.participants * self._stride

    @property
    def _stride(self) -> int:
        return -(-self.chunk // PAGE) * PAGE

    def share(self, who: int) -> tuple[int, int]:
        """Return (offset, bytes) of the part that participant `who` sends."""
        offset = c_uint64()
        size = _exchange_share(ctypes.byref(self._native), who, ctypes.byref(offset))
        return offset.value, int(size)

    def prepare(self, ring: int) -> None:
        """Initialize the zeroed memory at `ring` (ring_bytes) before the others see it.

        Raises:
            TransferError: EINVAL for facts that do not fit together.
        """
        code = _exchange_init(ring, ctypes.byref(self._native))
        if code < 0:
            raise TransferError(-code, -1)

    @staticmethod
    def read(ring: int) -> Facts:
        """Read the facts with which the memory at `ring` was prepared.

        Raises:
            TransferError: EINVAL when the memory was not prepared.
        """
        found = _Facts()
        code = _exchange_read(ring, ctypes.byref(found))
        if code < 0:
            raise TransferError(-code, -1)
        return Facts(*(getattr(found, name) for name in _FACTS))

    def run(
        self,
        ring: int,
        me: int,
        source: Sequence[Extent],
        to: Sequence[Extent],
        terms: Terms | None = None,
        gpu: OnGpu | None = None,
    ) -> Moved:
        """Take part as `me`: send `source` (this participant's share), receive the whole into `to` (or nothing).

        `gpu`: `to` is memory of that device, and the shared buffers are not behind the control block but there.

        Raises:
            TransferError
        """
        result = _Result()
        terms = terms or Terms()
        spans = (_Span * terms.spans)()
        log = _Log(spans, terms.spans, 0)
        native = terms._native(log)
        first = ring + self.control_bytes
        count = BUFFERS * self.participants
        addresses = [first + i * self._stride for i in range(count)] if gpu is None else gpu.buffers
        buffers = (c_uint64 * count)(*addresses)
        facts, lists = ctypes.byref(self._native), (_array(source), len(source), _array(to), len(to))
        terms_and_result = buffers, ctypes.byref(native), ctypes.byref(result)
        if gpu is None:
            code = _exchange_run(ring, me, facts, *lists, *terms_and_result)
        else:
            code = _exchange_run_gpu(gpu.ordinal, ring, me, facts, *lists, *terms_and_result)
        return _moved(code, result, [spans[i] for i in range(min(log.count, terms.spans))])


@dataclass(frozen=True)
class Progress:
    """`state`: 0 not here yet, 1 takes part, 2 left, 3 died. Chunks broadcast, and chunks reloaded."""

    state: int
    produced: int
    consumed: int


def look(ring: int, who: int) -> Progress:
    """Read the recent progress of a participant of an exchange.

    Raises:
        OSError: EINVAL when there is no such exchange.
    """
    progress = _Progress()
    code = _exchange_look(ring, who, ctypes.byref(progress))
    if code < 0:
        raise OSError(-code, os.strerror(-code))
    return Progress(progress.state, progress.produced, progress.consumed)


def _array(extents: Sequence[Extent]) -> ctypes.Array[_Extent]:
    return (_Extent * len(extents))(*(_Extent(address, size) for address, size in extents))


def _moved(code: int, result: _Result, spans: Sequence[_Span] = ()) -> Moved:
    if code < 0:
        raise TransferError(-code, result.failed)
    kept = tuple(Span(s.stage, s.source, s.begin, s.end) for s in spans)
    return Moved(result.bytes, result.copied, result.checksum, result.chunks, result.nanoseconds / 1e9, kept)
