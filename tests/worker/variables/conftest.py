"""For tests that keep a loop's variables inside of pytest's own process."""

from __future__ import annotations

import pytest

from ftrun.worker.variables import spaces

_ALL = spaces.script_modules


@pytest.fixture(autouse=True)
def the_program_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The "script" is the tests of this folder, not every test that pytest has imported: each look at those would take seconds."""
    here = __name__.rpartition(".")[0]
    monkeypatch.setattr(spaces, "script_modules", lambda: [one for one in _ALL() if one[0].startswith(here)])
