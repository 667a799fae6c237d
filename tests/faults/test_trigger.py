"""Faults fired by real processes: how each ends, and that the count survives the process that fired."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import timeit
from pathlib import Path

import pytest

from ftrun.core.shared.board import Board, Head
from ftrun.faults import oom, requests
from ftrun.faults.dice import MIXTURE, Dice
from ftrun.faults.plan import load_plan
from ftrun.faults.trigger import Trigger, fired, unfired

PROGRAM = """
import sys
from pathlib import Path
from ftrun.faults.plan import load_plan
from ftrun.faults.trigger import Trigger
trigger = Trigger(load_plan(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
for step in range(3):
    for phase in ("forward", "backward", "gate", "update", "idle"):
        trigger.fire(phase, step, 0)
assert "torch" not in sys.modules
print("survived")
"""


def plan_file(tmp_path: Path, *faults: str) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text("".join(f"[[fault]]\n{f}\n" for f in faults))
    return path


def start(plan: Path, rank: int, run_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(plan), str(rank), str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(plan: Path, rank: int, run_dir: Path) -> tuple[int, str, str]:
    process = start(plan, rank, run_dir)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("kill", -signal.SIGKILL),
        ("term", -signal.SIGTERM),
        ("segv", -signal.SIGSEGV),
        ("abort", -signal.SIGABRT),
        ("exit:7", 7),
        ("exit:0", 0),
        ("exception", 1),
    ],
)
def test_kinds_that_end_the_process_fire_once(tmp_path: Path, kind: str, code: int) -> None:
    at = "update" if kind == "exception" else "gate"
    path = plan_file(tmp_path, f'kind = "{kind}"\nrank = 1\nstep = 1\nat = "{at}"')
    plan = load_plan(path)
    assert [count for _, count in unfired(plan, tmp_path)] == [0]
    returncode, out, err = run(path, 1, tmp_path)
    assert (returncode, out) == (code, "")
    if kind == "exception":
        assert "RuntimeError: injected fault: exception on rank 1 in update of step 1" in err
    (firing,) = fired(tmp_path)
    assert (firing.fault, firing.count, firing.rank, firing.step, firing.phase, firing.kind) == (
        0,
        1,
        1,
        1,
        at,
        kind.partition(":")[0],
    )
    assert unfired(plan, tmp_path) == []
    assert run(path, 1, tmp_path)[1] == "survived\n"
    assert len(fired(tmp_path)) == 1


def test_times_counts_over_processes(tmp_path: Path) -> None:
    path = plan_file(tmp_path, 'kind = "exit:5"\nrank = 0\nat = "update"\ntimes = 3')
    assert [run(path, 0, tmp_path)[0] for _ in range(4)] == [5, 5, 5, 0]
    assert [f.count for f in fired(tmp_path)] == [1, 2, 3]


def test_other_ranks_and_spares_do_not_fire(tmp_path: Path) -> None:
    path = plan_file(tmp_path, 'kind = "kill"\nrank = 1', 'kind = "kill"\nrank = 0\nstep = 9')
    assert run(path, 0, tmp_path)[1] == "survived\n"
    spare = Trigger(load_plan(path), None, tmp_path)
    spare.fire("forward", 0, 0)
    plan = load_plan(path)
    assert [(fault.rank, count) for fault, count in unfired(plan, tmp_path)] == [(1, 0), (0, 0)]


def test_a_claim_is_taken_once_by_many_racing_processes(tmp_path: Path) -> None:
    path = plan_file(tmp_path, 'kind = "exit:9"\nrank = 0\ntimes = 2')
    racing = [start(path, 0, tmp_path) for _ in range(8)]
    codes = sorted(p.wait(timeout=30) for p in racing)
    for process in racing:
        process.communicate()
    assert codes == [0] * 6 + [9, 9]
    assert sorted(p.name for p in (tmp_path / "faults").iterdir()) == ["0-1.json", "0-2.json"]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.parametrize("kind", ["freeze", "hang"])
def test_kinds_that_stop_the_process(tmp_path: Path, kind: str) -> None:
    path = plan_file(tmp_path, f'kind = "{kind}"\nrank = 0\nstep = 1\nat = "backward"')
    process = start(path, 0, tmp_path)
    try:
        deadline = time.monotonic() + 30
        while not (fired(tmp_path) and (kind == "hang" or state_of(process.pid) == "T")):
            assert time.monotonic() < deadline, "never fired"
            assert process.poll() is None
            time.sleep(0.005)
        if kind == "hang":
            ticks = cpu_ticks(process.pid)
            while cpu_ticks(process.pid) < ticks + 5:
                assert time.monotonic() < deadline, "hangs without using the processor"
                time.sleep(0.005)
            return
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate(timeout=30)[0] == "survived\n"
    finally:
        process.kill()
        process.communicate()


def test_slow_stretches_only_the_phases_in_which_the_rank_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(time, "sleep", slept.append)
    trigger = Trigger(load_plan(plan_file(tmp_path, 'kind = "slow:3"\nrank = 0\nstep = 0')), 0, tmp_path)
    trigger.fire("forward", 0, 0)
    for phase, seconds in (("backward", 2.0), ("gate", 1.0), ("update", 5.0), ("idle", 0.5), ("forward", 4.0)):
        clock += seconds
        trigger.fire(phase, 0, 0)
    assert slept == [4.0, 2.0, 1.0]


def test_firings_are_plain_json(tmp_path: Path) -> None:
    path = plan_file(tmp_path, 'kind = "slow:2"\nrank = 0')
    Trigger(load_plan(path), 0, tmp_path).fire("forward", 4, 2)
    (file,) = (tmp_path / "faults").glob("*.json")
    raw = json.loads(file.read_text())
    assert (raw["step"], raw["attempt"], raw["pid"]) == (4, 2, os.getpid())


def test_a_step_is_found_in_its_epoch(tmp_path: Path) -> None:
    path = plan_file(tmp_path, 'kind = "exception"\nrank = 0\nepoch = 1\nstep = 2', 'kind = "exception"\nrank = 0\nepoch = 3')
    trigger = Trigger(load_plan(path), 0, tmp_path)
    struck = []
    for epoch, step in [(None, 2), *((epoch, step) for epoch in range(5) for step in range(4))]:
        try:
            trigger.fire("forward", step, 0, epoch)
        except RuntimeError as error:
            struck.append((epoch, step, str(error).partition(" in ")[2]))
    assert struck == [(1, 2, "forward of epoch 1, step 2"), (3, 0, "forward of epoch 3, step 0")]


# ---- requests and chance ---------------------------------------------------------------------------------------------


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board.create(tmp_path / "board", 8)


def ask(tmp_path: Path, board: Board, **what: object) -> requests.Request:
    request = requests.post(tmp_path, requests.Request(requests.FAULT, **what))  # type: ignore[arg-type]
    board[Head.REQUESTS] = request.number
    return request


def test_a_request_is_fired_once_where_it_was_asked_for(tmp_path: Path, board: Board) -> None:
    trigger = Trigger(None, 1, tmp_path, board)
    trigger.fire("forward", 0, 0)
    ask(tmp_path, board, kind="exception", rank=1, at="backward", step=3)
    ask(tmp_path, board, kind="exception", rank=0)
    for step in (2, 3):
        trigger.fire("forward", step, 0)
        if step == 2:
            trigger.fire("backward", step, 0)
    with pytest.raises(RuntimeError, match="exception on rank 1 in backward of step 3"):
        trigger.fire("backward", 3, 0)
    trigger.fire("backward", 3, 1)
    (firing,) = fired(tmp_path)
    assert (firing.source, firing.fault, firing.step) == ("request", 1, 3)
    assert [r.number for r in requests.pending(tmp_path)] == [2]


def test_a_replacement_hears_what_was_asked_before_it_came(tmp_path: Path, board: Board) -> None:
    ask(tmp_path, board, kind="exception", rank=1)
    with pytest.raises(RuntimeError):
        Trigger(None, 1, tmp_path, board).fire("forward", 7, 0)
    Trigger(None, 1, tmp_path, board).fire("forward", 7, 1)
    assert len(fired(tmp_path)) == 1


def test_what_was_taken_back_never_fires(tmp_path: Path, board: Board) -> None:
    trigger = Trigger(None, 1, tmp_path, board)
    request = ask(tmp_path, board, kind="exception", rank=1, at="gate")
    trigger.fire("idle", 0, 0)  # it knows of it now
    assert requests.take(tmp_path, request.number) and not requests.take(tmp_path, request.number)
    trigger.fire("gate", 0, 0)
    assert fired(tmp_path) == []


def test_numbers_of_requests_are_never_given_twice(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ftrun.faults.requests import Request, post, take\n"
        "for _ in range(20):\n    number = post(Path(sys.argv[1]), Request('fault', 'kill', rank=0)).number\n"
        "    print(number, take(Path(sys.argv[1]), number))"
    )
    racing = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = [line.split() for p in racing for line in p.communicate(timeout=30)[0].splitlines()]
    assert sorted(int(number) for number, _ in said) == list(range(1, 81))
    assert {taken for _, taken in said} == {"True"}


def test_chance_is_a_function_of_the_seed(tmp_path: Path) -> None:
    drawn = [Dice(0.2, 7, 4).draw(step) for step in range(1000)]
    assert drawn == [Dice(0.2, 7, 4).draw(step) for step in range(1000)]
    assert drawn != [Dice(0.2, 8, 4).draw(step) for step in range(1000)]
    found = [fault for fault in drawn if fault]
    assert 150 < len(found) < 250
    assert {f.rank for f in found} == {0, 1, 2, 3} and {f.kind for f in found} == set(MIXTURE)
    assert {f.at for f in found if f.kind == "exception"} == {"forward", "backward"}
    late = Dice(0.2, 7, 4, first=500)
    assert [late.draw(step) for step in range(1000)] == [None] * 500 + drawn[500:]


def test_a_step_done_again_meets_no_new_fault(tmp_path: Path, board: Board) -> None:
    trigger = Trigger(None, 0, tmp_path, board, dice=Dice(1.0, 1, 1, "exception"))
    for step in range(3):
        for attempt in range(2):
            try:
                for phase in ("idle", "forward", "backward"):
                    trigger.fire(phase, step, attempt)
                assert attempt == 1
            except RuntimeError:
                assert attempt == 0
    assert [(f.source, f.step) for f in fired(tmp_path)] == [("random-1", 0), ("random-1", 1), ("random-1", 2)]


def test_a_fire_without_anything_costs_next_to_nothing(tmp_path: Path, board: Board) -> None:
    trigger = Trigger(None, 0, tmp_path, board)
    best = min(timeit.repeat(lambda: trigger.fire("forward", 1, 0), number=2000, repeat=20)) / 2000
    assert best < 5e-6, f"{best * 1e9:.0f} ns"


@pytest.mark.parametrize("kind", ["hang", "gil", "freeze"])
def test_a_fault_with_a_duration_ends_by_itself(tmp_path: Path, kind: str) -> None:
    path = plan_file(tmp_path, f'kind = "{kind}"\nrank = 0\nstep = 1\nfor = 0.3')
    began = time.monotonic()
    assert run(path, 0, tmp_path)[1] == "survived\n"
    assert time.monotonic() - began > 0.3


def test_gil_lets_no_other_thread_run(tmp_path: Path) -> None:
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.005):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    path = plan_file(tmp_path, 'kind = "gil"\nrank = 0\nfor = 0.3')
    began = time.monotonic()
    Trigger(load_plan(path), 0, tmp_path).fire("forward", 0, 0)
    ended = time.monotonic()
    stop.set()
    thread.join()
    assert not [t for t in ticks if began + 0.02 < t < ended - 0.02]


def test_memory_runs_out_for_one_process_only(tmp_path: Path) -> None:
    if why := oom.why_not():
        pytest.skip(why)
    path = plan_file(tmp_path, 'kind = "oom"\nrank = 0\nstep = 1')
    assert run(path, 0, tmp_path)[0] == -signal.SIGKILL
    (firing,) = fired(tmp_path)
    group = Path(firing.detail)
    counter = group / "memory.oom_control"
    if counter.exists():
        assert "oom_kill 1" in counter.read_text()
    assert oom.discard(group) and not group.exists()
