"""Which devices a run may use, who uses one, and the quarantine's files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ftrun.core.errors import ConfigError, UsageError
from ftrun.host.devices import devices, quarantine, visible
from ftrun.host.devices.devices import Holder, users
from ftrun.host.devices.quarantine import QuarantineFile

GPUS: list[dict[str, Any]] = [
    {"index": 0, "uuid": "GPU-aa11", "name": "X", "mig": []},
    {
        "index": 1,
        "uuid": "GPU-bb22",
        "name": "X",
        "mig": [{"uuid": "MIG-b1", "gi": 1, "ci": 0}, {"uuid": "MIG-b2", "gi": 2, "ci": 0}],
    },
    {"index": 2, "uuid": "GPU-cc33", "name": "X", "mig": []},
]


@pytest.mark.parametrize(
    ("variable", "wanted"),
    [
        (None, "GPU-aa11 MIG-b1 MIG-b2 GPU-cc33"),
        ("", ""),
        ("-1", ""),
        ("2,0", "GPU-cc33 GPU-aa11"),
        ("0,7,2", "GPU-aa11"),  # CUDA stops at the first that is none
        ("0,0", "GPU-aa11"),
        ("GPU-c, GPU-aa", "GPU-cc33 GPU-aa11"),
        ("MIG-b2,MIG-b1", "MIG-b2 MIG-b1"),
        ("MIG-GPU-bb22/2/0", "MIG-b2"),
        ("MIG-b", ""),  # could be two
        ("GPU-bb22", "MIG-b1 MIG-b2"),
        ("x", ""),
    ],
)
def test_cuda_visible_devices(variable: str | None, wanted: str) -> None:
    assert [d.uuid for d in visible.choose(variable, GPUS)] == wanted.split()


def test_whom_an_event_is_about() -> None:
    ours = visible.choose("MIG-b1,MIG-b2,2", GPUS)
    assert visible.affected(ours, "GPU-bb22", 2, 0) == (["MIG-b2"], ["MIG-b1"])
    assert visible.affected(ours, "GPU-bb22", 2, None) == (["MIG-b2"], ["MIG-b1"])
    assert visible.affected(ours, "GPU-bb22", None, None) == (["MIG-b1", "MIG-b2"], [])
    assert visible.affected(ours, "GPU-cc33", None, None) == (["GPU-cc33"], [])
    assert visible.affected(ours, "GPU-aa11", None, None) == ([], [])


@pytest.mark.parametrize(
    ("environ", "files", "wanted"),
    [
        ({}, [], False),
        ({}, ["nvidia0", "null"], True),
        ({}, ["dxg"], True),
        ({}, ["nvidiactl"], False),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["nvidia0"], False),
        ({"CUDA_VISIBLE_DEVICES": "1,2"}, [], True),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, [], True),
    ],
)
def test_the_watcher_starts_only_where_gpus_may_be_used(
    tmp_path: Path, environ: dict[str, str], files: list[str], wanted: bool
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert devices.present(environ, tmp_path) is wanted


NOBODY = 2**22 + 5  # no process has this number
ONE, TWO = Holder(3, 0, os.getpid(), "GPU-a"), Holder(4, 1, NOBODY, "GPU-b")


def test_the_process_on_the_device_is_what_counts() -> None:
    assert users("GPU-b", [ONE, TWO], {"GPU-b": [os.getpid()]}, ever=True) == [ONE]
    assert users("GPU-a", [ONE, TWO], {"GPU-b": [os.getpid()]}, ever=True) == []  # seen on another one


def test_without_processes_the_device_that_a_rank_was_given_counts() -> None:
    assert users("GPU-b", [ONE, TWO], {}, ever=True) == [TWO]
    assert users("GPU-c", [ONE, TWO], {}, ever=True) == []
    assert users("GPU-a", [ONE, TWO], {"GPU-a": [NOBODY + 1]}, ever=False) == []  # this process has no GPU open


def test_a_process_with_a_gpu_open(tmp_path: Path) -> None:
    fds = tmp_path / "7" / "fd"
    fds.mkdir(parents=True)
    (fds / "1").symlink_to("/dev/null")
    assert not devices.uses_gpus(7, tmp_path)
    (fds / "2").symlink_to("/dev/nvidia3")
    assert devices.uses_gpus(7, tmp_path)
    assert not devices.uses_gpus(8, tmp_path)


def test_quarantine_is_kept_for_later_runs_and_released_by_hand(tmp_path: Path) -> None:
    shared = tmp_path / "shared.json"
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    first = QuarantineFile(one, str(shared))
    assert first.add("GPU-a", "Xid 48") == ""
    second = QuarantineFile(two, str(shared))
    assert second.reasons == {"GPU-a": "Xid 48"}
    assert second.add("GPU-b", "lost") == ""
    assert quarantine.read(shared) == {"GPU-a": "Xid 48", "GPU-b": "lost"}
    assert first.look() == ([], {"GPU-b": "lost"})
    raw = json.loads(shared.read_text())
    assert raw["GPU-b"]["run"] == "two"
    del raw["GPU-a"]
    shared.write_text(json.dumps(raw))
    assert (first.look(), second.look()) == ((["GPU-a"], {}), (["GPU-a"], {}))
    assert (first.look(), second.look()) == (([], {}), ([], {}))
    assert quarantine.read(one / quarantine.NAME) == {"GPU-b": "lost"}


def test_without_a_shared_file_the_runs_own_is_edited(tmp_path: Path) -> None:
    mine = QuarantineFile(tmp_path, None)
    mine.add("GPU-a", "Xid 48")
    mine.path.write_text("{half")
    assert mine.look() == ([], {})
    mine.path.write_text("{}")
    assert mine.look() == (["GPU-a"], {})


def test_what_cannot_be_written_is_told_and_lives_on_in_memory(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    mine = QuarantineFile(tmp_path, str(folder / "q.json"))
    folder.rmdir()
    folder.touch()
    assert "cannot be written" in mine.add("GPU-a", "Xid 48")
    assert mine.reasons == {"GPU-a": "Xid 48"}
    assert quarantine.read(tmp_path / quarantine.NAME) == {"GPU-a": "Xid 48"}


@pytest.mark.parametrize("text", ["{", "[]", '{"GPU-a": 3}'])
def test_a_broken_quarantine_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "q.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"q\.json"):
        quarantine.check(path)
    with pytest.raises(UsageError, match="cannot be written"):
        quarantine.check(tmp_path / "no" / "q.json")
