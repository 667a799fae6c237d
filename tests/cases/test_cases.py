"""Each pattern of a public bug report is as the table wants it, or wrong in the way that the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.cases import CASES, judge
from tests.e2e import harness


def _parameters() -> list[object]:
    return [pytest.param(n, marks=() if case.often else pytest.mark.slow) for n, case in CASES.items()]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", _parameters())
def test_case(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    verdict = judge(tmp_path, case)
    for folder in ("clean", "killed"):
        harness.check_no_strays(tmp_path / folder)
    if not case.known_wrong:
        assert verdict.seen in case.wanted, f"wanted {case.wanted}, seen: {verdict.seen}\n{verdict.told}"
        return
    assert verdict.seen not in case.wanted, (
        f"{name} is right now: take its known_wrong out of the table\n{verdict.told}"
    )
    assert verdict.seen in case.known_wrong, f"known: {case.known_wrong}, seen: {verdict.seen}\n{verdict.told}"
    with capsys.disabled():
        print(f"\n{name}: known wrong: {verdict.seen}; wanted: {' or '.join(case.wanted)}")


def test_every_script_is_a_case() -> None:
    scripts = {p.stem for p in (Path(__file__).parent / "scripts").glob("*.py")} - {"both_ways", "leave"}
    assert {case.script for case in CASES.values()} == scripts | {"shadow/train"}
