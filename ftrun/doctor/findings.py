"""Defines the findings of `ftrun doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK, WARNING, BROKEN = "ok", "warning", "broken"
SCHEMA = 1


@dataclass(frozen=True)
class Finding:
    """One fact. `state` is ok, warning (works partly or badly) or broken; `fix` is the remedy."""

    area: str
    name: str
    state: str
    text: str
    fix: str = ""


def worst(findings: list[Finding]) -> str:
    """Return the gravest state of the findings."""
    states = {finding.state for finding in findings}
    return BROKEN if BROKEN in states else WARNING if WARNING in states else OK


def as_json(findings: list[Finding]) -> dict[str, Any]:
    return {"schema": SCHEMA, "state": worst(findings), "findings": [asdict(finding) for finding in findings]}
