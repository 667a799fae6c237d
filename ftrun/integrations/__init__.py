"""Trainers of frameworks, with training steps that are repaired in place. Here: what they have in common."""

from __future__ import annotations

from typing import Any

from ftrun.core.errors import UsageError


def another_release(framework: str, found: str, written_for: str) -> UsageError:
    """The error for a release that is not as the one that the Trainer here was written for. `found`: release, and what differs."""
    return UsageError(
        f"ftrun.integrations: {framework} {found}; it has no public hook around a whole training step, so this was written "
        f"for {framework} {written_for}: install such a release, or train with its own Trainer (ftrun restarts all "
        "workers on a failure)"
    )


def scaler_of(owner: Any) -> dict[str, Any]:
    """What `protect` is given for the GradScaler of an accelerator or a precision plugin; nothing where there is none."""
    scaler = getattr(owner, "scaler", None)
    return {} if scaler is None else {"scaler": scaler}
