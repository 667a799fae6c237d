"""Which names of a loop carry a value from one iteration to the next."""

from __future__ import annotations

import sys
import warnings

import pytest

from ftrun.worker.variables.loop_names import loop_names

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
    assert set(names.carried) == carried
    assert "epoch" in names.outside and "step" in names.fresh


@pytest.mark.skipif(sys.version_info < (3, 11), reason="except* came with Python 3.11")
def test_groups_of_errors_are_not_caught_in_each_iteration() -> None:
    body = "try: a = get()\n            except* ValueError: b = 1\n            use(a, b)"
    names = loop_names(LOOP.format(body=body), 8)
    assert set(names.carried) == {"a", "b"}


def test_a_loss_of_the_last_of_some_backwards_is_fresh() -> None:
    body = "for half in halves:\n                loss = net(half)\n            print(loss)"
    names = loop_names(LOOP.format(body=body), 8)
    assert not names.carried and "loss" in names.fresh


def test_of_what_python_has_warned_nobody_warns_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = loop_names(LOOP.format(body=r"found = match('\d', x)"), 8)
    assert "found" in names.fresh


def test_without_a_loop_or_with_no_python_nothing_is_known() -> None:
    assert not any(loop_names("x = 1\n", 1))
    assert not any(loop_names("for (", 1))


def test_what_a_loop_around_makes_anew_is_told_from_what_this_one_does() -> None:
    source = "for e in range(2):\n    seen = []\n    for s in steps:\n        x = s + 1\n        seen.append(x)\n        n = n + 1\n"
    names = loop_names(source, 5)
    assert names.fresh == {"s", "x"}
    assert names.outside >= {"seen"}
