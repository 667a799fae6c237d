"""Shared results: each configuration runs once without a fault, however many tests and test processes ask for it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.e2e import harness
from tests.e2e.harness import Outcome

Reference = Callable[..., Outcome]


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """stock(*arguments): the uninterrupted result of stock torch and Gloo; see tests/e2e/stock.py."""
    # the processes of pytest-xdist have a folder each, in one that they share
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def run(*arguments: str) -> Outcome:
        chosen = harness.unhurried(arguments)
        folder = shared / f"stock-{hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]}"
        done = folder / "done"
        with FileLock(f"{folder}.lock", timeout=harness.TIMEOUT * 2 + 60):
            if not done.exists():
                harness.stock(folder, chosen).need()
                done.touch()
        return harness.read(folder, 0, 0.0)

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for one run; afterwards no process of it may be alive."""
    yield tmp_path
    harness.check_no_strays(tmp_path)
