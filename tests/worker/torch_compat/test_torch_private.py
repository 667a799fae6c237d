"""The private names that ftrun uses: each is there and behaves in this torch, and what is missing is named."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ftrun.worker
from tests.conftest import Ftrun, Run
from tests.lint import private_names
from tests.worker.torch_compat import private_probes

ROOT = Path(__file__).resolve().parents[3]
NAMES = private_probes.NAMES
GOOD = ("there", "not in this torch yet", "not needed on this Python")
# before the script: what another torch might lack, or might do otherwise
WITHOUT = "import torch.distributed as d; del d.Reducer._reset_state"
WITHOUT_FSDP = "from torch.distributed.fsdp._fully_shard import _fsdp_state as f; del f.FSDPState._reset_iter_state"  # as torch 2.12
OTHERWISE = "import torch.distributed as d; d.Reducer._rebuild_buckets = lambda self: False"
UNTRIED = 'import torch; torch.__version__ = "2.99.0"'

SCRIPT = """
import os, torch, torch.distributed as dist, ftrun
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
dist.init_process_group("ftrun")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
PROTECTED = """
job = ftrun.protect(model=model, optimizer=optimizer)
for step in job.steps(4):
    with step:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained", flush=True)
"""
DIES_ONCE = """
    if dist.get_rank() == 0 and not os.path.exists(__file__ + ".died"):
        open(__file__ + ".died", "w").close()
        os.kill(os.getpid(), 9)
"""
PLAIN = """
for _ in range(4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)
"""


def start(ftrun: Ftrun, text: str, *options: object) -> Run:
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, *options, ftrun.script(text))
    run.wait()
    return run


def asked(before: str = "") -> tuple[int, dict[str, dict[str, Any]]]:
    """What `python -m tests.worker.torch_compat.private_probes --json` says in an interpreter that did `before` first."""
    program = f"{before or 'pass'}; import sys, runpy; sys.argv[1:] = ['--json']; "
    program += "runpy.run_module('tests.worker.torch_compat.private_probes', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout, done.stderr
    return done.returncode, {entry["name"]: entry for entry in json.loads(done.stdout)["names"]}


def test_every_name_is_there_and_behaves() -> None:
    code, answers = asked()
    assert set(answers) == {entry.name for entry in NAMES}
    assert {n: a["state"] for n, a in answers.items() if a["state"] not in GOOD} == {}
    assert code == 0


@pytest.mark.slow
def test_a_missing_name_and_one_that_behaves_otherwise_are_told_apart() -> None:
    code, answers = asked(WITHOUT)
    gone = answers["torch.distributed.Reducer._reset_state"]
    assert code == 1 and (gone["state"], gone["detail"]) == ("missing", "_reset_state")
    code, answers = asked(OTHERWISE)
    assert code == 1 and answers["torch.distributed.Reducer._rebuild_buckets"]["state"] == "behaves differently"
    assert answers["torch.Tensor._version"]["state"] == "there"


def test_the_list_is_printed_as_text() -> None:
    command = [sys.executable, "-m", "tests.worker.torch_compat.private_probes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    states = "|".join(GOOD)
    for entry in NAMES:
        assert re.search(rf"^({states}) +{re.escape(entry.needs)} +{re.escape(entry.name)}$", done.stdout, re.M)
        assert entry.why in done.stdout and entry.without in done.stdout


def test_doctor_says_what_is_missing_and_what_that_costs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "ftrun", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    found = findings["private names"]
    assert done.returncode == 1 and found["state"] == "broken"
    assert "Reducer._reset_state is missing" in found["text"] and "redone step fails" in found["text"]


@pytest.mark.slow
def test_doctor_only_warns_of_what_sharded_models_need(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_FSDP)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "ftrun", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}["private names"]
    assert found["state"] == "warning" and "_reset_iter_state is missing (needed for protect of sharded models)" in found["text"]


