"""An append-only log in memory that outlives the worker; each record is whole or absent."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator

from ftrun import native
from ftrun.core.errors import WorkerError
from ftrun.worker.memory.segment import Segment

_RECORD = struct.Struct("<QQ")  # length and checksum, before each record
_HEADER = mmap.PAGESIZE  # its first word counts the bytes written


class Damaged(WorkerError):
    """Memory does not hold the bytes that were sealed there."""


class Log:
    """A log in `room` bytes at `base` of a segment, both multiples of a page."""

    def __init__(self, segment: Segment, base: int, room: int) -> None:
        self._segment = segment
        self._base = base
        self._room = room - _HEADER

    @property
    def head(self) -> tuple[int, int]:
        """(offset, size) in the segment of the word that counts the bytes written."""
        return self._base, 8

    @property
    def content(self) -> tuple[int, int]:
        """(offset, size) in the segment of all records."""
        return self._base + _HEADER, self.used

    @property
    def used(self) -> int:
        """Offset at which the next record begins."""
        return self._segment.load(self._base)

    def append(self, record: bytes) -> None:
        """Append a record. Raises WorkerError when the log is full."""
        content = self.used + _RECORD.size
        if content + len(record) > self._room:
            raise WorkerError("a log of this rank is full")
        place = self._base + _HEADER + content
        self._segment.view(place, len(record))[:] = record
        checksum = native.checksum(self._segment.address + place, len(record))
        self._segment.view(place - _RECORD.size, _RECORD.size)[:] = _RECORD.pack(len(record), checksum)
        self._segment.store(self._base, content + len(record))  # publishes it

    def records(self, begin: int = 0, end: int | None = None) -> Iterator[memoryview]:
        """Yield the records between two values of `used`, not copied.

        Raises:
            Damaged
        """
        at, end = begin, self.used if end is None else end
        while at < end:
            place = self._base + _HEADER + at
            size, checksum = _RECORD.unpack(self._segment.view(place, _RECORD.size))
            place, at = place + _RECORD.size, at + _RECORD.size + size
            if at > end or native.checksum(self._segment.address + place, size) != checksum:
                raise Damaged("a log of a rank does not match its checksums: its memory was overwritten")
            yield self._segment.view(place, size)

    def start_over(self, held: int) -> int:
        """Choose where records that do not depend on earlier ones begin: behind those, or at the front once that is free.

        `held`: records from this offset up to `used` must not be overwritten.
        """
        if self.used > self._room // 2 and held > self._room // 4:
            self._segment.store(self._base, 0)
        return self.used

    def forget(self, begin: int, end: int) -> None:
        """Give the memory of these records back to the system."""
        page = mmap.PAGESIZE
        first, last = -(-(self._base + _HEADER + begin) // page) * page, (self._base + _HEADER + end) // page * page
        if first < last:
            with mmap.mmap(self._segment.fd, last - first, offset=first) as part:
                part.madvise(mmap.MADV_REMOVE)
