"""Deaths of ftrun's own processes while a real training runs: it goes on, and ends on the same weights."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftrun.core.shared.board import Board, Cell, F, Head
from ftrun.core.shared.world import World, read_world
from ftrun.core.system import procfs
from tests.conftest import leaked_memory, small_file_system
from tests.e2e import harness, sharding
from tests.e2e.conftest import Reference
from tests.e2e.harness import fault, kill

SLOW = ["--stretch", "0.03"]  # seconds a phase, so that there is a middle of the run

# holds one rank before its process group while a file is missing
HELD = """
import os, runpy, sys, time
rank = os.environ["RANK"]
open(f"up-{{rank}}", "w").close()
while rank in {ranks!r} and not os.path.exists("go"):
    time.sleep(0.01)
sys.path.insert(0, os.path.dirname({script!r}))
runpy.run_path({script!r}, run_name="__main__")
"""


def until(condition: Callable[[], Any], what: str, seconds: float = 40.0) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for: {what}"
        time.sleep(0.01)
    return value


class Live:
    """A run that goes on: its processes by name, and its board."""

    def __init__(self, folder: Path, command: list[str], env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.running = harness.start(folder, command, env)
        self.launcher = self.running.process.pid
        run_dir = self.run_dir = self.running.run_dir()
        self.board: Board = until(lambda: _board(run_dir), "the board")

    def pid(self, name: str) -> int:
        """The one process of this run that is called `name`."""

        def found() -> int | None:
            for pid in harness.strays(self.folder):
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}/comm").read_text().strip() == name[:15]:
                        return pid
            return None

        return int(until(found, f"a process called {name}"))

    def kill(self, name: str) -> int:
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def world(self) -> World:
        until(lambda: self.board[Head.PUBLISHED], "a world")
        return read_world(self.run_dir, self.board[Head.PUBLISHED])

    def cells(self) -> list[Cell]:
        return [self.board.cell(place.cell) for place in self.world().places]

    def reach(self, step: int) -> None:
        """Wait until every rank has begun `step`."""
        self.ended_or(lambda: all((c.step or 0) >= step for c in self.cells()), f"step {step}")

    def said(self, text: str) -> None:
        self.ended_or(lambda: text in self.running.output, repr(text))

    def ended_or(self, condition: Callable[[], Any], what: str) -> None:
        def there() -> Any:
            assert self.running.process.poll() is None, f"ended before {what}\n{self.running.output}"
            return condition()

        until(there, f"{what}\n{self.running.output}")

    def finish(self) -> harness.Outcome:
        return harness.finish(self.running)


def _board(run_dir: Path) -> Board | None:
    try:
        return Board.open(run_dir / "board")
    except (OSError, ValueError):
        return None  # being made


@pytest.fixture
def begin(folder: Path) -> Iterator[Callable[..., Live]]:
    """begin(arguments, faults, ...): a run in `folder`; ended after the test if it still goes on."""
    lives: list[Live] = []

    def start(arguments: list[str], faults: list[str] | None = None, **options: Any) -> Live:
        lives.append(Live(folder, harness.ftrun_command(folder, arguments, faults or [], **options)))
        return lives[-1]

    yield start
    for live in lives:
        if live.running.process.poll() is None:
            with contextlib.suppress(OSError):
                os.kill(live.launcher, signal.SIGCONT)
            live.running.process.kill()
            live.running.process.wait()


def held(folder: Path, *ranks: int) -> list[str]:
    """The command of a run in which `ranks` make their process group only once there is a file "go"."""
    script = folder / "held.py"
    folder.mkdir(parents=True, exist_ok=True)
    script.write_text(HELD.format(ranks=[str(r) for r in ranks], script=str(harness.REFERENCE)))
    command = harness.ftrun_command(folder, [])
    return [str(script) if part == str(harness.REFERENCE) else part for part in command]


@pytest.mark.parametrize(
    ("service", "title"),
    [("fork server", "forksrv"), ("fd store", "fd store"), pytest.param("store", "store", marks=pytest.mark.slow)],
)
def test_service_dies_in_training_and_then_a_rank(
    stock: Reference, begin: Callable[..., Live], service: str, title: str
) -> None:
    live = begin(SLOW)
    live.reach(2)
    old = live.kill(f"ftrun {title}")
    live.said(f"our {service} process died")
    assert live.pid(f"ftrun {title}") != old
    live.reach(4)
    live.kill("ftrun rank 2")
    outcome = live.finish()
    harness.same(stock(), outcome)
    assert harness.replaced_ranks(outcome) == {2}
    harness.check_survivors(outcome)
    # the workers have given their memory to the new fd store
    source = outcome.notes("incident")[0]["sources"]["2"]["name"]
    assert source in ("adopt", "peer")
    assert "bit-identical to an uninterrupted run: yes" in outcome.output


@pytest.mark.slow
def test_the_fd_store_is_reached_in_a_folder_whose_name_is_too_long_for_a_socket(
    stock: Reference, folder: Path
) -> None:
    deep = folder / ("d" * 90)
    outcome = harness.ftrun(deep, [], [kill(1, "backward", 5)])
    harness.check_no_strays(deep)
    harness.same(stock(), outcome)
    assert "adopted in place" in outcome.output


def test_store_dies_while_the_ranks_connect(stock: Reference, begin: Callable[..., Live]) -> None:
    """They do not need it for that. The launcher is held back: it may have everyone meet again when it hears of it."""
    faults = [kill(1, "backward", 5), fault("freeze", 2, "reset")]
    live = begin([], faults, options=["--heartbeat-timeout", "60"])
    live.ended_or(lambda: live.world().generation == 2, "the second world")
    frozen = live.pid("ftrun rank 2")
    until(lambda: Path(f"/proc/{frozen}/stat").read_text().rpartition(")")[2].split()[0] == "T", "a frozen rank")
    live.ended_or(lambda: sum(c[F.READY] == 2 for c in live.cells()) == 3, "the other ranks")
    os.kill(live.launcher, signal.SIGSTOP)
    try:
        live.kill("ftrun store")
        os.kill(frozen, signal.SIGCONT)
        until(lambda: all(c[F.RESET] == 2 for c in live.cells()), "every rank to be connected")
    finally:
        os.kill(live.launcher, signal.SIGCONT)
    outcome = live.finish()
    harness.same(stock(), outcome)
    assert [e["service"] for e in outcome.events("ServiceDied")] == ["store"]
    assert [a["generation"] for a in outcome.actions("Publish")] in ([1, 2], [1, 2, 3])
    harness.check_survivors(outcome)


@pytest.mark.slow
def test_the_others_meet_a_rank_before_it_is_restored_and_wait_for_it_then(
    stock: Reference, begin: Callable[..., Live]
) -> None:
    """A step done meanwhile would change the buffers that the rank may have to copy."""
    live = begin([], [kill(1, "update", 5), fault("hang", 1, "restore") + "for = 2.0\n"])
    live.ended_or(lambda: live.board[Head.PUBLISHED] == 2, "the second world")
    cells = live.cells()
    live.ended_or(lambda: sum(c[F.RESTORED] == 2 for c in cells) == 3, "the three others")
    looks = 0

    def settled() -> bool:
        nonlocal looks
        went_on = [c[F.RESUMED] == 2 for c in cells]
        if cells[1][F.SETTLED] == 2:
            return True
        looks += 1
        assert not any(went_on)
        return False

    live.ended_or(settled, "rank 1 to have all it takes from others")
    assert looks >= 20
    outcome = live.finish()
    harness.same(stock(), outcome)
    assert [a["generation"] for a in outcome.actions("Publish")] == [1, 2]


def test_what_is_left_of_a_dead_worker_steps_aside(stock: Reference, begin: Callable[..., Live]) -> None:
    live = begin(SLOW)
    live.reach(2)
    fork_server = live.pid("ftrun forksrv")
    os.kill(fork_server, signal.SIGSTOP)  # it reaps nobody meanwhile
    try:
        dead = live.kill("ftrun rank 2")
        live.ended_or(lambda: os.getpriority(os.PRIO_PROCESS, dead) == 19, "the lowest priority")
    finally:
        os.kill(fork_server, signal.SIGCONT)
    harness.same(stock(), live.finish())


@pytest.mark.slow
def test_a_stall_does_not_wait_until_the_dead_is_reaped(stock: Reference, begin: Callable[..., Live]) -> None:
    """The kernel's word that it runs no more code is enough for memory of the host: taking a large process down takes seconds."""
    live = begin(SLOW)
    live.reach(2)
    fork_server = live.pid("ftrun forksrv")
    os.kill(fork_server, signal.SIGSTOP)  # it reaps nobody meanwhile
    try:
        dead = live.kill("ftrun rank 2")
        live.said("recovered in")
        fields = procfs.stat(dead)
        assert fields is not None and fields[0] == "Z", "somebody reaped it"
    finally:
        os.kill(fork_server, signal.SIGCONT)
    outcome = live.finish()
    assert "state adopted in place, 0 B moved" in outcome.output
    harness.same(stock(), outcome)


