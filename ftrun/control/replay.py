"""Replays a journal: the same configuration and events must give the same actions, phases and generations.

It reads JSON lines only and starts nothing. `python -m ftrun.control.replay FILE` exits 0 when nothing differs, else 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ftrun.control.events import Event, Message
from ftrun.control.machine import Config, IllegalEvent, State, advance, initial
from ftrun.core.text import printable, tell


def replay(lines: Iterable[str]) -> list[str]:
    """Return the differences between a journal and the machine's answers to its events, one sentence each; [] = none.

    A missing answer at the end of the journal, and a last line cut short, are no difference: the launcher may have been
    killed there. An event that the machine refuses must have no answer in the journal (or an empty one).
    """
    found: list[str] = []
    config: Config | None = None
    state: State | None = None
    answer: tuple[int, str, dict[str, Any]] | None = None  # line and name of the event, the answer that must follow in the journal
    for number, line in _lines(lines, found):
        try:
            if "config" in line and config is None:
                config = Config.from_json(line["config"])
                state = initial(config)
            elif "event" in line:
                if answer is not None:
                    _missing(answer, found)
                if config is None or state is None:
                    found.append(f"line {number}: an event before the configuration")
                    return found
                state, answer = _step(config, state, number, line["event"])
            elif "actions" in line:
                if answer is None:
                    found.append(f"line {number}: actions without an event")
                else:
                    _compare(number, answer, line, found)
                answer = None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            found.append(f"line {number}: not a journal line ({type(error).__name__}: {error})")
            return found
    if config is None:
        found.append("no configuration: this is not a journal")
    return found


def _lines(lines: Iterable[str], found: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    broken: str | None = None
    for number, text in enumerate(lines, 1):
        if broken is not None:
            found.append(broken)
            broken = None
        if not text.strip():
            continue
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            broken = f"line {number}: not JSON ({error.msg})"
            continue
        if isinstance(raw, dict):
            yield number, raw
        else:
            found.append(f"line {number}: not an object")


def _step(
    config: Config, state: State, number: int, raw: dict[str, Any]
) -> tuple[State, tuple[int, str, dict[str, Any]]]:
    event = Message.from_json(raw)
    if not isinstance(event, Event):
        raise ValueError(f"{raw['kind']} is no event")
    try:
        state, actions = advance(config, state, event)
    except IllegalEvent:
        actions = ()
        refused = True
    else:
        refused = False
    wanted = {
        "actions": json.loads(json.dumps([a.to_json() for a in actions])),
        "phase": state.told,
        "generation": state.generation,
    }
    return state, (number, raw["kind"], {**wanted, "refused": refused})


def _missing(answer: tuple[int, str, dict[str, Any]], found: list[str]) -> None:
    number, kind, wanted = answer
    if not wanted["refused"]:
        found.append(f"line {number}: {kind} has no answer in the journal")


def _compare(number: int, answer: tuple[int, str, dict[str, Any]], line: dict[str, Any], found: list[str]) -> None:
    _, kind, wanted = answer
    found += [
        f"line {number}: {key} after {kind} differ: journal {line[key]}, machine {wanted[key]}"
        for key in ("actions", "phase", "generation")
        if key in line and line[key] != wanted[key]
    ]


def main(arguments: Sequence[str]) -> int:
    """Replay the journal file that the command line names. Exit code 0 = same, 1 = different or unreadable, 2 = usage."""
    if len(arguments) != 1:
        print("usage: python -m ftrun.control.replay JOURNAL", file=sys.stderr)
        return 2
    try:
        text = Path(arguments[0]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        tell(f"{arguments[0]}: {error}")
        return 1
    found = replay(text.splitlines())
    for difference in found:
        print(printable(difference))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
