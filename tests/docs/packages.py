"""Prints the packages of the `docs` extra, for pip: the site needs them, and neither ftrun nor torch."""

from __future__ import annotations

import re
from pathlib import Path

if __name__ == "__main__":
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^docs = \[(.*)\]$", text, re.M)
    print(*re.findall(r'"([^"]+)"', listed))
