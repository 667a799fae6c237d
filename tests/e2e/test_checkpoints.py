"""Checkpoints by the job: of a sharded model each rank writes its part, and a later run goes on from the newest that is complete."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from ftrun.worker.process.checkpoints import PartsFolder
from tests.e2e import harness
from tests.e2e.harness import Outcome

SCRIPT = harness.SCRIPTS / "checkpointed.py"


def digests(out: Path) -> dict[str, str]:
    found = {path.name: path.read_text() for path in out.glob("digest-*")}
    for path in out.glob("digest-*"):
        path.unlink()
    return found


def run(folder: Path, layout: str, steps: int, kills: str = "", code: int = 0, ranks: int = 4) -> Outcome:
    """One of several runs that write to the same folder."""
    arguments = ["ftrun", layout, str(folder / "out"), str(steps), kills]
    folder = Path(tempfile.mkdtemp(dir=folder))
    outcome = harness.finish(harness.start(folder, harness.script_command(folder, SCRIPT, arguments, ranks=ranks)), 0)
    assert outcome.code == code, outcome.tail()
    return outcome


def by_torch(folder: Path, layout: str, *until: int) -> dict[str, str]:
    """Runs under torchrun, each of which goes on from the checkpoint of the one before."""
    command = [harness.tool("torchrun"), "--standalone", "--nproc-per-node", "4", str(SCRIPT)]
    for steps in until:
        outcome = harness.by_torch(folder, [*command, "gloo", layout, str(folder / "out"), str(steps), ""], 0)
        assert outcome.code == 0, outcome.tail()
    found = digests(folder / "out")
    assert len(found) == 4
    return found


@pytest.mark.parametrize(
    "layout",
    ["fsdp", "stages", pytest.param("hsdp", marks=pytest.mark.slow), pytest.param("ddp", marks=pytest.mark.slow)],
)
def test_a_run_goes_on_from_its_checkpoint(folder: Path, layout: str) -> None:
    """Ranks die before, while and after checkpoints are written, and after one was read: a replacement reads none.

    DDP itself ends on other bits when it begins anew in the middle (its first buckets are others), so torchrun does the same.
    """
    expected = by_torch(folder / "stock", layout, 10, 14)
    last = folder / "out" / "last"
    saving = "saving:3:2 saving:7:0" if layout != "ddp" else "saving:3:0"
    outcome = run(folder, layout, 10, f"forward:2:1 {saving}")
    assert len(harness.deaths(outcome)) == 1 + len(saving.split()), outcome.tail()
    if layout != "ddp":
        kept = {(step, str(rank)) for step in ("4", "8") for rank in range(4)}  # the newest may yet be cut off
        names = [file.name.split("-") for file in last.iterdir()]
        assert len(names) == 8 and {(name[1], name[3]) for name in names} == kept
        assert len({(name[1], name[6]) for name in names}) == 2, "ranks, replacements too, do not say the same of one moment"
    outcome = run(folder, layout, 14, f"forward:9:3 forward:13:2 {'ending:14:2' if layout != 'ddp' else ''}")
    assert len(harness.deaths(outcome)) == (3 if layout != "ddp" else 2), outcome.tail()
    marks = [file.name.rpartition("-")[2] for file in (folder / "out" / "end").glob("step-14-*")]
    assert layout == "ddp" or (len(marks) == 4 and len({*marks}) == 1), "a replacement says another moment"
    assert "bit-identical to an uninterrupted run: yes" in outcome.output, outcome.tail()
    assert digests(folder / "out") == expected


def test_only_a_complete_checkpoint_is_read(folder: Path) -> None:
    expected = by_torch(folder / "stock", "fsdp", 8)
    last = folder / "out" / "last"
    run(folder, "fsdp", 5)
    digests(folder / "out")
    (last / "step-8-rank-1-of-4-0.pt").write_bytes(b"of a run that was cut off")
    run(folder, "fsdp", 7)  # it went on from step 4
    run(folder, "fsdp", 8)
    assert digests(folder / "out") == expected
    for step in (4, 8):
        next(last.glob(f"step-{step}-rank-2-of-4-*.pt")).unlink()
    outcome = run(folder, "fsdp", 8, code=2)
    assert "no complete checkpoint: of step 8 rank 2 wrote nothing" in outcome.output, outcome.tail()
    outcome = run(folder, "fsdp", 8, code=2, ranks=3)
    assert "was written by 4 ranks, each its part of the model" in outcome.output, outcome.tail()


def test_parts_of_two_runs_are_never_taken_for_one(tmp_path: Path) -> None:
    """Another run begins anew in the same folder, and two of its ranks die before they write."""
    folders = [PartsFolder(tmp_path, rank, 4) for rank in range(4)]
    for step in (10, 20):
        for one in folders:
            one.write(step, "a", {"run": 1, "step": step})
    for one in folders[:2]:
        one.write(10, "b", {"run": 2, "step": 10})
    read = [one.read(torch.device("cpu")) for one in folders]
    assert read == [{"run": 1, "step": 10}] * 4
    for one in folders[2:]:
        one.write(10, "b", {"run": 2, "step": 10})
    assert [one.read(torch.device("cpu")) for one in folders] == [{"run": 2, "step": 10}] * 4
    for one in folders[:3]:
        one.write(10, "c", {"run": 2, "step": 10, "again": True})  # without a step of its own it is written over
    assert [one.read(torch.device("cpu")) for one in folders] == [{"run": 2, "step": 10}] * 4
