"""Real runs of plain scripts: environment, output, exit codes, restarts."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Ftrun, wait_for

ENVIRONMENT = """
import json, os, sys
print(json.dumps({"env": dict(os.environ), "argv": sys.argv, "path0": sys.path[0], "name": __name__}))
"""


def test_workers_see_what_torchrun_gives(ftrun: Ftrun) -> None:
    script = ftrun.script(ENVIRONMENT)
    run = ftrun.start("--nproc_per_node=4", "--run-id", "env", script, "--lr", "0.1", "--spares")
    assert run.wait() == 0, run.stderr
    seen = {}
    for line in run.stdout.splitlines():
        prefix, _, rest = line.partition("] ")
        raw = json.loads(rest)
        assert prefix == f"[rank {raw['env']['RANK']}"
        seen[int(raw["env"]["RANK"])] = raw
    assert sorted(seen) == [0, 1, 2, 3]
    for rank, raw in seen.items():
        env = raw["env"]
        assert env["LOCAL_RANK"] == env["ROLE_RANK"] == str(rank)
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == env["ROLE_WORLD_SIZE"] == "4"
        assert env["GROUP_RANK"] == "0" and env["GROUP_WORLD_SIZE"] == "1"
        assert env["MASTER_ADDR"] == "127.0.0.1" and int(env["MASTER_PORT"]) > 0
        assert env["TORCHELASTIC_RUN_ID"] == "env" and env["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert env["OMP_NUM_THREADS"] == "1"
        assert raw["argv"] == [str(script), "--lr", "0.1", "--spares"]
        assert raw["path0"] == str(script.parent) and raw["name"] == "__main__"
    assert run.stderr.count("OMP_NUM_THREADS") == 1
    assert run.stderr.startswith("ftrun: run env, 4 workers + 1 spare, ")
    assert not list(ftrun.runs_root.glob("[!.]*")), "the run directory stays"


def test_log_files_and_journal_are_kept(ftrun: Ftrun) -> None:
    script = ftrun.script("import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)\n")
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, "--run-id", "kept", script)
    assert run.wait() == 0, run.stderr
    folder = ftrun.base / "logs" / "kept"
    for rank in (0, 1):
        assert (folder / "attempt_0" / str(rank) / "stdout.log").read_text() == f"out {rank}\n"
        assert (folder / "attempt_0" / str(rank) / "stderr.log").read_text() == "err\n"
    journal = run.journal()
    assert journal[0]["config"]["nproc"] == 2
    assert any(line.get("event", {}).get("kind") == "Finished" for line in journal)
    assert journal[-1]["note"] == "end"


PRIVATE = """
import os, time, torch, torch.distributed as dist, ftrun
os.umask(0)
dist.init_process_group("ftrun")
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=opt)
for step in job.steps(2):
    with step:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        job.log(loss=loss)
        opt.step()
while not os.path.exists(GO):
    time.sleep(0.01)
