"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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
