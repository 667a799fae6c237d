"""Runs of the launcher with settings that the command line need not know."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.conftest import Ftrun, Run

_CODE = """
import json, sys
sys.path.pop(0)
from ftrun.host.run.launcher import launch
from ftrun.host.base.settings import Settings
raw = json.loads(sys.argv[1])
raw = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
sys.exit(launch(Settings(**raw)))
"""


def start(ftrun: Ftrun, script: Path, nproc: int = 2, **settings: Any) -> Run:
    """Start a run of `script` without spares; `settings` are fields of Settings, JSON only."""
    raw = {"argv": [str(script)], "nproc": nproc, "spares": 0, "log_dir": str(ftrun.base / "logs"), **settings}
    command, ftrun.command = ftrun.command, lambda *_: [sys.executable, "-c", _CODE, json.dumps(raw)]  # type: ignore[method-assign]
    try:
        return ftrun.start(logs=False)
    finally:
        ftrun.command = command  # type: ignore[method-assign]
