"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_HIDDEN = re.compile(r"<!--.*?-->", re.S)


@dataclass(frozen=True)
class Block:
    """One code block: `page` relative to the checkout, its number among the page's blocks, language and text."""

    page: str
    number: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.removeprefix('docs/').removesuffix('.md')}-{self.number}"


def pages() -> list[Path]:
    """README and every page of docs/, sorted."""
    return [README, *sorted(DOCS.rglob("*.md"))]


def blocks(language: str) -> list[Block]:
    """All code blocks in a language, "" for those without one."""
    found = []
    for page in pages():
        name = str(page.relative_to(ROOT))
        for number, (kind, text) in enumerate(_FENCED.findall(page.read_text())):
            if kind == language:
                found.append(Block(name, number, kind, text))
    return found


def commands() -> dict[str, str]:
    """Every command line in a shell block, without its comment -> the page that has it (the first of several)."""
    lines: dict[str, str] = {}
    for block in blocks("sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            command = " ".join(re.split(r"\s\s+#", line)[0].split())
            if command:
                lines.setdefault(command, block.page)
    return lines


def prose(text: str) -> str:
    """A page without code blocks and comments."""
    return _HIDDEN.sub("", _FENCED.sub("", text))
