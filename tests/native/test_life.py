"""Liveness locks, watchers and the beat thread, with real processes that are really killed."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrun import native
from tests.conftest import ROOT
from tests.native.conftest import DEADLINE, Children, until

LIFE, MAIN, BEAT, READY = 0, 64, 128, 256


class Watched:
    """A watcher of one lock with its eventfd."""

    def __init__(self, lock: int) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.handle = native.watch_start(lock, self.fd)

    def fired(self, timeout: float) -> bool:
        return bool(select.select([self.fd], [], [], timeout)[0])


@pytest.fixture
def watch() -> Iterator[type[Watched]]:
    made: list[Watched] = []

    class Kept(Watched):
        def __init__(self, lock: int) -> None:
            super().__init__(lock)
            made.append(self)

    yield Kept
    for watched in made:
        try:
            native.watch_stop(watched.handle, wait=True)
        except OSError as error:
            assert error.errno == errno.ENOENT  # noqa: PT017  (the test stopped it itself)
        os.close(watched.fd)


def hold_and_wait(page: int, lock: int) -> None:
    native.life_hold(page + lock)
    native.store64(page + READY, 1)
    time.sleep(2 * DEADLINE)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGABRT])
def test_the_death_of_the_owner_reaches_the_watcher(
    page: int, children: Children, watch: type[Watched], sign: int
) -> None:
    native.life_init(page + MAIN)
    pid = children.fork(lambda: hold_and_wait(page, MAIN))
    until(lambda: native.load64(page + READY) == 1)
    watched = watch(page + MAIN)
    assert not watched.fired(0.6)  # longer than one slice of the watcher's wait
    os.kill(pid, sign)
    assert watched.fired(DEADLINE)
    assert children.wait(pid) == -sign


def test_two_watchers_of_one_lock_both_fire(page: int, children: Children, watch: type[Watched]) -> None:
    native.life_init(page + MAIN)
    pid = children.fork(lambda: hold_and_wait(page, MAIN))
    until(lambda: native.load64(page + READY) == 1)
    both = watch(page + MAIN), watch(page + MAIN)
    children.kill(pid)
    assert all(watched.fired(DEADLINE) for watched in both)


def test_an_orderly_release_fires_too(page: int, watch: type[Watched]) -> None:
    native.life_init(page)
    native.life_hold(page)
    watched = watch(page)
    assert not watched.fired(0.0)
    native.life_release(page)
    assert watched.fired(DEADLINE)


def test_a_stopped_watcher_stays_silent(page: int, children: Children, watch: type[Watched]) -> None:
    native.life_init(page + MAIN)
    pid = children.fork(lambda: hold_and_wait(page, MAIN))
    until(lambda: native.load64(page + READY) == 1)
    watched = watch(page + MAIN)
    native.watch_stop(watched.handle, wait=True)
    children.kill(pid)
    children.wait(pid)
    assert not watched.fired(0.0)
    with pytest.raises(OSError) as caught:
        native.watch_stop(watched.handle)
    assert caught.value.errno == errno.ENOENT


def test_many_watchers_at_once(page: int, children: Children, watch: type[Watched]) -> None:
    locks = [64 * (i + 8) for i in range(16)]
    for lock in locks:
        native.life_init(page + lock)

    def hold_all() -> None:
        for lock in locks:
            native.life_hold(page + lock)
        hold_and_wait(page, MAIN)

    native.life_init(page + MAIN)
    pid = children.fork(hold_all)
    until(lambda: native.load64(page + READY) == 1)
    all_watched = [watch(page + lock) for lock in locks]
    children.kill(pid)
    assert all(watched.fired(DEADLINE) for watched in all_watched)


def test_a_held_lock_is_refused_to_others(page: int) -> None:
    native.life_init(page)
    native.life_hold(page)
    caught: list[int | None] = []

    def other() -> None:
        for call in (native.life_hold, native.life_release):
            try:
                call(page)
            except OSError as error:
                caught.append(error.errno)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert caught == [errno.EBUSY, errno.EPERM]
    native.life_release(page)


def test_a_lock_left_by_a_dead_process_can_be_held_again(page: int, children: Children) -> None:
    native.life_init(page)
    assert children.wait(children.fork(lambda: native.life_hold(page))) == 0
    native.life_hold(page)
    native.life_release(page)


def test_a_fork_does_not_own_the_locks_of_its_parent(page: int, children: Children, watch: type[Watched]) -> None:
    native.life_init(page)
    native.life_hold(page)
    watched = watch(page)
    assert children.wait(children.fork(lambda: None)) == 0
    assert not watched.fired(0.6)
    native.life_release(page)
    assert watched.fired(DEADLINE)


def test_the_beat_goes_on_until_it_is_stopped(page: int) -> None:
    native.life_init(page + LIFE)
    native.beat_start(page + LIFE, page + BEAT, 0.005, 0, 0.0)
    try:
        with pytest.raises(OSError) as caught:
            native.life_hold(page + LIFE)
        assert caught.value.errno == errno.EBUSY
        with pytest.raises(OSError) as caught:
            native.beat_start(page + LIFE, page + BEAT, 0.005, 0, 0.0)
        assert caught.value.errno == errno.EALREADY
        first = native.load64(page + BEAT)
        assert 0 < first <= time.monotonic_ns()
        until(lambda: native.load64(page + BEAT) > first)
    finally:
        native.beat_stop()
    native.life_hold(page + LIFE)
    last = native.load64(page + BEAT)
    time.sleep(0.05)
    assert native.load64(page + BEAT) == last
    native.life_release(page + LIFE)
    native.beat_stop()


def test_all_processes_beat_at_the_same_time(page: int, children: Children) -> None:
    """One look just after that time sees whose beat is missing."""
    interval, beats = 0.05, (BEAT, BEAT + 8)

    def beat(number: int) -> None:
        time.sleep(number * 0.017)  # begins at another time
        native.beat_start(page + number * MAIN, page + beats[number], interval, 0, 0.0)
        time.sleep(2 * DEADLINE)

    for number in range(2):
        native.life_init(page + number * MAIN)
        children.fork(lambda number=number: beat(number))  # type: ignore[misc]
    first = [0, 0]

    def past_the_first() -> bool:
        now = [native.load64(page + at) for at in beats]
        first[:] = [old or new for old, new in zip(first, now, strict=True)]
        return all(old and new > old for old, new in zip(first, now, strict=True))

    until(past_the_first)
    late: list[float] = []
    while len(late) < 20:  # after each multiple of the interval, as a busy machine lets them
        late += [native.load64(page + at) / 1e9 % interval for at in beats]
        time.sleep(interval)
    assert sorted(late)[len(late) // 2] < interval / 4, f"beats at any time: {late}"


def test_a_taken_lock_refuses_the_beat(page: int) -> None:
    native.life_init(page)
    native.life_hold(page)
    with pytest.raises(OSError) as caught:
        native.beat_start(page, page + BEAT, 0.1, 0, 0.0)
    assert caught.value.errno == errno.EBUSY
    native.life_release(page)
    assert native.load64(page + BEAT) == 0


def test_a_frozen_process_does_not_beat_and_still_lives(page: int, children: Children, watch: type[Watched]) -> None:
    native.life_init(page)

    def beat() -> None:
        native.beat_start(page, page + BEAT, 0.005, 0, 0.0)
        time.sleep(2 * DEADLINE)

    pid = children.fork(beat)
    until(lambda: native.load64(page + BEAT) > 0)
    watched = watch(page)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    frozen = native.load64(page + BEAT)
    assert not watched.fired(0.1)
    assert native.load64(page + BEAT) == frozen
    os.kill(pid, signal.SIGCONT)
    until(lambda: native.load64(page + BEAT) > frozen)
    children.kill(pid)
    assert watched.fired(DEADLINE)


def test_a_fork_of_a_beating_process_has_no_beat(page: int, children: Children) -> None:
    native.life_init(page)
    native.life_init(page + MAIN)
    native.beat_start(page, page + BEAT, 0.005, 0, 0.0)

    def child() -> None:
        native.beat_stop()  # harmless: the thread is the parent's
        native.beat_start(page + MAIN, page + BEAT + 8, 0.005, 0, 0.0)
        native.beat_stop()

    try:
        assert children.wait(children.fork(child)) == 0
        last = native.load64(page + BEAT)
        until(lambda: native.load64(page + BEAT) > last)
    finally:
        native.beat_stop()


def worker_of(page: int, launcher: int, grace: float) -> None:
    """A group leader with a helper process, both of which must not outlive the launcher."""
    os.setsid()
    helper = os.fork()
    if helper == 0:
        time.sleep(2 * DEADLINE)
        os._exit(0)
    native.store64(page + READY + 8, helper)
    native.beat_start(page, page + BEAT, 0.01, launcher, grace)
    native.store64(page + READY, os.getpid())
    time.sleep(2 * DEADLINE)


def is_gone(pid: int) -> bool:
    """Ended, or a zombie that nobody has reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("grace", [0.0, 0.3])
