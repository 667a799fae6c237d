"""Aborting a process group may never return: that costs the rank it happens in, and no more than the stop's deadline."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.test_services import Live

HERE = Path(__file__).resolve().parent


@pytest.fixture
def hanging(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Variables of a run in which the worker of a name hangs in its first abort."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the preloaded library needs a C compiler")
    library, once = tmp_path / "hanging_abort.so", tmp_path / "once"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(HERE / "hanging_abort.c")], check=True)
    once.touch()
    return lambda name: {"LD_PRELOAD": str(library), "HANGING_ABORT": name, "HANGING_ABORT_ONCE": str(once)}


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [True, False], ids=["abort hangs", "control"])
def test_a_rank_whose_abort_hangs_is_replaced(
    stock: Reference, folder: Path, tmp_path: Path, hanging: Callable[[str], dict[str, str]], hangs: bool
) -> None:
    """Rank 1 is busy in Python when rank 2 dies. The thread that would interrupt it is the one whose abort never returns."""
    command = harness.ftrun_command(
        folder,
        [],
        [harness.fault("hang", 1, "forward", 3)],
        spares=2,
        options=("--stop-timeout", "2", "--max-replacements", "50"),
    )
    live = Live(folder, command, hanging("ftrun rank 1") if hangs else {})
    journal = live.run_dir / "journal.jsonl"
    live.ended_or(lambda: journal.exists() and '"kind": "hang"' in journal.read_text(), "rank 1 to be busy")
    live.kill("ftrun rank 2")
    outcome = live.finish()
    harness.same(stock(), outcome)
    assert (tmp_path / "once").exists() != hangs, "its abort hung"
    assert harness.replaced_ranks(outcome) == ({1, 2} if hangs else {2})
