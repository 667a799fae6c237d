"""Whose failure is the root cause, and what is said of the others."""

from __future__ import annotations

import pytest

from ftrun.control import blame
from ftrun.control.blame import Failure
from ftrun.control.machine import Config
from ftrun.control.restarts import attempt_name
from ftrun.core.text import ranks
from ftrun.host.base.settings import Output
from ftrun.host.base.streams import Std, Streams
from ftrun.host.output.logformat import on_console


def own(rank: int, at: float, kind: str = "TypeError", where: str = "train.py:3") -> Failure:
    return Failure(rank, rank, at, "exit 1", kind, "bad operand", where)


def killed(rank: int, at: float, cause: str = "SIGKILL") -> Failure:
    return Failure(rank, rank, at, cause)


def bereft(rank: int, at: float, message: str = "[pair.cc:534] Connection closed by peer [127.0.0.1]:5") -> Failure:
    return Failure(rank, rank, at, "exit 1", "RuntimeError", message, "train.py:9")


# failures, decisive cell, then the ranks expected: root, same, others, bereft
CASES: list[tuple[str, list[Failure], int | None, tuple[int, list[int], list[int], list[int]]]] = [
    ("one", [own(2, 1.0)], None, (2, [], [], [])),
    ("the first by time", [own(2, 2.0, "KeyError"), own(1, 1.0)], None, (1, [], [2], [])),
    ("all the same", [own(r, 1.0 + r) for r in range(8)], None, (0, list(range(1, 8)), [], [])),
    ("the same kind elsewhere", [own(0, 1.0), own(1, 2.0, where="train.py:7")], None, (0, [], [1], [])),
    ("a peer after a death", [killed(3, 1.0), bereft(0, 1.1), bereft(1, 1.2)], None, (3, [], [], [0, 1])),
    ("a peer noticed first", [bereft(0, 1.0), own(3, 1.4)], None, (3, [], [], [0])),
    ("long before any death", [bereft(0, 1.0), own(3, 9.0)], None, (0, [], [3], [])),
    ("just in time", [bereft(0, 1.0), own(3, 3.0)], None, (3, [], [], [0])),
    ("an exception and a death", [own(0, 1.0), killed(1, 2.0, "exit 1")], None, (0, [], [1], [])),
    ("nobody else failed", [bereft(1, 2.0), bereft(0, 1.0)], None, (0, [], [], [1])),
    ("signals alike", [killed(0, 1.0), killed(1, 1.1), killed(2, 1.2, "SIGSEGV")], None, (0, [1], [2], [])),
    ("what could not be repaired", [killed(0, 1.0), own(1, 2.0)], 1, (1, [], [0], [])),
    ("a decisive one that lost a peer", [killed(0, 1.0), bereft(1, 2.0)], 1, (0, [], [], [1])),
    ("equal times: by rank", [own(5, 1.0, "KeyError"), own(4, 1.0)], None, (4, [], [5], [])),
]


@pytest.mark.parametrize(("failures", "decisive", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_judge(
    failures: list[Failure], decisive: int | None, expected: tuple[int, list[int], list[int], list[int]]
) -> None:
    for order in (failures, failures[::-1]):
        verdict = blame.judge(order, decisive)
        assert verdict is not None
        found = tuple([f.rank for f in group] for group in (verdict.same, verdict.others, verdict.bereft))
        assert (verdict.root.rank, *found) == expected


def test_no_failure_has_no_cause() -> None:
    assert blame.judge([]) is None


def test_those_of_a_node_where_another_nodes_failure_was_the_cause() -> None:
    late, lost, first = own(2, 3.0), bereft(1, 2.0), killed(0, 1.0)
    verdict = blame.caused_elsewhere([late, lost, first])
    assert (verdict.root, verdict.others, verdict.bereft) == (None, (first, late), (lost,))
    assert verdict.own == (first, late)


def test_all_that_did_not_only_lose_a_peer() -> None:
    failures = [own(0, 1.0), own(1, 2.0), killed(2, 3.0), bereft(3, 4.0)]
    verdict = blame.judge(failures)
    assert verdict is not None and list(verdict.own) == failures[:3]


@pytest.mark.parametrize(
    ("kind", "message", "lost"),
    [
        ("RuntimeError", "[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:40311", True),
        ("RuntimeError", "Read error [127.0.0.1]:40311: Connection reset by peer", True),
        ("RuntimeError", "[gloo] Timed out waiting 1800000ms for recv operation to complete", True),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error", True),
        ("DistNetworkError", "failed to recv, got 0 bytes", True),
        ("ConnectionRefusedError", "[Errno 111] Connection refused", True),
        ("RuntimeError", "shape '[2, 3]' is invalid for input of size 5", False),
        ("ValueError", "the words connection closed by peer in another error", False),
        ("", "", False),
    ],
)
def test_what_only_says_that_a_peer_is_gone(kind: str, message: str, lost: bool) -> None:
    assert blame.lost_a_peer(Failure(0, 0, 1.0, "exit 1", kind, message)) is lost


@pytest.mark.parametrize(
    ("in_script", "grouped", "age", "expected"),
    [
        (False, False, 0.1, blame.BEFORE_SCRIPT),
        (False, False, 99.0, blame.BEFORE_SCRIPT),
        (True, False, 0.1, blame.AT_START),
        (True, False, 10.0, blame.LATER),
        (True, True, 0.1, blame.LATER),
    ],
)
def test_how_far(in_script: bool, grouped: bool, age: float, expected: str) -> None:
    assert blame.how_far(in_script, grouped, age) == expected


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([7, 0, 2, 3, 4, 5, 9], "ranks 0, 2-5, 7, 9"),
        ([1, 1, 1], "rank 1"),
    ],
)
def test_ranks(numbers: list[int], text: str) -> None:
    assert ranks(numbers) == text


@pytest.mark.parametrize(
    ("max_restarts", "attempt", "pause", "text"),
    [
        (2, 2, 0.0, "2 of 3"),
        (2, 3, 0.5, "3 of 3, after a pause of 0.5 s"),
        (0, 2, 0.0, "2"),  # a start-up restart of a script that wants recovery: beyond --max-restarts
        (1, 3, 30.0, "3, after a pause of 30 s"),
    ],
)
def test_attempt_name(max_restarts: int, attempt: int, pause: float, text: str) -> None:
    assert attempt_name(Config(2, max_restarts=max_restarts), attempt, pause) == text


ERR = Streams(Std.ERR)
ALL = Streams(Std.ALL)


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (Output(), True),
        (Output(redirects=ALL), False),
        (Output(redirects=ERR), False),
        (Output(redirects=Streams(Std.OUT)), True),
        (Output(redirects=ALL, tee=ERR), True),
        (Output(redirects=Streams(Std.NONE, {1: Std.ALL})), False),
        (Output(redirects=Streams(Std.NONE, {0: Std.ALL})), True),
        (Output(filter=(0,)), False),
        (Output(filter=(0, 1)), True),
        (Output(tee=ERR, stderr_filters=("loss",)), True),
    ],
    ids=str,
)
def test_what_rank_1_wrote_was_shown(output: Output, shown: bool) -> None:
    assert on_console(output, 1, "stderr") is shown
