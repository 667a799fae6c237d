"""Mistakes on the command line: one clear sentence, the right exit code, nothing started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import Ftrun


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing.py"], "script missing.py does not exist"),
        (["folder"], "folder is a directory, not a script"),
        (
            ["--nproc-per-node", "many", "train.py"],
            "--nproc-per-node must be a number, auto, cpu, gpu, gpu:0,1 or xpu, not 'many'",
        ),
        (["--nproc_per_node", "0", "train.py"], "--nproc-per-node must be between 1 and"),
        (["--spares", "-1", "train.py"], "--spares must not be negative"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts must not be negative"),
        (["--nprocs-per-node", "2", "train.py"], "--nproc-per-node"),
        (["--spares", "two", "train.py"], "--spares"),
        (["--run-id", "a/b", "train.py"], "run id 'a/b' must be"),
        (["--run-id", "..", "train.py"], "run id '..' must be"),
        (["--nnodes", "2", "train.py"], "--nnodes 2 needs --node-rank on each node"),
        (["--worker-start", "magic", "train.py"], "--worker-start must be forkserver or exec"),
        (["--stop-timeout", "0", "train.py"], "--stop-timeout must be a number of seconds above 0"),
        (["--hang-timeout", "soon", "train.py"], "--hang-timeout must be auto or a number"),
        (["--nproc-per-node", "2"], "there is no script: say which"),
    ],
)
def test_mistake(ftrun: Ftrun, args: list[str], message: str) -> None:
    ftrun.script("")
    (ftrun.base / "folder").mkdir()
    result = ftrun.call(*args)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.startswith("ftrun: error: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_bad_plan_is_a_configuration_error(ftrun: Ftrun) -> None:
    plan = ftrun.script("[[fault]]\nkind = 'kill'\nrank = 0\nwhere = 'here'\n", "plan.toml")
    result = ftrun.call("--fault-plan", plan, ftrun.script(""))
    assert result.returncode == 78
    assert f"{plan}:4" in result.stderr


def test_a_runs_folder_with_no_room_is_one_sentence(ftrun: Ftrun) -> None:
    command = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *ftrun.command(ftrun.script(""))]  # every write fails
    result = subprocess.run(command, cwd=ftrun.base, env=ftrun.env, capture_output=True, text=True, timeout=30)
    assert result.returncode == 69
    assert result.stderr.startswith(f"ftrun: error: cannot write to {ftrun.runs_root}: "), result.stderr
    assert result.stderr.count("\n") == 1 and not list(ftrun.runs_root.iterdir())


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [("/proc/runs", 69, "can be made at"), ("file/runs", 69, "can be made at"), ("file", 2, "is not a directory")],
)
def test_a_runs_folder_that_cannot_be_is_one_sentence(ftrun: Ftrun, where: str, code: int, said: str) -> None:
    (ftrun.base / "file").touch()
    root = str(ftrun.base / where)
    for command in ((ftrun.script(""),), ("runs",)):
        result = ftrun.call(*command, FTRUN_RUNS_ROOT=root)
        assert (result.returncode, result.stderr.count("\n")) == (code, 1), result.stderr
        assert said in result.stderr and root in result.stderr and "FTRUN_RUNS_ROOT" in result.stderr


def test_open_runs_folder_is_refused(ftrun: Ftrun) -> None:
    ftrun.runs_root.chmod(0o755)
    result = ftrun.call(ftrun.script(""))
    assert result.returncode == 2
    assert f"chmod 700 {ftrun.runs_root}" in result.stderr


def test_foreign_folder_under_the_runs_name_is_refused(ftrun: Ftrun) -> None:
    (ftrun.runs_root / "mine").mkdir(mode=0o700)
    (ftrun.runs_root / "mine" / "precious").touch()
    result = ftrun.call("--run-id", "mine", ftrun.script(""))
    assert result.returncode == 2
    assert "is not a run directory of ftrun" in result.stderr
    assert (ftrun.runs_root / "mine" / "precious").exists()


def test_help_is_light() -> None:
    # from 0.29 on typer reads a command line with pydantic: what the smallest program imports is its own affair
    code = (
        "import sys, typer\napp = typer.Typer(rich_markup_mode=None)\napp.command()(lambda: None)\n"
        "app([], standalone_mode=False)\ntypers = {*sys.modules}\n"
        "from ftrun.cli.main import execute\nassert execute(['run', '--help']) == 0\n"
        "heavy = {'torch', 'rich', 'pydantic', 'pynvml', 'asyncio', 'numpy', 'filelock', 'tomllib', 'tomli'} & set(sys.modules) - typers\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr
    assert "--nproc-per-node" in result.stdout


def test_no_arguments_show_help(ftrun: Ftrun) -> None:
    result = ftrun.call()
    assert result.returncode == 2 and "Usage: ftrun" in result.stdout
