"""The board: one mmap'd file a node, where every process shows what it does and reads what it may do.

Each field is written by one side only (said beside it) and is an aligned 64-bit word, so a reader never sees half
of one. The file outlives dead workers: the phase and step in which one died stay readable. The three bells (workers',
launcher's, gate's) are 32-bit futex words: ring one after a change, and a lost ring costs latency only, since every
wait has a deadline and looks again.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
from pathlib import Path

from ftrun import native
from ftrun.core.errors import PlatformError
from ftrun.core.shared import gate

MAGIC = 0x3144_4252_4E55_5246  # "FRUNRBD1"
VERSION = 8
CELL_BYTES = 2048
ROWS_KEPT = 5  # attempts at a step whose phases stay readable, see ftrun.core.shared.steps
ROW_WORDS = 8
COUNTS = 16  # process groups of a rank whose collectives are counted on the board
_CELLS_AT = 8192
_WORD = 8
_SHIFT_ZERO = 1 << 40
RUN_WORDS = 224  # of one text about the run
RUN_BYTES = (RUN_WORDS - 1) * 8
OPENINGS_KEPT = 256


class Head:
    """Header fields: word index from the start of the file."""

    MAGIC = 0
    VERSION = 1
    CELLS = 2
    GATE = 3  # gate word, swapped by launcher and workers
    BELLS = 4  # two 32-bit words: workers' bell, launcher's bell
    PUBLISHED = 5  # launcher: newest generation whose world file is complete
    LAUNCHER_PID = 6
    WORLD_SIZE = 7
    FD_STORE_EPOCH = 8  # launcher: +1 for each fd store; workers send their descriptors again
    ENDING = 9  # launcher: 1 = the run ends, leave at once
    ATTEMPT = 10  # launcher: how often the whole world was restarted
    GATE_BELL = 11  # 32-bit futex word: rung at each arrival and opening, so that only ranks at the gate wake
    REQUESTS = 12  # number of the newest fault or drain that a person asked for (ftrun.faults.requests)
    WAITING = 14  # launcher: 1 = no healthy device for every rank; waits for a world go on
    RUN = 15  # launcher: number of the newest text about the run, which is in slot RUN % 2; 0 = there is none
    DIFFER = 16  # worker that opens a gate: its number + 1, where ranks that should hold the same were seen to differ; 0 = nowhere yet
    MADE = 17  # replacement: 1 = it made an update in place of a dead rank that no other rank can be compared with
    EQUAL = 18  # worker that opens a gate: 1 = all ranks that should hold the same were equal when they were last compared
    ROOM = 19  # launcher: cells that have memory, which are the first ones; to read another one where there is no room is a SIGBUS
    RUN_TEXT = 64  # two slots of RUN_WORDS words: length in bytes, then the text
    OPENINGS = 512  # written by the opener of a gate: OPENINGS_KEPT slots of gate number + 1 (0 = being written), and when (ns)


class F:
    """Cell fields: word index inside the cell of one worker incarnation. Written by the worker unless said."""

    PID = 0
    RANK = 1  # rank + 1; 0 = none yet (a spare)
    GENERATION = 2  # generation it takes part in
    PHASE = 3  # see Phase
    STEP = 4  # step index + 1; 0 = before the loop
    ARRIVAL = 5  # gate.arrival(generation, step)
    BEAT = 6  # CLOCK_MONOTONIC ns, by the native thread
    PROGRESS = 7  # ns of the last sign of life from Python
    COLLECTIVE = 8  # see `collective_word`: the newest collective it entered since the step was handed out
    COLLECTIVE_NAME = 9  # first 8 bytes of its name
    COLLECTIVE_SINCE = 10  # ns
    FLAGS = 11  # see Flag
    ATTEMPT = 12  # Step.attempt
    DEVICE = 13  # device index + 1; 0 = cpu
    PYTHON = 14  # ns, by the control thread: some Python of the process runs
    WORK = 15  # ns of its own work in its last step, without waiting for others
    # answers to a generation bump: the generation answered, and when (ns)
    STOPPED = 16
    STOPPED_NS = 17
    CLEANED = 18
    CLEANED_NS = 19
    READY = 20  # wants to rebuild its groups
    READY_NS = 21
    RESET = 22
    RESET_NS = 23
    RESTORED = 24
    RESTORED_NS = 25
    RESUMED = 26  # entered the resume step
    RESUMED_NS = 27
    FIRST_DONE = 28  # completed the first step never committed before
    FIRST_DONE_NS = 29
    SOURCE = 30  # see Source: where its state came from in this generation
    SOURCE_BYTES = 31
    RAISED = 32  # generation in which its body raised; details: FailureNote
    RAISED_NS = 33
    REDONE_NS = 34  # finished doing `resume` again
    INEXACT = 35  # see Inexact: bit set of reasons why exactness is not promised; where they were seen: DoubtNote
    # written by the launcher
    EXITED = 36  # 1 = reaped
    EXIT_STATUS = 37  # exit code, or 128 + signal
    FENCED = 38  # 1 = runs no more code, 2 = fence missed its deadline: do not adopt
    FENCED_NS = 39
    DETECTED_NS = 40
    # written by the worker
    SHIFT = 41  # _SHIFT_ZERO + step index - gate number; 0 = not in a loop yet
    # the transfer that it is in: bytes that arrived, bytes in all, and since when (ns); 0 = none
    MOVED = 42
    MOVE_TOTAL = 43
    MOVE_SINCE = 44
    BUSY = 45  # see Busy: why it may go without a sign of life for long
    SUM = 46  # checksum of the replicated state
    SUM_AT = 47  # see `sum_word`: at which gate that was
    LIFE = 48  # a robust mutex of 64 bytes, see ftrun.native, held by the beat thread: its loss is the death of the process
    NO_SOURCE = 72  # generation in which it found no source for its rank's state; see Flag.UNRESTORABLE
    CORRUPT = 73  # written by the launcher: 1 = its memory is corrupt, nobody takes anything from there
    UNCONNECTED = 74  # generation in which it could not be connected; why: UnconnectedNote
    SETTLED = 75  # generation in which it is in the loop and takes nothing more from other ranks' memory
    # written by the worker
    INPUTS = 76  # digest of what protected models were called with in the step that INPUTS_AT names
    INPUTS_AT = 77  # see `inputs_word`
    PYTHON_SUM = 78  # checksum of the optimizers' hyperparameters, as of SUM_AT
    REPLICAS = 79  # checksum of the ranks that hold the same as this one, itself among them; 0 = nobody is known to
    # written by the worker: the phases of its last steps, see ftrun.core.shared.steps
    FIRST_ROW = 80  # ROWS_KEPT rows of ROW_WORDS words
    ROWS = 120  # rows ever begun
    EPOCH = 121  # epoch of job.epochs + 1; 0 = none
    LOOP_END = 122  # step index after the last one of its loop; 0 = not in a loop yet
    ENDS = 123  # loops, and calls between loops, that it passed: each ends at a gate that is no step's
    MISSED = 124  # gate number + 1 of the step that it took a rank over at, without what the script did since the body before; 0 = none
    # written by the worker: who waits for whom, see ftrun.control.waits
    PEER = 128  # rank + 1 that the send or receive in COLLECTIVE is with; 0 = it is a collective
    FIRST_COUNT = 129  # COUNTS words: of each group, `collective_word` of its collectives since the hand-out, + 1
    COUNTED = 145  # generation in which that count began: only such of one generation can be compared
    COLLECTIVE_ENDED = 146  # ns of the end of its newest collective that is over
    CUT = 147  # generation + 1 in which a collective of its failed, as one over connections that were closed does; 0 = none
    # written by the worker: gate number + 1 of the host snapshot in each of its two halves, 0 = none, or being written
    FIRST_HALF = 148
    # written by the worker: of the bodies that its checks looked at as a whole, how many, and the gate number + 1 of the last; 0 = none
    LOOKS = 150
    LOOKED_AT = 151
    LEFT_OUT = 152  # number of names in its LeftOutNote


class Phase(enum.IntEnum):
    """The part of its step that a rank is in, for people and for fault injection. No decision reads it."""

    START = 0
    IDLE = 1
    FORWARD = 2
    BACKWARD = 3
    GATE = 4
    UPDATE = 5
    DONE = 6


_PHASE_NAMES = {int(phase): phase.name.lower() for phase in Phase}


def phase_name(word: int) -> str:
    """The name of a value of F.PHASE, also of one outside Phase."""
    return _PHASE_NAMES.get(word, f"phase {word}")


class Flag(enum.IntFlag):
    """Milestones of a worker incarnation; bits are only ever added."""

    ALIVE = 1  # its liveness lock is held
    PARKED = 2  # a spare waits for a rank
    GROUP = 4  # has an "ftrun" process group
    PROTECTED = 8  # protect() returned and a loop begins
    LOOPING = 16  # the first step was handed out
    LOOP_DONE = 32  # passed the virtual gate of its last loop (cleared when another loop starts)
    EXITING = 64  # the script ended normally
    UNRESTORABLE = 128  # a replaced rank found no source for its state; why: UnrestorableNote
    SCRIPT = 256  # the script's first line comes next
    STEPPED = 512  # an optimizer of the script took a step
    LEFT = 1024  # an exception left a body or a job.call of the script: nobody's collectives get what this rank owed them
    ANEW = 2048  # its process gives the liveness lock up and becomes a fresh interpreter
    HELD_ANEW = 4096  # which holds it again


class Busy(enum.IntFlag):
    """Reasons why a worker may go without a sign of life for longer than a step takes, and at which kind of gate it is."""

    FIRST = 1  # this process has completed no body yet
    COMPILING = 2
    CALL = 4  # in job.call
    AT_LOOP_END = 8  # at the gate after its loop's last step
    DEBUGGER = 32  # in pdb
    AT_CALL_END = 16  # at the gate after a job.call between two loops


class Source(enum.IntEnum):
    """The source of a replacement's state."""

    NONE = 0
    ADOPT = 1
    PEER = 2
    SEALED = 3
    SNAPSHOT = 4


