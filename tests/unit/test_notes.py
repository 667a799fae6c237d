"""Notes of workers: read back as they were written, and not known when they are torn, foreign, or of another type."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ftrun.core.shared import notes
from ftrun.core.shared.board import Inexact
from ftrun.core.shared.mesh import MeshPlace
from ftrun.core.shared.moment import Moment
from ftrun.core.shared.notes import Note
from tests.conftest import small_file_system

LEFT: dict[str, Note] = {
    "failure-3-2": notes.FailureNote(3, 2, "cuda", "", "ValueError at x.py:3", message="\udcff\n", traceback="ä", final=1, time=1.5e9),
    "unconnected-3-2": notes.UnconnectedNote(3, 2, "connection refused"),
    "unrestorable-3-2": notes.UnrestorableNote(3, 2, "no replica", -1, True),
    "doubt-3-512": notes.DoubtNote(3, Inexact.BUFFERS_UNKNOWN, Moment("gate", 6, None, 12), ("mean", "seen")),
    "left-out-3": notes.LeftOutNote(3, {"feed": "is a range_iterator", "x": ""}),
    "kept": notes.KeptNote(0, 3, 3, (notes.KeptCopy(("losses",), 90), notes.KeptCopy(("a", "b"), 40))),
    "mesh-3": notes.MeshNote(3, MeshPlace({"replicate": 2, "shard": 4}, {"replicate": 1, "shard": 3})),
    "group-77": notes.GroupNote(77, (0, 2)),
    "moves-3-2": notes.MovesNote(3, 2, (notes.Move("h2d", 1, 5, 9),)),
    "parked-3": notes.ParkedNote(3, "train.py:3"),
    "where-3": notes.WhereNote(3, "train.py:9 (in sleep)", 1 << 60),
}
WRONG: tuple[Any, ...] = (None, True, -2, 1 << 64, 0.5, "x", "1", [], [0.5], {}, {"a": 0.5})
EVERY = pytest.mark.parametrize("name", LEFT)


def key_of(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("-") if part.isdecimal())


def test_here_is_one_of_each_kind() -> None:
    assert [type(note) for note in LEFT.values()] == Note.__subclasses__()


@EVERY
def test_a_note_comes_back_as_it_was_left(tmp_path: Path, name: str) -> None:
    note = LEFT[name]
    notes.write(tmp_path, note)
    (path,) = (tmp_path / "notes").iterdir()
    assert path.name == f"{name}.json" and path.stat().st_mode & 0o777 == 0o600
    assert notes.read(type(note), tmp_path, *key_of(name)) == note
    notes.remove(type(note), tmp_path, *key_of(name))
    notes.remove(type(note), tmp_path, *key_of(name))
    assert notes.read(type(note), tmp_path, *key_of(name)) is None and not [*path.parent.iterdir()]


def wrong(value: Any) -> list[Any]:
    """Values of other types in place of a field's; a float may be whole."""
    others = [one for one in WRONG if not isinstance(value, float) or type(one) not in (int, float)]
    return [one for one in others if type(one) is not type(value) or one in (-2, 1 << 64)]


@EVERY
def test_a_field_of_another_type_is_not_known(tmp_path: Path, name: str) -> None:
    note = LEFT[name]
    notes.write(tmp_path, note)
    path, raw = tmp_path / "notes" / f"{name}.json", json.loads(json.dumps(asdict(note)))  # type: ignore[call-overload]
    for field, value in raw.items():
        for other in wrong(value):
            path.write_text(json.dumps({**raw, field: other}))
            assert notes.read(type(note), tmp_path, *key_of(name)) is None, (field, other)
    path.write_text(json.dumps({**raw, "of a later version": []}))
    assert notes.read(type(note), tmp_path, *key_of(name)) == note


@EVERY
def test_a_torn_or_foreign_file_is_not_known(tmp_path: Path, name: str) -> None:
    note = LEFT[name]
    notes.write(tmp_path, note)
    path = tmp_path / "notes" / f"{name}.json"
    whole = path.read_bytes()
    other = next(left for left in LEFT.values() if type(left) is not type(note) and left.key != note.key)
    for content in (*(whole[:end] for end in range(len(whole))), b"[]", b"\xff", b"[" * 99_999, json.dumps(asdict(other)).encode()):  # type: ignore[call-overload]
        path.write_bytes(content)
        assert notes.read(type(note), tmp_path, *key_of(name)) is None, content[:80]
    path.unlink()
    path.mkdir()
    assert notes.read(type(note), tmp_path, *key_of(name)) is None


def test_a_note_that_lies_under_another_name_is_not_known(tmp_path: Path) -> None:
    notes.write(tmp_path, notes.ParkedNote(3, "train.py:3"))
    (tmp_path / "notes" / "parked-3.json").rename(tmp_path / "notes" / "parked-4.json")
    assert notes.read(notes.ParkedNote, tmp_path, 4) is None


def test_a_reason_of_a_later_version_is_not_known(tmp_path: Path) -> None:
    notes.write(tmp_path, LEFT["doubt-3-512"])
    path = tmp_path / "notes" / "doubt-3-512.json"
    path.rename(path.with_name("doubt-3-2.json")).write_text(path.with_name("doubt-3-2.json").read_text().replace("512", "2"))
    assert not notes.read_all(notes.DoubtNote, tmp_path)


def test_all_of_a_kind_in_the_order_of_their_cells(tmp_path: Path) -> None:
    doubt = LEFT["doubt-3-512"]
    assert isinstance(doubt, notes.DoubtNote)
    left = [replace(doubt, cell=cell, why=why) for cell in (2, 12) for why in (Inexact.UPDATE_USED_RNG, Inexact.BUFFERS_UNKNOWN)]
    for note in reversed(left):
        notes.write(tmp_path, note)
    for name in ("doubt-1-1", "doubt-x-1", "doubt-3", "doubt"):
        (tmp_path / "notes" / f"{name}.json").write_text('{"cell"')
    assert notes.read_all(notes.DoubtNote, tmp_path) == left
    assert notes.read_all(notes.DoubtNote, tmp_path, since=3) == left[2:]


def test_without_room_only_what_is_needed_raises(tmp_path: Path) -> None:
    with small_file_system(tmp_path, 0.1):
        before = notes.LeftOutNote(3, {"x": ""})
        notes.write(tmp_path, before)
        more = notes.LeftOutNote(3, {"x" * 200_000: ""})
        notes.write(tmp_path, more)
        assert notes.read(notes.LeftOutNote, tmp_path, 3) == before, "as it was"
        with pytest.raises(OSError, match="No space left"):
            notes.write(tmp_path, more, needed=True)
        assert notes.read(notes.LeftOutNote, tmp_path, 3) == before
        assert os.listdir(tmp_path / "notes") == ["left-out-3.json"]


def test_a_note_has_a_largest_size(tmp_path: Path) -> None:
    most = notes.ParkedNote(3, "x" * (notes.MOST - len(json.dumps(asdict(notes.ParkedNote(3, ""))))))
    notes.write(tmp_path, most, needed=True)
    with pytest.raises(OSError, match="no room for that much"):
        notes.write(tmp_path, replace(most, line=most.line + "x"), needed=True)
    assert notes.read(notes.ParkedNote, tmp_path, 3) == most


def test_without_the_folder_of_the_run_only_what_is_needed_raises(tmp_path: Path) -> None:
    notes.write(tmp_path / "gone", LEFT["parked-3"])
    with pytest.raises(OSError, match="No such file"):
        notes.write(tmp_path / "gone", LEFT["parked-3"], needed=True)
