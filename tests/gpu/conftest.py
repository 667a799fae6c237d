"""Runs of the training script on the fake GPU; the uninterrupted one is made once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import harness
from tests.native import fake

SCRIPT = Path(__file__).resolve().parent / "scripts" / "train.py"
RANKS = 4


@dataclass
class Outcome:
    """`ranks`: what each rank wrote; `journal`, `output`: of the run."""

    code: int
    ranks: list[dict[str, Any]]
    journal: list[dict[str, Any]]
    output: str

    def sources(self) -> list[str]:
        """Where each replaced rank's state came from, by the incidents of the journal."""
        incidents = [line for line in self.journal if line.get("note") == "incident"]
        return [source["name"] for incident in incidents for source in incident["sources"].values()]


def command(
    folder: Path,
    *arguments: str,
    faults: tuple[str, ...] = (),
    replacements: int = 50,
    options: tuple[str, ...] = (),
) -> list[str]:
    """`ftrun` with further `options` on the script, with a plan if there are faults."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "out").mkdir(exist_ok=True)
    given = ["--nproc-per-node", str(RANKS), "--spares", "1", "--max-replacements", str(replacements), *options]
    if faults:
        (folder / "plan.toml").write_text("seed = 1\n" + "".join(faults))
        given += ["--fault-plan", str(folder / "plan.toml")]
    return [harness.tool("ftrun"), *given, str(SCRIPT), "--out", str(folder / "out"), *arguments]


def finish(running: harness.Running, timeout: float = 60.0) -> Outcome:
    """Wait for the end and gather what was written."""
    code = running.wait(timeout)
    harness.check_journal(running.folder)
    paths = [running.folder / "out" / f"rank-{rank}.json" for rank in range(RANKS)]
    ranks = [json.loads(path.read_text()) for path in paths if path.exists()]
    return Outcome(code, ranks, harness.read_journal(running.folder), running.output)


def run(
    folder: Path,
    control: fake.Control,
    *arguments: str,
    faults: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> Outcome:
    """A whole run on the fake GPU."""
    line = command(folder, *arguments, faults=faults, options=options)
    return finish(harness.start(folder, line, control.env))


def at_step(folder: Path, rank: int) -> int:
    """The step that a rank is in, -1 before its first."""
    try:
        return int((folder / "out" / f"at-{rank}").read_text())
    except (OSError, ValueError):
        return -1


def named(folder: Path, name: str) -> list[int]:
    """Processes of a run whose title begins with `name`."""
    found = []
    for pid in harness.strays(folder):
        try:
            if Path(f"/proc/{pid}/comm").read_text().startswith(name):
                found.append(pid)
        except OSError:
            pass
    return found


COMPARED: tuple[str, ...] = ("weights", "optimizer", "buffers", "rng", "loss")


def same(one: Outcome, other: Outcome) -> None:
    """Fail with what differs, and the end of the output."""
    for outcome in (one, other):
        assert outcome.code == 0 and len(outcome.ranks) == RANKS, outcome.output[-4000:]
    different = [
        f"rank {rank}: {key}"
        for rank, (a, b) in enumerate(zip(one.ranks, other.ranks, strict=True))
        for key in COMPARED
        if a[key] != b[key]
    ]
    assert not different, f"{different}\n{other.output[-4000:]}"


def _only_without_cuda() -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA and would use the fake driver itself; `make gpu` asks a real one")


@pytest.fixture
def control(tmp_path: Path) -> fake.Control:
    _only_without_cuda()
    return fake.Control(tmp_path / "cuda.txt")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    harness.check_no_strays(tmp_path / "run")


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The uninterrupted result."""
    _only_without_cuda()
    folder = tmp_path_factory.mktemp("clean")
    return run(folder / "run", fake.Control(folder / "cuda.txt"))