class Inexact(enum.IntFlag):
    """Reasons why a recovery cannot promise a bit-identical result."""

    UPDATE_USED_RNG = 1
    DDP_LAYOUT = 16
    BUFFERS_FROM_PEER = 64
    WAS_CORRUPT = 32
    REPLICAS_DIFFER = 128
    OTHER_INPUTS = 256
    BUFFERS_UNKNOWN = 512
    OWN_STATE_LOST = 1024
    STATE_UNKNOWN = 2048
    DREW_BETWEEN = 4096
    UPDATE_DOUBTED = 8192
    INPUTS_UNKNOWN = 16384
    INPUTS_UNASKED = 32768


class Cell:
    """One worker incarnation's fields. `cell[F.STEP]` reads, `cell[F.STEP] = 3` publishes (release order)."""

    __slots__ = ("_base", "_words", "address", "index")

    def __init__(self, words: memoryview, address: int, index: int) -> None:
        self._words = words
        self._base = (_CELLS_AT + index * CELL_BYTES) // _WORD
        self.address = address + _CELLS_AT + index * CELL_BYTES
        self.index = index

    def __getitem__(self, field: int) -> int:
        return int(self._words[self._base + field])

    def __setitem__(self, field: int, value: int) -> None:
        self._words[self._base + field] = value

    def words(self) -> memoryview:
        """All words of the cell, for callers that read or write many; each write is one word, as by `cell[field]`."""
        return self._words[self._base : self._base + CELL_BYTES // _WORD]

    def field_address(self, field: int) -> int:
        """Address of a field in this process, for native calls."""
        return self.address + field * _WORD

    def add_flag(self, flag: Flag) -> None:
        """Set one milestone; call from one thread of the worker at a time."""
        self[F.FLAGS] = self[F.FLAGS] | flag

    def drop_flag(self, flag: Flag) -> None:
        """Clear one milestone; call from one thread of the worker at a time."""
        self[F.FLAGS] = self[F.FLAGS] & ~flag

    def has(self, flag: Flag) -> bool:
        return bool(self[F.FLAGS] & flag)

    @property
    def rank(self) -> int | None:
        raw = self[F.RANK]
        return raw - 1 if raw else None

    @property
    def step(self) -> int | None:
        raw = self[F.STEP]
        return raw - 1 if raw else None

    @property
    def shift(self) -> int:
        """Step index minus gate number of the loop it is in (they part after a first loop or a loaded checkpoint)."""
        raw = self[F.SHIFT]
        return raw - _SHIFT_ZERO if raw else 0

    @property
    def gate_number(self) -> int | None:
        """The gate number of the step that it is in; unlike the index it does not come again in another epoch."""
        return None if self.step is None else self.step - self.shift

    def set_shift(self, shift: int) -> None:
        self[F.SHIFT] = _SHIFT_ZERO + shift

    @property
    def epoch(self) -> int | None:
        """The epoch of job.epochs; None for a script without."""
        raw = self[F.EPOCH]
        return raw - 1 if raw else None

    @property
    def phase(self) -> Phase:
        return Phase(self[F.PHASE])


class Board:
    """The mapped file. `create` makes a zeroed one of `cells` cells; `open` maps an existing one.

    Raises:
        PlatformError: When the file is not a board of this version.
        OSError: From the system calls.
    """

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        if size < _CELLS_AT or size % _WORD:
            raise PlatformError(f"the run's board is damaged: it has {size} bytes; end the run and start it again")
        self._map = mmap.mmap(fd, 0)
        self._words = memoryview(self._map).cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if self._words[Head.MAGIC] != MAGIC or self._words[Head.VERSION] != VERSION:
            raise PlatformError("the run's board has another format: launcher and workers must use the same ftrun")
        self.cells = int(self._words[Head.CELLS])
        if size < _CELLS_AT + self.cells * CELL_BYTES:
            raise PlatformError(
                f"the run's board is damaged: {self.cells} cells do not fit into its {size} bytes; end the run and start it again"
            )
        self._gate_address = self.address + Head.GATE * _WORD
        self._worker_bell = self.address + Head.BELLS * _WORD
        self._launcher_bell = self._worker_bell + 4
        self._gate_bell = self.address + Head.GATE_BELL * _WORD

    @classmethod
    def create(cls, path: Path, cells: int) -> Board:
        """A reader never sees an unfinished one: it is made under another name."""
        unfinished = path.with_suffix(".new")
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _CELLS_AT + cells * CELL_BYTES)
            os.posix_fallocate(fd, 0, _CELLS_AT)
            head = (MAGIC, VERSION, cells, gate.pack(gate.GateWord(0, True, -1)))
            os.pwrite(fd, b"".join(v.to_bytes(8, "little") for v in head), 0)
            os.rename(unfinished, path)
            return cls(fd)
        finally:
            os.close(fd)

    @staticmethod
    def make_room(path: Path, cell: int) -> None:
        """Have memory behind a cell before anybody reads or writes there: without, a full file system is a SIGBUS.

        Raises:
            OSError
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # those before it as well: one that found no room earlier is read, too
            os.posix_fallocate(fd, _CELLS_AT, (cell + 1) * CELL_BYTES)
            before = int.from_bytes(os.pread(fd, _WORD, Head.ROOM * _WORD), "little")
            os.pwrite(fd, max(before, cell + 1).to_bytes(_WORD, "little"), Head.ROOM * _WORD)
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: Path) -> Board:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(fd)
        finally:
            os.close(fd)

    def __getitem__(self, field: int) -> int:
        return int(self._words[field])

    def __setitem__(self, field: int, value: int) -> None:
        self._words[field] = value

    def show_run(self, text: bytes) -> None:
        """Publish a text about the whole run for `run_text`. One above RUN_BYTES has no place and is not shown."""
        if len(text) > RUN_BYTES:
            return
        number = self[Head.RUN] + 1
        at = Head.RUN_TEXT + number % 2 * RUN_WORDS
        self._map[(at + 1) * _WORD : (at + 1) * _WORD + len(text)] = text
        self[at] = len(text)
        self[Head.RUN] = number

    def run_text(self) -> bytes:
        """The newest text of `show_run`, empty before the first."""
        while number := self[Head.RUN]:
            at = Head.RUN_TEXT + number % 2 * RUN_WORDS
            text = self._map[(at + 1) * _WORD : (at + 1) * _WORD + min(self[at], RUN_BYTES)]
            if self[Head.RUN] == number:  # else this slot may be written by now
                return text
        return b""

    def show_opening(self, number: int, now: int) -> None:
        """The caller opened gate `number` at `now`, ns. For people; decides nothing."""
        words, at = self._words, Head.OPENINGS + number % OPENINGS_KEPT * 2
        words[at] = 0
        words[at + 1] = now
        words[at] = number + 1

    def openings(self, last: int) -> list[int]:
        """The times at which the newest gates up to `last` opened, ns, oldest first; no gate between them is missing."""
        slots = self._words[Head.OPENINGS : Head.OPENINGS + 2 * OPENINGS_KEPT].tolist()
        times: list[int] = []
        for number in range(last, max(-1, last - OPENINGS_KEPT), -1):
            at = number % OPENINGS_KEPT * 2
            if slots[at] != number + 1:
                break
            times.append(slots[at + 1])
        return times[::-1]

    def cell(self, index: int) -> Cell:
        """The cell of incarnation `index`. IndexError outside the board."""
        if not 0 <= index < self.cells:
            raise IndexError(f"cell {index} of {self.cells}")
        return Cell(self._words, self.address, index)

    def column(self, field: int, cells: int) -> list[int]:
        """One field of the first `cells` cells; quick also for thousands of them."""
        stride = CELL_BYTES // _WORD
        first = _CELLS_AT // _WORD + field
        return self._words[first : first + cells * stride : stride].tolist()

    def gate(self) -> int:
        """The raw gate word (acquire)."""
        return native.load64(self._gate_address)

    def generation(self) -> int:
        """The generation in the gate word, by a plain read."""
        return self._words[Head.GATE] >> gate.GENERATION_SHIFT

    def words_of_gate(self) -> memoryview:
        """The gate word alone, for callers that read it many times a step by a plain read, and look again anyway."""
        return self._words[Head.GATE : Head.GATE + 1]

    def requests(self) -> int:
        """Number of the newest request for a fault or a drain; passed as often as `generation`."""
        return self._words[Head.REQUESTS]

    def swap_gate(self, expected: int, desired: int) -> bool:
        """Compare and swap the gate word; True when it was `expected`. Rings nobody."""
        return native.cas64(self._gate_address, expected, desired) == expected

    def ring_workers(self) -> None:
        """Wake every worker, wherever it waits: after a stop, a publication, a fence."""
        native.bell_ring(self._worker_bell)
        native.bell_ring(self._gate_bell)

    def ring_gate(self) -> None:
        """Wake the ranks that wait at the gate."""
        native.bell_ring(self._gate_bell)

    def gate_bell(self) -> int:
        return native.load32(self._gate_bell)

    def wait_gate(self, seen: int, timeout: float) -> bool:
        """Wait as `wait_workers`, for the gate's bell."""
        return native.bell_wait(self._gate_bell, seen, timeout)

    def ring_launcher(self) -> None:
        native.bell_ring(self._launcher_bell)

    def worker_bell(self) -> int:
        """The bell's count: read it, look at the board, then wait with it, and no ring is missed."""
        return native.load32(self._worker_bell)

    def launcher_bell(self) -> int:
        return native.load32(self._launcher_bell)

    def wait_workers(self, seen: int, timeout: float) -> bool:
        """Sleep (GIL released) until the workers' bell is rung after `seen` or `timeout` seconds; True = rung."""
        return native.bell_wait(self._worker_bell, seen, timeout)

    @property
    def gate_address(self) -> int:
        """Address of the gate word in this process, for native calls."""
        return self._gate_address

    def wait_launcher(self, seen: int, timeout: float) -> bool:
        """Wait as `wait_workers`, for the launcher's bell: milestones, answers to a stop, injected faults."""
        return native.bell_wait(self._launcher_bell, seen, timeout)


