"""The board: one mmap'd file per node, in which every process publishes its state and reads the state of the others.

Theory of operation. The file is a header (`Head`), then one cell (`F`) for each worker incarnation. Each field is an aligned 64-bit word,
so a reader never sees half of a value. A comment beside a field names its one writer; only a few words of the header have more. The file
outlives dead workers: the phase and step in which a worker died stay readable. The bells (workers', launcher's, gate's, the copies') are
32-bit futex words: a writer rings one after a change, and a lost ring costs latency only, since every wait has a deadline and looks again.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from ftrun import native
from ftrun.core.errors import PlatformError
from ftrun.core.shared import gate
from ftrun.core.shared.bell import Bell

MAGIC = 0x3144_4252_4E55_5246  # "FRUNRBD1"
VERSION = 8
CELL_BYTES = 2048
ROWS_KEPT = 5  # the phases of that many attempts at a step stay readable, see ftrun.core.shared.steps
ROW_WORDS = 8
COUNTS = 16  # the board counts the collectives of that many process groups of a rank
_CELLS_AT = 8192
_WORD = 8
_SHIFT_ZERO = 1 << 40
RUN_WORDS = 224  # words of one text about the run
RUN_BYTES = (RUN_WORDS - 1) * 8
OPENINGS_KEPT = 256


class Head:
    """Header fields: word index from the file's start; comments name writers. A restart of the world clears 16 to 18, 20, 24 and 25."""

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
    ATTEMPT = 10  # launcher: number of restarts of the whole world
    GATE_BELL = 11  # 32-bit futex word: rung at each arrival and opening, so that only ranks at the gate wake
    REQUESTS = 12  # poster of a request: number of the newest request for a fault or drain (ftrun.faults.requests)
    WAITING = 14  # launcher: 1 = no healthy device for every rank; waits for a world go on
    RUN = 15  # launcher: number of the newest text about the run, which is in slot RUN % 2; 0 = there is none
    DIFFER = 16  # worker that opens a gate: the first gate number + 1 at which replicas differed; 0 = none yet
    MADE = 17  # replacement: 1 = it made an update in place of a dead rank that had no replica to compare with
    EQUAL = 18  # worker that opens a gate: 1 = all replicas were equal at their last comparison
    ROOM = 19  # launcher: number of cells that have memory, the first ones; reading a later one on a full file system is a SIGBUS
    MISSED = 20  # launcher of one of several nodes: as F.MISSED, of ranks of any node in the last repair
    LEASE = 21  # launcher of one of several nodes: ns, see ftrun.core.shared.lease; 0 = it has none
    RENEWED = 22  # launcher of one of several nodes: CLOCK_BOOTTIME ns when it began the last beat that succeeded
    FENCED = 23  # fd store: how often it ended ranks because the lease was over
    # first rank, of several nodes, and launcher when all go back: gate number + 1 of the newest host snapshot of all ranks, 0 = none
    SNAPSHOT = 24
    # of nodes that copy the host snapshots of the node before (ftrun.helpers.snapshot_copies):
    COPIED = 25  # first rank: as SNAPSHOT, of the newest one whose copies were made by all nodes, or given up
    COPIES = 26  # fd store: two words, gate number + 1 of which copies of all ranks of the node before are whole here; 0 = none
    COPIES_AT = 28  # fd store: the value of SNAPSHOT whose copies are made, or given up
    COPIES_BELL = 29  # 32-bit futex word: rung when SNAPSHOT changes
    RUN_TEXT = 64  # launcher: two slots of RUN_WORDS words: length in bytes, then the text
    OPENINGS = 512  # opener of a gate: OPENINGS_KEPT slots of gate number + 1 (0 = being written), and the time of its opening (ns)