@pytest.mark.slow
def test_store_dies_before_anybody_connected(stock: Reference, folder: Path) -> None:
    live = Live(folder, held(folder, 0, 1, 2, 3))
    live.ended_or(lambda: len(list(folder.glob("up-*"))) == 4, "the ranks")
    old = live.kill("ftrun store")
    live.said("our store process died")
    assert live.pid("ftrun store") != old
    (folder / "go").touch()
    outcome = live.finish()
    harness.same(stock(), outcome)
    assert [a["attempt"] for a in outcome.actions("Publish")] == [0], "nobody needed a second start"


@pytest.mark.slow
def test_store_dies_while_the_first_groups_are_made(stock: Reference, folder: Path) -> None:
    """They meet without it, and whoever comes late finds another one in its place."""
    live = Live(folder, held(folder, 3))
    live.ended_or(lambda: len(list(folder.glob("up-*"))) == 4, "the ranks")
    until(lambda: len(list(live.run_dir.glob("meetings/*/*/ports_*"))) == 3, "three ranks to meet")
    old = live.kill("ftrun store")
    live.said("our store process died")
    assert live.pid("ftrun store") != old
    (folder / "go").touch()
    outcome = live.finish()
    harness.same(stock(), outcome)
    assert [a["attempt"] for a in outcome.actions("Publish")] == [0], "nobody needed a second start"


