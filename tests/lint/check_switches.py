"""Checks that nothing in ftrun/ and native/ is there for a test to switch: see tests/injected instead. Run by `make lint`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SWITCH = re.compile(r"FTRUN_(TEST|FAKE)\w*|INJECTED_\w+|\btest-only\b|\btests[./]injected\b")
_CODE = frozenset({".py", ".pyi", ".cpp", ".hpp", ".h", ".cu", ".txt"})


def switches(text: str) -> Iterator[tuple[int, str]]:
    """Line and word of each."""
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, found[0]) for found in _SWITCH.finditer(line))


def main() -> int:
    files = [path for folder in ("ftrun", "native") for path in sorted((ROOT / folder).rglob("*")) if path.suffix in _CODE]
    found = [f"{path.relative_to(ROOT)}:{line}: {word}" for path in files for line, word in switches(path.read_text())]
    for one in found:
        print(one, file=sys.stderr)
    print(f"test switches in product code: {len(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
