"""The controller of one node among several: it stops and starts; what ends the run is decided by all nodes."""

from __future__ import annotations

import pytest

from ftrun.control import events as ev
from ftrun.control.machine import RunPhase
from tests.unit.driver import Driver


def node(**options: object) -> Driver:
    return Driver(2, 0, shared=True, **options).up(protect=False)


def whats(actions: tuple[ev.Action, ...]) -> list[str]:
    return [a.what for a in actions if isinstance(a, ev.Say)]


def test_a_death_is_never_the_end_by_itself() -> None:
    run = node(max_restarts=0)
    for _ in range(5):
        actions = run.send(ev.Died(run.t, run.holder(1), "exit 1", 1))
        assert whats(actions) == ["died", "world_stopped"]
        assert ev.StartService("store") in actions
        assert run.at(RunPhase.RESTARTING)
        run.leave()
        run.t += 100.0
        run.send(ev.Expired(run.t, "backoff", run.state.generation))
        run.send(ev.ServiceReady(run.t, "store"))
        assert run.at(RunPhase.STARTING)
        run.raise_world(protect=False)
    assert run.state.restarts == 0


def test_an_error_of_ours_still_ends_the_run() -> None:
    run = node(max_restarts=5)
    actions = run.send(ev.Died(run.t, run.holder(1), "exit 1", 1, final=2))
    assert isinstance(actions[-1], ev.End) and actions[-1].code == 2


def test_another_nodes_failure_stops_everyone() -> None:
    run = node()
    cells = [run.holder(0), run.holder(1)]
    actions = run.send(ev.PeerFailed(run.t, "node 1 is gone", 1))
    assert [a.worker for a in actions if isinstance(a, ev.Dismiss)] == cells
    assert whats(actions) == ["peer_failed"] and ev.StartService("store") in actions
    assert run.send(ev.PeerFailed(run.t, "node 1 is gone", 1)) == ()
    run.leave()
    run.send(ev.ServiceReady(run.t, "store"))
    assert run.at(RunPhase.STARTING)


def test_a_world_that_breaks_during_the_pause_is_not_started() -> None:
    run = node()
    for _ in range(3):
        run.send(ev.PeerFailed(run.t, "node 1 is gone", 1))
        run.leave()
        run.send(ev.ServiceReady(run.t, "store"))
        if run.at(RunPhase.RESTARTING):
            break
    assert run.at(RunPhase.RESTARTING)
    assert run.send(ev.PeerFailed(run.t, "node 1 is gone", 1)) == (ev.StartService("store"),)
    run.send(ev.Expired(run.t, "backoff", run.state.generation))
    assert run.at(RunPhase.RESTARTING)
    run.send(ev.ServiceReady(run.t, "store"))
    assert run.at(RunPhase.STARTING)


def test_a_node_that_is_done_waits_for_the_others() -> None:
    run = node()
    assert run.send(ev.Finished(run.t, run.holder(0))) == ()
    assert run.send(ev.Finished(run.t, run.holder(1))) == (ev.NodeDone(),)
    assert run.at(RunPhase.RUNNING)
    actions = run.send(ev.WorldEnded(run.t, 0, "done"))
    assert whats(actions) == ["done"] and actions[-1] == ev.End(0, "done")


def test_a_node_that_is_done_starts_again_with_the_others() -> None:
    run = node()
    for rank in (0, 1):
        run.send(ev.Finished(run.t, run.holder(rank)))
    run.send(ev.PeerFailed(run.t, "rank 3 failed", 1, 3))
    run.send(ev.ServiceReady(run.t, "store"))
    assert run.at(RunPhase.STARTING) and not any(w.finished for w in run.state.workers)


def test_the_end_on_another_node() -> None:
    run = node()
    actions = run.send(ev.WorldEnded(run.t, 1, "rank 3 on node 1 failed: exit 7"))
    assert whats(actions) == ["world_ended"] and actions[-1] == ev.End(1, "rank 3 on node 1 failed: exit 7")


def test_nobody_came() -> None:
    run = Driver(2, 0, shared=True)
    assert run.send(ev.WorldEnded(0.0, 1, "only 1 of 2 nodes came"))[-1] == ev.End(1, "only 1 of 2 nodes came")


@pytest.mark.parametrize("started", [True, False])
def test_the_store_of_the_world_dies(started: bool) -> None:
    run = node() if started else Driver(2, 0, shared=True).begin()
    actions = run.send(ev.ServiceDied(run.t, "store"))
    assert run.at(RunPhase.RESTARTING) and ev.StartService("store") in actions
    assert run.send(ev.ServiceDied(run.t, "store"))[-1] == ev.StartService("store")
