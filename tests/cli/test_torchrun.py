"""Every option of torchrun, taken from its own parser: each spelling, its variable, its default, and what it means.

Runs against whatever torch is installed: an option that only a newer one has is not looked for in an older one.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from ftrun.cli import completion, spelling
from ftrun.cli.options import BY_NAME, OPTIONS
from ftrun.core.errors import UsageError
from ftrun.doctor.software import version_of
from tests.cli.conftest import Plan
from tests.e2e.harness import tool

TORCH = version_of(torch.__version__)[:2]
ACTIONS = [a for a in get_args_parser()._actions if a.option_strings and a.dest != "help"]
SETTINGS = [a for a in ACTIONS if a.dest != "print_completion"]  # which prints and leaves no plan to look at
FLAGS = {a.dest for a in ACTIONS if a.nargs == 0}
NO_VARIABLE = {"logs_specs", "numa_binding"}
C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=host:1")
# what ftrun has instead of "None" or of an own folder in /tmp
OTHER_DEFAULTS = {"log_dir": "ftrun-logs", "shutdown_timeout": "30"}


class Means(NamedTuple):
    """A value to try, and how to see it in our plan and in what torchrun parsed."""

    text: str
    ours: Callable[[dict[str, Any]], Any]
    theirs: Callable[[Any], Any] = lambda value: value
    more: tuple[str, ...] = ()


def setting(*path: str) -> Callable[[dict[str, Any]], Any]:
    def look(plan: dict[str, Any]) -> Any:
        value: Any = plan["settings"]
        for key in path:
            value = value[key]
        return value

    return look


def said(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda plan: plan["options"][name]["value"]


def numbers(names: str) -> list[int]:
    return [int(signal.Signals[name]) for name in names.split(",")]


MEANING = {
    "nnodes": Means(
        "2:4", lambda p: (setting("nodes", "least")(p), setting("nodes", "most")(p)), parse_min_max_nnodes, C10D
    ),
    "nproc_per_node": Means("3", setting("nproc"), int),
    "rdzv_backend": Means("c10d", setting("nodes", "backend")),
    "rdzv_endpoint": Means("host:29401", setting("nodes", "endpoint"), more=("--rdzv-backend=c10d",)),
    "rdzv_id": Means("job 7/3", setting("rdzv_id")),
    "rdzv_conf": Means(
        "timeout=900, last_call_timeout=60",
        setting("nodes", "conf"),
        lambda text: {k.strip(): v for k, v in (part.split("=") for part in text.split(","))},
    ),
    "standalone": Means("", setting("nodes", "standalone")),
    "max_restarts": Means("5", setting("max_restarts")),
    "monitor_interval": Means("0.5", said("monitor-interval"), str),
    "start_method": Means("forkserver", said("start-method")),
    "event_log_handler": Means("console", said("event-log-handler")),
    "role": Means("trainer", setting("role")),
    "module": Means("", lambda p: setting("kind")(p) == "module"),
    "no_python": Means("", lambda p: setting("kind")(p) == "program"),
    "run_path": Means("", said("run-path")),
    "log_dir": Means("some/where", setting("log_dir")),
    "redirects": Means("3", setting("output", "redirects", "default"), int),
    "tee": Means("0:3,1:2", setting("output", "tee", "by_rank"), lambda text: {"0": 3, "1": 2}),
    "log_line_prefix_template": Means(
        "${hostname}/$role_name {${rank}} $$${local_rank}$other: ",
        setting("output", "template"),
        lambda text: "{host}/{role} {{{rank}}} ${local_rank}$other: ",
    ),
    "local_ranks_filter": Means("0,2", setting("output", "filter"), lambda text: [*map(int, text.split(","))]),
    "duplicate_stdout_filters": Means("apple,pear,,peach", setting("output", "stdout_filters")),
    "duplicate_stderr_filters": Means("apple", setting("output", "stderr_filters")),
    "node_rank": Means("1", setting("nodes", "rank"), more=("--nnodes=2",)),
    "master_addr": Means("10.0.0.1", setting("nodes", "master_addr")),
    "master_port": Means("29501", setting("nodes", "master_port")),
    "local_addr": Means("10.0.0.2", setting("nodes", "local_addr")),
    "logs_specs": Means("default", said("logs-specs")),
    "numa_binding": Means("socket", setting("numa_binding")),
    "signals_to_handle": Means("SIGTERM,SIGUSR1", setting("signals"), numbers),
    "shutdown_timeout": Means("7", setting("shutdown_timeout")),
    "virtual_local_rank": Means("", setting("virtual_local_rank")),
}


def script_of(dest: str) -> tuple[str, ...]:
    return {"no_python": ("true",), "module": ("train",)}.get(dest, ("train.py",))


def test_the_table_is_complete() -> None:
    """A new torch has no option that nobody looked at."""
    known = {name for name in MEANING if BY_NAME[name.replace("_", "-")].since <= TORCH}
    assert {action.dest for action in SETTINGS} == known
    assert ("print_completion" in {action.dest for action in ACTIONS}) is (BY_NAME["print-completion"].since <= TORCH)


@pytest.mark.parametrize(
    "line", [["--print-completion=bash"], ["--print_completion", "zsh", "train.py"], ["--print=fish"]]
)
def test_print_completion(line: list[str]) -> None:
    done = subprocess.run([tool("ftrun"), *line], capture_output=True, text=True, timeout=30)
    shell = next(s for s in completion.SHELLS if s in " ".join(line))
    assert (done.returncode, done.stdout, done.stderr) == (0, completion.made_for(shell), "")


def test_print_completion_of_an_unknown_shell() -> None:
    done = subprocess.run([tool("ftrun"), "--print-completion", "tcsh"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (2, "") and "bash, zsh, fish, not for 'tcsh'" in done.stderr


@pytest.mark.parametrize("action", SETTINGS, ids=lambda action: action.dest)
def test_option(action: argparse.Action, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    means = MEANING[action.dest]
    script = script_of(action.dest)
    name = action.dest.replace("_", "-")
    for spelled in {*action.option_strings, f"--{name}"}:
        if action.dest in FLAGS:
            ways = [[spelled]]
        elif spelled.startswith("--"):
            ways = [[f"{spelled}={means.text}"], [spelled, means.text]]
        else:
            ways = [[f"{spelled}{means.text}"], [spelled, means.text]]
        for way in ways:
            wanted = getattr(get_args_parser().parse_args([*way, *script]), action.dest)
            shown = plan(*means.more, *way, script=script)
            assert means.ours(shown) == means.theirs(wanted), way
            assert shown["options"][name]["from"] == "command line"
    if action.dest not in NO_VARIABLE:
        monkeypatch.setenv(f"PET_{action.dest.upper()}", "1" if action.dest in FLAGS else means.text)
        wanted = getattr(get_args_parser().parse_args([*script]), action.dest)
        shown = plan(*(m for m in means.more if name not in m), script=script)
        assert means.ours(shown) == means.theirs(wanted)
        assert shown["options"][name]["from"] == f"PET_{action.dest.upper()}"


@pytest.mark.parametrize("action", SETTINGS, ids=lambda action: action.dest)
def test_default(action: argparse.Action, plan: Plan) -> None:
    shown = plan()["options"][action.dest.replace("_", "-")]
    assert shown["from"] == "default"
    wanted: object = OTHER_DEFAULTS.get(action.dest, get_args_parser().get_default(action.dest))
    if not isinstance(wanted, bool | None):
        wanted = ",".join(wanted) if isinstance(wanted, list) else str(wanted)
    assert shown["value"] == wanted


def test_every_abbreviation_means_what_it_means_there() -> None:
    ours = spelling.Spellings(OPTIONS)
    tried = 0
    for action in ACTIONS:
        for full in action.option_strings:
            for length in range(3, len(full)):
                short = full[:length]
                found = {a.dest for a in ACTIONS for s in a.option_strings if s.startswith(short)}
                if len(found) == 1:
                    assert ours.find(short).key == action.dest, short
                    tried += 1
    assert tried > 300


def test_an_abbreviation_of_older_torchruns_keeps_its_meaning() -> None:
    """2.14's --log-line-prefix-template made --log_ ambiguous there."""
    ours = spelling.Spellings(OPTIONS)
    assert ours.find("--log_").name == "log-dir"
    assert ours.find("--log_l").name == "log-line-prefix-template"


