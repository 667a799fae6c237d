"""Shared results: each configuration runs once without a fault, however many tests and test processes ask for it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.e2e import harness, sharding
from tests.e2e.harness import Outcome

Reference = Callable[..., Outcome]


def _once(
    tmp_path_factory: pytest.TempPathFactory, what: object, run: Callable[[Path], Outcome], ranks: int
) -> Outcome:
    """What `run` leaves in a folder that all test processes share; `what` names it."""
    # the processes of pytest-xdist have a folder each, in one that they share
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = shared / f"stock-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}"
    done = folder / "done"
    with FileLock(f"{folder}.lock", timeout=sharding.SLOW + 60):
        if not done.exists():
            run(folder).need()
            done.touch()
    return harness.read(folder, 0, 0.0, ranks)


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """stock(*arguments, ranks=4): the uninterrupted result of stock torch and Gloo; see tests/e2e/stock.py."""

    def run(*arguments: str, ranks: int = harness.RANKS) -> Outcome:
        chosen = harness.unhurried(arguments)
        return _once(tmp_path_factory, (ranks, chosen), lambda folder: harness.stock(folder, chosen, ranks), ranks)

    return run


@pytest.fixture(scope="session")
def sharded_stock(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """sharded_stock(*arguments, ranks=4): the same of scripts/sharded.py."""

    def run(*arguments: str, ranks: int = harness.RANKS) -> Outcome:
        what = ("sharded", ranks, arguments)
        return _once(tmp_path_factory, what, lambda folder: sharding.stock(folder, arguments, ranks), ranks)

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for one run; afterwards no process of it may be alive."""
    yield tmp_path
    harness.check_no_strays(tmp_path)
