"""Which names of a loop carry a value from one iteration to the next."""

from __future__ import annotations

import runpy
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from ftrun.worker.state.loop_names import loop_names, reads_unbound_behind

LOOP = """
n = 0
t0 = time.time()
for epoch in range(3):
    k = 0
    for step in job.steps(5):
        with step:
            {body}
"""


@pytest.mark.parametrize(
    ("body", "carried"),
    [
        ("n += 1", {"n"}),
        ("k = k + 1", {"k"}),
        ("self.seen += 1", {"self.seen"}),
        ("best = min(best, loss)", {"best"}),
        ("loss = net(x); x, y = get()", {"x"}),
        ("if loss < best: best = loss", {"best"}),
        ("x, y = get(); loss = net(x)", set()),
        ("dt = time.time() - t0; t0 = time.time()", set()),
        ("z = [i for i in range(3)]; total = sum(i for i in z)", set()),
        ("(last := get()); use(last)", set()),
        ("match k:\n                case 0: a = 1\n                case _: b = 2\n            use(a)", {"a"}),
        ("match k:\n                case 0: a = 1\n                case [b, *c] if b: a = c\n            use(a, b)", {"a", "b"}),
        ("match k:\n                case {'x': a, **b}: use(a, b)\n                case _: a = 2\n            use(a)", set()),
    ],
)
def test_what_is_read_before_it_is_written(body: str, carried: set[str]) -> None:
    names = loop_names(LOOP.format(body=body), 8)
    assert names is not None and set(names.carried) == carried
    assert "epoch" in names.outside and "step" in names.fresh


@pytest.mark.skipif(sys.version_info < (3, 11), reason="except* came with Python 3.11")
def test_groups_of_errors_are_not_caught_in_each_iteration() -> None:
    body = "try: a = get()\n            except* ValueError: b = 1\n            use(a, b)"
    names = loop_names(LOOP.format(body=body), 8)
    assert names is not None and set(names.carried) == {"a", "b"}


def test_a_loss_of_the_last_of_some_backwards_is_fresh() -> None:
    body = "for half in halves:\n                loss = net(half)\n            print(loss)"
    names = loop_names(LOOP.format(body=body), 8)
    assert names is not None and not names.carried and "loss" in names.fresh


def test_of_what_python_has_warned_nobody_warns_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = loop_names(LOOP.format(body=r"found = match('\d', x)"), 8)
    assert names is not None and "found" in names.fresh


def test_without_a_loop_or_with_no_python_nothing_is_known() -> None:
    assert loop_names("x = 1\n", 1) is None
    assert loop_names("for (", 1) is None


def test_what_a_loop_around_makes_anew_is_told_from_what_this_one_does() -> None:
    source = "for e in range(2):\n    seen = []\n    for s in steps:\n        x = s + 1\n        seen.append(x)\n        n = n + 1\n"
    names = loop_names(source, 5)
    assert names is not None
    assert names.fresh == {"s", "x"}
    assert names.outside >= {"seen"}


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
        if step: {behind}
"""
BEHIND = [
    ("pass", False),
    ("losses.append(x)", False),
    ("losses.append(before)", False),
    ("losses.append(loss)", True),
    ("show_nothing()", True),  # a function of the script reads the name that the module binds: one is enough for all
]


def asked(source: str, path: Path) -> list[bool]:
    path.write_text(source)
    found: list[bool] = []
    runpy.run_path(str(path), {"found": found, "ask": lambda frame: reads_unbound_behind([frame], lambda value: value == "body")})
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