@pytest.mark.parametrize(
    "line",
    [
        ["train.py", "a", "--lr", "0.1"],
        ["--", "train.py", "--nnodes", "3"],
        ["train.py", "--", "--nnodes", "3"],
        ["train.py", "a", "--", "--nnodes"],
        ["--", "train.py", "--", "a"],
        ["--standalone", "train.py", "-m", "--", "-t", "3"],
        ["-r3", "--nproc_per_node", "2", "train.py", "x"],
        ["-r=1", "train.py", "--standalone"],
        ["--redirect=3", "--nnode", "1", "--max-restarts=2", "train.py"],
        ["--role", "a b", "--rdzv-id=", "train.py", ""],
    ],
    ids=" ".join,
)
def test_where_the_script_begins(line: list[str], plan: Plan) -> None:
    theirs = get_args_parser().parse_args(line)
    shown = plan(*line, script=())
    assert shown["settings"]["argv"] == [theirs.training_script, *theirs.training_script_args]
    assert shown["settings"]["role"] == theirs.role
    assert str(shown["settings"]["output"]["redirects"]["default"]) == theirs.redirects
    assert shown["settings"]["max_restarts"] == theirs.max_restarts


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("2", True), ("true", True), ("", False)])
def test_flags_from_variables(value: str, on: bool, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", value)
    assert plan()["settings"]["nodes"]["standalone"] is on
    assert plan("--standalone")["settings"]["nodes"]["standalone"] is True


def test_flags_in_one_word() -> None:
    assert spelling.spelled_out(["-mr3", "thing"]) == ["--module", "--redirects=3", "--", "thing"]
    with pytest.raises(UsageError, match="-m takes no value"):
        spelling.spelled_out(["-m=1", "thing"])
