"""What `ftrun doctor` looks at, one finding a fact. Nothing here changes the machine, and the launcher's process imports no torch.

Each check tries the thing itself (a lock, a process's death, a descriptor sent) instead of reading a version where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ftrun.doctor import container, devices, memory, network, sharing, software
from ftrun.doctor.findings import WARNING, Finding

Check = Callable[[], Iterator[Finding]]


def examine(endpoint: str | None) -> Iterator[Finding]:
    """Every finding, as it is made. `endpoint`: the folder or HOST[:PORT] where nodes are to meet, if any."""
    checks: tuple[tuple[str, Check], ...] = (
        ("software", software.check),
        ("devices", devices.check),
        ("devices", sharing.check),
        ("memory", memory.check),
        ("container", container.check),
        ("rendezvous", lambda: network.rendezvous(endpoint)),
        ("network", network.check),
    )
    for area, check in checks:
        try:
            yield from check()
        except Exception as error:  # a check that cannot look must not hide what the others see
            yield Finding(
                area, "check", WARNING, f"could not look: {type(error).__name__}: {error}", "please report this"
            )
