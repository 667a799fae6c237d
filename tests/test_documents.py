"""What the documents name is there: places in the code, targets of make, files; and the figures are those measured."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.bench import tables

ROOT = Path(__file__).resolve().parents[1]
WALKS = ROOT / "docs" / "how-it-works.md"
DOCUMENTS = [ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def file_of(name: str) -> Path:
    """That of `package.module.Class.function`."""
    parts = name.split(".")
    return next(path for cut in range(len(parts) - 1, 0, -1) if (path := ROOT.joinpath(*parts[:cut]).with_suffix(".py")).exists())


def exists(name: str) -> bool:
    """Is `package.module.Class.function` defined in the file of that module? Nothing is imported."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:cut])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.exists():
            body: list[ast.stmt] = ast.parse(path.read_text()).body
            for part in parts[cut:]:
                found = [node for node in body if part in _defined(node)]
                if not found:
                    return False
                body = getattr(found[-1], "body", [])
            return True
    return False


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a module or a class gives to something."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_every_place_of_the_walks_exists() -> None:
    walks = re.split(r"^## ", WALKS.read_text(), flags=re.M)[1:]
    assert len(walks) == 5
    for walk in walks:
        places = re.findall(r"^\| `([^`]+)` \|", walk, re.M)
        assert 3 <= len(places) <= 8, walk.splitlines()[0]
        assert [place for place in places if not exists(place)] == []
    files = {file_of(place) for place in re.findall(r"^\| `([^`]+)` \|", "".join(walks), re.M)}
    assert 10 < len(files) <= 20, "from a kill to the first step that is done again"


def test_a_place_that_is_not_there_is_noticed() -> None:
    assert exists("tests.test_documents.exists")
    assert not exists("tests.test_documents.missing") and not exists("ftrun.core.shared.gate.Missing.opened")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_targets_that_a_document_names(document: Path) -> None:
    text = document.read_text()
    listed = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, timeout=30).stdout
    targets = {line.split()[1] for line in listed.splitlines() if line.startswith("make ")}
    assert set(re.findall(r"`make ([\w-]+)", text)) <= targets
    named = re.findall(r"`((?:ftrun|tests|native|docs|examples|completions)/[\w./-]*)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda path: path.name)
def test_the_tables_are_those_that_the_benchmarks_wrote(page: Path) -> None:
    assert tables.with_tables(page.read_text()) == page.read_text(), "run: python -m tests.bench.tables"


def test_every_benchmark_has_its_table() -> None:
    readme, page = (path.read_text() for path in tables.PAGES)
    shown = [found[1] for found in tables.SHOWN.findall(page)]
    wanted = {"stall", "stall_by_step", "step_cost", "detection", "coldstart", "footprint", "scale"}
    assert wanted <= set(shown)
    assert [found[1:4] for found in tables.SHOWN.findall(readme)] == [("stall", "1", "3")]


def test_sentences_that_tell_a_cost_come_from_the_tables() -> None:
    """What stands between the marks is compared above; a percentage of a step's cost stands nowhere else."""
    for page, name in zip(tables.PAGES, ("readme", "cost"), strict=True):
        text = page.read_text()
        assert [found[1] for found in tables.TOLD.findall(text)] == [name]
        others = tables.SHOWN.sub("", tables.TOLD.sub("", text))
        assert re.findall(r"[\d.]+ % [^.]*longer|longer[^.]* [\d.]+ %", others) == []


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_each_table_says_where_it_comes_from(path: Path) -> None:
    text = path.read_text()
    facts = dict(re.findall(r"^- (\w+): (.+)$", text, re.M))
    assert [*facts] == [*tables.FACTS]
    assert re.fullmatch(r"[0-9a-f]{7,}.*", facts["commit"]) and re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])
    assert re.search(r"\(-?[\d.]+ to -?[\d.]+, n=\d+\)", text), "no figure with its spread and n"
