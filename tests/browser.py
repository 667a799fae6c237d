"""A browser without a window, for pictures and for tests that look at a page. Standard library only: `make screens` has no more."""

from __future__ import annotations

import shutil
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
NONE = f"no browser on this machine ({', '.join(BROWSERS)})"


def command(profile: str | Path, width: int, height: int, dark: bool = False) -> list[str]:
    """How to call it, without the page, for a window of so many px and a user who prefers `dark`; [] where there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        return []
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    return [found, *options, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
