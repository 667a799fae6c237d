"""The account of a run, event by event: when an incident is open, what it made of the steps, and what all of them cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftrun.control import phases
from ftrun.core.account import OVER, UNHURT, Account, Fact, Incident, Victim
from ftrun.core.shared.moment import AFTER_LOOP, CALL_AFTER, LOOP_END, Moment

BACKWARD = Moment("backward", 7)
COST = {"began_ns": 10 * 10**9, "total_ms": 2000.0, "again_ms": 500.0, "redone": 1}


def after(account: Account, *facts: tuple[float, str, dict[str, Any]]) -> Account:
    return account.then(*(Fact(*fact) for fact in facts))


def phase(t: float, name: str, generation: int = 1) -> tuple[float, str, dict[str, Any]]:
    return t, "phase", {"phase": name, "generation": generation}


def died(t: float, worker: int) -> tuple[float, str, dict[str, Any]]:
    return t, "Died", {"worker": worker, "cause": "SIGKILL", "step": 7, "phase": "backward"}


def said(t: float, what: str) -> tuple[float, str, dict[str, Any]]:
    return t, "Say", {"what": what, "detail": "why"}


@pytest.fixture
def running() -> Account:
    """Two ranks that train since 2 s."""
    publish = {"workers": [0, 1], "replaced": [], "fresh": True, "attempt": 0}
    begun = after(Account(), (0.0, "config", {"wall": 100.0}), (1.0, "Publish", publish), phase(1.0, "STARTING"))
    return after(begun, phase(1.5, "RUNNING"), (1.6, "Protected", {"worker": 0}), (2.0, "Protected", {"worker": 1}))


def test_the_phases_are_the_controllers() -> None:
    interrupted = {*phases.INTERRUPTED} - {*phases.REPAIR_STAGES}
    assert {*OVER} == {*phases.OVER} and {*phases.RunPhase} == {*OVER, *UNHURT, *interrupted, phases.RunPhase.REPAIRING}


def test_training_begins_once_all_are_protected(running: Account) -> None:
    assert (running.training, running.wall, running.holders, running.restarts) == (2.0, 100.0, (0, 1), 0)
    assert after(running, (9.0, "Protected", {"worker": 3}), phase(9.0, "RUNNING", 2)).effective(10.0) is not None


def test_a_repair_from_its_death_to_its_cost(running: Account) -> None:
    open_ = after(running, died(10.0, 1), phase(10.1, "STOPPING", 2))
    assert open_.open is not None and open_.open.victims == (Victim(1, 1, 7, "backward", "SIGKILL"),)
    assert open_.open.stages == (("STOPPING", 10.1),) and open_.lost(11.0) == 1.0
    resumed = after(open_, (10.2, "Publish", {"workers": [0, 4], "replaced": [1]}), phase(11.0, "RUNNING", 2))
    assert resumed.open is not None and resumed.open.stages[-1] == ("FIRST_STEP", 11.0)
    over = after(resumed, said(12.0, "recovered"))
    assert over.open is None and over.since == 10.0, "what it cost is not known yet"
    known = after(over, (12.0, "incident", COST))
    assert known.since is None and known.lost(20.0) == 2.5 and known.redone == 1
    assert known.replaced == ((1, 4),)


def test_who_holds_no_rank_and_who_dies_at_the_end_is_no_victim(running: Account) -> None:
    assert after(running, died(3.0, 5)).open is None
    assert after(running, phase(3.0, "ENDING"), died(3.1, 1)).open is None
    assert after(running, died(3.0, 1), phase(3.0, "ENDING")).since is None


def test_a_restart_is_over_when_the_workers_start(running: Account) -> None:
    begun = running.then(STRUCK)
    again = after(begun, died(3.0, 1), said(3.0, "restarting"), phase(3.0, "RESTARTING", 2))
    assert again.open is not None and again.open.restart and again.open.said == "why" and again.failed_attempts == 1
    assert again.incident is not None and again.incident.restart
    fresh = {"workers": [2, 3], "replaced": [], "fresh": True, "attempt": 1}
    started = after(again, (4.0, "Publish", fresh), phase(4.0, "STARTING", 2))
    assert started.open is None and started.since == 3.0 and started.restarts == 1


def test_an_incident_that_the_end_cuts_off_is_counted_apart(running: Account) -> None:
    cut = after(running, (12.0, "incident", COST), (20.0, "cut off", COST), (20.0, "End", {"code": 3}))
    assert (len(cut.incidents), len(cut.costs), cut.redone, cut.lost_ms, cut.exit_code) == (1, 2, 2, 5000.0, 3)
    assert cut.effective(99.0) == pytest.approx((20 - 2 - 5) / 20), "time after the end does not count"


def test_what_is_no_part_of_the_account_changes_nothing(running: Account) -> None:
    assert after(running, (3.0, "Stage", {}), (3.0, "exit", {}), said(3.0, "died")) == running


# ---- what the board showed ---------------------------------------------------------------------------------------------


def world(generation: int, resume: int, *spares: int, **more: bool) -> Fact:
    """Of two ranks, one of them new."""
    facts = {"generation": generation, "resume": resume, "workers": (0, 4), "replaced": (1,), "spares": spares}
    return Fact(0.0, "published", {"rollback": False, "tail": False, **facts, **more})


def closed(last: int, *begun: Moment, shift: int = 0, epoch: int | None = None, end: int = 0) -> Fact:
    return Fact(0.0, "closed", {"last": last, "begun": begun, "shift": shift, "epoch": epoch, "end": end})


def victim(found: Victim) -> Fact:
    return Fact(0.0, "victim", vars(found))


STRUCK = Fact(0.0, "struck", {"began": 1, "detected": 2})


def incident(account: Account) -> Incident:
    assert account.incident is not None
    return account.incident


def test_nothing_is_seen_of_an_incident_that_is_none(running: Account) -> None:
    assert running.then(closed(6, BACKWARD), world(2, 7), victim(Victim(0, 0, 7, "", ""))) == running


def test_the_first_failure_begins_it_and_the_second_is_another_victim(running: Account) -> None:
    first, second = Victim(0, 0, 7, "backward", "SIGKILL"), Victim(1, 1, 7, "gate", "SIGSEGV")
    seen = incident(running.then(STRUCK, victim(first), Fact(0.0, "struck", {"began": 3, "detected": 4}), victim(second)))
    assert (seen.began, seen.detected, seen.victims) == (1, 2, (first, second))
    assert after(running.then(STRUCK), (0.0, "dropped", {})) == running


@pytest.mark.parametrize(("begun", "redone"), [((), 0), ((BACKWARD,), 1), ((Moment(LOOP_END, 7, None, 7),), 0)])
def test_a_step_that_some_rank_had_begun_is_done_again(running: Account, begun: tuple[Moment, ...], redone: int) -> None:
    stopped = running.then(STRUCK, closed(6, *begun, shift=20, epoch=3, end=40), world(2, 7, 5), world(3, 7, 4))
    seen = incident(stopped)
    assert (seen.last, seen.resume, seen.redone, seen.spares, seen.generation) == (26, 27, redone, (4, 5), 3)
    assert seen.going_on() == Moment("", 27, 3, 40)


def test_a_rollback_does_all_steps_since_the_snapshot_again(running: Account) -> None:
    """Also when the gate is closed once more before: what was reached then counts."""
    stopped = running.then(STRUCK, closed(6, BACKWARD, epoch=3), world(2, 7))
    seen = incident(stopped.then(closed(6, epoch=3), world(3, 5, rollback=True)))
    assert (seen.redone, seen.resume, seen.rollback, seen.reached) == (3, 5, True, 8)
    assert seen.going_on().epoch is None


@pytest.mark.parametrize(
    ("last", "begun", "then"),
    [
        (5, {"backward"}, ""),
        (6, set(), LOOP_END),
        (6, {CALL_AFTER, LOOP_END}, CALL_AFTER),
        (6, {AFTER_LOOP}, AFTER_LOOP),
        (7, set(), AFTER_LOOP),
    ],
)
def test_where_all_go_on_at_the_end_of_a_loop_of_seven(running: Account, last: int, begun: set[str], then: str) -> None:
    moments = tuple(Moment(name, 7) for name in begun)
    assert incident(running.then(STRUCK, closed(last, *moments, end=7))).then == then


def test_in_the_tail_nobody_is_stopped(running: Account) -> None:
    killed = Victim(1, 1, 40, AFTER_LOOP, "SIGKILL", epoch=2, end=40)
    seen = incident(running.then(STRUCK, victim(killed), world(2, -1, 4, tail=True)))
    assert seen == replace(
        Incident(1, 2, (killed,)), generation=2, survivors=1, then=AFTER_LOOP, resume=40, last=39, epoch=2, end=40, spares=(4,)
    )
