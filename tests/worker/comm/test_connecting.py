"""The inner group's own connections and threads, told from everything else in the process."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from ftrun.worker.comm.stillness import Stillness
from tests.conftest import wait_for

SCRIPTS = Path(__file__).parent / "scripts"


def ranks(script: str, shown: int) -> list[str]:
    """Two ranks run a script; what the rank `shown` says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SCRIPTS / script), str(port)]
    with subprocess.Popen([*command, str(1 - shown)]) as other:
        try:
            said = subprocess.run([*command, str(shown)], capture_output=True, text=True, timeout=100)
        finally:
            other.kill()
    assert said.returncode == 0, said.stderr[-2000:]
    return said.stdout.split()


def test_an_abort_closes_the_groups_connections_and_no_others() -> None:
    assert ranks("aborted.py", shown=0) == ["1", "connections", "True", "False", "True"]


def test_an_abort_ends_every_collective_of_a_group() -> None:
    """Also behind a message nobody wants any more, around which Gloo would run in circles."""
    torn, ended, used = ranks("left_message.py", shown=1)
    assert (torn, ended) == ("True", "True") and float(used) < 0.1


def test_swapped_groups_leave_no_threads_and_no_descriptors() -> None:
    assert ranks("swaps.py", shown=1) == ["0", "0"]


def test_threads_are_still_when_all_sleep_and_none_ran_between_two_looks() -> None:
    stop = threading.Event()
    rounds = [0]

    def busy() -> None:
        while not stop.is_set():
            rounds[0] += 1

    threads = [threading.Thread(target=stop.wait), threading.Thread(target=busy)]
    for thread in threads:
        thread.start()
    names = {str(t.native_id) for t in threads}
    sleeping, both = Stillness({str(threads[0].native_id)}), Stillness(names)
    assert not sleeping.seen(), "one look says nothing"
    wait_for(sleeping.seen, "a thread asleep")
    seen = rounds[0]
    for _ in range(20):
        assert not both.seen()
        time.sleep(0.001)
    assert rounds[0] > seen
    stop.set()
    for thread in threads:
        thread.join()
    assert not both.seen() and not Stillness(set()).seen()


def test_a_thread_that_ended_holds_up_no_judgement() -> None:
    ended, stop = threading.Event(), threading.Event()
    threads = [threading.Thread(target=stop.wait), threading.Thread(target=ended.wait)]
    for thread in threads:
        thread.start()
    look = Stillness({str(t.native_id) for t in threads})
    look.seen()
    ended.set()
    threads[1].join()
    wait_for(look.seen, "the other thread asleep")
    stop.set()
    threads[0].join()


def test_a_thread_that_woke_in_between_was_not_still() -> None:
    turn, stop = threading.Event(), threading.Event()

    def now_and_then() -> None:
        while not stop.is_set():
            turn.wait()
            turn.clear()

    thread = threading.Thread(target=now_and_then)
    thread.start()
    look = Stillness({str(thread.native_id)})
    look.seen()
    wait_for(look.seen, "a thread asleep")
    turn.set()
    wait_for(lambda: not turn.is_set(), "the thread's turn")
    assert not look.seen()
    stop.set()
    turn.set()
    thread.join()
