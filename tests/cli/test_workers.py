"""What the options do to real workers: programs, modules, arguments with the rank, variables."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Ftrun, processes_of, wait_for

PROBE = """#!/bin/bash
echo "rank=$RANK/$WORLD_SIZE local=$LOCAL_RANK/$LOCAL_WORLD_SIZE group=$GROUP_RANK role=$ROLE_NAME:$ROLE_RANK"
echo "run=$TORCHELASTIC_RUN_ID addr=$MASTER_ADDR port=${MASTER_PORT:+set} try=$TORCHELASTIC_RESTART_COUNT args=[$*]"
echo "to stderr of $RANK" >&2
"""
ARGUMENTS = "import os, sys\nprint('sees', sys.argv[1:], os.environ['RANK'], os.environ['LOCAL_RANK'], flush=True)\n"


def program(ftrun: Ftrun, text: str, name: str = "probe.sh") -> Path:
    path = ftrun.script(text, name)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_bash_program_with_two_ranks(ftrun: Ftrun) -> None:
    path = program(ftrun, PROBE)
    run = ftrun.start(
        "--no_python",
        "--nproc_per_node",
        2,
        "--role",
        "shell",
        "--rdzv-id",
        "job/1",
        path,
        "--",
        "--x",
        "d${local_rank}",
    )
    assert run.wait() == 0, run.stderr
    for rank in (0, 1):
        assert f"[rank {rank}] rank={rank}/2 local={rank}/2 group=0 role=shell:{rank}\n" in run.stdout
        line = f"[rank {rank}] run=job/1 addr=127.0.0.1 port=set try=0 args=[--x d{rank}]\n"
        assert line in run.stdout
        assert f"to stderr of {rank}" in run.stderr
    assert "spare" not in run.stderr


@pytest.mark.parametrize("start", ["forkserver", "exec"])
def test_exit_code_of_a_program(ftrun: Ftrun, start: str) -> None:
    path = program(ftrun, "#!/bin/sh\nif [ $RANK = 1 ]; then exit 9; fi\nexec sleep 60\n")
    run = ftrun.start("--no-python", "--nproc-per-node=2", f"--worker-start={start}", path)
    assert run.wait() == 1
    assert "rank 1 failed: exit 9" in run.stderr


def test_a_program_gets_a_second_chance_and_dies_of_a_closed_pipe(ftrun: Ftrun) -> None:
    # `yes` ends only by SIGPIPE, which Python ignores and would hand down
    path = program(
        ftrun,
        "#!/bin/bash\nyes | head -n 1\necho try $TORCHELASTIC_RESTART_COUNT\n[ $TORCHELASTIC_RESTART_COUNT = 1 ]\n",
    )
    run = ftrun.start("--no-python", "--max-restarts=1", path)
    assert run.wait() == 0, run.stderr
    assert "try 0" in run.stdout and "try 1" in run.stdout


def test_killed_program_and_a_silent_one(ftrun: Ftrun) -> None:
    """A program beats no heart, and is not taken for frozen."""
    path = program(
        ftrun,
        f"#!/bin/bash\necho $$ > {ftrun.base}/pid$RANK.new\nmv {ftrun.base}/pid$RANK.new {ftrun.base}/pid$RANK\nread\nsleep 60\n",
    )
    run = ftrun.start("--no-python", "--nproc-per-node=2", "--heartbeat-timeout=0.2", path)
    pids = [int(wait_for(lambda r=r: _text(ftrun.base / f"pid{r}"), "a pid")) for r in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    assert run.wait() == 1
    assert "rank 1 failed: SIGKILL" in run.stderr and "frozen" not in run.stderr


def test_signals_reach_a_program(ftrun: Ftrun) -> None:
    path = program(
        ftrun, "#!/bin/bash\ntrap 'echo caught TERM; exit 0' TERM\necho up\nwhile true; do sleep 0.05; done\n"
    )
    run = ftrun.start("--no-python", "--nproc-per-node=2", path)
    run.wait_output("up", 2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert run.stdout.count("caught TERM") == 2


def test_programs_do_not_outlive_the_launcher(ftrun: Ftrun) -> None:
    run = ftrun.start("--no-python", "--nproc-per-node=2", program(ftrun, "#!/bin/bash\necho up\nexec sleep 60\n"))
    run.wait_output("up", 2)
    run.process.kill()
    run.process.wait()
    wait_for(lambda: not processes_of(ftrun.runs_root), "the end of every process")


def test_program_that_cannot_be_run(ftrun: Ftrun) -> None:
    run = ftrun.start("--no-python", program(ftrun, "echo no first line\n"))
    assert run.wait() == 1
    assert "cannot be run: Exec format error; a script needs a first line such as #!/bin/sh" in run.stderr
    run = ftrun.start("--no-python", program(ftrun, "#!/no/such/shell\n", "other"))
    assert run.wait() == 1
    assert "or the interpreter that its first line names does not exist" in run.stderr


def test_script_arguments_with_the_rank(ftrun: Ftrun) -> None:
    script = ftrun.script(ARGUMENTS)
    run = ftrun.start("--nproc-per-node=2", "--spares=0", "--run-path", script, "a${local_rank}b", "${other}", "$$")
    assert run.wait() == 0, run.stderr
    for rank in (0, 1):
        assert f"sees ['a{rank}b', '${{other}}', '$$'] {rank} {rank}" in run.stdout


def test_a_spare_parks_before_its_arguments_need_a_rank(ftrun: Ftrun) -> None:
    go = ftrun.base / "go"
    script = ftrun.script(
        f"import os, sys, time\nprint('sees', sys.argv[1:], flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    )
    run = ftrun.start("--nproc-per-node=2", "--spares=1", script, "${local_rank}")
    run.wait_output("sees", 2)
    wait_for(lambda: run.pids("ftrun spare"), "the spare")
    wait_for(lambda: '"Parked"' in (run.dir / "journal.jsonl").read_text(), "the spare parks")
    go.touch()
    assert run.wait() == 0, run.stderr
    assert sorted(line for line in run.stdout.splitlines() if "sees" in line) == [
        "[rank 0] sees ['0']",
        "[rank 1] sees ['1']",
    ]


def test_module_with_arguments(ftrun: Ftrun) -> None:
    ftrun.script(ARGUMENTS, "thing.py")
    run = ftrun.start("--spares=0", "-m", "thing", "--", "-m", "--nnodes")
    assert run.wait() == 0, run.stderr
    assert "sees ['-m', '--nnodes'] 0 0" in run.stdout


def test_virtual_local_rank(ftrun: Ftrun) -> None:
    script = ftrun.script("import os\nprint(*map(os.environ.get, ('RANK', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES')))\n")
    run = ftrun.start("--nproc-per-node=2", "--spares=0", "--virtual-local-rank", script, CUDA_VISIBLE_DEVICES="5,7")
    assert run.wait() == 0, run.stderr
    assert "[rank 0] 0 0 5\n" in run.stdout and "[rank 1] 1 0 7\n" in run.stdout


def test_one_rdzv_id_for_two_runs_at_once(ftrun: Ftrun) -> None:
    """Tutorials give everybody the same one."""
    go = ftrun.base / "go"
    script = ftrun.script(
        f"import os, time\nprint('up', os.environ['TORCHELASTIC_RUN_ID'], flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    )
    line = ("--spares=0", "--rdzv-id=100", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", script)
    first = ftrun.start(*line)
    first.wait_output("up 100")
    second = ftrun.start(*line)
    second.wait_output("up 100")
    go.touch()
    assert first.wait() == 0 and second.wait() == 0
    assert "run 100," in first.stderr and "run 100-2," in second.stderr


def test_a_script_called_like_a_command(ftrun: Ftrun) -> None:
    ftrun.script("print('my own status')\n", "status")
    run = ftrun.start("--spares=0", "./status")
    assert run.wait() == 0 and "[rank 0] my own status" in run.stdout


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


# the variable has to be there before the interpreter begins, as LD_PRELOAD or a hash seed has
STARTS_AGAIN = """
import os, sys, time
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv])
rank = os.environ["RANK"]
print("again, rank", rank, flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit(3 * (rank == sys.argv[2]))
"""


@pytest.mark.parametrize("start", ["forkserver", pytest.param("exec", marks=pytest.mark.slow)])
def test_a_worker_that_starts_itself_again_is_judged_by_its_end(ftrun: Ftrun, start: str) -> None:
    """It gives up its lock and its beat, and lives: that is no death. A spare that does so is of no use, and no failure."""
    go = ftrun.base / "go"
    run = ftrun.start(
        "--nproc-per-node=2", f"--worker-start={start}", "--heartbeat-timeout=0.2", ftrun.script(STARTS_AGAIN), go, "1"
    )
    run.wait_output("again, rank", 2)
    journal = run.dir / "journal.jsonl"
    wait_for(lambda: "spare-unneeded" in journal.read_text(), "the spare known to be another program")
    assert journal.read_text().count('"note": "exec"') == 3
    assert '"Died"' not in journal.read_text()
    go.touch()
    assert run.wait() == 1
    assert "rank 1 failed: exit 3" in run.stderr
    assert "started another program in place of itself (exec)" in run.stderr
    assert "spare" not in run.stderr.split("started another", 1)[1], run.stderr


@pytest.mark.slow
def test_a_worker_that_started_itself_again_may_run_for_long(ftrun: Ftrun) -> None:
    go = ftrun.base / "go"
    run = ftrun.start("--nproc-per-node=2", ftrun.script(STARTS_AGAIN), go, "none")
    run.wait_output("again, rank", 2)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(13.0)  # longer than the launcher waits for an exit code
    go.touch()
    assert run.wait() == 0, run.stderr
