"""Runs the checks of `ftrun doctor`, with one finding per fact. No check changes the machine, or imports torch in this process.

Where it can, a check tries the feature itself (a lock, a process's death, a descriptor sent) instead of reading a version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ftrun.doctor import container, devices, memory, network, sharing, software
from ftrun.doctor.findings import WARNING, Finding

Check = Callable[[], Iterator[Finding]]


def examine(endpoint: str | None) -> Iterator[Finding]:
    """Yield every finding as soon as its check makes it. `endpoint`: the folder or HOST[:PORT] of the rendezvous, if any."""
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
        except Exception as error:  # a failing check must not hide the findings of the others
            yield Finding(
                area, "check", WARNING, f"could not look: {type(error).__name__}: {error}", "please report this"
            )
