"""The design pages are true as far as names go: what they mention exists, and each term of the glossary says where it lives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS
from tests.test_documents import exists

PAGES = sorted((DOCS / "design").glob("*.md"))
_DOTTED = re.compile(r"`(ftrun(?:\.\w+)+)`")
_PATH = re.compile(r"`((?:ftrun|tests|native|docs)/[\w./-]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_exists(page: Path) -> None:
    assert [name for name in _DOTTED.findall(page.read_text()) if not exists(name)] == []


def test_every_term_of_the_glossary_says_where_it_lives() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", (DOCS / "design" / "glossary.md").read_text(), re.M)
    terms = [(term, place) for term, place in rows if term not in ("term", "---")]
    assert len(terms) > 40 and len({term for term, _ in terms}) == len(terms)
    assert [term for term, place in terms if not (_DOTTED.fullmatch(place) or _PATH.fullmatch(place))] == []


def test_a_name_that_is_gone_is_noticed() -> None:
    assert exists("ftrun.core.shared.board.F.ARRIVAL") and exists("ftrun.control.budgets") and exists("ftrun.worker.comm")
    assert not exists("ftrun.core.shared.board.F.GONE") and not exists("ftrun.gone") and not exists("ftrun.worker.comm.gone.Group")
