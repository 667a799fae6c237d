"""What the controller does about exceptions, budgets and reports, and what the policy may change."""

from __future__ import annotations

from typing import Any

import pytest

from ftrun.control import events as ev
from ftrun.control.machine import RunPhase
from ftrun.control.policy import Overrides
from tests.unit.driver import Driver, kinds, only, says


def test_an_exception_in_a_body_is_retried_once() -> None:
    run = Driver(3, 0).up()
    actions = run.send(ev.Raised(0.0, 0, 5, "ValueError", 1))
    assert kinds(actions) == ["Say", "CloseGate", "Deadline"]
    assert run.send(ev.Raised(0.0, 1, 5, "ValueError", 1)) == ()  # the same one, of the same generation
    run.recover()
    assert ev.Publish(2, 5, (0, 1, 2), (), ()) in run.orders
    assert kinds(run.send(ev.Raised(0.0, 2, 5, "KeyError", 2))) == ["Say", "CloseGate", "Deadline"]
    run.recover()
    actions = run.send(ev.Raised(0.0, 1, 5, "ValueError", 3))
    assert says(actions) == ["raised_again"]
    assert only(actions, ev.End).code == 1


def test_the_same_exception_at_another_step_is_another_one() -> None:
    run = Driver().up()
    run.send(ev.Raised(0.0, 0, 5, "ValueError", 1))
    run.recover()
    assert says(run.send(ev.Raised(0.0, 0, 7, "ValueError"))) == ["raised"]
    run.recover(6)
    assert says(run.send(ev.Raised(0.0, 0, 7, "ValueError"))) == ["raised_again"]


def test_the_same_exception_on_another_rank_is_counted() -> None:
    """The kernel may end the loader process of one rank, and of the next while the step is done again; one of all ranks is bounded."""
    run = Driver(3, 0, max_replacements=1).up()
    for rank, step in ((0, 5), (1, 5), (2, 6), (0, 40), (1, 60)):
        assert says(run.send(ev.Raised(0.0, rank, step, "RuntimeError"))) == ["raised"]
        run.recover(step - 1)
    actions = run.send(ev.Raised(0.0, 2, 60, "RuntimeError"))
    assert says(actions) == ["raised", "too_many_replacements"] and only(actions, ev.End).code == 75


def test_an_exception_that_only_a_reset_hides_is_the_programs() -> None:
    """DDP's about unused parameters, say: the step done again passes, and the next one raises it once more."""
    run = Driver().up()
    run.send(ev.Raised(0.0, 0, 5, "RuntimeError", 1))
    run.recover()
    assert says(run.send(ev.Raised(0.0, 0, 6, "RuntimeError"))) == ["raised_again"]


def test_an_exception_after_the_update_ends_the_run_or_restarts_all() -> None:
    """The step counts, and what the body had still to do would never be done."""
    for restarts, wanted in ((0, "failed"), (1, "restarting")):
        run = Driver(2, 0, max_restarts=restarts).up()
        assert wanted in says(
            run.kill(0, signature="ValueError", code=1, fault="exception", outside="after the update")
        )


TWICE = pytest.mark.parametrize("facts", [{"signature": "ValueError", "code": 1}, {"code": 3, "cause": "exit 3"}], ids=str)


@TWICE
@pytest.mark.parametrize(("rank", "place"), [(0, {}), (1, {"step": 6}), (1, {"gate": 19})], ids=str)
def test_the_same_failure_of_another_rank_or_in_another_step_is_counted(
    facts: dict[str, Any], rank: int, place: dict[str, int]
) -> None:
    """An index comes again in another epoch, where the gate number tells the steps apart."""
    run = Driver(2, 0, max_replacements=2).up()
    run.kill(1, **facts)
    run.recover()
    assert says(run.kill(run.holder(rank), **facts, **place)) == ["died"]
    run.recover()
    for _ in range(run.config.max_replacements - 1 - rank):
        run.kill(run.holder(rank))
        run.recover()
    actions = run.kill(run.holder(rank), **{**facts, "step": 300})
    assert says(actions) == ["died", "too_many_replacements"] and only(actions, ev.End).code == 75


@TWICE
def test_the_same_failure_twice_is_the_programs(facts: dict[str, Any]) -> None:
    run = Driver(2, 0).up()
    assert says(run.kill(0, **facts)) == ["died"]
    run.kill(1, **facts)  # at the same time: counts once
    run.recover()
    actions = run.kill(run.holder(1), **facts)
    assert says(actions) == ["died", "failed_again"]
    assert only(actions, ev.End).code == 1


def test_too_many_replacements_within_the_window() -> None:
    run = Driver(2, 0, max_replacements=2, replacement_window=100.0).up()
    for _ in range(2):
        run.kill(run.holder(0))
        run.recover()
    run.kill(run.holder(1))
    run.recover()
    run.t = 50.0
    actions = run.kill(run.holder(0))
    assert says(actions) == ["died", "too_many_replacements"]
    assert only(actions, ev.End).code == 75
    assert run.at(RunPhase.ENDING)


@pytest.mark.parametrize("fault", ["drain", "gave-way", "cut-off"])
def test_it_is_no_failure(fault: str) -> None:
    run = Driver(2, 1, max_replacements=0).up()
    for _ in range(3):
        assert says(run.kill(run.holder(1), cause="SIGKILL", fault=fault)) == ["died"]
        run.recover()
    assert run.at(RunPhase.RUNNING)
    assert says(run.kill(run.holder(1))) == ["died", "too_many_replacements"]


