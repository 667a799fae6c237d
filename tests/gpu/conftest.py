"""Runs of the training script on the fake GPU; the uninterrupted one is made once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import harness
from tests.gpu import machine
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

    def restored(self) -> list[dict[str, Any]]:
        """The journal's facts about replaced ranks' sources."""
        return [line for line in self.journal if line.get("note") == "restored"]


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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A row for each test on a real GPU: the point, how it ended, its figures. Also in build/bench/gpu-test.md."""
    rows = []
    for outcome in ("passed", "failed", "error", "skipped", "xfailed"):
        for report in terminalreporter.stats.get(outcome, []):
            _, _, name = report.nodeid.partition("tests/gpu/test_real_")
            if name and not (outcome == "skipped" and "needs an NVIDIA GPU" in str(report.longrepr)):
                why = str(report.longrepr[2]) if outcome == "skipped" and isinstance(report.longrepr, tuple) else ""
                figures = "; ".join(f"{key}: {value}" for key, value in report.user_properties)
                rows.append((name.partition("::test_")[2], outcome, figures or why))
    if not rows:
        return
    lines = [
        "| point | result | figures |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in sorted(rows, key=_point)),
    ]
    facts = [f"{name}: {value}" for name, value in machine.facts().items()]
    terminalreporter.write_line("")
    for line in (*facts, *lines):
        terminalreporter.write_line(line)
    out = machine.ROOT / "build" / "bench"
    out.mkdir(parents=True, exist_ok=True)
    parts = sorted(
        {report.nodeid.partition("test_real_")[2][:1] for report in terminalreporter.stats.get("passed", [])}
    )
    (out / f"gpu-test-{''.join(parts) or 'none'}.md").write_text("\n".join([*facts, "", *lines]) + "\n")


def _point(row: tuple[str, str, str]) -> tuple[int, str]:
    return int(row[0].partition("_")[0]), row[0]


def _only_without_cuda() -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA and would use the fake driver itself; `make gpu-test` runs what needs a GPU")


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