class F:
    """Cell fields: word index inside the cell of one worker incarnation. The worker writes a field unless a comment names another."""

    PID = 0
    RANK = 1  # rank + 1; 0 = none yet (a spare)
    GENERATION = 2  # the generation in which it takes part
    PHASE = 3  # see Phase
    STEP = 4  # step index + 1; 0 = before the loop
    ARRIVAL = 5  # gate.arrival(generation, step)
    BEAT = 6  # CLOCK_MONOTONIC ns, written by the native thread
    PROGRESS = 7  # ns of the last sign of life from Python
    COLLECTIVE = 8  # see `collective_word`: the newest collective that it entered since the hand-out of the step
    COLLECTIVE_NAME = 9  # first 8 bytes of its name
    COLLECTIVE_SINCE = 10  # ns
    FLAGS = 11  # see Flag
    ATTEMPT = 12  # Step.attempt
    DEVICE = 13  # device index + 1; 0 = cpu
    PYTHON = 14  # ns, written by the control thread: some Python thread of the process runs
    WORK = 15  # ns of its own work in its last step, without waits for other ranks
    # answers to a stop: the generation, and the time of the answer (ns)
    STOPPED = 16
    STOPPED_NS = 17
    CLEANED = 18
    CLEANED_NS = 19
    READY = 20  # ready to rebuild its groups
    READY_NS = 21
    RESET = 22
    RESET_NS = 23
    RESTORED = 24
    RESTORED_NS = 25
    RESUMED = 26  # entered the resume step
    RESUMED_NS = 27
    FIRST_DONE = 28  # completed the first step that was not committed before
    FIRST_DONE_NS = 29
    SOURCE = 30  # see Source: the source of its state in this generation
    SOURCE_BYTES = 31
    RAISED = 32  # generation in which its body raised; details: FailureNote
    RAISED_NS = 33
    REDONE_NS = 34  # time at which it finished step `resume` again
    INEXACT = 35  # see Inexact: bit set of reasons why exactness is not promised; details: DoubtNote
    # written by the launcher
    EXITED = 36  # 1 = reaped
    EXIT_STATUS = 37  # exit code, or 128 + signal
    FENCED = 38  # 1 = runs no more code, 2 = the fence missed its deadline: do not adopt
    FENCED_NS = 39
    DETECTED_NS = 40
    # written by the worker
    SHIFT = 41  # _SHIFT_ZERO + step index - gate number; 0 = not in a loop yet
    # the current transfer: bytes that arrived, total bytes, and its begin (ns); 0 = none
    MOVED = 42
    MOVE_TOTAL = 43
    MOVE_SINCE = 44
    BUSY = 45  # see Busy: reasons for a long time without a sign of life
    SUM = 46  # checksum of the replicated state
    SUM_AT = 47  # see `sum_word`: the gate at which SUM was taken
    LIFE = 48  # a robust mutex of 64 bytes, see ftrun.native, held by the beat thread: its loss is the death of the process
    NO_SOURCE = 72  # generation in which it has no source for its rank's state; see Flag.UNRESTORABLE
    CORRUPT = 73  # written by the launcher, or by the opener of one of several nodes: 1 = its memory is corrupt, no rank copies from it
    UNCONNECTED = 74  # generation in which it could not be connected; details: UnconnectedNote
    SETTLED = 75  # generation in which it is in the loop and copies nothing more from other ranks' memory
    # written by the worker
    INPUTS = 76  # digest of the inputs of protected models in the step that INPUTS_AT names
    INPUTS_AT = 77  # see `inputs_word`
    PYTHON_SUM = 78  # checksum of the optimizers' hyperparameters, as of SUM_AT
    REPLICAS = 79  # checksum of the list of its replicas, itself among them; 0 = none is known
    # written by the worker: the phases of its last steps, see ftrun.core.shared.steps
    FIRST_ROW = 80  # ROWS_KEPT rows of ROW_WORDS words
    ROWS = 120  # number of rows begun so far
    EPOCH = 121  # epoch of job.epochs + 1; 0 = none
    LOOP_END = 122  # step index after the last one of its loop; 0 = not in a loop yet
    ENDS = 123  # number of loops, and calls between loops, that it passed: each ends at a virtual gate
    MISSED = 124  # gate number + 1 of the step at which it took over a rank, without the script's work since the body before; 0 = none
    # written by the worker: the ranks that it waits for, see ftrun.control.waits
    PEER = 128  # rank + 1 of the peer of the send or receive in COLLECTIVE; 0 = it is a collective
    FIRST_COUNT = 129  # COUNTS words: for each group, `collective_word` of the number of its collectives since the hand-out + 1
    COUNTED = 145  # generation in which that count began: only counts of one generation are comparable
    COLLECTIVE_ENDED = 146  # ns of the end of the newest collective that it completed
    CUT = 147  # generation + 1 in which one of its collectives failed, as after a closed connection; 0 = none
    # written by the worker: gate number + 1 of the host snapshot in each of its two halves, 0 = none, or being written
    FIRST_HALF = 148
    # written by the worker: number of looks (bodies with the expensive checks), and the gate number + 1 of the last; 0 = none
    LOOKS = 150
    LOOKED_AT = 151
    LEFT_OUT = 152  # number of names in its LeftOutNote
    CUT_OFF = 153  # fd store: 1 = it ends this worker, since the lease of its node is over


