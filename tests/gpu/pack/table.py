"""The checks in their order, each with where it can run and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Needs(Enum):
    """What a check cannot do without."""

    DRIVER = "a driver"  # the tests' fake one will do
    TORCH = "torch with CUDA"
    NCCL = "torch with NCCL"
    TWO = "two GPUs and NCCL"


@dataclass(frozen=True)
class Check:
    """A row of the table.

    `function` is `module.name` below `tests.gpu.pack.checks`, `given` its arguments. The check begins only while `expected`
    seconds are left of the budget, and is stopped after `limit` seconds.
    """

    name: str
    function: str
    given: tuple[object, ...] = ()
    needs: Needs = Needs.DRIVER
    expected: float = 6.0
    limit: float = 30.0


def _run(name: str, function: str, *given: object, needs: Needs = Needs.DRIVER) -> Check:
    """A check that makes whole runs."""
    return Check(name, f"runs.{function}", given, needs, expected=12.0, limit=60.0)


CHECKS: tuple[Check, ...] = (
    # Does anything work at all, and does memory outlive its maker?
    Check("driver and device", "memory.facts"),
    Check("memory exported, mapped in a fresh process", "memory.fresh_process"),
    Check("imported memory after SIGKILL", "memory.after_kill", (True,)),
    Check("descriptor alone after SIGKILL", "memory.after_kill", (False,)),
    Check("kernels loaded, checksum as on the host", "memory.kernels"),
    Check("tensors over shared memory", "memory.dlpack", needs=Needs.TORCH),
    Check("random stream of a device goes back", "memory.random_stream", needs=Needs.TORCH, expected=10),
    # Does a run start, and is it repaired?
    _run("a run without a fault", "clean"),
    _run("start by fork", "starts", "forkserver"),
    _run("start by exec", "starts", "exec"),
    _run("kill in backward", "killed", "backward"),
    _run("kill in update", "killed", "update"),
    _run("kill at the gate", "killed", "gate"),
    _run("spare warm on the device", "warm_spare"),
    _run("the same bits twice", "same_bits_twice"),
    # What does it cost?
    Check("adopt 1 GB", "speed.adopt", (1,), expected=8),
    Check("adopt 10 GB", "speed.adopt", (10,), expected=12, limit=60),
    Check("H2D and D2D at 1 GB", "speed.copies", (1,), expected=8),
    Check("H2D and D2D at 10 GB", "speed.copies", (10,), expected=15, limit=60),
    Check("last gradient to first kernel of the update", "speed.update_gap", needs=Needs.TORCH, expected=25, limit=60),
    Check("launch-bound step, protected beside plain", "speed.launch_bound", needs=Needs.TORCH, expected=25, limit=60),
    Check("NCCL, aborted and made again", "nccl.world_of_one", ("nccl",), Needs.NCCL, expected=20, limit=60),
    Check("NCCL's older class", "nccl.world_of_one", ("nccl-legacy",), Needs.NCCL, expected=20, limit=60),
    # What do the dead leave?
    Check("end of a killed process with device memory", "memory.teardown", (False,), expected=8),
    Check("end of a killed process with pinned memory", "memory.teardown", (True,), expected=8, limit=60),
    _run("CUDA graph captured and repaired", "graph", needs=Needs.TORCH),
    Check("memory after an illegal address", "memory.after_illegal", needs=Needs.TORCH, expected=10),
    _run("pinned memory in workers", "pinned", needs=Needs.TORCH),
    Check("memory left by an open export descriptor", "memory.open_export"),
    Check("memory is quiet when its writer is over", "memory.quiet", needs=Needs.TORCH, expected=12, limit=60),
    Check("memory read for another node", "memory.read_for_others"),
    # The rest.
    Check("what the fd store's process takes", "memory.holder"),
    Check("work on another stream does not wait", "speed.other_stream", needs=Needs.TORCH, expected=10),
    Check("a first use of the device", "speed.first_use", needs=Needs.TORCH, expected=12),
    Check("protect without room for a second model", "memory.peak", needs=Needs.TORCH, expected=12, limit=60),
    Check("hidden devices", "memory.hidden"),
    Check("reload from host memory", "speed.reload", expected=8),
    _run("everyone back to the host snapshot", "snapshot"),
    _run("a run on the CPU of this machine", "on_cpu", needs=Needs.TORCH),
    _run("without CUBLAS_WORKSPACE_CONFIG", "workspace", needs=Needs.TORCH),
    Check("two NCCL ranks, aborted and made again", "nccl.two_ranks", ("nccl",), Needs.TWO, expected=20, limit=60),
    _run("two NCCL ranks are repaired", "on_nccl", needs=Needs.TWO),
)


def chosen(only: Sequence[str], start: str) -> tuple[Check, ...]:
    """The checks whose name has one of the words `only` (all without one), from the first whose name has `start`.

    Raises:
        ValueError: No check has such a name.
    """
    known = "the names are:\n  " + "\n  ".join(check.name for check in CHECKS)
    found = CHECKS
    if start:
        at = next((k for k, check in enumerate(found) if start.lower() in check.name.lower()), None)
        if at is None:
            raise ValueError(f"no check has {start!r} in its name; {known}")
        found = found[at:]
    if only:
        found = tuple(check for check in found if any(word.lower() in check.name.lower() for word in only))
        if not found:
            raise ValueError(f"no check has {' or '.join(map(repr, only))} in its name; {known}")
    return found
