"""The import checker finds what it is there to find."""

from __future__ import annotations

import pytest

from tests.lint import check_imports


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ftrun.control.machine", "from ftrun.host.base import loop"),
        ("ftrun.control.machine", "from ..host.loop import run"),
        ("ftrun.control.machine", "def f():\n    import time"),
        ("ftrun.core.shared.board", "from ftrun import control"),
        ("ftrun.host.base.loop", "import torch"),
        ("ftrun.host.base.loop", "def f():\n    from torch.distributed import TCPStore"),
        ("ftrun.host.base.loop", "import importlib\ndef f():\n    importlib.import_module('torch.nn')"),
        ("ftrun.host.base.loop", "def f():\n    import ftrun.worker.process.main"),
        ("ftrun.helpers.fork_server", "from ftrun.worker.process import main"),
        ("ftrun.faults.plan", "import ftrun.worker"),
        ("ftrun.worker.process.main", "from ftrun.helpers import fd_store"),
        ("ftrun.host.workers.fence", "def f():\n    from ftrun.host.detect import hang"),
        ("ftrun.host.nodes.membership.table", "from ftrun.host.nodes import node_group"),
        ("ftrun.host.run.launcher", "from ftrun.helpers import fd_store"),
        ("ftrun.extra.thing", "import os"),
    ],
)
def test_forbidden(module: str, source: str) -> None:
    assert len(check_imports.complaints(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ftrun.host.detect.hang", "from ftrun.host.workers import fence\nfrom ftrun.host.detect import heartbeat"),
        ("ftrun.cli.main", "def f():\n    from ftrun.view import status"),
        ("ftrun.control.machine", "from ftrun.core import gate\nfrom .events import Event\nimport enum"),
        ("ftrun.worker.process.main", "import torch\nfrom ftrun import native, UsageError"),
        ("ftrun.helpers.fork_server", "def child():\n    import torch\n    from ftrun.worker.process import main"),
    ],
)
def test_allowed(module: str, source: str) -> None:
    assert check_imports.complaints(module, source) == []


def test_a_package_resolves_relative_imports_from_itself() -> None:
    assert check_imports.complaints("ftrun.core", "from . import gate", is_package=True) == []
    assert check_imports.complaints("ftrun.core", "from ..host import loop", is_package=True) != []


def test_a_circle_is_found_also_through_late_imports_and_those_for_types() -> None:
    sources = {
        "ftrun.host.a": ("from ftrun.host.b import thing", False),
        "ftrun.host.b": ("def f():\n    from ftrun.host import c", False),
        "ftrun.host.c": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ftrun.host.a import Thing",
            False,
        ),
        "ftrun.host.d": ("from ftrun.host import a", False),
    }
    assert check_imports.circles(check_imports.graph(sources)) == [["ftrun.host.a", "ftrun.host.b", "ftrun.host.c"]]


def test_two_classes_of_one_name_are_refused() -> None:
    one = "class Loop:\n    class Inner: ...\n"
    sources = {"ftrun.a": (one, False), "ftrun.b": ("class Other: ...\n\nclass Loop: ...\n", False)}
    assert check_imports.same_names(sources) == ["ftrun.a:1: another class is called Loop: ftrun.b:3"]
    assert check_imports.same_names({"ftrun.a": (one, False)}) == []


def test_from_outside_only_the_doors_of_a_room_are_imported() -> None:
    room = "ftrun.worker.state"
    sources = {
        room: ('"""What there is.\n\nDoors:\n    open_one: used\n    unused: by nobody\n"""', True),
        f"{room}.open_one": ("import ftrun.worker.state.inside", False),
        f"{room}.inside": ("", False),
        f"{room}.unused": ("", False),
        "ftrun.worker.step.body": ("from ftrun.worker.state import inside\nfrom ftrun.worker.state.open_one import x", False),
    }
    wrong, doors = check_imports.walls(sources, [room])
    assert doors == {room: ["open_one", "unused"]}
    assert wrong == [
        "ftrun.worker.state:1: nobody outside imports its door unused",
        "ftrun.worker.step.body:1: imports ftrun.worker.state.inside, which is no door of that room",
    ]
