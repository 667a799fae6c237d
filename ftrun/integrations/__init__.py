"""Provide framework Trainers whose training steps ftrun repairs in place. This module holds their common helpers."""

from __future__ import annotations

from typing import Any

from ftrun.core.errors import UsageError


def another_release(framework: str, found: str, written_for: str) -> UsageError:
    """Return the error for an unsupported release. `found`: the release and its difference; `written_for`: supported releases."""
    return UsageError(
        f"ftrun.integrations: {framework} {found}; it has no public hook around a whole training step, so this was written "
        f"for {framework} {written_for}: install such a release, or train with its own Trainer (ftrun restarts all "
        "workers on a failure)"
    )


def scaler_of(owner: Any) -> dict[str, Any]:
    """Return the argument of `protect` for the GradScaler of an accelerator or precision plugin, {} without one."""
    scaler = getattr(owner, "scaler", None)
    return {} if scaler is None else {"scaler": scaler}
