"""TOML files of a user: read, or refused with file and line. The parser is imported only when there is something to read."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from ftrun.core.errors import ConfigError


def read_text(path: Path | str, what: str) -> str:
    """The text of a file that is to hold `what`.

    Raises:
        ConfigError
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot read {what}: it is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read {what}: {error.strerror or error}") from None


def parse(path: Path | str, text: str) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        ConfigError: With file and line, whatever is wrong with it.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return dict(tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # ValueError: also for numbers with too many digits
        at = re.search(r"at line (\d+)", str(error))
        line = at[1] if at else str(text.count("\n") + 1)
        raise ConfigError(f"{path}:{line}: not valid TOML: {error}") from None
