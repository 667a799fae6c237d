"""Drives the controller in tests: sends events, keeps the state, the actions and a journal in the launcher's format."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from ftrun.control import events as ev
from ftrun.control import incidents
from ftrun.control import machine as m
from ftrun.host.account.messages import WORDS

A = TypeVar("A", bound=ev.Action)
STAGES = tuple(m.STAGES)
# every key of a Say for which the launcher has words, in a template or in its own code
SAID = WORDS.keys() | {"died", "raised", "raised_again", "recovered", "spare_unneeded", "signalled", "done", "inexact"}


class Driver:
    """A run of `nproc` ranks; `t` only moves when a test moves it."""

    def __init__(
        self,
        nproc: int = 2,
        spares: int = 1,
        *,
        devices: tuple[str, ...] = (),
        quarantined: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self.config = m.Config(nproc, spares, **options)
        self.state = m.initial(self.config)
        self.devices = devices
        self.quarantined = quarantined
        self.t = 0.0
        self.hits: set[tuple[m.RunPhase, type[ev.Event]]] = set()
        self.told: set[tuple[str, type[ev.Event]]] = set()  # the same by what people are told of the phase
        self.orders: list[ev.Action] = []
        self.journal = [json.dumps({"t": 0.0, "wall": 0.0, "config": self.config.to_json()})]

    def send(self, event: ev.Event) -> tuple[ev.Action, ...]:
        """Hand one event to the machine; its actions."""
        self.journal.append(json.dumps({"t": self.t, "event": event.to_json()}))
        self.hits.add((self.state.phase, type(event)))
        self.told.add((self.state.told, type(event)))
        self.state, actions = m.advance(self.config, self.state, event)
        answer = {"actions": [a.to_json() for a in actions], "phase": self.state.told}
        self.journal.append(json.dumps({"t": self.t, **answer, "generation": self.state.generation}))
        self.orders += actions
        return actions

    # ---- shorthands ------------------------------------------------------------------------------------------------

    def at(self, phase: m.RunPhase) -> bool:
        return self.state.phase is phase

    def holder(self, rank: int) -> int:
        cell = self.state.holder[rank]
        assert cell is not None
        return cell

    def begin(self) -> Driver:
        if self.devices:
            self.send(ev.Devices(self.t, self.devices, self.quarantined))
        self.send(ev.Begin(self.t))
        return self

    def up(self, *, protect: bool = True) -> Driver:
        """Begin, every rank started (and protected), spares parked."""
        self.begin()
        self.raise_world(protect=protect)
        return self

    def raise_world(self, *, protect: bool = True) -> None:
        for worker in self.state.workers:
            self.send(ev.Started(self.t, worker.cell))
            if worker.rank is None:
                self.send(ev.Parked(self.t, worker.cell))
            elif protect:
                self.send(ev.Grouped(self.t, worker.cell))
                self.send(ev.Protected(self.t, worker.cell))

    def kill(self, worker: int, **facts: Any) -> tuple[ev.Action, ...]:
        facts = {"cause": "SIGKILL", "code": 137, "step": 5, **facts}
        return self.send(ev.Died(self.t, worker, **facts))

    def fault(self, rank: int, code: int = 0, fault: str = "xid", **facts: Any) -> tuple[ev.Action, ...]:
        """The device of a rank fails; the rank's worker uses it."""
        device = self.state.device[rank]
        return self.send(ev.DeviceFault(self.t, fault, (device,), (self.holder(rank),), code=code, **facts))

    def leave(self) -> None:
        """Everyone who was told to end does."""
        for cell in self.state.leaving:
            assert kinds(self.kill(cell, cause="SIGTERM", code=143))[0] == "Fence"

    def close(self, last: int = 4) -> tuple[ev.Action, ...]:
        return self.send(ev.GateClosed(self.t, self.state.generation, last))

    def answer(self, stage: str, ranks: tuple[int, ...] | None = None) -> tuple[ev.Action, ...]:
        """These ranks (all) answer one stage of the present generation."""
        found: list[ev.Action] = []
        for rank in range(self.config.nproc) if ranks is None else ranks:
            found += self.send(ev.Stage(self.t, self.holder(rank), self.state.generation, stage))
        return tuple(found)

    def recover(self, last: int = 4) -> None:
        """From STOPPING to the end of the incident."""
        self.close(last)
        for stage in STAGES:
            self.answer(stage)
        assert self.at(m.RunPhase.RUNNING)

    def stall(self, *workers: int) -> tuple[ev.Action, ...]:
        """These workers make no progress in the repair, none given: all those that it waits for."""
        cells = workers or tuple(w.cell for w in incidents.awaited(self.state))
        return self.send(ev.Stalled(self.t, self.state.generation, cells, 30.0, "train.py:7"))

    def expire(self, name: str, generation: int | None = None) -> tuple[ev.Action, ...]:
        return self.send(ev.Expired(self.t, name, self.state.generation if generation is None else generation))


def only(actions: tuple[ev.Action, ...], kind: type[A]) -> A:
    """The one action of this kind."""
    found = [a for a in actions if isinstance(a, kind)]
    assert len(found) == 1, actions
    return found[0]


def says(actions: tuple[ev.Action, ...]) -> list[str]:
    """Keys of everything said, each of them known."""
    found = [a.what for a in actions if isinstance(a, ev.Say)]
    assert set(found) <= SAID
    return found


def kinds(actions: tuple[ev.Action, ...]) -> list[str]:
    return [type(a).__name__ for a in actions]


def in_incident(stages: int, **options: Any) -> Driver:
    """A run whose rank 1 died, `stages` stages into its recovery."""
    run = Driver(**options).up()
    run.kill(1)
    run.close()
    for stage in STAGES[:stages]:
        run.answer(stage, (0,) if stage in ("stopped", "cleaned") else None)
    return run


def in_restart() -> Driver:
    """A run that starts anew."""
    run = Driver(max_restarts=1).up(protect=False)
    run.kill(0)
    return run