def test_fd_store_and_a_rank_die_at_once(begin: Callable[..., Live]) -> None:
    """The weights are copied from a healthy rank; what was the rank's own is lost, and the closing line says so."""
    live = begin(SLOW, spares=0)
    live.reach(3)
    rank, fd_store = live.pid("ftrun rank 2"), live.pid("ftrun fd store")
    os.kill(live.launcher, signal.SIGSTOP)  # it sees both deaths together
    os.kill(fd_store, signal.SIGKILL)
    os.kill(rank, signal.SIGKILL)
    os.kill(live.launcher, signal.SIGCONT)
    outcome = live.finish()
    results = outcome.need()
    assert "the fd store died with this rank's worker" in outcome.output and "copied from a peer" in outcome.output
    assert len({result["weights"] for result in results}) == 1, "the ranks did not go on together"
    said = outcome.output.partition("bit-identical to an uninterrupted run: no (")[2]
    assert "a rank's own random streams and place in the data were lost" in said, outcome.tail()


def sharded(folder: Path, faults: list[str], *options: str, steps: int = 60) -> Live:
    """A sharded model, which can be had from snapshots only once a rank died in its update."""
    out = ["--out", str(folder / "out"), "--steps", str(steps)]
    command = harness.script_command(folder, sharding.SCRIPT, out, faults, spares=0, options=options)
    return Live(folder, command)


@pytest.mark.slow
def test_fd_store_dies_after_a_replacement_took_over_its_predecessors_snapshot(
    sharded_stock: Reference, folder: Path
) -> None:
    """The next fd store gets it from the replacement."""
    live = sharded(folder, [kill(1, "backward", 55), kill(2, "update", 99)], "--snapshot-every", "50", steps=102)
    live.said("takes over rank 1")
    live.kill("ftrun fd store")
    live.said("our fd store process died")
    outcome = live.finish()
    sharding.exact(outcome, sharded_stock("--steps", "102"))
    assert [a["resume"] for a in outcome.actions("Publish") if a["rollback"]] == [50], outcome.tail()


def test_who_has_snapshots_is_told_why_they_do_not_help(folder: Path) -> None:
    """They died with the fd store and the rank, so another one is not what the run lacked."""
    live = sharded(folder, [], "--snapshot-every", "20")
    live.reach(3)
    rank, fd_store = live.pid("ftrun rank 2"), live.pid("ftrun fd store")
    os.kill(live.launcher, signal.SIGSTOP)  # it sees both deaths together
    os.kill(fd_store, signal.SIGKILL)
    os.kill(rank, signal.SIGKILL)
    os.kill(live.launcher, signal.SIGCONT)
    outcome = live.finish()
    assert outcome.code == 75 and "there is no host snapshot of rank 2" in outcome.output, outcome.tail()
    assert "--snapshot-every" not in outcome.output, outcome.tail()


def test_launcher_dies_and_nothing_is_left(begin: Callable[..., Live], folder: Path) -> None:
    memory = set(os.listdir("/dev/shm"))
    live = begin(["--stretch", "0.1", "--steps", "1000"])
    live.reach(3)
    os.kill(live.launcher, signal.SIGKILL)
    live.running.process.wait()
    harness.check_no_strays(folder, 5.0)
    assert leaked_memory(memory) == set()
    assert harness.read_journal(folder)[0]["config"]["nproc"] == 4


@pytest.mark.slow
def test_a_rank_dies_while_the_run_directory_is_full(stock: Reference, folder: Path) -> None:
    """As when data loaders have filled /dev/shm; what is kept in reserve is enough for a repair, and is made again."""
    runs = folder / "runs"
    with small_file_system(runs, 3), contextlib.ExitStack() as ending:
        live = Live(folder, harness.ftrun_command(folder, ["--stretch", "0.4"]))
        ending.callback(live.running.process.kill)  # when a check fails; nothing once it has ended
        live.reach(2)
        until(lambda: list(live.run_dir.glob("notes/parked-*.json")), "a spare")
        ballast = runs / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        live.kill("ftrun rank 2")
        live.said("the repair goes on in a reserve of 256 kB")
        live.said("recovered in")
        time.sleep(1.5)  # the first look for room finds none
        assert not (live.run_dir / "reserve").exists()
        ballast.unlink()
        until((live.run_dir / "reserve").exists, "the reserve")
        outcome = live.finish()
        harness.same(stock("--stretch", "0.4"), outcome)
