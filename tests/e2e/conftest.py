"""Shared results: each configuration runs once under torchrun and once clean under ftrun, however many tests use it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import Outcome

Reference = Callable[..., Outcome]


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """stock(*arguments): the uninterrupted result under torchrun with stock Gloo."""
    cache: dict[tuple[str, ...], Outcome] = {}

    def run(*arguments: str) -> Outcome:
        if arguments not in cache:
            outcome = harness.torchrun(tmp_path_factory.mktemp("torchrun"), arguments)
            if outcome.code:  # torchrun on a busy machine: its failure is no finding about ftrun, but it is shown
                warnings.warn(f"torchrun ended with {outcome.code}, once more:\n{outcome.tail()}", stacklevel=2)
                outcome = harness.torchrun(tmp_path_factory.mktemp("torchrun"), arguments)
            outcome.need()
            cache[arguments] = outcome
        return cache[arguments]

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for one run; afterwards no process of it may be alive."""
    yield tmp_path
    harness.check_no_strays(tmp_path)
