"""What a loop changes goes on in a replacement as if it had not been cut off: forty ways to keep a value."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.random import default_rng

from ftrun.core.paths import OWN_FILES
from ftrun.worker.variables.variables import Variables
from tests.worker.variables.kept_values import SCRIPTS, Meter, Steps, best_and_when

CUT = 4

# the loop of ftrun stands in a file of its own: frames of the script are those of other files
_LOOP = """
def loop(variables, first, saved, slots):
    for step in range(first, 7):
        variables.here()
        if saved:
            variables.put_back(saved)
            saved = None
        slots[step] = variables.capture(step < 3)
        variables.begins()
        yield step
    variables.leave()
"""
_space: dict[str, Any] = {}
exec(compile(_LOOP, OWN_FILES + "loop_of_a_test.py", "exec"), _space)  # noqa: S102
LOOP: Callable[..., Steps] = _space["loop"]


def run(
    script: Callable[[Steps], Any], first: int = 0, saved: Any = None, **options: Any
) -> tuple[Any, dict[int, Any], Variables, list[str]]:
    """What the script gives, what was kept at each hand-out, and what was lost."""
    slots: dict[int, Any] = {}
    lost: list[str] = []
    variables = Variables(options.pop("modules", []), options.pop("known", {}), ["slots", "saved", "lost"], **options)
    variables.told = lost.extend
    return script(LOOP(variables, first, saved, slots)), slots, variables, lost


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_replacement_goes_on(name: str) -> None:
    wanted, slots, _, _ = run(SCRIPTS[name])
    found, _, _, lost = run(SCRIPTS[name], CUT, slots[CUT])
    assert found == wanted and not lost


@pytest.mark.parametrize("name", SCRIPTS)
def test_and_the_replacement_of_that(name: str) -> None:
    wanted, slots, _, _ = run(SCRIPTS[name])
    _, later, _, _ = run(SCRIPTS[name], CUT, slots[CUT])
    found, _, _, lost = run(SCRIPTS[name], CUT + 2, later[CUT + 2])
    assert found == wanted and not lost


def test_what_the_loop_makes_anew_and_what_it_leaves_alone_is_not_kept() -> None:
    def plain(steps: Steps) -> int:
        batch, folder = torch.zeros(1), {"path": "x"}
        for step in steps:
            batch = torch.full((1,), float(step))
            value = batch.sum()
        return int(value) + len(folder)

    _, slots, _, _ = run(plain)
    assert not any(slots.values())


def test_a_step_that_is_done_again_finds_what_its_first_try_found() -> None:
    variables = Variables([], {}, ["slots", "lost"])
    lost: list[str] = []
    variables.told = lost.extend
    slots: dict[int, Any] = {}
    n, seen, stage = 0, [], "first"  # type: ignore[var-annotated]
    for step in LOOP(variables, 0, None, slots):
        n += 1
        seen.append(step)
        if step == 5:
            stage = "second"  # for the first time, so that no slot has it
            assert (n, stage) == (6, "second")
            variables.capture(True)  # at the gate, which is not passed
            variables.stopped(rewind=True)
            variables.put_back(slots[5])
            break
    assert (n, seen, stage) == (5, [0, 1, 2, 3, 4], "first") and not lost


def test_what_the_loop_will_change_is_kept_before_it_does() -> None:
    """A replacement may read another value from a checkpoint that was written meanwhile."""
    read = {"best": 9.0, "bad": [1]}

    def resumed(steps: Steps) -> Any:
        best, bad, meter = read["best"], read["bad"], Meter()
        meter.total = best
        for step in steps:
            if step == 5:
                best = min(best, 7.0)  # type: ignore[call-overload]
                bad = bad + [2]  # type: ignore[operator]  # noqa: RUF005
                meter.total = meter.total / 2
        return best, bad, meter.total

    wanted, slots, _, _ = run(resumed)
    read = {"best": 1.0, "bad": [5, 6]}
    found, _, _, lost = run(resumed, CUT, slots[CUT])
    assert found == wanted == (7.0, [1, 2], 4.5) and not lost


def test_names_of_what_the_job_knows_are_bound_again() -> None:
    def swapped(steps: Steps) -> str:
        current = known["a"]
        for step in steps:
            if step == 2:
                current = known["b"]
        return next(name for name, thing in known.items() if thing is current)

    known: dict[str, Any] = {"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1)}
    _, slots, _, _ = run(swapped, known=known)
    known = {"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1)}
    found, _, _, lost = run(swapped, CUT, slots[CUT], known=known)
    assert found == "b" and not lost


def test_attributes_of_a_protected_module() -> None:
    def schedule(steps: Steps) -> float:
        for step in steps:
            if step == 1:
                net[1].p = 0.5
        return float(net[1].p)

    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.0))
    _, slots, _, _ = run(schedule, modules=[net])
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.0))
    found, _, _, lost = run(schedule, CUT, slots[CUT], modules=[net])
    assert found == 0.5 and not lost


@pytest.mark.parametrize(
    "make",
    [lambda: itertools.count(), lambda: iter(range(100)), lambda: (n for n in range(100))],
    ids=["count", "iter", "generator"],
)
def test_an_iterator_is_not_kept_and_not_covered(make: Callable[[], Any]) -> None:
    def drawn(steps: Steps) -> int:
        numbers, total, covered = make(), 0, True
        for _ in steps:
            total += next(numbers)
            covered = "numbers" not in variables.not_kept()[1]
        assert not covered
        return total

    variables = Variables([], {}, ["slots", "lost"])
    slots: dict[int, Any] = {}
    drawn(LOOP(variables, 0, None, slots))
    assert not any("numbers" in name for kept in slots.values() for name in kept)
    assert any("total" in name for name in slots[CUT])


def test_what_locals_gave_stays_as_it_is() -> None:
    """Until Python 3.12 that is a dict that each look at the variables of a frame writes into."""

    def main(steps: Steps) -> list[list[str]]:
        taken, found, rate = locals(), [], 1.0
        for _ in steps:
            rate *= 0.5
            found.append([*taken])
        return found

    slots: dict[int, Any] = {}
    found = main(LOOP(Variables([], {}, ["slots", "lost"]), 0, None, slots))
    assert found == [["steps"]] * 7 and {*slots[CUT]} == {"variable main().|rate", "variable main().|found"}


def test_what_the_loop_lets_go_is_gone() -> None:
    def main(steps: Steps) -> list[bool]:
        gone = []
        for step in steps:
            large = Holder() if step % 2 else None
            reference = weakref.ref(large) if large else Holder
            variables.capture(False)  # at the gate
            del large
            gone.append(reference() is None)
        return gone

    variables = Variables([], {}, ["slots", "lost"])
    assert main(LOOP(variables, 0, None, {})) == [False, True] * 3 + [False]


class Holder:
    pass


def test_what_one_case_of_several_writes() -> None:
    def staged(steps: Steps) -> list[str]:
        stage, found = "first", []
        for step in steps:
            match step:
                case 2:
                    stage = "second"
            found.append(stage)
        return found

    wanted, slots, _, _ = run(staged)
    found, _, _, lost = run(staged, CUT, slots[CUT])
    assert found == wanted and not lost


def test_a_class_that_does_not_say_its_module() -> None:
    """As functions of Cython's up to 3.1 (in numpy 2.2, the last one for Python 3.10)."""

    def main(steps: Steps) -> int:
        draw, odd, n = default_rng, Odd(), 0
        for _ in steps:
            n += 1
        return n + (draw is default_rng) + isinstance(odd, Odd)

    wanted, slots, _, _ = run(main)
    found, _, _, lost = run(main, CUT, slots[CUT])
    assert found == wanted == 9 and {*slots[CUT]} == {"variable main().|n"} and not lost


