"""The watcher by itself, over its socket: what it says about devices, events, health, probes and calls that never return."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftrun.core.shared import wire
from ftrun.host.services import spawn
from tests.faults.fake_nvml import ECC, RECOVERY, FakeNvml

CODE = "from ftrun.helpers import nvml_reader; nvml_reader.main()"
Message = dict[str, Any]


class Watcher:
    """The process, and what it said so far."""

    def __init__(self, nvml: FakeNvml, **env: str) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out = os.open(os.devnull, os.O_WRONLY)
        with theirs:
            self.pid = spawn.start(CODE, (), {**os.environ, **nvml.env, **env}, theirs.fileno(), out)
        os.close(out)
        self.said: list[Message] = []

    def until(self, wanted: Callable[[Message], bool], what: str, seconds: float = 20.0) -> Message:
        """The first message that is `wanted`, from now on."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if select.select([self.sock], [], [], 0.1)[0]:
                frame = wire.receive(self.sock)
                assert frame is not None, f"the watcher ended before: {what}"
                self.said.append(frame[0])
                if wanted(frame[0]):
                    return frame[0]
        pytest.fail(f"no {what}; it said {self.said[-8:]}")

    def op(self, op: str, **facts: Any) -> Message:
        return self.until(lambda m: m["op"] == op and facts.items() <= m.items(), f"{op} {facts}")

    def close(self) -> int:
        """It ends when the launcher is gone; its exit code."""
        self.sock.close()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        pytest.fail("it outlives its launcher")


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path, 2, (0, 2))


@pytest.fixture
def watcher(nvml: FakeNvml) -> Iterator[Watcher]:
    found = Watcher(nvml)
    found.op("sample")
    found.until(lambda m: m["op"] == "sample" and len(m["gpus"]) == 2, "both GPUs")
    yield found
    assert found.close() == 0


def test_inventory_and_health(watcher: Watcher, nvml: FakeNvml) -> None:
    inventory = next(m for m in watcher.said if m["op"] == "inventory")
    assert [gpu["uuid"] for gpu in inventory["gpus"]] == nvml.uuids
    assert [mig["uuid"] for mig in inventory["gpus"][1]["mig"]] == [mig["uuid"] for mig in nvml.migs]
    nvml.set(0, utilisation=61, temperature=77, used=5, total=9, throttle=4 | 32)
    sample = watcher.until(lambda m: m["op"] == "sample" and bool(m["gpus"][nvml.uuids[0]]["throttle"]), "a new look")
    whole = sample["gpus"][nvml.uuids[0]]
    assert whole["throttle"] == ["power cap", "software thermal"]
    assert whole["devices"] == [
        {"uuid": nvml.uuids[0], "utilisation": 61, "temperature": 77, "memory_used": 5, "memory_total": 9}
    ]
    parts = sample["gpus"][nvml.uuids[1]]["devices"]
    assert [(part["uuid"], part["utilisation"]) for part in parts] == [(mig["uuid"], None) for mig in nvml.migs]


def test_events_come_at_once_with_what_belongs_to_them(watcher: Watcher, nvml: FakeNvml) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        folder = Path(f"{nvml.control}.procs") / nvml.uuids[0]
        folder.mkdir(parents=True)
        (folder / str(process.pid)).touch()
        late = []
        for code in (13, 31, 43, 48, 63):
            at = nvml.xid(0, code)
            event = watcher.op("event", code=code)
            late.append(event["seen"] - at)
            assert (event["kind"], event["gpu"], event["recovery"]) == ("xid", nvml.uuids[0], 0)
            assert event["pids"] == {nvml.uuids[0]: [process.pid]}
        assert sorted(late)[2] < 0.05
    finally:
        process.kill()
        process.wait()
    nvml.set(0, recovery=2)
    nvml.event(0, RECOVERY, 2)
    assert watcher.op("event", kind="recovery")["recovery"] == 2
    nvml.event(1, ECC, gi=2, ci=0)
    event = watcher.op("event", kind="ecc")
    assert (event["gpu"], event["gi"], event["ci"]) == (nvml.uuids[1], 2, 0)


def test_a_lost_gpu_is_told_once(watcher: Watcher, nvml: FakeNvml) -> None:
    nvml.set(0, lost=1)
    assert watcher.op("event", kind="lost")["gpu"] == nvml.uuids[0]
    for _ in range(2):
        watcher.op("sample")
    assert sum(m["op"] == "event" for m in watcher.said) == 1


def test_counters_tell_what_no_event_does(watcher: Watcher, nvml: FakeNvml) -> None:
    nvml.set(0, field4=0, field145=0, field219=0)
    watcher.op("sample")
    watcher.op("sample")
    nvml.set(0, field219=7)
    assert watcher.op("counts")["counts"] == {"nvlink_errors": 7}
    nvml.set(0, field4=1)
    assert watcher.op("event", kind="ecc")["gpu"] == nvml.uuids[0]


def test_probes(watcher: Watcher, nvml: FakeNvml) -> None:
    def probe(device: str) -> Message:
        wire.send(watcher.sock, {"op": "probe", "device": device})
        return watcher.op("probed", device=device)

    assert probe(nvml.uuids[0])["ok"] is True
    assert probe(nvml.migs[1]["uuid"])["ok"] is True
    nvml.set(0, recovery=1)
    assert probe(nvml.uuids[0]) == {
        "op": "probed",
        "device": nvml.uuids[0],
        "ok": False,
        "detail": "recovery action 1",
    }
    nvml.set(0, recovery=0, lost=1)
    assert probe(nvml.uuids[0])["detail"] == "NVML error 15"


def test_a_call_that_never_returns_is_told_and_the_rest_goes_on(watcher: Watcher, nvml: FakeNvml) -> None:
    nvml.set(0, wedge="nvmlDeviceGetMemoryInfo")
    told = watcher.op("wedged", gpu=nvml.uuids[0])
    assert told["call"] == "nvmlDeviceGetMemoryInfo" and told["seconds"] >= 3
    nvml.xid(0, 13)  # events have a thread of their own
    assert watcher.op("event", code=13)["recovery"] == 0
    nvml.set(0, wedge="all")
    nvml.xid(1, 31)
    watcher.op("event", code=31, gpu=nvml.uuids[1])
    nvml.set(0, wedge="")
    watcher.op("unwedged", gpu=nvml.uuids[0])


def test_an_event_does_not_wait_for_a_driver_that_is_stuck(watcher: Watcher, nvml: FakeNvml) -> None:
    nvml.set(0, wedge="nvmlDeviceGetFieldValues")
    at = nvml.xid(0, 13)
    event = watcher.op("event", code=13)
    assert event["recovery"] == -1
    assert time.monotonic() - at < 1.0
    nvml.set(0, wedge="")


def test_without_a_library_it_says_so(nvml: FakeNvml) -> None:
    watcher = Watcher(nvml, LD_LIBRARY_PATH="")
    inventory = watcher.op("inventory")
    if inventory["error"]:
        assert inventory["gpus"] == []
    assert watcher.close() == 0
