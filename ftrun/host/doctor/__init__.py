"""What `ftrun doctor` looks at, one finding a fact. Nothing here changes the machine, and the launcher's process imports no torch.

Each check tries the thing itself (a lock, a process's death, a descriptor sent) instead of reading a version where it can.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

OK, WARNING, BROKEN = "ok", "warning", "broken"
SCHEMA = 1


@dataclass(frozen=True)
class Finding:
    """One fact. `state` is ok, warning (works, but not everything or not well) or broken; `fix` says what to do then."""

    area: str
    name: str
    state: str
    text: str
    fix: str = ""


Check = Callable[[], Iterator[Finding]]


def examine(endpoint: str | None) -> Iterator[Finding]:
    """Every finding, as it is made. `endpoint`: the folder or HOST[:PORT] where nodes are to meet, if any."""
    from ftrun.host.doctor import container, devices, memory, network, sharing, software

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


def is_folder(endpoint: str) -> bool:
    """Does --rdzv-endpoint name a folder, not HOST[:PORT]?"""
    return os.sep in endpoint or os.path.isdir(endpoint)


def worst(findings: list[Finding]) -> str:
    """The gravest state of all."""
    states = {finding.state for finding in findings}
    return BROKEN if BROKEN in states else WARNING if WARNING in states else OK


def as_json(findings: list[Finding]) -> dict[str, Any]:
    return {"schema": SCHEMA, "state": worst(findings), "findings": [asdict(finding) for finding in findings]}