class Odd:
    pass


Odd.__module__ = property(lambda self: __name__)  # type: ignore[assignment]

class Keys(dict[str, Any]):
    """Its keys are attributes, in the shortest way, which raises a KeyError for others."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


def test_a_dict_whose_keys_are_attributes() -> None:
    """Python 3.10 asks it for attributes of its own and cannot copy it: there it is named."""

    def main(steps: Steps) -> dict[str, Any]:
        state = Keys(best=0, seen=[])
        for step in steps:
            state.best += step
            state.seen.append(step)
            covered[step] = "state" not in variables.not_kept()[1]
        return dict(state)

    covered: dict[int, bool] = {}
    slots: dict[int, Any] = {}
    variables = Variables([], {}, ["slots", "lost", "covered"])
    wanted = main(LOOP(variables, 0, None, slots))
    if sys.version_info < (3, 11):
        assert not covered[CUT]
        return
    variables = Variables([], {}, ["slots", "lost", "covered"])
    assert covered[CUT] and main(LOOP(variables, CUT, slots[CUT], {})) == wanted


COMPREHENSION = """
total = 0

def one(step):
    global total
    total += step
    return total

last = [one(step) for step in steps][-1]
"""


def test_a_comprehension_in_a_module(tmp_path: Path) -> None:
    """It has a frame of its own until Python 3.11."""

    def module(steps: Steps) -> int:
        space = {"__name__": "a_script", "steps": steps}
        exec(compile(COMPREHENSION, str(tmp_path / "script.py"), "exec"), space)  # noqa: S102
        return int(str(space["total"]))

    _, slots, _, _ = run(module)
    keys = {key for kept in slots.values() for key in kept}
    assert keys - {"variable <listcomp>().|step"} == {"variable global a_script.|total"}
    found, _, _, lost = run(module, CUT, slots[CUT])
    assert found == sum(range(7)) and not lost


def test_off_and_names() -> None:
    _, slots, _, _ = run(best_and_when, only=[])
    assert not any(slots.values())
    _, slots, _, _ = run(best_and_when, only=["at"])
    assert {name.rpartition("|")[2] for kept in slots.values() for name in kept} == {"at"}


def test_what_is_too_large_is_not_covered() -> None:
    def grown(steps: Steps) -> bool:
        large, small = torch.zeros(1 << 19), torch.zeros(1)
        for _ in steps:
            large += 1
            small += 1
        return not variables.why_not("large")

    variables = Variables([], {}, ["slots", "lost"])
    slots: dict[int, Any] = {}
    covered = grown(LOOP(variables, 0, None, slots))
    assert not covered and {name.rpartition("|")[2] for name in slots[CUT]} == {"small"}