def name_word(name: str) -> int:
    """The first 8 bytes of an ASCII name as the word for F.COLLECTIVE_NAME."""
    return int.from_bytes(name.encode("ascii", "replace")[:8].ljust(8, b"\0"), "little")


def word_name(word: int) -> str:
    """Inverse of `name_word`."""
    return word.to_bytes(8, "little").rstrip(b"\0").decode("ascii", "replace")


_FULL_NAMES = {
    name[:8]: name
    for name in ("allgather", "all_gather", "allreduce", "all_to_all", "broadcast", "recv_anysource", "reduce_scatter")
}


def collective_name(word: int) -> str:
    """The name in F.COLLECTIVE_NAME; the plain one of those that begin in the same way."""
    short = word_name(word).lstrip("_")
    return _FULL_NAMES.get(short, short)


def collective_word(group: int, number: int) -> int:
    """F.COLLECTIVE: `group` is 0 for the whole world, else a hash of its ranks; `number` counts its collectives from 1."""
    return (group & 0xFFFFFFFF) << 32 | (number & 0xFFFFFFFF)


def collective_of(word: int) -> tuple[int, int]:
    """Inverse of `collective_word`."""
    return word >> 32, word & 0xFFFFFFFF


def sum_word(gate_number: int, trusted: bool) -> int:
    """F.SUM_AT: at which gate F.SUM was taken; `trusted`: all replicas were equal before."""
    return (gate_number + 1) << 1 | trusted


def inputs_word(number: int, calls: int) -> int:
    """F.INPUTS_AT: gate number of the step, and how many calls of models the digest is of."""
    return (number + 1) << 16 | min(calls, 0xFFFF)


def inputs_of(word: int) -> tuple[int, int]:
    """Inverse of `inputs_word`; gate -1 = none."""
    return (word >> 16) - 1, word & 0xFFFF


def sum_of(word: int) -> tuple[int, bool]:
    """Inverse of `sum_word`; gate -1 = none was taken."""
    return (word >> 1) - 1, bool(word & 1)
