"""Whole runs of ftrun on the device, compared bit for bit with an uninterrupted one."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from tests.conftest import wait_for
from tests.e2e import harness
from tests.e2e.harness import kill
from tests.gpu import conftest, real
from tests.gpu.pack.checks import memory
from tests.gpu.pack.here import Here

_LONG = 45.0


def _start(here: Here, name: str, *arguments: str, device: str = "cuda:0", **more: object) -> harness.Running:
    """A run of several ranks that share the device. Under the fake driver: of the script whose model lies there."""
    if here.fake:
        return real.start(here.folder / name, *arguments, "--device", "0", script="train.py", **more)  # type: ignore[arg-type]
    return real.start(here.folder / name, *arguments, "--device", device, **more)  # type: ignore[arg-type]


def _clean(here: Here, device: str = "cuda:0") -> conftest.Outcome:
    """The uninterrupted run, made once for all checks."""
    path = here.shared / f"clean-{device.partition(':')[0]}.json"
    if not path.exists():
        outcome = conftest.finish(_start(here, f"clean-{device[:3]}", device=device), _LONG)
        assert outcome.code == 0 and len(outcome.ranks) == conftest.RANKS, outcome.output[-4000:]
        path.write_text(json.dumps(asdict(outcome)))
    return conftest.Outcome(**json.loads(path.read_text()))


def clean(here: Here) -> None:
    """What the others are compared with."""
    outcome = _clean(here)
    here.note("told", next((line for line in reversed(outcome.output.splitlines()) if "ftrun: " in line), "nothing"))


def starts(here: Here, mode: str) -> None:
    """What forks the workers has not opened the GPU; the run ends on the bits of the other modes."""
    begin = time.monotonic()
    running = _start(here, "run", "--pause", "0.1", options=("--worker-start", mode))
    wait_for(lambda: conftest.at_step(here.folder / "run", 2) >= 0, "the first step", 50)
    here.note("first step after", f"{time.monotonic() - begin:.1f} s")
    for server in conftest.named(here.folder / "run", "ftrun forksrv"):
        assert not real.open_devices(server), "CUDA is open in the process that forks workers"
    outcome = conftest.finish(running, _LONG)
    conftest.same(_clean(here), outcome)


def killed(here: Here, at: str) -> None:
    outcome = conftest.finish(_start(here, "run", faults=(kill(2, at, 4),)), _LONG)
    conftest.same(_clean(here), outcome)
    _tell(here, outcome)


def _tell(here: Here, outcome: conftest.Outcome) -> None:
    sources = outcome.sources()
    assert sources, f"no repair\n{outcome.output[-3000:]}"
    here.note("stall", real.total_ms(outcome))
    here.note("state", ", ".join(sources))
    line = next((text for text in outcome.output.splitlines() if "recovered in" in text), "")
    here.note("told", line.partition("recovered in ")[2] or "nothing")


def warm_spare(here: Here) -> None:
    """A spare has the shared device open before it is needed."""
    folder = here.folder / "run"
    running = _start(here, "run", "--pause", "0.5", faults=(kill(2, "backward", 6),))
    wait_for(lambda: conftest.at_step(folder, 2) >= 1, "two steps", 40)
    spares = conftest.named(folder, "ftrun spare")
    assert spares, "no spare is there"
    if not here.fake:
        wait_for(lambda: all(real.open_devices(pid) for pid in spares), "the spare to open the device", 15)
    outcome = conftest.finish(running, _LONG)
    conftest.same(_clean(here), outcome)
    _tell(here, outcome)


def same_bits_twice(here: Here) -> None:
    outcome = conftest.finish(_start(here, "run"), _LONG)
    conftest.same(_clean(here), outcome)
    assert here.fake or "for the same bits set" not in outcome.output, "all is set, and it warns"


def snapshot(here: Here) -> None:
    """All holders of the state die in one update."""
    clean = _clean(here)
    faults = tuple(kill(rank, "update", 4) for rank in range(conftest.RANKS))
    outcome = conftest.finish(_start(here, "run", faults=faults, options=("--snapshot-every", "3")), 55.0)
    conftest.same(clean, outcome)
    assert "from the host snapshot of step 3" in outcome.output, outcome.output[-3000:]
    _tell(here, outcome)


def on_cpu(here: Here) -> None:
    """A model on the CPU of a machine with a GPU."""
    clean = _clean(here, "cpu")
    outcome = conftest.finish(_start(here, "run", device="cpu", faults=(kill(2, "backward", 4),)), _LONG)
    conftest.same(clean, outcome)
    _tell(here, outcome)


def workspace(here: Here) -> None:
    """Whether the bits are others without the setting is a fact; that it is told is required. torch itself may refuse such a run."""
    clean = _clean(here)
    outcome = conftest.finish(_start(here, "run", env={"CUBLAS_WORKSPACE_CONFIG": ""}), _LONG)
    assert "for the same bits set CUBLAS_WORKSPACE_CONFIG=:4096:8" in outcome.output, outcome.output[-3000:]
    if outcome.code:
        here.note("without it", "torch refuses: it is asked for determinism")
        return
    same = [r["weights"] for r in outcome.ranks] == [r["weights"] for r in clean.ranks]
    here.note("without it", "the same bits" if same else "other bits")


def on_nccl(here: Here) -> None:
    clean = conftest.finish(real.start(here.folder / "clean", "--device", "own", ranks=2), _LONG)
    faults = (kill(1, "backward", 3), kill(0, "update", 5))
    outcome = conftest.finish(real.start(here.folder / "run", "--device", "own", faults=faults, ranks=2), 55.0)
    real.equal(clean, outcome, 2)
    _tell(here, outcome)


def graph(here: Here) -> None:
    """Forward and backward in a CUDA graph: a replacement captures anew, over the memory that it adopted."""
    found = []
    for name, faults in (("clean", ()), ("killed", (kill(0, "gate", 4),))):
        arguments = ("--graph", "--steps", "9")
        running = real.start(here.folder / name, *arguments, script="launch_bound.py", faults=faults, ranks=1)
        outcome = conftest.finish(running, _LONG)
        assert outcome.code == 0 and len(outcome.ranks) == 1, outcome.output[-4000:]
        found.append(outcome)
    clean, again = found
    assert clean.ranks[0]["weights"] == again.ranks[0]["weights"], "other weights"
    _tell(here, again)


def pinned(here: Here) -> None:
    """None: the end of a process takes a tenth of a second for each GB. (torch pins a little for a script's own copies.)"""
    folder: Path = here.folder / "run"
    running = _start(here, "run", "--pause", "0.3")
    wait_for(lambda: conftest.at_step(folder, 2) >= 2, "three steps", 40)
    ranks = [pid for pid in harness.strays(folder) if _name(pid).startswith("ftrun rank")]
    assert len(ranks) == conftest.RANKS
    locked = max(memory.pinned_of(pid) for pid in ranks)
    outcome = conftest.finish(running, _LONG)
    conftest.same(_clean(here), outcome)
    here.note("locked or pinned by the kernel's count", f"{locked} KiB a worker")
    here.note("pinned by torch", f"{max(r['pinned'] for r in outcome.ranks) >> 10} KiB a worker")
    assert locked <= 1024, "a worker has pinned memory"


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""
