"""The controller against a simulated world that does its worst: any order of answers, faults at any time, also of our
own processes. Invariants hold after each event, and once the faults stop every run ends."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ftrun.control import events as ev
from tests.unit.driver import Driver
from tests.unit.simulation import SERVICES, Simulation

CODES = [137, 137, 137, 139, 1, 3, None]
JUMPS = [0, 0, 0, 1, 5]
XIDS = [13, 31, 43, 45, 48, 79, 74, 94, 119, 154, 999]
UUIDS = tuple(f"GPU-{letter}" for letter in "abcdefg")


class World(Simulation, RuleBasedStateMachine):
    """Hypothesis picks what happens next, and makes a failing story short."""

    @initialize(
        nproc=st.integers(1, 4),
        spares=st.integers(0, 2),
        restarts=st.integers(0, 2),
        replacements=st.sampled_from([0, 3, 30, 30]),
        warm=st.sampled_from([True, True, False]),
        devices=st.sampled_from([0, 1, 4, 6, 7]),
        wait=st.booleans(),
    )
    def begin(
        self, nproc: int, spares: int, restarts: int, replacements: int, warm: bool, devices: int, wait: bool
    ) -> None:
        options = {"max_restarts": restarts, "max_replacements": replacements, "wait_for_device": wait}
        self.start(Driver(nproc, spares, devices=UUIDS[:devices], **options), warm=warm)

    @precondition(lambda self: self.walking())
    @rule(data=st.data(), jump=st.sampled_from(JUMPS))
    def a_worker_goes_on(self, data: st.DataObject, jump: int) -> None:
        self.walk(data.draw(st.sampled_from(self.walking())), jump)

    @precondition(lambda self: self.walking())
    @rule()
    def all_workers_go_on(self) -> None:
        self.everyone_walks()

    @precondition(lambda self: self.staying())
    @rule(data=st.data(), everyone=st.integers(0, 3))
    def a_worker_may_leave(self, data: st.DataObject, everyone: int) -> None:
        """Its loop, or after that its script."""
        staying = self.staying()
        for process in staying if everyone == 0 else [data.draw(st.sampled_from(staying))]:
            process.leaving = True

    @precondition(lambda self: self.owed)
    @rule(data=st.data())
    def the_gate_is_closed(self, data: st.DataObject) -> None:
        self.answer_gate(data.draw(st.integers(0, len(self.owed) - 1)))

    @precondition(lambda self: self.over is None and self.alive())
    @rule(data=st.data(), code=st.sampled_from(CODES), name=st.integers(0, 9))
    def a_worker_dies(self, data: st.DataObject, code: int | None, name: int) -> None:
        process = data.draw(st.sampled_from(self.alive()))
        self.die(process, code, f"ValueError {name}" if code == 1 and name < 7 else "")

    @precondition(lambda self: self.looping())
    @rule(data=st.data())
    def a_worker_begins_to_die(self, data: st.DataObject) -> None:
        self.begin_to_die(data.draw(st.sampled_from(self.looping())))

    @precondition(lambda self: self.dying())
    @rule(data=st.data(), code=st.sampled_from(CODES))
    def an_exit_code_shows(self, data: st.DataObject, code: int | None) -> None:
        self.die(data.draw(st.sampled_from(self.dying())), code)

    @precondition(lambda self: self.over is None and self.run.state.armed and self.alive())
    @rule(data=st.data(), count=st.integers(1, 3), between=st.integers(0, 6))
    def machines_fail(self, data: st.DataObject, count: int, between: int) -> None:
        """Some deaths by a signal with some progress after each: faults in every state of an incident."""
        for _ in range(count):
            if self.over is not None or not self.alive():
                break
            self.die(data.draw(st.sampled_from(self.alive())))
            for _ in range(between):
                if self.owed:
                    self.answer_gate(len(self.owed) - 1)
                self.everyone_walks()

    @precondition(lambda self: self.looping())
    @rule(data=st.data(), kind=st.integers(0, 3), known=st.booleans())
    def a_body_raises(self, data: st.DataObject, kind: int, known: bool) -> None:
        self.raise_in(data.draw(st.sampled_from(self.looping())), f"E{kind}", known=known)

    @precondition(lambda self: self.connecting())
    @rule(data=st.data())
    def a_rank_cannot_connect(self, data: st.DataObject) -> None:
        self.cut_off(data.draw(st.sampled_from(self.connecting())))

    @rule(ahead=st.integers(0, 2))
    def everybody_waits(self, ahead: int) -> None:
        self.send(ev.Stuck(self.run.t, self.last + 1 + ahead, max(1, self.gate), "allreduce"))

    @precondition(lambda self: self.over is None and self.run.devices)
    @rule(data=st.data(), code=st.sampled_from(XIDS), recovery=st.sampled_from([-1, 0, 0, 0, 1, 5]), used=st.booleans())
    def a_device_fails(self, data: st.DataObject, code: int, recovery: int, used: bool) -> None:
        fault = data.draw(st.sampled_from(["xid", "xid", "xid", "gpu-lost", "ecc"]))
        self.fail_device(data.draw(st.sampled_from(self.run.devices)), fault, code, recovery, used=used)

    @precondition(lambda self: self.probes)
    @rule(ok=st.booleans())
    def a_probe_ends(self, ok: bool) -> None:
        self.answer_probe(ok)

    @precondition(lambda self: self.quarantine and self.over is None)
    @rule(data=st.data())
    def a_device_is_mended(self, data: st.DataObject) -> None:
        self.heal(data.draw(st.sampled_from(sorted(self.quarantine))))

    @precondition(lambda self: self.deadlines)
    @rule(data=st.data())
    def a_deadline_passes(self, data: st.DataObject) -> None:
        self.expire(data.draw(st.sampled_from(sorted(self.deadlines))))

    @precondition(lambda self: self.waited_for())
    @rule(chance=st.integers(0, 3))
    def a_repair_stands_still(self, chance: int) -> None:
        if not chance:
            self.stall()

    @precondition(lambda self: self.published is not None and self.published.replaced)
    @rule(data=st.data(), chance=st.integers(0, 4), back=st.sampled_from([None, 0, 1, 3]))
    def a_rank_cannot_be_restored(self, data: st.DataObject, chance: int, back: int | None) -> None:
        assert self.published is not None
        rank = data.draw(st.sampled_from(self.published.replaced))
        if chance == 0:
            self.refuse(rank, back)

    @precondition(lambda self: self.over is None)
    @rule(service=st.sampled_from(SERVICES))
    def a_service_dies(self, service: str) -> None:
        self.kill_service(service)

    @precondition(lambda self: self.starting)
    @rule()
    def a_service_is_ready(self) -> None:
        self.service_ready()

    @rule(seconds=st.sampled_from([0.1, 10.0, 100.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.run.t += seconds

    @rule(data=st.data())
    def an_old_event_comes_again(self, data: st.DataObject) -> None:
        self.again(data.draw(st.sampled_from(self.old)))

    @rule(chance=st.integers(0, 30))
    def a_signal(self, chance: int) -> None:
        if chance == 0:
            self.send(ev.Signalled(self.run.t, 15))

    @invariant()
    def check(self) -> None:
        self.the_state_fits_the_world()
        self.somebody_is_waited_for()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.finish()


World.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


TestWorld = World.TestCase


class Longer(World):
    """The same rules, more stories."""


Longer.TestCase.settings = settings(World.TestCase.settings, max_examples=150)
TestMoreWorlds = pytest.mark.slow(Longer.TestCase)


def _story(seed: int) -> Simulation:
    """A long run with faults picked by `seed`, most of them while an incident is going on."""
    pick = random.Random(seed)
    world = Simulation()
    options = {
        "max_restarts": pick.choice([0, 2]),
        "max_replacements": pick.choice([2, 50, 50]),
        "devices": UUIDS[: seed % 8],
        "wait_for_device": seed % 16 > 8,
    }
    world.start(Driver(pick.randint(1, 4), pick.randint(0, 2), **options), warm=pick.random() < 0.9)
    for _ in range(pick.choice([30, 120])):
        if world.over is not None:
            break
        roll = pick.random()
        if world.run.devices and pick.random() < 0.02:
            device, code = pick.choice(world.run.devices), pick.choice(XIDS)
            world.fail_device(device, pick.choice(["xid", "xid", "xid", "ecc"]), code, pick.choice([-1, 0, 0, 0, 1]))
        elif world.dying() and pick.random() < 0.3:
            world.die(pick.choice(world.dying()), pick.choice(CODES))
        elif world.probes and pick.random() < 0.1:
            world.answer_probe(pick.random() < 0.7)
        elif roll < 0.70 and world.walking():
            world.walk(pick.choice(world.walking()), pick.choice(JUMPS))
        elif roll < 0.80 and world.owed:
            world.answer_gate(pick.randrange(len(world.owed)))
        elif roll < 0.90 and world.starting:
            world.service_ready()
        elif 0.9 <= roll < 0.935 and world.looping():
            world.begin_to_die(pick.choice(world.looping()))
        elif roll < 0.945 and world.alive():
            world.die(pick.choice(world.alive()))
        elif roll < 0.95 and world.alive():
            world.die(pick.choice(world.alive()), pick.choice(CODES), pick.choice(["", f"E{seed % 7}{roll}"]))
        elif roll < 0.963 and world.looping():
            world.raise_in(pick.choice(world.looping()), f"E{pick.randrange(2)}", known=pick.random() < 0.8)
        elif roll < 0.965 and world.connecting():
            world.cut_off(pick.choice(world.connecting()))
        elif roll < 0.967 and world.deadlines:
            world.expire(pick.choice(sorted(world.deadlines)))
        elif roll < 0.969 and world.waited_for():
            world.stall()
        elif roll < 0.97 and world.published is not None and world.published.replaced:
            if pick.random() < 0.1:
                world.refuse(pick.choice(world.published.replaced), pick.choice([None, 0, 2]))
        elif roll < 0.98 and world.staying():
            pick.choice(world.staying()).leaving = True
        elif roll < 0.985:
            world.kill_service(pick.choice(SERVICES))
        elif roll < 0.99:
            world.run.t += pick.choice([0.1, 10.0, 4000.0])
        else:
            world.again(pick.choice(world.old))
        world.the_state_fits_the_world()
        world.somebody_is_waited_for()
    world.finish()
    return world


@pytest.mark.slow
def test_long_stories_of_faults_end() -> None:
    seen: Counter[str] = Counter()
    for seed in range(800):
        try:
            world = _story(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        orders = world.run.orders
        seen[f"code {world.over}"] += 1
        seen["incidents"] += sum(isinstance(a, ev.CloseGate) for a in orders)
        seen["tails"] += sum(isinstance(a, ev.Publish) and a.tail for a in orders)
        seen["restarts"] += sum(isinstance(a, ev.ResetGate) for a in orders) - 1
        seen.update(a.what for a in orders if isinstance(a, ev.Say))
        seen.update(f"{kind.__name__} in {phase}" for phase, kind in world.run.told)
    print(seen)
    # The stories are worth something only while they get everywhere.
    for phase in ("STOPPING", "CLEANING", "RESETTING", "RESTORING", "RESUMING"):
        assert seen[f"Died in {phase}"] > 1 and seen[f"Dying in {phase}"] > 1
    for what in ("device_quarantined", "device_suspect", "devices_exhausted", "device_waited_for", "links_reset"):
        assert seen[what] > 1, what
    for what in (
        "incidents",
        "tails",
        "restarts",
        "recovered",
        "raised",
        "raised_again",
        "unconnected",
        "spare_died",
        "code 75",
    ):
        assert seen[what] > 1, what
    assert seen["Raised in RESUMING"] > 0
    assert seen["Unconnected in RESETTING"] > 1 and seen["Stalled in RESETTING"] > 1
