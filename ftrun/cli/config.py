"""Options from a TOML file: the one named with --config, else the table [tool.ftrun] of ./pyproject.toml.

Every mistake is a ConfigError that starts with FILE:LINE and names the key. A TOML reader is imported only when there
is something to read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ftrun.cli.options import BY_NAME, OPTIONS, Option
from ftrun.cli.spelling import nearest
from ftrun.core.errors import ConfigError
from ftrun.core.toml import parse, read_text

PYPROJECT = Path("pyproject.toml")
_KEY = r"\s*[\"']?{key}[\"']?\s*(?:=|\.)"
_TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a table",
}


class ConfigFile:
    """The options in a file: name -> value as one would write it on the command line. `path` None = no file."""

    def __init__(self, path: Path | None = None, text: str = "", table: str = "") -> None:
        self.path = path
        self.text = text
        self.table = table
        self.values: dict[str, str] = {}
        self.policy: Any = {}  # what [policy] says, unchecked: see ftrun.cli.policyfile
        self._lines = text.splitlines()

    def where(self, name: str) -> str:
        """FILE:LINE of an option."""
        underscored = name.replace("-", "_")
        key = re.compile(_KEY.format(key=f"(?:{re.escape(name)}|{re.escape(underscored)})"))
        first = 0
        if self.table:
            header = re.compile(rf"\s*\[\s*{re.escape(self.table)}\s*\]")
            first = next((n for n, line in enumerate(self._lines) if header.match(line)), 0)
        for number, line in enumerate(self._lines[first:], first + 1):
            if key.match(line):
                return f"{self.path}:{number}"
        return str(self.path)

    def _fill(self, raw: dict[str, Any]) -> None:
        names = [option.name for option in OPTIONS if option.takes]
        for key, value in raw.items():
            if key == "policy":
                self.policy = value
                continue
            name = key.replace("_", "-")
            option = BY_NAME.get(name)
            if option is None:
                close = nearest(name, names)
                hint = f"; did you mean {close}?" if close else f"; there are {', '.join(names)}"
                raise ConfigError(f"{self.where(key)}: there is no option {key!r}{hint}")
            if not option.takes:
                raise ConfigError(f"{self.where(key)}: {key} belongs on the command line, not into a file")
            if name in self.values:
                raise ConfigError(f"{self.where(key)}: {name} is there twice")
            self.values[name] = self._text(option, key, value)

    def _text(self, option: Option, key: str, value: Any) -> str:
        # a bool is an int for Python, not for people
        if not any(type(value) is kind for kind in option.takes):
            wanted = " or ".join(_TYPES[kind] for kind in option.takes)
            raise ConfigError(f"{self.where(key)}: {key} must be {wanted}, not {value!r}")
        parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        for part in parts:
            if isinstance(part, bool) or not isinstance(part, str | int | float):
                raise ConfigError(f"{self.where(key)}: {key} must hold strings and numbers, not {part!r}")
        if isinstance(value, dict):
            return ",".join(f"{k}={v}" for k, v in value.items())
        if isinstance(value, list):
            return ",".join(str(part).replace(",", ",,") for part in value)
        return str(int(value)) if isinstance(value, bool) else str(value)


def read(named: str | None) -> ConfigFile:
    """The file `named`, else pyproject.toml if it has something for us.

    Raises:
        ConfigError
    """
    if named is not None:
        path = Path(named)
        text = read_text(path, "the configuration")
        if path.name != PYPROJECT.name:
            return _filled(ConfigFile(path, text), parse(path, text))
    else:
        path = PYPROJECT
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ConfigFile()
    if named is None and "ftrun" not in text:
        return ConfigFile()
    table = parse(path, text).get("tool", {})
    raw = table.get("ftrun", {}) if isinstance(table, dict) else {}
    config = ConfigFile(path, text, "tool.ftrun")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: tool.ftrun must be a table")
    return _filled(config, raw)


def _filled(config: ConfigFile, raw: dict[str, Any]) -> ConfigFile:
    config._fill(raw)
    return config