class Phase(enum.IntEnum):
    """A rank's part of its step, for people, fault injection and detectors. No decision about a repair reads it."""

    START = 0
    IDLE = 1
    FORWARD = 2
    BACKWARD = 3
    GATE = 4
    UPDATE = 5
    DONE = 6


_PHASE_NAMES = {int(phase): phase.name.lower() for phase in Phase}


def phase_name(word: int) -> str:
    """Return the name of a value of F.PHASE, also of one outside Phase."""
    return _PHASE_NAMES.get(word, f"phase {word}")


class Flag(enum.IntFlag):
    """Milestones of a worker incarnation. The worker clears only LOOP_DONE and LEFT again."""

    ALIVE = 1  # its liveness lock is held
    PARKED = 2  # a spare waits for a rank
    GROUP = 4  # has an "ftrun" process group
    PROTECTED = 8  # protect() returned and a loop begins
    LOOPING = 16  # the first step was handed out
    LOOP_DONE = 32  # passed the virtual gate of its last loop (cleared when another loop starts)
    EXITING = 64  # the script ended normally
    UNRESTORABLE = 128  # a replacement has no source for its state; details: UnrestorableNote
    SCRIPT = 256  # the script's first line comes next
    STEPPED = 512  # an optimizer of the script took a step
    LEFT = 1024  # an exception left a body or a job.call of the script: this rank will not enter the collectives that others wait in
    ANEW = 2048  # its process gives the liveness lock up and becomes a fresh interpreter
    HELD_ANEW = 4096  # the fresh interpreter holds the liveness lock again


