"""Codes of errors: each has a page and each page a code, messages end with them, and `ftrun explain` prints the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ftrun.cli.main import execute
from ftrun.core import codes
from ftrun.core.errors import ConfigError, UsageError
from tests.docs.test_generated import _sentences

PAGES = Path(__file__).resolve().parents[2] / "docs" / "errors"
SOURCES = Path(__file__).resolve().parents[2] / "ftrun"


def text(code: codes.Code) -> str:
    return (PAGES / f"{code.page}.md").read_text()


def test_each_code_has_a_page_and_each_page_a_code() -> None:
    assert [code.name for code in codes.CODES] == sorted(codes.BY_NAME), "once each, and in order"
    assert sorted(code.page for code in codes.CODES) == sorted(p.stem for p in PAGES.glob("*.md") if p.stem != "index")
    for code in codes.CODES:
        assert text(code).startswith(f"# {code.name}: "), code
        assert "**Why.**" in text(code) and "**What to do.**" in text(code), code
    mentioned = set(re.findall(r"ftrun explain (F\d+)", "".join(map(str, _sentences()))))
    assert mentioned <= set(codes.BY_NAME)


def test_each_code_is_said_somewhere() -> None:
    said = set(re.findall(r'"(F\d{3})"', "".join(path.read_text() for path in SOURCES.rglob("*.py") if path.name != "codes.py")))
    assert said == set(codes.BY_NAME)


def test_an_error_has_the_code_that_it_is_given_or_that_of_its_class() -> None:
    assert UsageError("something", explain="F305").explain == "F305"
    assert ConfigError("x.toml:1: script x does not exist").explain == "F102"
    assert UsageError("something").explain == "" == codes.read_on("")


@pytest.mark.parametrize("word", ["F305", "f305", "305"])
def test_explain(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["explain", word]) == 0
    assert capsys.readouterr().out == text(codes.BY_NAME["F305"]).rstrip() + "\n"


def test_explain_lists_all_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["explain"]) == 0
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == [*codes.BY_NAME]
    assert execute(["explain", "F999"]) == 2
    assert "there is no code F999; all of them: ftrun explain" in capsys.readouterr().err
