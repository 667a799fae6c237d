"""Collects facts that need an expensive import or may never return (torch, NVML), in a child process with a deadline."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from ftrun.host.services import spawn


def ask(code: str, seconds: float) -> tuple[dict[str, Any] | None, str]:
    """Run Python `code` whose last line of output is a JSON object; return (object, ""), or (None, reason) after `seconds` or an error."""
    try:
        done = subprocess.run(
            spawn.command(code), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {seconds:g} s"
    except OSError as error:
        return None, str(error)
    lines = done.stdout.strip().splitlines()
    try:
        facts = json.loads(lines[-1])
        if isinstance(facts, dict):
            return facts, ""
    except (IndexError, ValueError):
        pass
    said = done.stderr.strip().splitlines()
    return None, said[-1] if said else f"ended with code {done.returncode} and said nothing"
