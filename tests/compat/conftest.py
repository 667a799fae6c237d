"""These tests need the packages of the `compat` extra, so they run only where they are asked for: `-m compat`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect them in every other run. Asked for without the packages they fail; they are never skipped."""
    if "compat" in config.getoption("markexpr"):
        return
    kept = [item for item in items if item.get_closest_marker("compat") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_report_header() -> str:
    """What exactly ran."""
    found = []
    for name in ("torch", "accelerate", "transformers", "lightning"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} is not installed")
    return f"compat: {', '.join(found)}"
