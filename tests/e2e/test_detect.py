"""Faults that are no death: each is detected as what it is, in the right rank, and the run ends on the clean run's weights."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrun.host.workers import oom_kills
from tests import cgroups
from tests.conftest import small_file_system, wait_for
from tests.e2e import harness
from tests.e2e.harness import Outcome

# FAULTS holds "kind rank step" entries; each strikes once, whoever holds the rank then
SCRIPT = """
import ctypes, hashlib, os, signal, sys, time
import torch
import torch.distributed as dist
import ftrun
from torch import nn

torch.manual_seed(1)
dist.init_process_group("ftrun")
net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.003)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
job = ftrun.protect(model=model, optimizer=optimizer)
faults = [f.split(":") for f in os.environ.get("FAULTS", "").split()]

def strikes(step, *kinds):
    for number, (kind, rank, at) in enumerate(faults):
        if kind in kinds and int(rank) == job.rank and int(at) == step.index:
            try:
                os.close(os.open(f"fired-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return kind
    return ""

for step in job.steps(int(os.environ.get("STEPS", "40"))):
    if strikes(step, "call"):
        job.call(time.sleep, 1.8)
    with step:
        time.sleep(0.02)
        if strikes(step, "exit"):
            os._exit(3)
        if strikes(step, "kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if strikes(step, "raise"):
            raise LookupError("nowhere")
        if strikes(step, "freeze"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if strikes(step, "hang"):
            while True:
                pass
        if strikes(step, "gil"):
            ctypes.PyDLL(None).sleep(600)
        if strikes(step, "cuda"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if strikes(step, "bitflip"):
            word = ctypes.c_uint32.from_address(net[0].weight.data_ptr() + 64)
            word.value ^= 1 << 20
        if strikes(step, "slow"):
            time.sleep(0.4)  # twenty times a step
        if os.environ.get("SLOW_RANK") == str(job.rank):
            time.sleep(0.06)
        model.require_backward_grad_sync = not strikes(step, "skip")
        loss = model(torch.full((4, 32), 0.1 * (step.index + job.rank))).square().mean()
        if strikes(step, "poison") or os.environ.get("POISON") == f"{job.rank}:{step.index}":
            loss = loss * float("nan")
        loss.backward()
        if strikes(step, "late-poison"):
            net[0].weight.grad[3, 5] = float("inf")
        optimizer.step()
        optimizer.zero_grad()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"rank {job.rank} weights {digest}", flush=True)
"""

LIMITS = ("--hang-floor", "1.4", "--check-every", "1", "--max-replacements", "9")


def begin(folder: Path, faults: str = "", options: tuple[str, ...] = LIMITS, **env: str) -> harness.Running:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    command = [harness.tool("ftrun"), "--nproc-per-node", "4", "--spares", "1", *options, "train.py"]
    return harness.start(folder, command, {"FAULTS": faults, **env})


def run(folder: Path, faults: str = "", options: tuple[str, ...] = LIMITS, **env: str) -> Outcome:
    return harness.finish(begin(folder, faults, options, **env), 4, 90)


def weights(outcome: Outcome) -> set[str]:
    """What the four ranks ended on."""
    assert outcome.code == 0, outcome.tail()
    found = re.findall(r"rank \d weights ([0-9a-f]{64})", outcome.output)
    assert len(found) == 4, outcome.tail()
    return set(found)


def seen(outcome: Outcome) -> list[tuple[str, int | None]]:
    """(fault, rank) of everything that was detected, in order."""
    holders: dict[int, int] = {}
    found: list[tuple[str, int | None]] = []
    for line in outcome.journal:
        event = line.get("event", {})
        if event.get("fault"):
            assert event["evidence"], event
            worker = event.get("worker")
            found.append((event["fault"], None if worker is None else holders.get(worker)))
        for action in line.get("actions", ()):
            if action.get("kind") == "Publish":
                holders = {cell: rank for rank, cell in enumerate(action["workers"])}
            elif action.get("kind") == "Spawn" and action["rank"] is not None:
                holders[action["worker"]] = action["rank"]
    return found


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The weights of a run in which long calls and slow steps are all that happens: nothing is reported of those."""
    outcome = run(tmp_path_factory.mktemp("clean"), "call:1:9 slow:2:14 slow:0:19")
    assert seen(outcome) == [], "a false alarm"
    lines = [line for line in outcome.output.splitlines() if line.startswith("ftrun:") and "protected:" not in line]
    assert "rank" not in "".join(lines)
    result = weights(outcome)
    assert len(result) == 1
    return result


def test_every_kind_in_one_run(folder: Path, clean: set[str]) -> None:
    faults = "freeze:1:6 poison:2:9 cuda:3:12 bitflip:0:15 skip:1:18 hang:2:22 gil:3:26 late-poison:0:30 exit:1:32 kill:2:34 raise:3:36"
    outcome = run(folder, faults)
    expected = [
        ("frozen", 1),
        ("nonfinite", 2),
        ("cuda", 3),
        ("corrupt", 0),
        ("collective", 1),
        ("hang", 2),
        ("gil", 3),
        ("nonfinite", 0),
        ("exit", 1),
        ("signal", 2),
        ("exception", 3),
    ]
    assert seen(outcome) == expected, outcome.tail()
    assert weights(outcome) == clean
    assert "result bit-identical to an uninterrupted run: yes" in outcome.output
    incidents = outcome.notes("incident")
    assert [i["fault"] for i in incidents] == [fault for fault, _ in expected]
    assert all(i["evidence"] for i in incidents)
    for words in (
        r"rank 1 froze in forward of step 6 \(no beat for 0\.\d+ s: the process is stopped by a signal",
        r"the gradient of module\.\S+ is not finite on rank 2 \(element \d+, its own, before the exchange\)",
        r"rank 3 died in forward of step 12 \(RuntimeError: CUDA error",
        r"rank 0 became corrupt .* differs from that of 3 of 4 ranks at the gate of step 15",
        r"rank 1 hung .*ranks 0, 2, 3 have waited in allreduce #2 of step 18 for [01]\.\d s",
        r"rank 2 hung in forward of step 22 \(no progress for [123]\.\d s: Python runs and gets nowhere; .* last seen at train\.py:\d+",
        r"rank 3 hung in forward of step 26 .*something holds the GIL",
        r"the gradient of module\.0\.weight is not finite on rank 0 \(element 101, after the exchange\)",
    ):
        assert re.search(words, outcome.output), words + "\n" + outcome.tail()
    parts = {i["fault"]: i["ms"]["detect"] for i in incidents}
    assert parts["collective"] < 3000 and parts["frozen"] < 1500


def test_the_same_poison_twice_ends_the_run(folder: Path) -> None:
    outcome = run(folder, POISON="2:5", STEPS="8")
    assert outcome.code == 1
    assert seen(outcome)[:2] == [("nonfinite", 2), ("nonfinite", 2)]
    assert "also after a retry; the run ends (--nonfinite ignore would make such updates)" in outcome.output
    name = re.search(r"to see it: ftrun events (\S+)", outcome.output)
    assert name, "an incident that came to no end cannot be drawn\n" + outcome.tail()
    told = subprocess.run(
        [harness.tool("ftrun"), "events", name[1]], cwd=folder, capture_output=True, text=True, timeout=30
    )
    assert told.returncode == 0 and "NonFiniteError" in told.stdout


def test_a_rank_that_another_one_stopped_before_it_looked_is_found_in_the_second_try(folder: Path) -> None:
    command = harness.script_command(folder, harness.SCRIPTS / "late_to_its_gate.py", [], ranks=3, spares=0)
    outcome = harness.finish(harness.start(folder, command), ranks=0)
    assert outcome.code == 1, outcome.tail()
    reasons = [e["evidence"] for e in outcome.events("Raised") if e["generation"] == 2]
    assert any("on rank 1 (element 6000, its own, before the exchange)" in reason for reason in reasons), reasons


@pytest.mark.slow
@pytest.mark.parametrize(("what", "code"), [("stop", 1), ("ignore", 0)])
def test_nonfinite_can_stop_at_once_or_be_ignored(folder: Path, what: str, code: int) -> None:
    outcome = run(folder, options=("--nonfinite", what), POISON="2:5", STEPS="8")
    assert outcome.code == code, outcome.tail()
    assert [f for f, rank in seen(outcome) if rank == 2] == (["nonfinite"] if code else [])
    assert len(outcome.actions("Publish")) == 1, "nothing was done again"


@pytest.mark.slow
def test_rarer_checks_of_the_replicas_promise_less(folder: Path) -> None:
    outcome = run(folder, "bitflip:2:5", ("--check-every", "4"), STEPS="12")
    assert seen(outcome) == [("corrupt", 2)]
    assert len(weights(outcome)) == 1, "all ranks end on the same weights"
    assert re.search(r"uninterrupted run: no \(seen at step \d+: a rank's weights were corrupt", outcome.output), outcome.tail()


SCALED = """
import os
import torch
import torch.distributed as dist
import ftrun
from torch import nn

torch.manual_seed(1)
dist.init_process_group("ftrun")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=os.environ["FUSED"] == "1")
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
job = ftrun.protect(model=model, optimizer=optimizer, scaler=scaler)
for step in job.steps(12):
    with step:
        loss = model(torch.full((4, 8), 3.0 + step.index + job.rank)).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
print("scale", scaler.get_scale(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fused", ["0", "1"])
def test_infinities_that_a_gradscaler_looks_for_are_its_own_business(folder: Path, fused: str) -> None:
    (folder / "train.py").write_text(SCALED)
    command = [harness.tool("ftrun"), "--nproc-per-node", "4", "--spares", "0", "train.py"]
    outcome = harness.finish(harness.start(folder, command, {"FUSED": fused}), 4, 60)
    assert outcome.code == 0, outcome.tail()
    assert seen(outcome) == []
    scales = [float(s) for s in re.findall(r"scale (\S+)", outcome.output)]
    assert len(scales) == 4 and scales[0] < 2.0**127, "it never saw an infinity"


@pytest.mark.slow
def test_a_gradscaler_that_is_switched_off_looks_for_nothing(folder: Path) -> None:
    script = SCALED.replace("init_scale=2.0**127", "enabled=False")
    script = script.replace(
        "scaler.scale(loss)", "scaler.scale(loss * (float('inf') if step.index == 5 and job.rank == 2 else 1))"
    )
    (folder / "train.py").write_text(script)
    command = [harness.tool("ftrun"), "--nproc-per-node", "4", "--spares", "0", "train.py"]
    outcome = harness.finish(harness.start(folder, command, {"FUSED": "0"}), 0, 60)
    assert outcome.code == 1, outcome.tail()
    assert seen(outcome)[:1] == [("nonfinite", 2)], outcome.tail()


@pytest.mark.slow
def test_a_straggler_is_reported_and_left_alone(folder: Path) -> None:
    outcome = run(folder, SLOW_RANK="3", STEPS="60")
    assert seen(outcome) == [("straggler", 3)], outcome.tail()
    assert re.search(r"ftrun: rank 3: a straggler: its own part of a step takes [2-9]\.\d times", outcome.output)
    assert len(outcome.actions("Publish")) == 1


COMPILING = """
import os
import time
import torch
import torch.distributed as dist
import ftrun
from torch import nn

def slowly(graph, inputs):
    time.sleep(2.0)
    return graph.forward

torch.manual_seed(1)
dist.init_process_group("ftrun")
net = nn.Linear(8, 8)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=optimizer)
if os.environ.get("RESET"):
    torch._dynamo.reset()
head = torch.compile(lambda y: y.square().mean(), backend=slowly)
for step in job.steps(12):
    with step:
        y = model(torch.ones(4, 8))
        if step.index == 8 and job.rank == 1:
            head(y.detach())
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("reset", ["", "1"])
def test_compilation_in_the_middle_of_a_run_is_no_hang(folder: Path, reset: str) -> None:
    (folder / "train.py").write_text(COMPILING)
    options = ("--spares", "0", "--hang-floor", "1", "--nproc-per-node", "4")
    running = harness.start(folder, [harness.tool("ftrun"), *options, "train.py"], {"RESET": reset})
    outcome = harness.finish(running, 4, 60)
    assert outcome.code == 0 and outcome.output.count("] done\n") == 4, outcome.tail()
    assert seen(outcome) == []


# ---- cgroups ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def freezer() -> Iterator[Path]:
    group = cgroups.make("freezer")
    try:
        yield group
    finally:
        (group / "freezer.state").write_text("THAWED")
        cgroups.remove(group)


def pid_of(running: harness.Running, rank: int, step: int) -> int:
    """The process of a rank, once it is at `step`."""
    from ftrun.core.shared.board import Board, F

    board = Board.open(running.run_dir() / "board")

    def there() -> int:
        cells = (board.cell(i) for i in range(8))
        return next((c[F.PID] for c in cells if c.rank == rank and c.step is not None and c.step >= step), 0)

    return int(wait_for(there, f"step {step} of rank {rank}"))


@pytest.mark.slow
def test_a_frozen_cgroup_is_found_and_its_rank_replaced(folder: Path, freezer: Path, clean: set[str]) -> None:
    running = begin(folder)
    (freezer / "cgroup.procs").write_text(str(pid_of(running, 2, 5)))
    (freezer / "freezer.state").write_text("FROZEN")
    wait_for(lambda: "takes over rank 2" in running.output, "the replacement")
    (freezer / "freezer.state").write_text("THAWED")  # a frozen process cannot die
    outcome = harness.finish(running, 4, 60)
    assert seen(outcome) == [("frozen", 2)]
    assert weights(outcome) == clean
    assert re.search(r"rank 2 froze .*its cgroup is frozen", outcome.output)


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A memory cgroup of the version that this machine has."""
    group = cgroups.make_v2("memory") or cgroups.make("memory")
    try:
        yield group
    finally:
        cgroups.remove(group)


def limit_memory(group: Path, limit: int) -> None:
    """Set what the group's processes may take, in bytes, without swap."""
    if (group / "memory.max").exists():
        (group / "memory.max").write_text(str(limit))
        with contextlib.suppress(OSError):  # a kernel without swap accounting
            (group / "memory.swap.max").write_text("0")
    else:
        (group / "memory.limit_in_bytes").write_text(str(limit))


def test_a_kill_by_the_kernel_is_told_from_any_other(folder: Path, small_memory: Path, clean: set[str]) -> None:
    running = begin(folder)
    victim = pid_of(running, 1, 4)
    # first the limit, which Linux does not set below what is in use; what the victim touches once inside is too much
    limit_memory(small_memory, 4096)
    (small_memory / "cgroup.procs").write_text(str(victim))
    wait_for(lambda: "rank 1 died" in running.output, "the kernel's kill")
    os.kill(pid_of(running, 2, 4), signal.SIGKILL)
    outcome = harness.finish(running, 4, 60)
    assert seen(outcome) == [("oom", 1), ("signal", 2)], outcome.tail()
    assert weights(outcome) == clean
    assert re.search(
        r"rank 1 died .*(the kernel says that it killed|an out-of-memory kill in its cgroup)", outcome.output
    )


HUNGRY = "import sys; sys.stdin.read(1); waste = bytearray(256 << 20); waste[::4096] = b'x' * len(waste[::4096]); sys.stdin.read()"


def test_the_cgroup_tells_it_where_the_kernel_may_not_be_asked(
    small_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom_kills, "_open_kernel", lambda: None)
    limit_memory(small_memory, 64 << 20)
    kills = oom_kills.Kills()
    enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(small_memory / "cgroup.procs")]
    victims = [
        subprocess.Popen([*enter, sys.executable, "-c", HUNGRY], stdin=subprocess.PIPE, bufsize=0) for _ in range(2)
    ]
    try:
        inside = small_memory / "cgroup.procs"
        wait_for(lambda: {str(v.pid) for v in victims} <= set(inside.read_text().split()), "processes in the cgroup")
        for victim in victims:
            kills.watch(victim.pid)
        victims[0].kill()
        victims[0].wait(10)
        assert kills.evidence(victims[0].pid) == "", "a plain SIGKILL"
        assert victims[1].stdin is not None
        victims[1].stdin.write(b"x")
        assert victims[1].wait(30) == -signal.SIGKILL
        assert str(small_memory) in kills.evidence(victims[1].pid)
    finally:
        for victim in victims:
            victim.kill()
            victim.wait()


# ---- no room ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tiny"
    with small_file_system(path, 2):
        yield path


def test_a_full_log_folder_is_reported_and_the_run_goes_on(folder: Path, tiny_disk: Path) -> None:
    (tiny_disk / "ballast").write_bytes(bytes(1 << 20))
    outcome = run(folder, options=("--log-dir", str(tiny_disk / "logs")), STEPS="8")
    assert len(weights(outcome)) == 1
    assert re.search(r"ftrun: shared memory under .*tiny/logs.* is full \(1\.\d MB are left\)", outcome.output)
