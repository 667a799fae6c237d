"""Files that processes leave for each other: written whole or not at all, read as far as they are there."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def replace(path: Path, data: str) -> None:
    """Put `data` (UTF-8) at `path`: a reader sees the old content or the new one. A device or pipe is written directly.

    Errors: OSError; what was there before is still there then.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            file.write(data)
        return
    # the machine is named too: several may share the folder
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        temporary.write_text(data, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, {} when there is none or it is damaged."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}
