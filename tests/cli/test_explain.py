"""Codes of errors: each has a page and each page a code, messages end with them, and `ftrun explain` prints the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ftrun.cli.main import execute
from ftrun.core import codes
from tests.docs.test_generated import _sentences

PAGES = Path(__file__).resolve().parents[2] / "docs" / "errors"


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


def test_messages_have_the_code_of_their_page() -> None:
    """A piece that tells a message is one of a sentence of the program, and tells the message that its page shows."""
    sentences = _sentences() - {piece for code in codes.CODES for piece in code.says}
    for code in codes.CODES:
        for piece in code.says:
            assert any(piece in sentence for sentence in sentences), f"nothing says {piece!r} any more"
        if code.says:
            shown = re.search(r"```text\n(.*?)\n```", text(code), re.S)
            assert shown and codes.of_message(shown[1]) == code.name, code


def test_errors_without_a_piece_have_the_code_of_their_class() -> None:
    assert codes.of_error("UsageError", "something") == "F301"
    assert codes.of_error("UsageError", "something", "F101") == "F101"
    assert codes.of_error("ConfigError", "x.toml:1: script x does not exist") == "F102"
    assert codes.of_error("RuntimeError", "there is no script") == "" == codes.read_on("")


@pytest.mark.parametrize("word", ["F305", "f305", "305"])
def test_explain(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["explain", word]) == 0
    assert capsys.readouterr().out == text(codes.BY_NAME["F305"]).rstrip() + "\n"


def test_explain_lists_all_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["explain"]) == 0
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == [*codes.BY_NAME]
    assert execute(["explain", "F999"]) == 2
    assert "there is no code F999; all of them: ftrun explain" in capsys.readouterr().err