class Busy(enum.IntFlag):
    """Reasons why a worker may give no sign of life for longer than a step takes, and the kind of gate at which it is."""

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
    REMOTE = 5


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
    """The fields of one worker incarnation. `cell[F.STEP]` reads one, `cell[F.STEP] = 3` publishes one (release order)."""

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
        """Return all words of the cell, for callers that read or write many; each write is one word, as by `cell[field]`."""
        return self._words[self._base : self._base + CELL_BYTES // _WORD]

    def field_address(self, field: int) -> int:
        """Return the address of a field in this process, for native calls."""
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
        """Return step index minus gate number in its loop (they differ after a first loop or a loaded checkpoint)."""
        raw = self[F.SHIFT]
        return raw - _SHIFT_ZERO if raw else 0

    @property
    def gate_number(self) -> int | None:
        """Return the gate number of its step, which unlike the step index does not recur in another epoch; None before the loop."""
        return None if self.step is None else self.step - self.shift

    def set_shift(self, shift: int) -> None:
        self[F.SHIFT] = _SHIFT_ZERO + shift

    @property
    def epoch(self) -> int | None:
        """Return the epoch of job.epochs, None for a script without it."""
        raw = self[F.EPOCH]
        return raw - 1 if raw else None

    @property
    def phase(self) -> Phase:
        return Phase(self[F.PHASE])


class Board:
    """The mapped file. `create` makes a zeroed one of `cells` cells; `open` maps an existing one.

    Raises:
        PlatformError: The file is not a board of this version.
        OSError: The file cannot be made, opened or mapped.
    """

    def __init__(self, fd: int, for_good: bool = False) -> None:
        size = os.fstat(fd).st_size
        if size < _CELLS_AT or size % _WORD:
            raise PlatformError(f"the run's board is damaged: it has {size} bytes; end the run and start it again")
        self._map = mmap.mmap(fd, 0)
        self._words = memoryview(self._map).cast("Q")
        # Native threads wait in the map. One may still run when Python ends and drops the map: then the memory must stay (else SIGSEGV).
        self.address = native.map_fd(fd, size) if for_good else ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if self._words[Head.MAGIC] != MAGIC or self._words[Head.VERSION] != VERSION:
            raise PlatformError("the run's board has another format: launcher and workers must use the same ftrun")
        self.cells = int(self._words[Head.CELLS])
        if size < _CELLS_AT + self.cells * CELL_BYTES:
            raise PlatformError(
                f"the run's board is damaged: {self.cells} cells do not fit into its {size} bytes; end the run and start it again"
            )
        self._gate_address = self.address + Head.GATE * _WORD
        self.worker_bell = Bell(self.address + Head.BELLS * _WORD)
        self.launcher_bell = Bell(self.address + Head.BELLS * _WORD + 4)
        self.gate_bell = Bell(self.address + Head.GATE_BELL * _WORD)
        self.copies_bell = Bell(self.address + Head.COPIES_BELL * _WORD)

    @classmethod
    def create(cls, path: Path, cells: int) -> Board:
        """Make a board and map it. It gets its name when it is complete, so a reader never sees an unfinished one."""
        unfinished = path.with_suffix(".new")
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _CELLS_AT + cells * CELL_BYTES)
            os.posix_fallocate(fd, 0, _CELLS_AT)
            head = (MAGIC, VERSION, cells, gate.pack(gate.GateWord(0, True, -1)))
            os.pwrite(fd, b"".join(v.to_bytes(8, "little") for v in head), 0)
            os.rename(unfinished, path)
            return cls(fd, for_good=True)
        finally:
            os.close(fd)

    @staticmethod
    def make_room(path: Path, cell: int) -> None:
        """Allocate the memory of a cell before any process reads or writes it: on a full file system an access is a SIGBUS.

        Raises:
            OSError: The file system is full.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # allocate the earlier cells as well: one whose allocation failed before is read, too
            os.posix_fallocate(fd, _CELLS_AT, (cell + 1) * CELL_BYTES)
            before = int.from_bytes(os.pread(fd, _WORD, Head.ROOM * _WORD), "little")
            os.pwrite(fd, max(before, cell + 1).to_bytes(_WORD, "little"), Head.ROOM * _WORD)
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: Path, for_good: bool = False) -> Board:
        """Map a board. `for_good`: `address` stays mapped until the process ends, as `create` has it."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(fd, for_good)
        finally:
            os.close(fd)

    def __getitem__(self, field: int) -> int:
        return int(self._words[field])

    def __setitem__(self, field: int, value: int) -> None:
        self._words[field] = value

    def show_run(self, text: bytes) -> None:
        """Publish a text about the whole run for `run_text`; ignore a text longer than RUN_BYTES."""
        if len(text) > RUN_BYTES:
            return
        number = self[Head.RUN] + 1
        at = Head.RUN_TEXT + number % 2 * RUN_WORDS
        self._map[(at + 1) * _WORD : (at + 1) * _WORD + len(text)] = text
        self[at] = len(text)
        self[Head.RUN] = number

    def run_text(self) -> bytes:
        """Return the newest text of `show_run`, empty before the first."""
        while number := self[Head.RUN]:
            at = Head.RUN_TEXT + number % 2 * RUN_WORDS
            text = self._map[(at + 1) * _WORD : (at + 1) * _WORD + min(self[at], RUN_BYTES)]
            if self[Head.RUN] == number:  # else a writer may have reached this slot
                return text
        return b""

    def show_opening(self, number: int, now: int) -> None:
        """Record that the caller opened gate `number` at `now`, ns. The record is for people; no decision reads it."""
        words, at = self._words, Head.OPENINGS + number % OPENINGS_KEPT * 2
        words[at] = 0
        words[at + 1] = now
        words[at] = number + 1

    def openings(self, last: int) -> list[int]:
        """Return the opening times (ns) of the newest consecutive gates up to `last`, oldest first."""
        slots = self._words[Head.OPENINGS : Head.OPENINGS + 2 * OPENINGS_KEPT].tolist()
        times: list[int] = []
        for number in range(last, max(-1, last - OPENINGS_KEPT), -1):
            at = number % OPENINGS_KEPT * 2
            if slots[at] != number + 1:
                break
            times.append(slots[at + 1])
        return times[::-1]

    def cell(self, index: int) -> Cell:
        """Return the cell of incarnation `index`; raise IndexError outside the board."""
        if not 0 <= index < self.cells:
            raise IndexError(f"cell {index} of {self.cells}")
        return Cell(self._words, self.address, index)

    def column(self, field: int, cells: int) -> list[int]:
        """Return one field of the first `cells` cells, in one copy."""
        stride = CELL_BYTES // _WORD
        first = _CELLS_AT // _WORD + field
        return self._words[first : first + cells * stride : stride].tolist()

    def gate(self) -> int:
        """Return the raw gate word (acquire)."""
        return native.load64(self._gate_address)

    def generation(self) -> int:
        """Return the generation in the gate word, by a plain read."""
        return self._words[Head.GATE] >> gate.GENERATION_SHIFT

    def words_of_gate(self) -> memoryview:
        """Return a view of the gate word alone, for callers that read it often by a plain read and look again anyway."""
        return self._words[Head.GATE : Head.GATE + 1]

    def requests(self) -> int:
        """Return the number of the newest request for a fault or a drain, by a plain read."""
        return self._words[Head.REQUESTS]

    def swap_gate(self, expected: int, desired: int) -> bool:
        """Compare and swap the gate word; return True if it was `expected`. The caller rings."""
        return native.cas64(self._gate_address, expected, desired) == expected

    def ring_workers(self) -> None:
        """Wake every worker, wherever it waits, after a stop, a publication or a fence."""
        self.worker_bell.ring()
        self.gate_bell.ring()

    def show_snapshot(self, step: int) -> None:
        """Show the newest host snapshot that all ranks of all nodes have, -1 = none, and let it be copied."""
        if self[Head.SNAPSHOT] != step + 1:
            self[Head.SNAPSHOT] = step + 1
            self.copies_bell.ring()

    def copies(self) -> set[int]:
        """Return the gate numbers of which this node has copies of the host snapshots of all ranks of the node before."""
        return {shown - 1 for shown in (self[Head.COPIES], self[Head.COPIES + 1]) if shown}

    @property
    def gate_address(self) -> int:
        """Return the address of the gate word in this process, for native calls."""
        return self._gate_address