def test_an_orphan_ends_with_its_group(page: int, children: Children, grace: float) -> None:
    native.life_init(page)

    def launcher() -> None:
        me = os.getpid()
        if os.fork() == 0:
            worker_of(page, me, grace)
            os._exit(0)
        time.sleep(2 * DEADLINE)

    pid = children.fork(launcher)
    until(lambda: native.load64(page + READY) > 0)
    worker, helper = native.load64(page + READY), native.load64(page + READY + 8)
    assert not is_gone(worker)
    died = time.monotonic()
    children.kill(pid)  # stays a zombie until `wait`: a zombie is dead too
    until(lambda: is_gone(worker) and is_gone(helper))
    assert time.monotonic() - died >= grace
    children.wait(pid)


def test_a_launcher_that_is_already_dead_is_noticed(page: int, children: Children) -> None:
    native.life_init(page)
    dead = children.fork(lambda: None)
    children.wait(dead)
    pid = children.fork(lambda: worker_of(page, dead, 0.0))
    assert children.wait(pid) == -signal.SIGKILL


def test_closing_every_descriptor_is_no_death_of_the_launcher(page: int, children: Children) -> None:
    native.life_init(page)

    def worker() -> None:
        os.setsid()
        native.beat_start(page, page + BEAT, 0.005, os.getppid(), 0.0)
        os.closerange(3, 256)
        os.pipe()  # takes the numbers that were the beat thread's
        last = native.load64(page + BEAT)
        until(lambda: native.load64(page + BEAT) > last + 50_000_000)
        native.beat_stop()

    assert children.wait(children.fork(worker)) == 0


