"""The memory of a rank on another node, as a mirror: sparse segments here, whose parts are filled over TCP as they are needed.

A mirror has the layout of the original, so all code that reads another rank's arena and slots reads it like one of this node. `look`
brings the marks and tags, `read_slots` the contents of the slots, `read_weights` the zones of the arena in host memory. What is on a GPU
has no mirror: whoever copies it gets it piece by piece. The original may change meanwhile: slots have checksums of their own, and whoever
copies weights compares the commit mark before and after, as with a replica on this node. Each chunk on its way has a checksum, too
(`ftrun.core.shared.far`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from ftrun.core.errors import PlatformError, WorkerError
from ftrun.core.shared import far
from ftrun.native.cuda import CudaError
from ftrun.worker.memory.arena import Arena
from ftrun.worker.memory.gpu_memory import FarDevice
from ftrun.worker.memory.segment import Segment
from ftrun.worker.repair.recovery_points import END, GATE, START, Slots

_AGAIN = 5  # times that slots are read again if they changed on the way
_Range = tuple[int, int]  # place and length in a segment
Counted = Callable[[int], AbstractContextManager[Callable[[int], None]]]  # shows a transfer of so many bytes, and hears of each piece


class Unreached(WorkerError):
    """Another node cannot be reached any more, or its memory cannot be used from here."""


class _Line:
    """A connection to the node that serves segments of `rank` at `address` (host, port), each with a mirror of its length here.

    Raises:
        OSError: By the constructor and each method, if the node cannot be reached or has no such memory.
    """

    def __init__(self, address: tuple[str, int], secret: str, rank: int, names: Sequence[str]) -> None:
        self._rank = rank
        self.mirrors: dict[str, Segment] = {}
        self._line = far.FarLine(address, secret)
        try:
            for name in names:
                self.add(name)
        except (OSError, PlatformError):
            self._line.close()
            for segment in self.mirrors.values():
                segment.close()
            raise

    def close(self) -> None:
        self._line.close()

    def add(self, name: str) -> Segment:
        """Make the mirror of a segment."""
        size = self.size(name)
        if size is None:
            raise OSError(f"its node has no {name} of rank {self._rank}")
        self.mirrors[name] = Segment.create(f"far-{name}-{self._rank}", size)
        return self.mirrors[name]

    def size(self, name: str) -> int | None:
        """Return the bytes of a segment, None = there is none."""
        return self._line.size(self._rank, name)

    def read(self, name: str, ranges: list[_Range], moved: Callable[[int], None] = lambda size: None) -> None:
        mirror = self.mirrors[name]
        if any(at < 0 or size < 0 or at + size > mirror.length for at, size in ranges):
            raise OSError(f"the {name} of rank {self._rank} changed while it was read")
        self._line.read(self._rank, name, ranges, mirror.view, lambda _, part: moved(len(part)))

    def pass_on(self, name: str, place: _Range, put: Callable[[int, memoryview], None], moved: Callable[[int], None]) -> None:
        """Read a part of a segment that has no mirror, and give each piece to `put(place, piece)`."""
        room = memoryview(bytearray(min(far.CHUNK, place[1])))

        def pieces(at: int, piece: memoryview) -> None:
            put(at, piece)
            moved(len(piece))

        self._line.read(self._rank, name, [place], lambda _, size: room[:size], pieces)


def mirrored_slots(address: tuple[str, int], secret: str, rank: int) -> Segment:
    """Bring the slots of a rank whose node is lost from the node that mirrors them, served at `address`.

    Nobody writes to them: the lost node did.

    Raises:
        OSError: That node cannot be reached, or has none.
    """
    line = _Line(address, secret, rank, ("slots",))
    segment = line.mirrors["slots"]
    try:
        slots = Slots(segment)
        line.read("slots", slots.all_heads())
        line.read("slots", slots.grown({}))
    except OSError:
        segment.close()
        raise
    finally:
        line.close()
    return segment


class FarMemory:
    """Arena and slots of `rank`, served at `address` (host, port).

    Raises:
        OSError: By the constructor and each method, if the node cannot be reached or has no such memory.
    """

    def __init__(self, address: tuple[str, int], secret: str, rank: int, counted: Counted) -> None:
        self._rank = rank
        self._counted = counted
        self._line = _Line(address, secret, rank, ("arena", "slots"))
        self.arena, self.slots = Arena(self._line.mirrors["arena"]), Slots(self._line.mirrors["slots"])

    def close(self) -> None:
        """Hang up, and give the mirror of the arena back."""
        self._line.close()
        self.arena.segment.close()

    def has_weights(self) -> bool:
        """Can they be brought? Those on a GPU only while the rank's worker lives. Call `look` before."""
        return not self.arena.has_gpu or self._line.size("device") is not None

    def look(self) -> None:
        """Bring the tags of the slots and the commit mark as they are now."""
        self._line.read("slots", self.slots.heads())
        self._line.read("arena", [self.arena.head])

    def read_slots(self) -> None:
        """Bring the contents of all slots that are whole, and the logs that they refer to."""
        self.look()
        for _ in range(_AGAIN):
            before = self._tags()
            self._line.read("slots", self.slots.contents())
            self.look()
            if self._tags() == before:
                return
        raise OSError(f"the slots of rank {self._rank} changed while they were read")

    def read_weights(self, buffers_only: bool = False) -> None:
        """Bring what the arena holds in host memory, then its marks again."""
        self._line.read("arena", [self.arena.head])
        places = self.arena.in_use(buffers_only)
        if self.arena.has_gpu:
            self.arena.far = FarDevice(self.arena.segment, self._read_device)
        with self._counted(sum(size for _, size in places)) as moved:
            self._line.read("arena", places, moved)
        self._line.read("arena", [self.arena.head])

    def _read_device(self, offset: int, size: int, put: Callable[[int, memoryview], None]) -> None:
        """Read a part of what the arena has on a GPU, then its marks again.

        Raises:
            Unreached
        """
        try:
            with self._counted(size) as moved:
                self._line.pass_on("device", (offset, size), put, moved)
            self._line.read("arena", [self.arena.head])
        except CudaError:
            raise  # of the device here
        except OSError as error:
            raise Unreached(f"rank {self._rank}: {error}") from error

    def _tags(self) -> list[int]:
        return [self.slots.tag(slot) for slot in (START, GATE, END)]