raise ValueError("the end")
"""


def test_files_of_a_run_are_for_its_owner_alone(ftrun: Ftrun) -> None:
    """Also where the umask would let others read them, and whoever writes them: launcher, worker, or a worker that fails."""
    plan = ftrun.script("[[fault]]\nkind = 'kill'\nrank = 0\nstep = 1\n", "plan.toml")
    script = ftrun.script(PRIVATE.replace("GO", repr(str(ftrun.base / "go"))))
    before = os.umask(0)
    try:
        run = ftrun.start("--nproc-per-node", 2, "--spares", 1, "--fault-plan", plan, script, OMP_NUM_THREADS="1")
        wait_for(lambda: list((ftrun.base / "logs").glob("*/attempt_0/metrics.jsonl")), "a logged value")
        wait_for(lambda: (run.dir / "world-2.json").exists(), "the replacement")
    finally:
        os.umask(before)
    found = _modes(run.dir)
    (ftrun.base / "go").touch()
    assert run.wait() == 1, run.stderr
    assert {"board", "journal.jsonl", "run.json", "world-2.json", "fault-plan.toml"} <= found.keys()
    kept = _modes(ftrun.base / "logs")
    names = {Path(name).name for name in kept}
    assert {"journal.jsonl", "services.log", "error.json", "metrics.jsonl", "stdout.log", "attempt_0"} <= names
    for mode in (found, kept):
        assert not {name: oct(bits) for name, bits in mode.items() if bits & 0o077}


def _modes(folder: Path) -> dict[str, int]:
    """Of the folder and all that is in it, files and folders (no sockets: whoever reaches one is asked who they are)."""
    every = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in every
        if path.is_file() or path.is_dir()
    }


@pytest.mark.parametrize("limit", [8, 32, 36])
def test_too_few_descriptors_are_one_sentence(ftrun: Ftrun, limit: int) -> None:
    script = ftrun.script("")
    command = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *ftrun.command("--nproc-per-node", 1, script)]
    done = subprocess.run(command, cwd=ftrun.base, env=ftrun.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 69 and not done.stdout
    wanted = f"ftrun: error: too few descriptors for 1 worker and 1 spare (the limit is {limit} open files): run `ulimit -n 1024`"
    assert done.stderr == f"{wanted} and start again [ftrun explain F201]\n"


def test_descriptors_that_run_out_end_the_run_with_one_sentence(ftrun: Ftrun) -> None:
    script = ftrun.script("import time\ntime.sleep(60)\n")
    code = (
        "import sys; sys.path.pop(0)\nfrom ftrun.host.run import launcher\nlauncher._OWN_DESCRIPTORS = 0\n"
        "from ftrun.cli.main import main; main()"
    )
    argv = ["--nproc-per-node", "2", str(script)]
    command = ["sh", "-c", 'ulimit -n 26; exec "$@"', "sh", sys.executable, "-c", code, *argv]
    done = subprocess.run(command, cwd=ftrun.base, env=ftrun.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 69 and "Traceback" not in done.stderr, done.stderr
    assert "too few descriptors for 2 workers and 1 spare (Too many open files): run `ulimit -n 1024`" in done.stderr
    assert not list(ftrun.runs_root.glob("[!.]*")), "the run directory stays"


def test_first_failure_decides_the_exit_code(ftrun: Ftrun) -> None:
    script = ftrun.script("import os, sys, time\nif os.environ['RANK'] == '2': sys.exit(7)\ntime.sleep(60)\n")
    run = ftrun.start("--nproc-per-node", 4, "--spares", 0, script)
    assert run.wait() == 1
    assert "rank 2 failed: exit 7" in run.stderr


def test_exception_is_shown_with_its_traceback(ftrun: Ftrun) -> None:
    script = ftrun.script(
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('no such luck')\ntime.sleep(60)\n"
    )
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, script)
    assert run.wait() == 1
    assert "[rank 1] ValueError: no such luck" in run.stderr
    assert f"rank 1 failed: ValueError at {script}:2" in run.stderr


def test_restart_gives_a_second_chance(ftrun: Ftrun) -> None:
    script = ftrun.script(
        "import os, sys\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('attempt', attempt, flush=True)\n"
        "if attempt == 0 and os.environ['RANK'] == '0': sys.exit(3)\n"
        "import time\n"
        "if attempt == 0: time.sleep(60)\n"
    )
    run = ftrun.start("--nproc-per-node", 3, "--spares", 0, "--max-restarts", 1, script)
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("attempt 1") == 3
    assert "rank 0 failed (exit 3); all workers start again" in run.stderr
    assert "not known (the script was started anew" in run.stderr


def test_restarts_are_counted(ftrun: Ftrun) -> None:
    script = ftrun.script("import os, sys\nprint('try', flush=True)\nsys.exit(5)\n")
    run = ftrun.start("--nproc-per-node", 1, "--spares", 0, "--max-restarts", 1, script)
    assert run.wait() == 1
    assert run.stdout.count("try") == 2


def test_module_and_worker_start_exec(ftrun: Ftrun) -> None:
    ftrun.script("import sys\nprint('module', __name__, sys.argv[1:])\n", "thing.py")
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, "--worker-start", "exec", "-m", "thing", "--x")
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("module __main__ ['--x']") == 2


def test_a_script_of_the_user_does_not_shadow_the_library(ftrun: Ftrun) -> None:
    ftrun.script("raise RuntimeError('imported by mistake')\n", "random.py")
    (ftrun.base / "src").mkdir()
    script = ftrun.script("print('fine')\n", "src/train.py")
    run = ftrun.start("--spares", 0, script)
    assert run.wait() == 0, run.stderr
    assert "[rank 0] fine" in run.stdout


def test_lines_stay_whole(ftrun: Ftrun) -> None:
    script = ftrun.script(
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "sys.stdout.write(rank * 1_000_000)\n"
        "sys.stdout.flush()\n"
        "for _ in range(300): print('line of', rank, 'x' * 200)\n"
    )
    run = ftrun.start("--nproc-per-node", 3, "--spares", 0, script)
    assert run.wait() == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 3 * 300
    for rank in "012":
        assert f"[rank {rank}] {rank * 1_000_000}line of {rank} {'x' * 200}" in lines
        assert lines.count(f"[rank {rank}] line of {rank} {'x' * 200}") == 299


def test_unfinished_last_line_is_shown(ftrun: Ftrun) -> None:
    run = ftrun.start("--spares", 0, ftrun.script("import sys\nsys.stdout.write('no newline')\n"))
    assert run.wait() == 0
    assert run.stdout == "[rank 0] no newline\n"


def test_reader_that_leaves_does_not_end_the_run(ftrun: Ftrun) -> None:
    done = ftrun.base / "done"
    script = ftrun.script(
        "import os, sys\n"
        "for i in range(20000): print('line', i)\n"
        f"open({str(done)!r} + os.environ['RANK'], 'w').close()\n"
    )
    command = ftrun.command("--log-dir", ftrun.base / "logs", "--nproc-per-node", 2, "--spares", 0, script)
    process = subprocess.Popen(
        command, cwd=ftrun.base, env=ftrun.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("[rank ")
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 0, errors
    assert errors.count("stdout is gone") == 1
    assert done.with_name("done0").exists() and done.with_name("done1").exists()


def test_full_disk_is_said_once(ftrun: Ftrun) -> None:
    # the first attempt prepares the disk of the second
    script = ftrun.script(
        "import os, pathlib, sys, time\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    if os.environ['RANK'] == '1': time.sleep(60)\n"
        "    for rank in '01':\n"
        "        folder = pathlib.Path('logs/full/attempt_1', rank)\n"
        "        folder.mkdir(parents=True)\n"
        "        (folder / 'stdout.log').symlink_to('/dev/full')\n"
        "    sys.exit(3)\n"
        "for i in range(1000): print('line', i)\n"
    )
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, "--max-restarts", 1, "--run-id", "full", script)
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("line 999\n") == 2
    assert run.stderr.count("not saved any more") == 1


def test_two_runs_at_once_and_a_name_in_use(ftrun: Ftrun) -> None:
    go = ftrun.base / "go"
    script = ftrun.script(
        f"import os, time\nprint('up', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    )
    first = ftrun.start("--nproc-per-node", 2, "--spares", 0, "--run-id", "one", script)
    second = ftrun.start("--nproc-per-node", 2, "--spares", 0, "--run-id", "two", script)
    first.wait_output("up", 2)
    second.wait_output("up", 2)
    taken = ftrun.call("--run-id", "one", script)
    assert taken.returncode == 2
    assert f"run id one is in use by process {first.process.pid}" in taken.stderr
    rows = json.loads(ftrun.call("runs", "--json").stdout)
    assert {row["run"]: row["pid"] for row in rows} == {"one": first.process.pid, "two": second.process.pid}
    refused = ftrun.call("stop", "--yes")
    assert refused.returncode == 2 and "2 runs are live, so say which: ftrun stop RUN (" in refused.stderr
    refused = ftrun.call("stop", "one")
    assert refused.returncode == 2 and "end run one: " in refused.stderr and "add --yes" in refused.stderr
    assert ftrun.call("stop", "one", "--yes").returncode == 0
    assert first.wait() == 128 + 15
    (ftrun.base / "elsewhere").mkdir()
    for command in (["stop"], ["drain", "--rank", "0"], ["inject-fault", "kill"]):
        refused = ftrun.call(*command, "--yes", folder=ftrun.base / "elsewhere")
        assert refused.returncode == 2 and "the live run was not started in this folder" in refused.stderr
        assert f"ftrun {command[0]}" in refused.stderr and f"(two: {script} in {ftrun.base})" in refused.stderr
    assert ftrun.call("inject-fault", "kill", "two", "--rank", "0").returncode == 2, "nobody is there to be asked"
    go.touch()
    assert second.wait() == 0
    assert wait_for(lambda: not list(ftrun.runs_root.glob("[!.]*")), "empty runs folder")
