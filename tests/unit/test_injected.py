"""What tests put into ftrun from outside: each place is there, and a name that is none of them is refused."""

from __future__ import annotations

import importlib
import operator

import pytest

from tests import injected

PLACES = {f"death: {point}": (it.module, it.name) for point, it in injected.inside.POINTS.items()}
PLACES |= {f"without: {part}": (module, name) for part, (module, name, _) in injected.inside.PARTS.items()}


@pytest.mark.parametrize("what", PLACES)
def test_its_place_is_there(what: str) -> None:
    module, name = PLACES[what]
    assert callable(operator.attrgetter(name)(importlib.import_module(module)))


@pytest.mark.parametrize(("die", "without"), [("swop:3:1", ""), ("", "seel")])
def test_an_unknown_name_is_refused(die: str, without: str) -> None:
    with pytest.raises(AssertionError):
        injected.env(die, without)
