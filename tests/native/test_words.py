"""Words and bells, inside one process and between two."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ftrun import native
from tests.native.conftest import DEADLINE, Children, until

BIG = (1 << 64) - 1


def test_words_keep_all_bits(page: int) -> None:
    native.store64(page, BIG)
    assert native.load64(page) == BIG
    assert native.load32(page + 4) == (1 << 32) - 1
    assert native.load64(page + 8) == 0


def test_compare_and_swap_returns_the_previous_word(page: int) -> None:
    assert native.cas64(page, 0, 5) == 0
    assert native.cas64(page, 4, 9) == 5
    assert native.load64(page) == 5


def test_swaps_of_two_processes_lose_nothing(page: int, children: Children) -> None:
    def add() -> None:
        for _ in range(5000):
            while True:
                old = native.load64(page)
                if native.cas64(page, old, old + 1) == old:
                    break

    pids = [children.fork(add) for _ in range(2)]
    assert [children.wait(pid) for pid in pids] == [0, 0]
    assert native.load64(page) == 10000


@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_all_equal_sees_one_that_differs(page: int, count: int) -> None:
    addresses = [page + 8 * i for i in range(count)]
    listed = native.AddressList(addresses)
    assert len(listed) == count
    assert native.all_equal64(listed, 0)
    assert native.all_equal64(listed, 3) is (count == 0)
    for address in addresses:
        native.store64(address, 1)
        assert not native.all_equal64(listed, 0)
        native.store64(address, 0)


@pytest.mark.parametrize("rounds", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_of_all_that_arrive_at_least_one_sees_the_others(page: int, children: Children, rounds: int) -> None:
    ranks = 2
    words = [page + 64 * rank for rank in range(ranks)]
    seen = [page + 64 * (ranks + rank) for rank in range(ranks)]
    turn = page + 64 * 2 * ranks

    def go(rank: int) -> None:
        listed = native.AddressList(words)
        for number in range(1, rounds + 1):
            last = native.arrive(words[rank], number, listed)
            native.store64(seen[rank], 2 * number + last)
            while native.load64(turn) < number:
                pass

    pids = [children.fork(lambda rank=rank: go(rank)) for rank in range(ranks)]  # type: ignore[misc]
    for number in range(1, rounds + 1):
        while any(native.load64(word) // 2 < number for word in seen):
            pass
        assert any(native.load64(word) & 1 for word in seen), f"nobody saw the others in round {number}"
        native.store64(turn, number)
    assert [children.wait(pid) for pid in pids] == [0, 0]


def test_a_bell_rung_before_the_wait_is_not_missed(page: int) -> None:
    seen = native.load32(page)
    native.bell_ring(page)
    assert native.bell_wait(page, seen, 0.0)
    assert native.load32(page) == seen + 1


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), 0.02])
def test_a_silent_bell_times_out(page: int, timeout: float) -> None:
    start = time.monotonic()
    assert not native.bell_wait(page, 0, timeout)
    assert timeout != 0.02 or time.monotonic() - start >= timeout


def test_an_endless_wait_ends_with_a_ring(page: int) -> None:
    ringer = threading.Timer(0.02, native.bell_ring, [page])  # also: the wait gives up the GIL
    ringer.start()
    assert native.bell_wait(page, 0, float("inf"))
    ringer.join()


def test_two_processes_ring_each_other(page: int, children: Children) -> None:
    there, back, rounds = page, page + 4, 200

    def answer() -> None:
        for turn in range(rounds):
            while native.load32(there) == turn:
                native.bell_wait(there, turn, DEADLINE)
            native.bell_ring(back)

    pid = children.fork(answer)
    for turn in range(rounds):
        native.bell_ring(there)
        assert native.bell_wait(back, turn, DEADLINE)
    assert children.wait(pid) == 0


def test_one_ring_wakes_every_waiter(page: int, children: Children) -> None:
    def wait(place: int) -> None:
        seen = native.load32(page)
        native.store64(page + 64 + 8 * place, 1)
        while native.load32(page) == seen:
            assert native.bell_wait(page, seen, DEADLINE)

    pids = [children.fork(lambda place=place: wait(place)) for place in range(4)]  # type: ignore[misc]
    until(lambda: all(native.load64(page + 64 + 8 * place) for place in range(4)))
    native.bell_ring(page)
    assert [children.wait(pid) for pid in pids] == [0] * 4


def test_a_missing_library_is_told_on_use_not_on_import(tmp_path: Path) -> None:
    package = Path(native.__file__).parents[1]
    (tmp_path / "ftrun").mkdir()
    (tmp_path / "ftrun" / "__init__.py").touch()
    (tmp_path / "ftrun" / "core").symlink_to(package / "core")
    (tmp_path / "ftrun" / "native").mkdir()
    (tmp_path / "ftrun" / "native" / "__init__.py").write_text(Path(native.__file__).read_text())
    program = """
from ftrun import native
from ftrun.core.errors import PlatformError
assert not native.available()
for call in (lambda: native.load64(0), lambda: native.life_init(0), lambda: native.checksum(0, 0), native.beat_stop):
    try:
        call()
    except PlatformError as error:
        assert "make native" in str(error)
    else:
        raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path, check=True, timeout=60)