def test_old_replacements_are_forgotten() -> None:
    run = Driver(2, 0, max_replacements=2, replacement_window=100.0).up()
    for _ in range(9):
        run.kill(run.holder(0))
        run.recover()
        run.t += 60.0
    assert run.at(RunPhase.RUNNING)


def test_an_exception_heard_only_after_its_recovery_starts_no_new_one() -> None:
    run = Driver().up()
    run.kill(1)
    run.recover()
    assert run.send(ev.Raised(0.0, 0, 5, "ValueError", 1)) == ()
    assert run.at(RunPhase.RUNNING)


def test_a_report_changes_nothing_and_names_the_rank() -> None:
    run = Driver().up()
    before = run.state
    actions = run.send(ev.Noticed(0.0, run.holder(1), "straggler", "slow"))
    assert actions == (ev.Say("noticed", run.holder(1), 1, "slow"),)
    assert run.send(ev.Noticed(0.0, None, "disk-full", "no room")) == (ev.Say("noticed", None, None, "no room"),)
    assert run.state == before


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("report", ["noticed"]),
        ("replace", ["died"]),
        ("stop", ["stopped_by_policy"]),
        ("roll-back", ["died", "restarting"]),
    ],
)
def test_the_policy_may_do_more_about_a_report(response: str, expected: list[str]) -> None:
    run = Driver(policy=Overrides((("straggler", response),)), max_restarts=1).up()
    assert says(run.send(ev.Noticed(0.0, run.holder(1), "straggler", "slow"))) == expected
    run = Driver(policy=Overrides((("disk-full", "stop"),))).up()
    assert says(run.send(ev.Noticed(0.0, None, "disk-full", "no room"))) == ["stopped_by_policy"]


@pytest.mark.parametrize(
    ("response", "expected"), [("redo", ["raised"]), ("replace", ["died"]), ("stop", ["stopped_by_policy"])]
)
def test_poisoned_gradients_have_a_row_of_their_own(response: str, expected: list[str]) -> None:
    run = Driver(policy=Overrides((("nonfinite", response),))).up()
    raised = ev.Raised(0.0, run.holder(1), 5, "NonFiniteError at train.py:3", 1, "nonfinite", "not finite")
    assert says(run.send(raised)) == expected
    run = Driver(policy=Overrides((("nonfinite", response),))).up()
    assert says(run.send(ev.Raised(0.0, run.holder(1), 5, "ValueError at train.py:3", 1))) == ["raised"]


def test_an_inexact_repair_ends_the_run_before_its_gate_opens_when_that_is_known() -> None:
    """All ranks have said by then what they know of it."""
    run = Driver(3, inexact_stops=True).up()
    run.kill(1)
    run.close()
    for stage in ("stopped", "cleaned", "reset"):
        run.answer(stage)
    assert run.send(ev.Doubted(0.0, run.holder(1), "buffers unknown")) == ()
    assert run.answer("restored", (0, 1)) == ()
    actions = run.answer("restored", (2,))
    assert kinds(actions) == ["Say", "Terminate", "End"] and says(actions) == ["inexact"]
    assert not only(actions, ev.Terminate).failed, "nobody is waited for while training goes on"
    assert only(actions, ev.End).code == 75


def test_what_is_found_out_later_ends_a_run_with_repairs_then() -> None:
    run = Driver(inexact_stops=True).up()
    run.kill(1)
    run.recover()
    actions = run.send(ev.Doubted(0.0, run.holder(0), "replicas differ"))
    assert says(actions) == ["inexact"] and only(actions, ev.End).code == 75


def test_what_was_known_before_the_first_repair_ends_the_run_in_it() -> None:
    run = Driver(inexact_stops=True).up()
    assert run.send(ev.Doubted(0.0, 0, "1 not kept")) == ()
    assert kinds(run.kill(1))[-2:] == ["CloseGate", "Deadline"]
    run.close()
    for stage in ("stopped", "cleaned", "reset"):
        run.answer(stage)
    assert says(run.answer("restored")) == ["inexact"]


def test_a_death_after_the_loop_counts_as_well() -> None:
    run = Driver(inexact_stops=True).up()
    run.send(ev.Doubted(0.0, 0, "1 not kept"))
    for rank in range(2):
        run.send(ev.LoopDone(0.0, run.holder(rank)))
    assert says(run.kill(run.holder(1), loop_done=True)) == ["died", "inexact"]


def test_an_exact_repair_goes_on_and_so_does_an_inexact_one_that_nobody_asked_to_stop() -> None:
    exact = Driver(inexact_stops=True).up()
    exact.kill(1)
    exact.recover()
    inexact = Driver().up()
    inexact.send(ev.Doubted(0.0, 0, "1 not kept"))
    inexact.kill(1)
    inexact.recover()


def test_a_start_from_the_scripts_checkpoint_is_no_repair() -> None:
    """And what was found out in the attempt before says nothing of this one."""
    run = Driver(max_restarts=1, inexact_stops=True).up()
    run.send(ev.Doubted(0.0, 0, "1 not kept"))
    assert "restarting" in says(run.kill(1, outside="after the update", fault="exception", signature="E"))
    run.leave()
    run.send(ev.ServiceReady(0.0, "store"))
    run.raise_world()
    run.kill(run.holder(1))
    run.recover()
