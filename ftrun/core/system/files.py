"""Reads and writes files between processes: private to their owner, and replaced as a whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO, Any

from ftrun.core.shape import loads


def open_private(path: Path, mode: str = "w") -> IO[bytes]:
    """Open a file to write ("w") or append ("a"); a new file gets mode 0600, whatever the umask.

    Raises:
        OSError: The file cannot be opened.
    """
    how = os.O_APPEND if mode == "a" else os.O_TRUNC
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o600), f"{mode}b")


def write_private(path: Path, data: str | bytes) -> None:
    """Write `data` (UTF-8) into a private file.

    Raises:
        OSError: The file cannot be written.
    """
    with open_private(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def append_private(path: Path, data: str) -> None:
    """Append `data` (UTF-8) to a private file.

    Raises:
        OSError: The file cannot be written.
    """
    with open_private(path, "a") as file:
        file.write(data.encode())


def copy_private(source: Path, target: Path) -> None:
    """Copy the content of a file into a private one.

    Raises:
        OSError: A file cannot be read or written.
    """
    with source.open("rb") as read, open_private(target) as written:
        while data := read.read(1 << 20):
            written.write(data)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, private to their owner.

    Raises:
        OSError: A folder cannot be made.
    """
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def replace(path: Path, data: str, *, private: bool = False) -> None:
    """Replace the content of `path` by `data` (UTF-8): a reader sees the old content or the new one. Write a device or pipe directly.

    `private`: only its owner may read it.

    Raises:
        OSError: The file cannot be written; the old content stays.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            file.write(data)
        return
    # the name includes the machine's: several machines may share the folder
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        if private:
            write_private(temporary, data)
        else:
            temporary.write_text(data, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file, {} if there is none or it is damaged."""
    try:
        raw = loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}
