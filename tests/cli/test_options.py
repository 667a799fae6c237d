"""What goes together and what does not: precedence, mistakes, several nodes, the dry run, names of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ftrun.cli.main import execute
from ftrun.cli.options import BY_NAME
from ftrun.core import environment
from tests.cli.conftest import Plan

Mistake = Callable[..., str]
# what stands in the environment of our processes already
INTERNAL = {"FTRUN_RUN_DIR", "FTRUN_RUNS_ROOT", "FTRUN_CELL", "FTRUN_SPEC", "FTRUN_FAULT_PLAN"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--spares-kept", "1", "train.py"], "there is no option --spares-kept; did you mean --spares?"),
        (["--nprocs_per_node=2", "train.py"], "there is no option --nprocs_per_node; did you mean --nproc-per-node?"),
        (["--qqq", "train.py"], "there is no option --qqq; all options: ftrun run --help"),
        (["-x", "train.py"], "there is no option -x"),
        (["--rdzv-e=a", "--rdzv", "a", "train.py"], "--rdzv could be --rdzv-backend, --rdzv-conf, --rdzv-endpoint or"),
        (["--max-re=1", "--st", "train.py"], "--st could be --standalone, --start-method, --start-timeout or --stop-"),
        (["--spares", "--standalone", "train.py"], "--spares needs a value (K)"),
        (["--spares"], "--spares needs a value (K)"),
        (["--spare-nodes", "1", "train.py"], "--spare-nodes is for a run on several nodes; on one node --spares keeps warm workers"),
        (
            ["--nnodes", "2", "--node-rank", "0", "--spare-nodes", "1", "train.py"],
            "--spare-nodes needs --rdzv-backend c10d, file, etcd or kubernetes",
        ),
        (["--node-loss", "ignore", "train.py"], "--node-loss must be restart or repair, not 'ignore'"),
        (["--standalone=1", "train.py"], "--standalone takes no value, and got '1'"),
        (["--spares", "-1", "train.py"], "--spares must not be negative, not -1"),
        (["--spares=1.5", "train.py"], "--spares must be a whole number, not '1.5'"),
        (["--nproc-per-node=some", "train.py"], "--nproc-per-node must be a number, auto, cpu, gpu, gpu:0,1 or xpu, not 'some'"),
        (["--no-python", "-m", "train.py"], "--no-python and --module do not go together"),
        (["--no-python", "no-such-program"], "program no-such-program does not exist on the PATH"),
        (
            ["--no-python", "train.py"],
            "program train.py is not on the PATH; a program in this folder is named ./train.py",
        ),
        (["--no-python", "./train.py"], "program ./train.py may not be executed; run: chmod +x ./train.py"),
        (["--redirects=4", "train.py"], "--redirects must be 0 (none), 1 (stdout)"),
        (["-t", "0:x", "train.py"], "--tee must be 0 (none)"),
        (["--local-ranks-filter=a", "train.py"], "--local-ranks-filter must be local ranks"),
        (["--signals-to-handle=TERM,NOPE", "train.py"], "--signals-to-handle: 'NOPE' is no signal"),
        (["--signals-to-handle=KILL", "train.py"], "no program can handle SIGKILL"),
        (["--forward-signals=SIGTERM", "train.py"], "SIGTERM cannot end the run and be only forwarded"),
        (["--shutdown-timeout=-1", "train.py"], "--shutdown-timeout must be a number of seconds, 0 or more"),
        (["--start-method=thread", "train.py"], "--start-method must be spawn, fork or forkserver, not 'thread'"),
        (["--logs-specs=mine", "train.py"], "--logs-specs 'mine' is not known"),
        (["--event-log-handler=mine", "train.py"], "--event-log-handler must be null, console or dynamic_rendezvous"),
        (["--numa-binding=far", "train.py"], "--numa-binding must be node, socket, exclusive or core-complex"),
        (["--on-exhausted=shrink", "train.py"], "--on-exhausted shrink is not yet supported"),
        (["--on-exhausted=cry", "train.py"], "--on-exhausted must be fail, shrink or wait"),
        (["--log-format=xml", "train.py"], "--log-format must be text or json"),
        (
            ["--log-prefix={pid}", "train.py"],
            "--log-prefix: {pid} in '{pid}' is unknown; known are {role}, {local_rank}",
        ),
        (["--json", "models"], "script models does not exist [ftrun explain F105]\n"),
        (["--nnodes=0", "train.py"], "--nnodes must be at least 1"),
        (["--nnodes=4:2", "train.py"], "--nnodes must be at least 1, and MIN not above MAX"),
        (["--nnodes=x", "train.py"], "--nnodes must be a number of nodes, or a range as in 1:4, not 'x'"),
        (["--nnodes=1:2:3", "train.py"], "--nnodes must be a number of nodes"),
        (["--rdzv-backend=zeus", "train.py"], "--rdzv-backend zeus is not supported, use c10d, file, etcd or kubernetes"),
        (["--nnodes=2", "--rdzv-backend=etcd", "train.py"], "--rdzv-backend etcd needs --rdzv-endpoint HOST[:PORT]"),
        (["--nnodes=2", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=a:b", "train.py"], "'a:b' must be HOST or HOST:PORT"),
        (["--rdzv-conf=timeout", "train.py"], "--rdzv-conf must be key=value,key=value, and 'timeout' in it is not"),
        (["--rdzv-endpoint=host:99999", "train.py"], "--rdzv-endpoint: the port must be a port between 0 and 65535"),
        (["--rdzv-endpoint=a:b:c", "train.py"], "--rdzv-endpoint"),
        (["--master-port=x", "train.py"], "--master-port must be a port between 0 and 65535, not 'x'"),
        (["--nnodes=2", "train.py"], "--nnodes 2 needs --node-rank on each node (0 to 1)"),
        (["--nnodes=2", "--node-rank=2", "train.py"], "--node-rank must be below the number of nodes (2), not 2"),
        (["--nnodes=1:2", "--node-rank=0", "train.py"], "--nnodes 1:2 needs --rdzv-backend c10d, file, etcd or kubernetes"),
        (["--nnodes=2", "--rdzv-backend=file", "train.py"], "--rdzv-backend file needs --rdzv-endpoint"),
        (["--nnodes=2", "--rdzv-backend=c10d", "train.py"], "--rdzv-backend c10d needs --rdzv-endpoint HOST"),
        (["--nnodes=2", "--node-rank=0", "--rdzv-conf=tiemout=3", "train.py"], "unknown rendezvous setting tiemout"),
        (["--nnodes=2", "--standalone", "train.py"], "--standalone runs on this node alone, and --nnodes asks for 2"),
        (["--standalone"], "there is no script: say which"),
        (["--run-id=.", "train.py"], "run id '.' must be"),
        (["statsu"], "script statsu does not exist; did you mean the command: ftrun status?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistake(args: list[str], message: str, mistake: Mistake) -> None:
    assert message in mistake(*args)


def test_json_needs_a_dry_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--json", "train.py"]) == 2
    assert "--json goes with --dry-run" in capsys.readouterr().err


def test_every_variable_is_free() -> None:
    variables = [option.variable for option in BY_NAME.values() if option.variable]
    assert not INTERNAL & set(variables) and len(set(variables)) == len(variables)


def test_precedence(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spares(*args: str) -> tuple[int, str]:
        shown = plan(*args)
        return shown["settings"]["spares"], shown["options"]["spares"]["from"]

    assert spares() == (1, "default")
    (folder / "pyproject.toml").write_text("[tool.ftrun]\nspares = 2\n")
    assert spares() == (2, "pyproject.toml")
    monkeypatch.setenv("FTRUN_SPARES", "3")
    assert spares() == (3, "FTRUN_SPARES")
    assert spares("--spares=4") == (4, "command line")
    assert spares("--spares=4", "--spares", "5") == (5, "command line")


def test_a_bad_variable_is_named(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "many")
    assert "--max-restarts must be a whole number, not 'many' (from PET_MAX_RESTARTS)" in mistake("train.py")


def test_variables_that_torchrun_reads_besides(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "12")
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name} {x} ${rank}]: ")
    settings = plan()["settings"]
    assert settings["shutdown_timeout"] == 12
    assert settings["output"]["template"] == "[{role} {{x}} {rank}]: "


def test_standalone_goes_first(plan: Plan) -> None:
    shown = plan("--standalone", "--rdzv-backend=c10d", "--rdzv-endpoint=host:1", "--rdzv-id=x", "--nnodes=1:3")
    settings = shown["settings"]
    nodes = settings["nodes"]
    assert (nodes["least"], nodes["most"], nodes["endpoint"], nodes["backend"]) == (1, 1, "", "c10d")
    assert settings["rdzv_id"] == "" and shown["run"] is None


def test_several_nodes(plan: Plan) -> None:
    nodes = plan("--nnodes=2", "--node-rank=1", "--master-addr=[::1]", "--master-port=1234")["settings"]["nodes"]
    assert nodes["rank"] == 1 and nodes["master_addr"] == "[::1]" and nodes["master_port"] == 1234
    nodes = plan(
        "--nnodes=1:4", "--rdzv-backend=file", "--rdzv-endpoint=/shared/a:b", "--rdzv-conf=timeout=60,store_type=x=y"
    )
    assert nodes["settings"]["nodes"]["conf"] == {"timeout": "60", "store_type": "x=y"}
    assert nodes["settings"]["nodes"]["endpoint"] == "/shared/a:b"


def test_who_names_the_run(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan()["run"] is None
    assert plan("--rdzv-id=none")["run"] is None
    assert plan("--rdzv-id=job-7")["run"] == "job-7"
    names = {plan(f"--rdzv-id={text}")["run"] for text in ("a/b", "a b", "a-b", "/", "ä" * 200)}
    assert len(names) == 5 and all(len(name) <= 100 and "/" not in name for name in names)
    shown = plan("--rdzv-id=a/b", "--run-id=mine")
    assert shown["run"] == "mine" and shown["settings"]["rdzv_id"] == "a/b"
    monkeypatch.setenv("FTRUN_RUN_ID", "from-variable")
    assert plan("--rdzv-id=a/b")["run"] == "from-variable"


def test_run_path_goes_first(plan: Plan) -> None:
    assert plan("--run-path", "--no-python", "-m")["settings"]["kind"] == "script"


def test_a_program_has_no_spare(plan: Plan) -> None:
    assert plan("--no-python", "--spares=2", script=("true",))["settings"]["spares"] == 0


def test_fault_plan_is_checked(folder: Path, mistake: Mistake) -> None:
    (folder / "plan.toml").write_text("[[fault]]\nkind = 'kill'\nrank = 5\n")
    assert "plan.toml:1: rank 5, but the run has ranks 0 to 1" in mistake(
        "--fault-plan=plan.toml", "--nproc-per-node=2", "train.py", code=78
    )


def test_dry_run_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "--dry-run",
        "--nproc=2",
        "--start-method=fork",
        "--forward-signals=usr1",
        "train.py",
        "--text",
        "two words",
    ]
    assert execute(line) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "script    train.py --text 'two words'" in printed.out
    assert "workers   2 per node, 1 spare" in printed.out
    assert "forwards  SIGUSR1" in printed.out
    assert "  nproc-per-node = 2  (command line)" in printed.out
    assert "  start-method = fork  (command line; no effect in ftrun)" in printed.out
    assert not list(folder.glob("ftrun-logs"))


def test_commands_and_scripts_of_one_name(folder: Path, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "status").touch()
    for line in (["./status"], ["--", "status"], ["--spares=0", "status"]):
        assert plan(script=tuple(line))["settings"]["argv"] == line[-1:]
    assert execute(["run", "--dry-run", "--json", "status"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["argv"] == ["status"]
    assert execute(["status", "--help"]) == 0
    assert "Show what a run does now" in capsys.readouterr().out


@pytest.mark.parametrize(("line", "code"), [(["--version"], 0), (["run", "--version"], 0), (["--help"], 0), ([], 2)])
def test_version_and_help(line: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(line) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("ftrun 0." if "--version" in line else "Usage: ftrun ")


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", "-h"]) == 0
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in BY_NAME)


def test_virtual_local_rank(plan: Plan, mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.virtual_variables(None, 3) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}
    assert environment.virtual_variables("4, GPU-ab", 1) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-ab"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    plan("--virtual-local-rank", "--nproc-per-node=2")
    assert "local rank 2 has no GPU" in mistake("--virtual-local-rank", "--nproc-per-node=3", "train.py")
