"""Programs of others, which know torchrun and have never heard of ftrun: what they print is the same under both.

Both launchers get the same command line. Each program's ranks are compared by the log files that `--tee 3` leaves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e import harness

SCRIPTS = Path(__file__).resolve().parent / "scripts"
RANKS = 2
SECONDS = 100.0  # for one run; a test makes up to three
pytestmark = [pytest.mark.compat, pytest.mark.timeout(4 * SECONDS)]
ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",  # without it accelerate takes two ranks without a GPU for two separate programs
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Ended(NamedTuple):
    """What each rank of a run wrote to stdout in its last attempt, and the run's whole output."""

    ranks: list[str]
    output: str

    def answers(self) -> list[dict[str, Any]]:
        """The JSON that each rank of our two scripts prints at its end."""
        found = []
        for rank, text in enumerate(self.ranks):
            lines = [line for line in text.splitlines() if line.startswith("answer ")]
            assert len(lines) == 1, f"rank {rank} printed {len(lines)} answers\n{self.output}"
            found.append(json.loads(lines[0].removeprefix("answer ")))
        return found


Launch = Callable[..., Ended]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """launch(tool, *arguments): a run with two ranks, which must end with exit code 0 and leave no process."""
    folders = []

    def run(tool: str, *arguments: object) -> Ended:
        folder = tmp_path / f"{tool}-{len(folders)}"
        folders.append(folder)
        command = [harness.tool(tool), "--standalone", "--nproc-per-node", RANKS, "--tee", 3, "--log-dir", "logs"]
        home = {"HF_HOME": str(folder / "home")}
        running = harness.start(folder, [*map(str, command), *map(str, arguments)], {**ENVIRONMENT, **home})
        code = running.wait(SECONDS)
        assert code == 0, f"{tool} ended with exit code {code}\n{running.output}"
        last = max(folder.glob("logs/*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        return Ended([(last / str(rank) / "stdout.log").read_text() for rank in range(RANKS)], running.output)

    yield run
    for folder in folders:
        harness.check_no_strays(folder)


@pytest.mark.parametrize(
    ("module", "proof"),
    [("test_script", "Training yielded the same results"), ("test_sync", "**Test Distributed `no_sync`")],
)
def test_accelerates_own_tests(module: str, proof: str, launch: Launch) -> None:
    program = ("-m", f"accelerate.test_utils.scripts.{module}")
    theirs, ours = launch("torchrun", *program), launch("ftrun", *program)
    assert proof in ours.ranks[0]
    if module == "test_script":
        for rank, text in enumerate(ours.ranks):
            assert "Distributed environment: DistributedType.MULTI_CPU  Backend: gloo" in text
            assert f"Num processes: {RANKS}\nProcess index: {rank}\n" in text
    assert ours.ranks == theirs.ranks


def test_a_transformers_trainer(launch: Launch) -> None:
    """Without a failure, and with one: all ranks start again from its checkpoint and end on the same weights."""
    script = SCRIPTS / "transformers_trainer.py"
    theirs = launch("torchrun", script, "--out", "out").answers()
    assert [(a["rank"], a["world_size"], a["mode"], a["steps"]) for a in theirs] == [
        (rank, RANKS, "distributed", 20) for rank in range(RANKS)
    ]
    assert len({a["weights"] for a in theirs}) == 1
    assert launch("ftrun", script, "--out", "out").answers() == theirs

    failing = launch("ftrun", "--max-restarts", 1, script, "--out", "out", "--stop-at", 12)
    assert "rank 1 failed (SIGKILL); all workers start again, attempt 2 of 2" in failing.output
    assert failing.answers() == [{**answer, "begun_at": 10} for answer in theirs]


def test_a_lightning_trainer(launch: Launch) -> None:
    script = SCRIPTS / "lightning_trainer.py"
    theirs = launch("torchrun", script, "out", "gloo").answers()
    for rank, answer in enumerate(theirs):
        assert (answer["rank"], answer["world_size"], answer["steps"]) == (rank, RANKS, 24)
        assert answer["environment"] == "TorchElasticEnvironment"
        assert not answer["launched_here"]
    assert len({a["weights"] for a in theirs}) == 1
    assert launch("ftrun", script, "out", "gloo").answers() == theirs
    assert launch("ftrun", script, "out", "ftrun").answers() == theirs, "its means of integers and objects too"
