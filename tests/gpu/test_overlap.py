"""What ftrun does while the device computes, and the little that it does while the device waits for the update's first kernel."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e import harness
from tests.native.fake import Control

RANKS = 2
SCRIPT = Path(__file__).resolve().parent / "scripts" / "overlap.py"
RATE = 5_000_000  # bytes a second: the last kernels of a backward and of an update take 25 ms or more
MOST = 42  # calls of ftrun's functions between the end of the wait and the update's first kernel, on the rank that opens the gate
MOST_BELOW = 20  # and the calls out of those, into torch or C: a tenth of the model's tensors
SEAL = 72  # where the word is in its page that says for which step the memory is whole
CAPTURES = ("worker/state/rng.py", "worker/state/python_state.py", "worker/memory/serialization.py", "worker/repair/rank_state.py")


class Call(NamedTuple):
    """Of ftrun's own code, or out of it; `event` as of `sys.setprofile`."""

    ns: int
    event: str
    name: str


class Work(NamedTuple):
    """What the driver says: `event` is queued, done or waited."""

    ns: int
    event: str
    call: str
    address: int
    value: int

    def stamps(self) -> bool:
        """Is it the word that says for which step the memory is whole?"""
        return self.call == "cuStreamWriteValue64" and self.address % 4096 == SEAL


@dataclass
class Ordinary:
    """One step of a rank that is not looked at as a whole. `wait`: when the rank began to wait for the device at its gate, ns."""

    rank: int
    calls: list[Call]
    work: list[Work]

    def first(self, name: str, event: str = "call", after: int = 0) -> int:
        """When a function was first called (or left) after a moment, ns."""
        return next(call.ns for call in self.calls if call.name == name and call.event == event and call.ns > after)

    @property
    def wait(self) -> int:
        return self.first("worker/memory/gpu_memory.py:finished", after=self.first("worker/step/body.py:pass_gate"))

    @property
    def waited(self) -> int:
        """When the driver last said that the device is done, before the rank went on."""
        left = self.first("worker/memory/gpu_memory.py:finished", "return", after=self.wait)
        return max(work.ns for work in self.work if work.event == "waited" and work.ns < left)

    def queued(self, wanted: Callable[[Work], bool], after: int = 0) -> Work:
        return next(work for work in self.work if work.event == "queued" and work.ns > after and wanted(work))

    def done(self, queued: Work) -> int:
        """When the device had done it."""
        same = (w for w in self.work if w.event == "done" and w[2:] == queued[2:] and w.ns > queued.ns)
        return next(same).ns

    def between(self, begin: int, end: int) -> list[Call]:
        return [call for call in self.calls if begin < call.ns < end and not call.event.endswith("return")]


def shown(calls: list[Call]) -> str:
    return "\n".join(f"{(call.ns - calls[0].ns) / 1e3:9.1f} us {call.event:6} {call.name}" for call in calls)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Ordinary]:
    """Of all ranks of one run."""
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA and would use the fake driver itself; `make gpu` asks a real one")
    folder = tmp_path_factory.mktemp("overlap")
    control = Control(folder / "cuda.txt")
    control.set(rate=RATE, order=folder / "order.txt")
    line = [harness.tool("ftrun"), "--nproc-per-node", str(RANKS), "--spares", "0", str(SCRIPT), str(folder)]
    running = harness.start(folder / "run", line, control.env)
    assert running.wait(harness.TIMEOUT) == 0, running.output[-4000:]
    harness.check_no_strays(folder / "run")
    return list(_steps(folder))


def _steps(folder: Path) -> Iterator[Ordinary]:
    lines = [line.split() for line in (folder / "order.txt").read_text().splitlines()]
    for rank in range(RANKS):
        found = json.loads((folder / f"calls-{rank}.json").read_text())
        work = sorted(Work(int(w[1]), w[2], w[3], int(w[4]), int(w[5])) for w in lines if int(w[0]) == found["pid"])
        for calls in ([Call(*call) for call in step] for step in found["steps"]):
            if not any(call.name == "worker/step/hidden_writes.py:body_started" for call in calls):
                yield Ordinary(rank, calls, [w for w in work if w.ns > calls[0].ns])


def test_what_a_slot_needs_is_captured_while_the_device_computes_the_gradients(steps: list[Ordinary]) -> None:
    assert len(steps) >= RANKS, "no step was an ordinary one"
    early = []
    for step in steps:
        for name in ("worker/state/rng.py:capture", "worker/state/python_state.py:capture", "worker/repair/ledger.py:_encoded"):
            assert step.first("worker/repair/ledger.py:record_gate") < step.first(name, "return") < step.wait, name
        gradients = step.queued(lambda work: work.call == "fake_update")
        early.append(step.first("worker/repair/ledger.py:record_gate", "return") < step.done(gradients) < step.waited)
    assert any(early), "the device was always done first"


def test_between_the_wait_and_the_update_stand_a_look_the_arrival_and_the_gate(steps: list[Ordinary]) -> None:
    counted = []
    for step in steps:
        waited = step.waited
        stamp = step.queued(lambda work: True, after=waited)
        assert stamp.stamps() and stamp.value == 0, f"{stamp} is not the word that opens the memory"
        kernel = step.queued(lambda work: work.call == "fake_update", after=waited)
        calls = step.between(waited, kernel.ns)
        assert not [call for call in calls if call.name.startswith(CAPTURES) or "_encoded" in call.name], shown(calls)
        if any(call.name.endswith("core/shared/bell.py:wait") for call in calls):
            continue  # another rank was later
        own, below = ([call for call in calls if call.event == event] for event in ("call", "c_call"))
        assert len(own) <= MOST and len(below) <= MOST_BELOW, f"{len(own)} calls, {len(below)} below\n{shown(calls)}"
        counted.append((len(own), len(below), (stamp.ns - waited) // 1000))
    assert counted, "no rank found the gate open"
    print(f"calls, those below them, and us to the first work: {counted}; the last of them:\n{shown(calls)}")


def test_the_end_of_a_body_is_kept_while_the_device_updates(steps: list[Ordinary]) -> None:
    early = []
    for step in steps:
        opened = step.queued(Work.stamps)
        sealed = step.queued(Work.stamps, after=opened.ns)
        assert sealed.value > 0
        *_, update = (w for w in step.work if w.event == "queued" and w.call == "fake_update" and opened.ns < w.ns < sealed.ns)
        capture = step.first("worker/state/rng.py:capture", after=opened.ns)
        assert update.ns < capture < sealed.ns
        waits = [work for work in step.work if update.ns < work.ns < sealed.ns and work.event == "waited"]
        assert not waits, "the device was waited for"
        early.append(sealed.ns < step.done(update))
    assert any(early), "the device was always done first"
