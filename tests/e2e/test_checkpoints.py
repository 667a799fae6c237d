"""Checkpoints by the job: of a sharded model each rank writes its part, and a later run goes on from the newest that is complete, also
with another number of ranks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from ftrun.core.errors import UsageError
from ftrun.worker.process import checkpoints
from ftrun.worker.process.sharded_checkpoints import CheckpointPart, ShardedFolder, _laid_out
from ftrun.worker.state import shards
from tests.e2e import harness
from tests.e2e.harness import Outcome

SCRIPT = harness.SCRIPTS / "checkpointed.py"


def digests(out: Path) -> dict[str, str]:
    found = {path.name: path.read_text() for path in out.glob("digest-*")}
    for path in out.glob("digest-*"):
        path.unlink()
    return found


def run(
    folder: Path, layout: str, steps: int, kills: str = "", code: int = 0, ranks: int = 4, options: tuple[str, ...] = ()
) -> Outcome:
    """One of several runs that write to the same folder."""
    arguments = ["ftrun", layout, str(folder / "out"), str(steps), kills]
    folder = Path(tempfile.mkdtemp(dir=folder))
    outcome = harness.finish(harness.start(folder, harness.script_command(folder, SCRIPT, arguments, ranks=ranks, options=options)), 0)
    assert outcome.code == code, outcome.tail()
    return outcome


def by_torch(folder: Path, layout: str, *until: int) -> dict[str, str]:
    """Runs under torchrun, each of which goes on from the checkpoint of the one before."""
    command = [str(SCRIPT)]
    for steps in until:
        outcome = harness.by_torch(folder, [*command, "gloo", layout, str(folder / "out"), str(steps), ""], 0)
        assert outcome.code == 0, outcome.tail()
    found = digests(folder / "out")
    assert len(found) == 4
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "stages", "hsdp", "ddp"])
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
        assert complete(last) == {4: True, 8: True}, "the newest may yet be cut off"
    outcome = run(folder, layout, 14, f"forward:9:3 forward:13:2 {'ending:14:2' if layout != 'ddp' else ''}")
    assert len(harness.deaths(outcome)) == (3 if layout != "ddp" else 2), outcome.tail()
    assert layout == "ddp" or complete(folder / "out" / "end") == {10: True, 14: True}, "a replacement says another moment"
    assert "bit-identical to an uninterrupted run: yes" in outcome.output, outcome.tail()
    assert digests(folder / "out") == expected


def test_only_a_complete_checkpoint_is_read(folder: Path) -> None:
    expected = by_torch(folder / "stock", "fsdp", 8)
    last = folder / "out" / "last"
    run(folder, "fsdp", 5)
    digests(folder / "out")
    cut_off = last / "step-8-of-4-0"
    cut_off.mkdir()
    (cut_off / "__1_0.distcp").write_bytes(b"of a run that was cut off")
    run(folder, "fsdp", 7)  # it went on from step 4
    run(folder, "fsdp", 8)
    assert digests(folder / "out") == expected
    for found in last.glob("step-*/__2.metadata"):
        found.unlink()
    outcome = run(folder, "fsdp", 8, code=2)
    assert "no complete checkpoint: of step 8 rank 2 wrote nothing" in outcome.output, outcome.tail()


@pytest.mark.slow
def test_ranks_die_in_the_middle_of_a_save(folder: Path) -> None:
    """No rank waits for them. What they left is never read; the moment before is, or one that was whole but for its last line."""
    expected = by_torch(folder / "stock", "fsdp", 18)
    all_die = " ".join(f"merging:11:{rank} describing:15:{rank}" for rank in range(4))
    outcome = run(folder, "fsdp", 18, f"tensors:3:1 describing:7:2 {all_die}")
    merging = len(list((folder / "out").glob("struck-merging-*")))  # all that found every part there
    assert merging >= 1 and len(harness.deaths(outcome)) == 6 + merging, outcome.tail()
    assert "the checkpoint of step 4" in outcome.output and "is not complete, rank 1 wrote nothing" in outcome.output, outcome.tail()
    last = folder / "out" / "last"
    assert complete(last) == {4: False, 8: False, 12: True, 16: False} and not list(last.glob("step-*/.metadata"))
    assert digests(folder / "out") == expected
    outcome = run(folder, "fsdp", 18)
    assert outcome.output.count("begins at step 12") == 4, outcome.tail()
    assert complete(last) == {12: True, 16: True} and len(list(last.glob("step-*/.metadata"))) == 2
    assert digests(folder / "out") == expected


@pytest.mark.slow
def test_runs_of_one_id_and_the_steps_after_a_rollback_have_checkpoints_of_their_own(folder: Path) -> None:
    """In step 9 everyone goes back to the snapshot of step 6: what was written of step 8 before is not taken for what comes after."""
    expected = by_torch(folder / "stock", "fsdp", 10)
    last = folder / "out" / "last"
    outcome = run(folder, "fsdp", 10, "update:9:1 again:7:3", options=("--run-id", "same", "--snapshot-every", "6"))
    assert len(harness.deaths(outcome)) == 2 and "host snapshot" in outcome.output, outcome.tail()
    assert digests(folder / "out") == expected and complete(last) == {8: True}
    first = {one.name for one in last.iterdir()}
    last.rename(folder / "out" / "before")
    run(folder, "fsdp", 10, options=("--run-id", "same"))
    assert len(first) == 2 and not first & {one.name for one in last.iterdir()}
    assert digests(folder / "out") == expected


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tp"])
def test_another_number_of_ranks(folder: Path, layout: str) -> None:
    """4 to 2, which train on, and 2 to 4: weights and optimizer state are what was saved, as are the scheduler and the step."""
    run(folder, layout, 8)
    by_torch_alone(folder, "full-4-8.pt")
    outcome = run(folder, "fsdp", 8, ranks=2)
    same_tensors(folder, "full-4-8.pt", "full-2-8.pt")
    assert "job.load: state stays as the script made it: each of the 4 ranks" in outcome.output, outcome.tail()
    assert all(f"rank {rank} begins at step 8, its own is {rank}" in outcome.output for rank in range(2)), outcome.tail()
    run(folder, "fsdp", 12, ranks=2)
    outcome = run(folder, layout, 12)
    assert outcome.output.count("begins at step 12") == 4, outcome.tail()
    same_tensors(folder, "full-2-12.pt", "full-4-12.pt")
    assert complete(folder / "out" / "last") == {8: True, 12: True}


def complete(last: Path) -> dict[int, bool]:
    """Steps of which there is a checkpoint, and whether it is whole."""
    return {one.step: not one.missing() for one in ShardedFolder(last, 0, 4).found()}


def by_torch_alone(folder: Path, name: str) -> None:
    (newest,) = [one.folder for one in ShardedFolder(folder / "out" / "last", 0, 4).found() if one.step == 8]
    whole = {key: one for key, one in torch.load(folder / "out" / name, weights_only=True).items() if " " not in key}
    read = {key: torch.zeros_like(one) for key, one in whole.items()}
    torch.distributed.checkpoint.load({"models.0": read}, checkpoint_id=newest, no_dist=True)
    assert len(read) == 4 and [key for key in whole if not torch.equal(whole[key], read[key])] == []


def same_tensors(folder: Path, *names: str) -> None:
    one, other = (torch.load(folder / "out" / name, weights_only=True) for name in names)
    assert one.keys() == other.keys() and len(one) == 4 + 4 * 3
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def own(**values: object) -> CheckpointPart:
    return CheckpointPart({}, {("step",): 10, **{("stateful", name): value for name, value in values.items()}})


def read(path: Path, ranks: int = 4) -> list[object]:
    return [ShardedFolder(path, rank, ranks).load([], [], torch.device("cpu")) for rank in range(ranks)]


def test_parts_of_two_runs_are_never_taken_for_one(tmp_path: Path) -> None:
    """Another run begins anew in the same folder, and two of its ranks die before they write."""
    folders = [ShardedFolder(tmp_path, rank, 4) for rank in range(4)]
    for step in (10, 20):
        for one in folders:
            one.write(step, "a", own(run=1))
    for one in folders[:2]:
        one.write(10, "b", own(run=2))
    assert read(tmp_path) == [(10, {"run": 1})] * 4
    for one in folders[2:]:
        one.write(10, "b", own(run=2))
    assert read(tmp_path) == [(10, {"run": 2})] * 4
    for one in folders[:3]:
        one.write(10, "c", own(run=2, again=True))  # without a step of its own it is written over
    assert read(tmp_path) == [(10, {"run": 2})] * 4
    for file in tmp_path.glob("step-10-of-4-b/*"):
        os.utime(file, (1.0, 1.0))
    for one in folders[:3]:
        one.write(10, "b", own(run=3), since=2.0)  # a run that calls itself as that one did
    with pytest.raises(UsageError, match="of step 10 rank 3 wrote nothing"):
        read(tmp_path)
    folders[3].write(10, "b", own(run=3), since=2.0)
    folders[0].write(10, "b", own(run=4))  # a part is written once
    assert read(tmp_path) == [(10, {"run": 3})] * 4


def test_what_each_rank_has_alone_is_read_by_another_number_of_ranks_where_all_had_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        ShardedFolder(tmp_path, rank, 4).write(10, "a", own(alike=torch.tensor([1.0, float("nan")]), streams=rank))
    found = read(tmp_path, 2)
    assert [list(state) for _, state in found] == [["alike"], ["alike"]]  # type: ignore[misc]
    assert capsys.readouterr().err.count("job.load: streams stays as the script made it: each of the 4 ranks") == 1
    for rank in range(4):
        part = own()
        part.own["models", 0, "stage.weight"] = ["plain", torch.full((3,), rank)]
        ShardedFolder(tmp_path, rank, 4).write(20, "a", part)
    with pytest.raises(UsageError, match=r"written by 4 ranks, and this run has 2: models\.0\.stage\.weight, .* go on with 4"):
        read(tmp_path, 2)
    for step in (12, 14):  # what ranks wrote that are no more is removed, too
        for rank in range(2):
            ShardedFolder(tmp_path, rank, 2).write(step, "b", own())
    assert complete(tmp_path) == {12: True, 14: True} and len(list(tmp_path.iterdir())) == 2


def test_what_is_no_such_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.pt").touch()
    with pytest.raises(UsageError, match=r"is a file, as job.save writes it for a model that each rank has whole"):
        read(tmp_path / "one.pt")
    with pytest.raises(UsageError, match=r"holds no checkpoint of a model of which each rank has a part$"):
        read(tmp_path)
    (tmp_path / "step-8-rank-0-of-4-01ab.pt").touch()
    with pytest.raises(UsageError, match=r"only an older ftrun's \(step-8-rank-0-of-4-01ab\.pt\), which this one does not read"):
        read(tmp_path)
    with pytest.raises(UsageError, match=r"is a folder, as job.save writes it for a model of which each rank has a part"):
        checkpoints.read(tmp_path, torch.device("cpu"))


@pytest.mark.parametrize(
    ("description", "why"),
    [
        (b"\x80\x02ctorch.distributed.checkpoint.brandnew\nThing\n.", "No module named"),
        (b"\x80\x02ctorch.distributed.checkpoint.metadata\nThing\n.", "Thing"),
        (b"\x80\x02K\x01.", "it holds int"),
        (b"", "Ran out of input"),
    ],
)
def test_a_description_that_this_torch_cannot_read_is_named(tmp_path: Path, description: bytes, why: str) -> None:
    ShardedFolder(tmp_path, 0, 1).write(10, "a", own())
    (whole,) = tmp_path.glob("*/.metadata")
    whole.write_bytes(description)
    with pytest.raises(UsageError, match=f"torch .* cannot read .*{why}"):
        read(tmp_path, 1)


def test_a_value_that_was_whole_and_is_spread_now_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "is_spread", lambda tensor: True)
    with pytest.raises(UsageError, match=r"models\.0\.bias is not spread over ranks, and the model's is"):
        _laid_out(("models", 0, "bias"), ["plain", torch.zeros(2)], torch.zeros(2), torch.zeros(2), {})
