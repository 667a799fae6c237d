"""Reads a user's TOML files; an error names file and line. It imports the parser only when there is text to parse."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from ftrun.core.errors import ConfigError


def read_text(path: Path | str, what: str) -> str:
    """Read a text file. `what` names its content in an error.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot read {what}: it is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read {what}: {error.strerror or error}") from None


def parse(path: Path | str, text: str) -> dict[str, Any]:
    """Parse the text of a TOML file.

    Raises:
        ConfigError: The text is not valid TOML; the message names file and line.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return dict(tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # a number with too many digits is a ValueError as well
        at = re.search(r"at line (\d+)", str(error))
        line = at[1] if at else str(text.count("\n") + 1)
        raise ConfigError(f"{path}:{line}: not valid TOML: {error}") from None
