"""A journal replayed through the controller: equal to itself, and every kind of difference is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ftrun.control import events as ev
from ftrun.control.replay import main, replay
from tests.unit.driver import Driver, in_incident


def _journal() -> list[str]:
    run = in_incident(7)
    run.journal.insert(5, json.dumps({"t": 0.0, "note": "log", "bytes": 3}))
    run.send(ev.Signalled(0.0, 15))
    return run.journal


def test_replay_agrees_with_itself() -> None:
    lines = _journal()
    assert replay(lines) == []
    assert replay(lines[:-1]) == []  # killed before the answer
    assert replay([*lines, '{"t": 3.0, "eve']) == []  # killed in the middle of a line


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda ls: [s.replace('"SIGKILL"', '"SIGTERM"') if '"event"' in s else s for s in ls], "actions after Died"),
        (lambda ls: [s.replace('"CLEANING"', '"RUNNING"') for s in ls], "phase after"),
        (lambda ls: [s.replace('"generation": 2}', '"generation": 3}') for s in ls], "generation after"),
        (lambda ls: ls[1:], "before the configuration"),
        (lambda ls: [ls[0], ls[1], *ls[3:]], "has no answer"),
        (lambda ls: [ls[0], ls[2]], "without an event"),
        (lambda ls: [], "not a journal"),
        (lambda ls: [ls[0], "[1]"], "line 2: not an object"),
        (lambda ls: [ls[0], "{", *ls[1:]], "line 2: not JSON"),
        (lambda ls: [ls[0], '{"event": {"kind": "Nonsense"}}'], "KeyError"),
        (lambda ls: [ls[0], '{"event": {"kind": "Spawn", "worker": 1, "rank": 0}}'], "is no event"),
    ],
)
def test_replay_finds_differences(change: Callable[[list[str]], list[str]], expected: str) -> None:
    found = replay(change(_journal()))
    assert any(expected in f for f in found), found


def test_each_difference_is_told_once_and_the_first_that_leaves_nothing_to_compare_is_the_last() -> None:
    lines = _journal()
    assert len(replay([lines[0], "{", "", *lines[1:]])) == 1
    event = json.dumps({"event": ev.Begin(0.0).to_json()})
    assert replay([event, event]) == ["line 1: an event before the configuration"]
    wrong = '{"event": {"kind": "Nonsense"}}'
    assert len(replay([lines[0], wrong, wrong])) == 1


def test_replay_accepts_a_refused_event_without_an_answer() -> None:
    refused = json.dumps({"t": 0.0, "event": ev.Begin(0.0).to_json()})
    lines = Driver().up().journal
    assert replay([*lines, refused, json.dumps({"event": ev.Signalled(0.0, 2).to_json()})]) == []


def test_replay_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("\n".join(_journal()) + "\n")
    assert main([str(path)]) == 0
    path.write_text("\n".join(_journal()[1:]) + "\n")
    assert main([str(path)]) == 1
    assert "before the configuration" in capsys.readouterr().out
    assert main([str(tmp_path / "none")]) == 1 and "No such file" in capsys.readouterr().err
    assert main([]) == 2 and "usage" in capsys.readouterr().err
