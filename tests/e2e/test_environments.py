"""Machines that give less than a developer's: a container with Docker's 64 MB of /dev/shm, no capabilities, no ptrace, and no home.

The tests are the container: namespaces and a seccomp filter of the kernel's. Root may make them; elsewhere they are skipped.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.harness import kill

# the run directory lies in the small /dev/shm, under the name that the test looks for
CONTAINER = """
set -e
mount -t tmpfs -o size=64m tmpfs /dev/shm
mkdir -m 700 /dev/shm/runs
mount --bind /dev/shm/runs "$FTRUN_RUNS_ROOT"
exec setpriv --bounding-set=-all --inh-caps=-all -- "$@"
"""
CONFINED = [sys.executable, str(harness.SCRIPTS / "confined.py")]
INSIDE = ["unshare", "--mount", "sh", "-c", CONTAINER, "sh", *CONFINED]
LOADER = ["--data", "loader", "--workers", "2"]  # its batches go through /dev/shm


def can_be_made(tmp_path: Path) -> bool:
    try:
        done = subprocess.run([*INSIDE, "true"], env=harness.environment(tmp_path), capture_output=True, timeout=20)
    except OSError:
        return False
    return done.returncode == 0


@pytest.fixture
def container(folder: Path) -> Callable[..., harness.Outcome]:
    """container(*options, **env): the reference script, two of its four ranks killed, in the container."""
    if not can_be_made(folder):
        pytest.skip("no mount namespace, setpriv or seccomp for this user")

    def run(*options: str, **env: str) -> harness.Outcome:
        faults = [kill(2, "backward", 2), kill(0, "update", 4)]
        command = harness.ftrun_command(folder, LOADER, faults, options=options)
        return harness.finish(harness.start(folder, [*INSIDE, *command], env))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("start", ["forkserver", "exec"])
def test_two_kills_in_a_small_container(
    start: str, stock: Reference, container: Callable[..., harness.Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    outcome = container("--worker-start", start, TMPDIR="/nonexistent")
    harness.same(stock(*LOADER), outcome)
    assert len(harness.deaths(outcome)) == 2, outcome.tail()
    harness.check_survivors(outcome)
