"""Notes: facts that a worker leaves in the run directory for the launcher and for `view`, in one small file each.

The board records that something happened; a note holds the details that have no room there. This file defines all kinds. The name of a
note's file is notes/KIND-CELL-GENERATION.json: after KIND come the first fields of the note, as many as the `key` of its class. Files
from workers to workers (constants/, order-*, meetings/) are no notes, nor is error.json, which torchrun's tools read.
"""

from __future__ import annotations

import contextlib
import errno
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from ftrun.core import shape
from ftrun.core.faults import Fault
from ftrun.core.shared.board import Inexact
from ftrun.core.shared.mesh import MeshPlace
from ftrun.core.shared.moment import Moment
from ftrun.core.system import files

FOLDER = "notes"
MOST = 1 << 24  # the most characters of a note's JSON
H2D, BROADCAST_SRC, BROADCAST_DST, RELOAD = "h2d", "broadcast_src", "broadcast_dst", "reload"  # stages of a Move


class Note:
    """Base of all kinds. `key`: the number of first fields that are in the file's name."""

    kind: ClassVar[str]
    key: ClassVar[int]

    def __init_subclass__(cls, kind: str, key: int) -> None:
        cls.kind, cls.key = kind, key


N = TypeVar("N", bound=Note)


@dataclass(frozen=True)
class FailureNote(Note, kind="failure", key=2):
    """An exception that left the script or a body, or the reason why a worker makes way for a replacement (Fault.GAVE_WAY).

    Fields as in `ftrun.control.events.Died`; `where`: FILE:LINE; `explain`: code of its page; `time`: unix time.
    """

    cell: int
    generation: int
    fault: str = Fault.EXCEPTION.value
    evidence: str = "exception"
    signature: str = "exception"
    type: str = ""
    message: str = ""
    traceback: str = ""
    where: str = ""
    outside: str = ""
    explain: str = ""
    final: int = 0
    time: float = 0.0


@dataclass(frozen=True)
class UnconnectedNote(Note, kind="unconnected", key=2):
    """The evidence that the worker could not be connected with the others (F.UNCONNECTED)."""

    cell: int
    generation: int
    evidence: str = ""


@dataclass(frozen=True)
class UnrestorableNote(Note, kind="unrestorable", key=2):
    """The reason why a replacement has no source for its state (F.NO_SOURCE). `snapshot`: gate number of all ranks' newest, -1 = none."""

    cell: int
    generation: int
    why: str = "no source is left"
    snapshot: int = -1
    requeue: bool = False


@dataclass(frozen=True)
class DoubtNote(Note, kind="doubt", key=2):
    """A reason why the result may not be exact (F.INEXACT). `moment`: where the worker first saw it; `names`: of the values concerned."""

    cell: int
    why: Inexact
    moment: Moment
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftOutNote(Note, kind="left-out", key=1):
    """Names that the loop changes and the worker does not keep (F.LEFT_OUT), with the reasons; "" = unknown."""

    cell: int
    names: dict[str, str]


@dataclass(frozen=True)
class KeptCopy:
    """Values of the script that share one copy."""

    names: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class KeptNote(Note, kind="kept", key=0):
    """Values of the script that the node's first rank keeps, as of step index `step`. `looked`: number of bodies after which it looked."""

    rank: int
    step: int
    looked: int
    values: tuple[KeptCopy, ...]


@dataclass(frozen=True)
class MeshNote(Note, kind="mesh", key=1):
    """The place of the worker's rank on the device mesh of its script."""

    cell: int
    place: MeshPlace


@dataclass(frozen=True)
class GroupNote(Note, kind="group", key=1):
    """The global ranks of a process group; the board has only its mark."""

    mark: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """One part of a transfer: a stage of figure 004, the source rank of the bytes, and times in ns (CLOCK_MONOTONIC).

    A receiver copies from the shared buffer straight into its weights: BROADCAST_DST is both.
    """

    stage: str
    source: int
    begin: int
    end: int


@dataclass(frozen=True)
class MovesNote(Note, kind="moves", key=2):
    """The transfers of the worker in the repair of one generation."""

    cell: int
    generation: int
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class ParkedNote(Note, kind="parked", key=1):
    """The line of the script at which a spare waits for a rank."""

    cell: int
    line: str


@dataclass(frozen=True)
class WhereNote(Note, kind="where", key=1):
    """The last known line of the script in a rank without a sign of life, as of `seen` (ns, CLOCK_MONOTONIC)."""

    cell: int
    line: str
    seen: int


def write(run_dir: Path, note: Note, *, needed: bool = False) -> None:
    """Write a note, whole or not at all.

    Raises:
        OSError: The note is `needed` and cannot be written; other notes are skipped.
    """
    path = _path(run_dir, type(note), _key(note))
    with contextlib.nullcontext() if needed else contextlib.suppress(OSError):
        data = json.dumps(asdict(note))  # type: ignore[call-overload]
        if len(data) > MOST:
            raise OSError(errno.EFBIG, "a note has no room for that much", str(path))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        files.replace(path, data, private=True)


def read(kind: type[N], run_dir: Path, *key: int) -> N | None:
    """Read the note of that kind and key; return None if there is none, or it is damaged or another version's."""
    try:
        note = shape.typed(kind, shape.loads(_path(run_dir, kind, key).read_bytes()))
    except (OSError, ValueError):
        return None
    return note if note is not None and _key(note) == key else None


def read_all(kind: type[N], run_dir: Path, since: int = 0) -> list[N]:
    """Return all readable notes of that kind, of cells from `since` on, in the order of their keys."""
    return [note for key in keys(kind, run_dir) if key[0] >= since and (note := read(kind, run_dir, *key)) is not None]


def keys(kind: type[Note], run_dir: Path) -> list[tuple[int, ...]]:
    """Return the keys of all files of that kind, sorted."""
    found = [path.stem.removeprefix(f"{kind.kind}-").split("-") for path in (run_dir / FOLDER).glob(f"{kind.kind}-*.json")]
    return sorted(tuple(map(int, key)) for key in found if len(key) == kind.key and all(map(shape.digits, key)))


def remove(kind: type[Note], run_dir: Path, *key: int) -> None:
    """Remove a note, if there is one."""
    with contextlib.suppress(OSError):
        _path(run_dir, kind, key).unlink()


def _path(run_dir: Path, kind: type[Note], key: tuple[int, ...]) -> Path:
    return run_dir / FOLDER / f"{'-'.join([kind.kind, *(str(int(part)) for part in key)])}.json"


def _key(note: Note) -> tuple[int, ...]:
    return tuple(vars(note).values())[: note.key]
