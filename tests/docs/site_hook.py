"""What mkdocs calls when it builds the site: its first page is the README, with the links of a page in docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
_NAMED = {"SECURITY.md": "security.md"}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page before it is rendered."""
    return readme() if page.file.src_uri == "index.md" else markdown


def readme() -> str:
    """The README as a page of docs/: a link that leaves the site becomes a name."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\[([^\]]+)\]\(CONTRIBUTING\.md\)", r"`\1`", text)
    return _LINK.sub(lambda found: f"]({_NAMED.get(found[1], found[1].removeprefix('docs/'))})", text)