def test_native_threads_take_no_signals(page: int, children: Children) -> None:
    native.life_init(page)

    def worker() -> None:
        native.beat_start(page, page + BEAT, 0.01, 0, 0.0)
        blocked = {}
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/status") as status:
                fields = dict(line.split(":", 1) for line in status if ":" in line)
            blocked[fields["Name"].strip()] = int(fields["SigBlk"], 16)
        term_and_int = (1 << (signal.SIGTERM - 1)) | (1 << (signal.SIGINT - 1))
        assert blocked["ftrun-beat"] & term_and_int == term_and_int
        native.beat_stop()

    assert children.wait(children.fork(worker)) == 0


WATCHES = """
import gc, os, signal, sys, time
from pathlib import Path
from ftrun import native
from ftrun.core.shared.board import Board, F
board = Board.create(Path(sys.argv[1]) / "board", 2)
if sys.argv[2] == "goes":
    board = Board.open(Path(sys.argv[1]) / "board")
lock = board.cell(0).field_address(F.LIFE)
native.life_init(lock)
ready, here = os.pipe()
child = os.fork()
if child == 0:
    native.life_hold(lock)
    os.write(here, b"x")
    time.sleep(60)
os.read(ready, 1)
native.watch_start(lock, os.eventfd(0))
time.sleep(0.1)  # the thread waits in the map
del board
gc.collect()
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
time.sleep(1.0)  # two of its slices
"""


@pytest.mark.parametrize(("map_of", "code"), [("stays", 0), ("goes", -signal.SIGSEGV)])
def test_a_watcher_may_outlive_the_board(tmp_path: Path, map_of: str, code: int) -> None:
    """As at the end of a launcher, where Python drops the board while a native thread still waits in it."""
    command = [sys.executable, "-c", WATCHES, str(tmp_path), map_of]
    assert subprocess.run(command, cwd=ROOT, timeout=DEADLINE, check=False).returncode == code
