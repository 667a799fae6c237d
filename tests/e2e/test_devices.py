"""Devices that fail under a real run of four ranks: each class of Xid does what its row says, the right rank is blamed,
and where recovery is promised the end is that of an uninterrupted run. Only libnvidia-ml is not the real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftrun.core.shared import gate
from ftrun.core.shared.board import Board
from tests.conftest import wait_for
from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.faults.fake_nvml import ECC, RECOVERY, FakeNvml

ON_DEVICE = harness.SCRIPTS / "on_device.py"
ARGUMENTS = ["--steps", "26"]
Strike = Callable[[FakeNvml], object]


class Trial:
    """A run on fake devices."""

    def __init__(
        self, folder: Path, gpus: int, *options: str, mig: tuple[int, ...] = (), stretch: float = 0.03
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.nvml = FakeNvml(folder, gpus, mig)
        chosen = ("--max-replacements", "50", *options)
        command = harness.ftrun_command(folder, [*ARGUMENTS, "--stretch", str(stretch)], options=chosen)
        at = command.index(str(harness.REFERENCE))
        self.running = harness.start(folder, [*command[:at], str(ON_DEVICE), *command[at:]], self.nvml.env)
        self.run_dir = self.running.run_dir()

    def step(self) -> int:
        """The last step that every rank finished its gradients of."""
        return gate.unpack(Board.open(self.run_dir / "board").gate()).last

    def ready(self) -> None:
        """Two more steps are done, and NVML shows all four processes."""
        goal = self.step() + 2
        wait_for(lambda: self.ended() or self.step() >= goal, "two steps", 60)
        wait_for(lambda: self.ended() or len(self.ranks()) == 4, "four ranks on devices", 20)
        assert not self.ended(), self.running.output

    def ended(self) -> bool:
        return self.running.process.poll() is not None

    def devices(self) -> list[dict[str, Any]]:
        """devices.json, [] while there is none."""
        path = self.run_dir / "devices.json"
        return list(json.loads(path.read_text())) if path.exists() else []

    def ranks(self) -> dict[int, str]:
        return {d["rank"]: d["uuid"] for d in self.devices() if d["rank"] is not None}

    def holds(self, wanted: dict[int, str]) -> None:
        """Until devices.json says that the ranks have these devices."""
        wait_for(lambda: self.ended() or wanted.items() <= self.ranks().items(), f"{wanted} in devices.json", 20)
        assert wanted.items() <= self.ranks().items(), self.running.output

    def until(self, text: str, times: int = 1) -> None:
        """Until the run said so."""
        wait_for(lambda: self.ended() or self.running.output.count(text) >= times, text, 40)
        assert self.running.output.count(text) >= times, self.running.output

    def finish(self) -> harness.Outcome:
        return harness.finish(self.running)


def died(outcome: harness.Outcome) -> list[tuple[int, str]]:
    """(rank, cause) of everyone who was said to have died, in order."""
    return [(a["rank"], a["detail"]) for a in outcome.actions("Say") if a["what"] == "died"]


@pytest.mark.slow
def test_one_run_each_class_of_xid(stock: Reference, folder: Path) -> None:
    """Application: same device. Log only: nothing. NVLink: connections. Needs a reset: the spare device."""
    trial = Trial(folder, 5)
    nvml = trial.nvml
    trial.ready()
    nvml.xid(1, 13)
    trial.until("recovered in", 1)
    trial.ready()
    trial.holds({1: nvml.uuids[1]})
    nvml.xid(0, 43)
    trial.until("Xid 43")
    nvml.xid(3, 74)
    trial.until("recovered in", 2)
    trial.ready()
    nvml.set(2, recovery=4)
    nvml.xid(2, 31)  # the table would keep the GPU, the driver wants it drained and reset
    trial.until("recovered in", 3)
    trial.holds({0: nvml.uuids[0], 1: nvml.uuids[1], 2: nvml.uuids[4], 3: nvml.uuids[3]})
    assert "drain and reset" in trial.devices()[2]["quarantined"]
    outcome = trial.finish()
    harness.same(stock(*ARGUMENTS), outcome)
    assert [(rank, cause[:6]) for rank, cause in died(outcome)] == [(1, "Xid 13"), (2, "Xid 31")]
    assert harness.replaced_ranks(outcome) == {1, 2}
    assert [a["device"] for a in outcome.actions("Quarantine")] == [nvml.uuids[2]]


@pytest.mark.slow
def test_a_lost_gpu_and_one_that_is_suspect(stock: Reference, folder: Path) -> None:
    """The lost one is given up at once; an unknown Xid: probe, one restart, then another device."""
    trial = Trial(folder, 6)
    nvml = trial.nvml
    trial.ready()
    nvml.set(3, lost=1)
    trial.until("recovered in", 1)
    trial.holds({3: nvml.uuids[4]})
    nvml.xid(0, 987)
    trial.until("recovered in", 2)
    trial.ready()
    trial.holds({0: nvml.uuids[0]})
    nvml.xid(0, 987)
    trial.until("recovered in", 3)
    trial.holds({0: nvml.uuids[5]})
    outcome = trial.finish()
    harness.same(stock(*ARGUMENTS), outcome)
    assert [rank for rank, _ in died(outcome)] == [3, 0, 0]
    assert [e["ok"] for e in outcome.events("Probed")] == [True]


STRIKES: dict[str, tuple[Strike, str]] = {
    "ecc": (lambda nvml: nvml.event(1, ECC), "uncorrectable memory error"),
    "recovery": (lambda nvml: (nvml.set(1, recovery=1), nvml.event(1, RECOVERY, 1)), "the driver asks for a reset"),
    "reset": (lambda nvml: nvml.xid(1, 48), "double-bit ECC error"),
    "reset-required": (lambda nvml: nvml.set(1, reset=1), "the device does not answer"),
    "counter": (lambda nvml: nvml.set(1, field145=1), "uncorrectable memory error"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRIKES)
def test_what_condemns_a_device(stock: Reference, folder: Path, name: str) -> None:
    strike, cause = STRIKES[name]
    trial = Trial(folder, 5)
    trial.nvml.set(1, field145=0)
    trial.ready()
    strike(trial.nvml)
    trial.until("recovered in")
    trial.ready()
    outcome = trial.finish()
    harness.same(stock(*ARGUMENTS), outcome)
    assert [(rank, cause in why) for rank, why in died(outcome)] == [(1, True)]
    assert [a["device"] for a in outcome.actions("Quarantine")] == [trial.nvml.uuids[1]]


@pytest.mark.slow
def test_without_a_spare_device(folder: Path) -> None:
    trial = Trial(folder, 4)
    trial.ready()
    trial.nvml.xid(2, 95)
    outcome = trial.finish()
    assert outcome.code == 75
    assert died(outcome) == [(2, "Xid 95 (uncontained memory error) on GPU 2 (GPU-cccccccc)")]
    assert "no healthy device is left" in outcome.output and "--on-exhausted wait" in outcome.output


@pytest.mark.slow
def test_waiting_for_a_device(stock: Reference, folder: Path) -> None:
    """Survivors wait where they stopped; a device that a person gives back ends the wait."""
    trial = Trial(folder, 4, "--on-exhausted", "wait")
    trial.ready()
    trial.nvml.xid(2, 95)
    trial.until("waiting for a healthy device")
    path = trial.run_dir / "quarantine.json"
    assert list(json.loads(path.read_text())) == [trial.nvml.uuids[2]]
    path.write_text("{}")
    trial.until("recovered in")
    outcome = trial.finish()
    harness.same(stock(*ARGUMENTS), outcome)
    assert "is out of quarantine" in outcome.output


@pytest.mark.slow
def test_a_machine_that_fails(folder: Path) -> None:
    trial = Trial(folder, 5)
    trial.ready()
    trial.nvml.xid(2, 79)
    outcome = trial.finish()
    assert outcome.code == 75
    assert "requeued elsewhere" in outcome.output


@pytest.mark.slow
def test_mig_instances_and_a_foreign_gpu(stock: Reference, folder: Path) -> None:
    """Instances are matched by their numbers; a reset takes every instance of the GPU; other GPUs are no matter of ours."""
    trial = Trial(folder, 3, mig=(4, 2, 0))
    uuids = [mig["uuid"] for mig in trial.nvml.migs]
    trial.ready()
    trial.nvml.xid(2, 48)  # not among the visible devices
    trial.nvml.xid(0, 31, gi=2, ci=0)
    trial.until("recovered in")
    trial.holds(dict(enumerate(uuids[:4])))
    outcome = trial.finish()
    harness.same(stock(*ARGUMENTS), outcome)
    assert [rank for rank, _ in died(outcome)] == [1]
    foreign = [n for n in outcome.notes("device-event") if n["gpu"] == trial.nvml.uuids[2]]
    assert [n["ours"] for n in foreign] == [False]


@pytest.mark.slow  # the watcher by itself: tests/helpers/test_nvml_reader.py
def test_a_driver_that_never_returns_is_told_and_holds_up_nobody(stock: Reference, folder: Path) -> None:
    trial = Trial(folder, 5, stretch=0.06)
    trial.ready()
    trial.nvml.set(1, wedge="nvmlDeviceGetTemperature")
    trial.until("the driver does not return from nvmlDeviceGetTemperature of GPU-bbbbbbbb")
    trial.nvml.set(2, wedge="all")
    trial.nvml.xid(0, 13)  # the other devices are still watched
    trial.until("recovered in")
    outcome = trial.finish()
    harness.same(stock(*ARGUMENTS), outcome)
    assert [rank for rank, _ in died(outcome)] == [0]
    harness.check_no_strays(folder)
