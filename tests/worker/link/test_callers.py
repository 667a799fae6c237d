"""Errors, hangs and parked spares name the user's own line: one rule of what is the script says which that is."""

from __future__ import annotations

import json
import os
import queue
import runpy
import sys
import threading
import traceback
import types
from pathlib import Path

import pytest

from ftrun.core.paths import OWN_FILES
from ftrun.worker.link import callers, stack_sampler
from ftrun.worker.process import standby
from ftrun.worker.torch_compat.torch_private import frame_of
from tests.conftest import wait_for


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of a folder that packages were installed to and that PYTHONPATH names."""
    place = tmp_path / "installed"
    (place / "library-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [sys.path[0], str(place), *sys.path[1:]])
    return place / "library.py"


def test_the_line_is_the_scripts_also_below_a_library(library: Path) -> None:
    library.write_text("where = ask()\n")
    found = runpy.run_path(str(library), {"ask": callers.caller})["where"]
    assert found.startswith(f"{__file__}:")  # runpy lies between the two


def test_what_a_script_has_put_into_its_path_by_mistake_finds_no_module_and_breaks_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert callers.is_script(str(tmp_path / "own.py"))


def test_where_none_is_the_scripts_a_library_comes_before_torch_and_that_before_nothing() -> None:
    import torch

    ours, own, frozen = (torch.__file__, 1), (f"{OWN_FILES}worker/x.py", 2), ("<frozen runpy>", 3)
    assert callers.line_of([own, ours, frozen, (os.__file__, 4), (json.__file__, 5)]) == f"{json.__file__}:5"
    assert callers.line_of([ours, own]) == f"{torch.__file__}:1"
    assert callers.line_of([]) == "?"


def test_an_error_in_the_package_of_an_installed_program_is_at_its_own_line(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.write_text("def fail(): raise ValueError\nfail()\n")
    with pytest.raises(ValueError) as failed:
        runpy.run_path(str(library))
    lines = [(frame.filename, frame.lineno) for frame in reversed(traceback.extract_tb(failed.value.__traceback__))]
    assert callers.line_of(lines).startswith(f"{__file__}:")
    program = types.ModuleType("__main__")
    vars(program).update(__file__=str(library))
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert callers.line_of(lines) == f"{library}:1"


def test_a_rank_that_waits_inside_the_standard_library_stands_in_the_scripts_line() -> None:
    waits: queue.Queue[None] = queue.Queue()
    thread = threading.Thread(target=lambda: waits.get())
    line = sys._getframe().f_lineno - 1
    thread.start()

    def waiting() -> types.FrameType | None:
        frame = frame_of(thread.ident or 0)
        return frame if frame is not None and frame.f_code.co_name == "wait" else None

    try:
        frame = wait_for(waiting, "the thread")
        assert frame is not None and stack_sampler._line(frame) == f"{os.path.relpath(__file__)}:{line} (in wait)"
    finally:
        waits.put(None)
        thread.join()


def test_what_a_library_looks_up_while_it_is_imported_parks_no_spare(library: Path, tmp_path: Path) -> None:
    """Wherever packages were installed; a module of the script's does ask."""
    own = tmp_path / "own.py"
    asks = {"is_import": standby._while_a_library_is_imported}
    for file in (library, own):
        file.write_text("found = is_import()\n")
    assert runpy.run_path(str(library), asks)["found"] and not runpy.run_path(str(own), asks)["found"]