def test_private_methods_of_torchs_that_ours_override_are_declared() -> None:
    declared = {name for entry in NAMES for name in entry.names}
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(ftrun.worker.__path__, "ftrun.worker.")]
    seen = 0
    for kind in {
        k for m in modules for k in vars(m).values() if isinstance(k, type) and k.__module__.startswith("ftrun.")
    }:
        theirs = [base for base in kind.__mro__ if base.__module__.startswith("torch")]
        for name in vars(kind) if theirs else ():
            if re.match(r"_[a-z]", name) and any(hasattr(base, name) for base in theirs):
                seen += 1
                assert name in declared, f"{kind.__name__}.{name} overrides a private name of torch's"
    assert seen >= 7


def test_the_page_in_docs_lists_the_same_names() -> None:
    text = private_names.PAGE.read_text()
    assert text.startswith(private_names.HEAD.partition("{date}")[0]), "whoever writes the page anew would lose what it says"
    rows = re.findall(r"^\| `([^`]+)`", text, re.M)
    assert rows == [entry.name for entry in NAMES]


def test_protect_names_what_is_missing_and_a_script_without_it_runs(ftrun: Ftrun) -> None:
    run = start(ftrun, WITHOUT + SCRIPT + PROTECTED)
    assert run.wait() == 2 and "trained" not in run.stdout
    told = re.findall(
        r"lacks torch\.distributed\.Reducer\._reset_state, which ftrun needs to make DDP's reducer forget", run.stderr
    )
    assert told and "use torch 2.12 to 2.15, or run the script without protect()" in run.stderr, run.stderr
    assert "AttributeError" not in run.stderr
    run = start(ftrun, WITHOUT + SCRIPT + PLAIN)
    assert run.wait() == 0 and run.stdout.count("trained") == 2, run.stderr


def test_a_sharded_model_is_refused_by_name_and_ddp_is_not(ftrun: Ftrun) -> None:
    ours = SCRIPT.replace("DDP(torch.nn.Linear(4, 1))", "fully_shard(torch.nn.Linear(4, 1))")
    run = start(ftrun, f"{WITHOUT_FSDP}; from torch.distributed.fsdp import fully_shard{ours}{PROTECTED}", "--max-restarts", 2)
    assert run.wait() == 2 and "trained" not in run.stdout
    assert "_reset_iter_state, which ftrun needs" in run.stderr and "use torch 2.13 to 2.15" in run.stderr, run.stderr
    run = start(ftrun, WITHOUT_FSDP + SCRIPT + PROTECTED)
    assert run.wait() == 0 and run.stdout.count("trained") == 2, run.stderr


def test_a_group_names_what_it_needs_and_is_missing(ftrun: Ftrun) -> None:
    run = start(ftrun, "import torch.distributed as d; del d.ProcessGroup._register_backend" + SCRIPT + PROTECTED)
    assert run.wait() == 2, run.stderr
    assert (
        "lacks torch.distributed.ProcessGroup._register_backend" in run.stderr
        and 'without init_process_group("ftrun")' in run.stderr
    )


def test_what_a_plain_model_does_not_need_may_be_missing(ftrun: Ftrun) -> None:
    run = start(ftrun, WITHOUT + SCRIPT.replace("DDP(torch.nn.Linear(4, 1))", "torch.nn.Linear(4, 1)") + PROTECTED)
    assert run.wait() == 0 and run.stdout.count("trained") == 2, run.stderr


def test_a_newer_torch_is_warned_of_once_a_run(ftrun: Ftrun) -> None:
    run = start(ftrun, UNTRIED + SCRIPT + PROTECTED.replace("    with step:\n", DIES_ONCE + "    with step:\n"))
    assert run.wait() == 0 and run.stdout.count("trained") == 2 and "SIGKILL" in run.stderr, run.stderr
    assert run.stderr.count("torch 2.99.0 is newer than what ftrun was tried with (torch 2.12 to 2.15)") == 1, (
        run.stderr
    )
    assert "is newer" not in start(ftrun, SCRIPT + PROTECTED).stderr
