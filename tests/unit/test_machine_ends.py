"""What the controller does at the end of a run: ranks that have left the loop, the last one, signals."""

from __future__ import annotations

from ftrun.control import events as ev
from ftrun.control.machine import RunPhase
from tests.unit.driver import Driver, in_incident, in_restart, kinds, only, says


def test_a_death_after_the_loop_stops_nobody() -> None:
    run = Driver(3, 1).up()
    for rank in range(3):
        run.send(ev.LoopDone(0.0, rank))
    run.send(ev.Finished(0.0, 0))
    actions = run.kill(1, loop_done=True)
    assert kinds(actions) == ["Fence", "Say", "Publish"]
    assert only(actions, ev.Publish) == ev.Publish(2, -1, (0, 3, 2), (1,), (1,), tail=True)
    assert run.at(RunPhase.RUNNING)
    # Its replacement dies before it has the state, and another rank with it.
    published = only(run.kill(3), ev.Publish)
    assert (published.workers, published.replaced, published.lost) == ((0, 4, 2), (1,), (1,))
    published = only(run.kill(2, loop_done=True), ev.Publish)
    assert (published.generation, published.replaced, published.lost) == (4, (1, 2), (1, 2))
    run.send(ev.Stage(0.0, 4, 3, "restored"))
    assert says(run.send(ev.Stage(0.0, 5, 4, "restored"))) == ["recovered"]
    run.send(ev.Finished(0.0, 4))
    assert only(run.send(ev.Finished(0.0, 5)), ev.End).code == 0


def test_a_replacement_after_the_loop_that_never_gets_there_is_replaced_too() -> None:
    run = Driver(3, 1, max_replacements=2).up()
    for rank in range(3):
        run.send(ev.LoopDone(0.0, rank))
    run.kill(1, loop_done=True)
    actions = run.stall()
    assert says(actions) == ["died"] and only(actions, ev.Fence).worker == 3
    assert only(actions, ev.Publish).workers == (0, 5, 2)
    assert run.send(ev.Stalled(0.0, 2, (3,), 30.0)) == (), "that one is over"
    run.send(ev.Stage(0.0, 5, 3, "restored"))
    assert run.stall(5) == (), "it is there: how long the script's tail takes is its own business"
    assert run.at(RunPhase.RUNNING)


def test_after_a_tail_the_gate_is_closed_into_the_next_generation() -> None:
    run = Driver(2, 0).up()
    run.kill(0, loop_done=True)
    assert only(run.kill(1), ev.CloseGate).generation == 3
    assert only(run.close(), ev.Publish).replaced == (0, 1)


def test_a_rank_in_its_loop_cannot_come_back_after_another_has_finished() -> None:
    run = Driver().up()
    run.send(ev.Finished(0.0, 0))
    actions = run.kill(1)
    assert says(actions) == ["died", "restarting"]  # the script wants recovery: a start-up restart
    run = Driver(max_replacements=0).up()
    run.send(ev.Finished(0.0, 0))
    assert says(run.send(ev.Raised(0.0, 1, 5, "ValueError", 1))) == ["cannot_recover"]
    assert run.state.exit_code == 1


def test_a_second_signal_kills_those_that_leave_too() -> None:
    run = in_restart()
    run.send(ev.Signalled(0.0, 2))
    assert ev.Fence(1) in run.send(ev.Signalled(0.0, 2))


def test_the_run_is_done_when_every_rank_has_finished() -> None:
    run = Driver().begin()
    run.send(ev.Finished(0.0, 1))
    assert run.at(RunPhase.STARTING)
    actions = run.send(ev.Finished(0.0, 0))
    assert actions == (ev.Say("done"), ev.Terminate("done"), ev.End(0, "done"))
    assert run.kill(1) == ()


def test_signals_end_the_run() -> None:
    run = Driver().up()
    actions = run.send(ev.Signalled(0.0, 2))
    assert kinds(actions) == ["Say", "Terminate", "End"]
    assert only(actions, ev.End).code == 130
    assert run.kill(0) == ()
    actions = run.send(ev.Signalled(0.0, 15))
    assert kinds(actions) == ["Fence", "Fence", "Fence", "End"]
    assert only(actions, ev.End).code == 130
    assert run.at(RunPhase.ENDED)


def test_a_replacement_that_leaves_before_the_loop_is_dead_whatever_its_exit_code() -> None:
    """The others wait for it: they cannot meet without its rank."""
    run = in_incident(2)
    held = run.holder(1)
    actions = run.send(ev.Finished(0.0, held, through=False))
    assert says(actions) == ["died"] and ev.Fence(held) in actions
    assert run.at(RunPhase.STOPPING) and run.state.replaced == (1,)
    run.close()
    actions = run.send(ev.Finished(0.0, run.holder(1), through=False))
    assert says(actions) == ["died", "failed_again"] and run.state.exit_code == 1


def test_a_replacement_may_leave_after_a_loop_that_was_over() -> None:
    run = in_incident(2)
    assert run.send(ev.Finished(0.0, run.holder(1))) == ()
    run = Driver(2, 1).up()
    run.send(ev.LoopDone(0.0, 0))
    run.kill(1, loop_done=True)
    assert "died" not in says(run.send(ev.Finished(0.0, run.holder(1), through=False))), "after the loop nobody waits for it"
