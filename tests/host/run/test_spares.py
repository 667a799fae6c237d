"""Spares of scripts without `protect`: never a failure, and never a rank that knows less than the others."""

from __future__ import annotations

from tests.conftest import Ftrun, wait_for

# the cell tells a spare from a rank without asking for the rank
SCRIPT = """
import os, time
print("up", flush=True)
if int(os.environ["FTRUN_CELL"]) < 2:
    while not os.path.exists({go!r}):
        time.sleep(0.01)
print("done", flush=True)
"""


def test_a_script_that_never_asks_for_its_rank_runs_without_spares(ftrun: Ftrun) -> None:
    go = ftrun.base / "go"
    run = ftrun.start("--nproc-per-node", 2, "--spares", 2, ftrun.script(SCRIPT.format(go=str(go))))
    run.wait_output("done", 2)
    run.wait_output("up", 4)
    live = next(run.runs_root.glob("*/journal.jsonl"))
    wait_for(lambda: "spare-unneeded" in live.read_text(), "the spares' end in the journal")
    go.touch()
    assert run.wait() == 0, run.stderr
    said = [line for line in run.stderr.splitlines() if line.startswith("ftrun:")]
    assert not [line for line in said[1:] if "OMP_NUM_THREADS" not in line], run.stderr
    journal = run.journal()
    assert len([line for line in journal if line.get("note") == "spare-unneeded"]) == 1
    spawned = [a for line in journal for a in line.get("actions", ()) if a["kind"] == "Spawn"]
    assert len(spawned) == 4, "no spare is tried again"


# looks for a checkpoint before it knows its rank, as many scripts do
LOOKS = """
import os, signal, time
found = os.path.exists({saved!r})
rank = os.environ["RANK"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while not os.path.exists({saved!r}):
        time.sleep(0.01)
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
print("checkpoint found:", found, flush=True)
"""


def test_every_rank_of_a_second_attempt_sees_the_checkpoint_of_the_first(ftrun: Ftrun) -> None:
    saved = ftrun.base / "saved"
    run = ftrun.start(
        "--nproc-per-node", 2, "--spares", 2, "--max-restarts", 1, ftrun.script(LOOKS.format(saved=str(saved)))
    )
    journal = run.dir / "journal.jsonl"
    wait_for(lambda: journal.exists() and journal.read_text().count('"Parked"') == 2, "two parked spares")
    saved.touch()
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("checkpoint found: True") == 2
    assert "checkpoint found: False" not in run.stdout
