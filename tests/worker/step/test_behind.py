"""Names that a script reads behind a body which was left."""

from __future__ import annotations

import runpy
import textwrap
from pathlib import Path

import pytest

from ftrun.worker.step.behind import reads_unbound

SCRIPT = """
import contextlib, sys
losses = []
def show(): print(loss)
def show_nothing(): print(1)
def main(before=1):
    for step in range(2):
        with contextlib.nullcontext():
            x = 1
            found.append(ask(sys._getframe()))
            if step: loss = 2
            match step and {{"kind": [x, step]}}:
                case {{"kind": [kind, *tail], **more}}: pass
        if step: {behind}
"""
BEHIND = [
    ("pass", False),
    ("losses.append(x)", False),
    ("losses.append(before)", False),
    ("losses.append(loss)", True),
    ("losses.append((kind, tail, more))", True),  # that a match binds
    ("show_nothing()", True),  # a function of the script reads the name that the module binds: one is enough for all
]


def asked(source: str, path: Path) -> list[bool]:
    path.write_text(source)
    found: list[bool] = []
    runpy.run_path(str(path), {"found": found, "ask": lambda frame: reads_unbound([frame], lambda value: value == "body")})
    return found


@pytest.mark.parametrize(("behind", "unbound"), BEHIND)
def test_what_is_read_behind_the_with_and_bound_in_it(tmp_path: Path, behind: str, unbound: bool) -> None:
    source = SCRIPT.format(behind=behind)
    in_function = unbound and behind != "show_nothing()"
    assert asked(f"{source}main()", tmp_path / "function.py") == [in_function, in_function]
    in_module = textwrap.dedent(source.partition("def main(before=1):\n")[2])
    head = source.partition("def main")[0] if behind == "show_nothing()" else source.partition("def show")[0]
    assert asked(f"{head}before = 1\n{in_module}", tmp_path / "module.py") == [unbound, unbound]


def test_what_stands_behind_another_with_in_the_body_is_none_of_it(tmp_path: Path) -> None:
    """What comes behind it belongs to the body that is left as a whole."""
    source = """
import contextlib, sys
def main(body):
    for step in range(2):
        with {around}:
            with contextlib.nullcontext():
                loss = found.append(ask(sys._getframe()))
            print(loss)
main(type("Body", (str, contextlib.nullcontext), {{}})("body"))
"""
    for around, unbound in (("body", False), ("contextlib.nullcontext()", True)):
        assert asked(source.format(around=around), tmp_path / f"inner-{unbound}.py") == [unbound, False]


def test_of_a_source_that_nobody_can_read_it_may(tmp_path: Path) -> None:
    assert asked("import os, sys\nos.unlink(__file__)\nfound.append(ask(sys._getframe()))\n", tmp_path / "gone.py") == [True]
