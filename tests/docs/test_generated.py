"""Pages that are made from the program are what it says now, and the site is built without a warning."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ftrun
from tests.docs import generate
from tests.docs.blocks import DOCS, README, ROOT, blocks, pages, prose

MADE = "run: python -m tests.docs.generate"


def test_the_command_line_is_the_commands() -> None:
    assert generate.CLI.read_text() == generate.cli(), MADE


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_generated_parts(page: Path) -> None:
    assert page.read_text() == generate.with_parts(page.read_text()), MADE


def test_every_part_has_a_page() -> None:
    text = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert [name for name in generate.PARTS if f"<!-- generated: {name} -->\n|" not in text] == []


@pytest.mark.parametrize("thing", ["Job", "Step"])
def test_every_public_name_of_the_interface_is_described(thing: str) -> None:
    text = (DOCS / "reference" / "python.md").read_text()
    described = getattr(ftrun, thing)
    names = [name for name in vars(described) if not name.startswith("_")]
    assert [name for name in names if not re.search(rf"{thing.lower()}\.{name}\b", text)] == []


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def _anchors(page: Path) -> set[str]:
    """What a link may name in a page: its headings, as mkdocs spells them."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text()), re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", prose(page.read_text())):
        assert (page.parent / target).exists(), target
        assert not anchor or anchor in _anchors(page.parent / target), f"{target}#{anchor}"
        inside = page == README or Path(os.path.normpath(page.parent / target)).is_relative_to(DOCS)
        assert inside, f"{target} is not part of the site"


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 130


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("the packages of the docs extra are not installed; `make docs` does the same")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert (tmp_path / "site" / "reference" / "cli.html").exists()


def test_the_citation_names_this_version() -> None:
    assert f"version: {ftrun.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def _sentences() -> set[str]:
    """Every string in ftrun's code, with "…" for what is put into it."""
    found = set()
    for path in (ROOT / "ftrun").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"\{\w+\}", "…", node.value))  # as str.format fills it in
    return found


def test_the_messages_that_troubleshooting_explains_are_those_of_the_program() -> None:
    sentences = _sentences()
    messages = {block.page: block.text.strip() for block in blocks("text") if block.page.startswith("docs/errors/")}
    assert len(messages) >= 20
    assert [page for page, text in messages.items() if not any(text in said for said in sentences)] == []
