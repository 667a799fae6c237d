"""Spares of scripts without `protect`: never a failure, and never a rank that knows less than the others."""

from __future__ import annotations

import os

import pytest

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
    wait_for(lambda: [p.read_text() for p in (ftrun.base / "logs").glob("*/*/spare-*/stdout.log")] == ["up\ndone\n"] * 2, "spares")
    run.wait_output("up", 2)
    live = next(run.runs_root.glob("*/journal.jsonl"))
    wait_for(lambda: "spare-unneeded" in live.read_text(), "the spares' end in the journal")
    go.touch()
    assert run.wait() == 0, run.stderr
    said = [line for line in run.stderr.splitlines() if line.startswith("ftrun:")]
    assert said[-1].startswith("ftrun: done in "), run.stderr
    assert not [line for line in said[1:-1] if "OMP_NUM_THREADS" not in line], run.stderr
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


# the address of such a listener lies in the temporary folder of multiprocessing
LISTENS = """
import multiprocessing.connection, os, signal, time
where = multiprocessing.connection.Listener(family="AF_UNIX").address
rank = os.environ["RANK"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    print("listens at", where, flush=True)
    while not os.path.exists({go!r}):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
print("called", open("/proc/self/comm").read().strip() + ", rank", rank, flush=True)
"""


@pytest.mark.parametrize("start", ["forkserver", "exec"])
def test_names_and_litter(ftrun: Ftrun, start: str) -> None:
    """A spare that took a rank is called so in `ps`; a killed worker leaves no folder of multiprocessing's."""
    go, temporary = ftrun.base / "go", ftrun.base / "tmp"
    (temporary / "pymp-of-somebody-else").mkdir(parents=True)
    options = ("--nproc-per-node", 2, "--spares", 2, "--max-restarts", 1, "--worker-start", start, "--run-id", "x")
    run = ftrun.start(*options, ftrun.script(LISTENS.format(go=str(go))), TMPDIR=str(temporary))
    journal = run.dir / "journal.jsonl"
    wait_for(lambda: journal.exists() and journal.read_text().count('"Parked"') == 2, "two parked spares")
    run.wait_output("listens at", 2)
    go.touch()
    assert run.wait() == 0, run.stderr
    for rank in (0, 1):
        assert f"[rank {rank}] called ftrun rank {rank}, rank {rank}" in run.stdout
    assert os.listdir(temporary) == ["pymp-of-somebody-else"]
    assert not list(ftrun.runs_root.glob("[!.]*")), "the run directory stays"


def test_a_spare_does_not_park_while_a_library_is_imported(ftrun: Ftrun) -> None:
    """tqdm looks through the whole environment then; behind it stands what a spare is to have ready."""
    go = ftrun.base / "go"
    script = ftrun.script(
        "import os, time\nimport tqdm\nprint('built', flush=True)\nrank = os.environ['RANK']\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    )
    run = ftrun.start("--nproc-per-node", 1, "--spares", 1, "--worker-start", "exec", script)
    wait_for(lambda: [p.read_text() for p in (ftrun.base / "logs").glob("*/*/spare-*/stdout.log")] == ["built\n"], "the spare")
    go.touch()
    assert run.wait() == 0, run.stderr