def name_word(name: str) -> int:
    """Pack the first 8 bytes of an ASCII name into the word for F.COLLECTIVE_NAME."""
    return int.from_bytes(name.encode("ascii", "replace")[:8].ljust(8, b"\0"), "little")


def word_name(word: int) -> str:
    """Invert `name_word`."""
    return word.to_bytes(8, "little").rstrip(b"\0").decode("ascii", "replace")


_FULL_NAMES = {
    name[:8]: name
    for name in ("allgather", "all_gather", "allreduce", "all_to_all", "broadcast", "recv_anysource", "reduce_scatter")
}


def collective_name(word: int) -> str:
    """Return the collective's full name for F.COLLECTIVE_NAME; of names with the same beginning, the plain one."""
    short = word_name(word).lstrip("_")
    return _FULL_NAMES.get(short, short)


def collective_word(group: int, number: int) -> int:
    """Pack F.COLLECTIVE: `group` is 0 for the whole world, else a hash of its ranks; `number` counts its collectives from 1."""
    return (group & 0xFFFFFFFF) << 32 | (number & 0xFFFFFFFF)


def collective_of(word: int) -> tuple[int, int]:
    """Invert `collective_word`."""
    return word >> 32, word & 0xFFFFFFFF


def sum_word(gate_number: int, trusted: bool) -> int:
    """Pack F.SUM_AT: the gate at which F.SUM was taken; `trusted`: all replicas were equal before."""
    return (gate_number + 1) << 1 | trusted


def inputs_word(number: int, calls: int) -> int:
    """Pack F.INPUTS_AT: gate number of the step, and the number of model calls in the digest."""
    return (number + 1) << 16 | min(calls, 0xFFFF)


def inputs_of(word: int) -> tuple[int, int]:
    """Invert `inputs_word`; gate -1 = none."""
    return (word >> 16) - 1, word & 0xFFFF


def sum_of(word: int) -> tuple[int, bool]:
    """Invert `sum_word`; gate -1 = no sum was taken."""
    return (word >> 1) - 1, bool(word & 1)


def snapshots_of(cells: Iterable[Cell]) -> set[int]:
    """Return the gate numbers of which each of these workers shows a host snapshot."""
    each = [{shown - 1 for shown in (cell[F.FIRST_HALF], cell[F.FIRST_HALF + 1]) if shown} for cell in cells]
    return set.intersection(*each) if each else set()
