"""What the benchmark of a step's cost makes of its measurements: figures, goals, lines, sentences."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import cost, runs, step_parts, tables, told
from tests.bench.cost import FTRUN, LOADS, TORCHRUN, Cost, System

BEFORE = System("before", "ftrun", "/elsewhere/ftrun")


def costs(*walls: float) -> list[Cost]:
    """Runs with as much processor time as wall clock, an eighth of it beside the ranks."""
    return [Cost(wall, wall * 7 / 8, wall / 8) for wall in walls]


def of(row: str) -> list[cost.Load]:
    return [load for load in LOADS if load.row == row]


def found() -> dict[cost.Load, cost.Found]:
    """Three pairs of each load: 0.3 ms and 0.492 ms more for few and many tensors, 2 % elsewhere."""
    few, many = of("a")
    tiny = {
        few: {FTRUN.name: costs(0.9, 0.8, 0.7), TORCHRUN.name: costs(0.6, 0.5, 0.4)},
        many: {FTRUN.name: costs(2.492, 2.392, 2.592), TORCHRUN.name: costs(2.0, 1.9, 2.1)},
    }
    others = [load for load in LOADS if load.row not in "af"]
    kept = {FTRUN.name: costs(0.55, 0.6, 0.7), cost.NOT_KEPT.name: costs(0.5, 0.5, 0.5), TORCHRUN.name: costs(0.2, 0.2, 0.2)}
    return {
        **tiny,
        **{load: {FTRUN.name: costs(510, 499, 520), TORCHRUN.name: costs(500, 500, 500)} for load in others},
        **dict.fromkeys(of("f"), kept),
    }


def lines(rows: list[list[str]], begin: str) -> dict[str, list[str]]:
    return {row[1]: row[2:] for row in rows if row[0].startswith(begin)}


def test_a_goal_is_reached_missed_or_missed_by_less_than_the_spread() -> None:
    assert cost.reached([1.0, 1.01, 1.09], 1.01) == "yes"
    assert cost.reached([1.0, 1.02, 1.03], 1.01) == "no, but within the spread"
    assert cost.reached([1.02, 1.03, 1.04], 1.01) == "no"


def test_costs_are_those_of_pairs_and_stand_beside_their_goals() -> None:
    rows = cost.table(found())
    assert all(len(row) == len(cost.HEAD) for row in rows)
    long = lines(rows, "b: ")
    assert long[cost.WALL] == [
        "510 ms (499 to 520, n=3)",
        "500 ms (500 to 500, n=3)",
        "1.020 times (0.998 to 1.040, n=3)",
        "1.01 times",
        "no, but within the spread",
    ]
    assert long[cost.CPU][3:] == ["1.01 times", "no, but within the spread"]
    assert long[cost.BESIDE][:2] == ["63.8 ms (62.4 to 65.0, n=3)", "62.5 ms (62.5 to 62.5, n=3)"]
    assert lines(rows, "d: ")[cost.WALL][3:] == ["1.04 times", "yes"]


def test_what_is_fixed_and_what_is_each_tensors() -> None:
    """0.3 ms with 8 tensors, 0.492 with 200: 1 µs a tensor, and 292 are left."""
    rows = cost.table(found())
    assert lines(rows, "a: 1 rank, of that fixed")[cost.WALL][2:] == ["292 µs (292 to 292, n=3)", "150 µs", "no"]
    assert lines(rows, "a: 1 rank, of that for each")[cost.WALL][2] == "1.00 µs (1.00 to 1.00, n=3)"
    assert lines(rows, "a: 1 rank, 8 ")[cost.WALL][2] == "300 µs (300 to 300, n=3)"


def test_what_is_kept_is_compared_with_what_is_not() -> None:
    row = lines(cost.table(found()), "f: 1 rank, 10 ")[cost.WALL]
    assert row[2:] == ["100.0 µs (50.0 to 200.0, n=3) more than not kept", "100 µs more than not kept", "yes"]


def test_another_commit_has_lines_of_its_own_without_a_goal() -> None:
    (load,) = of("b")
    more = {FTRUN.name: costs(505), BEFORE.name: costs(600), TORCHRUN.name: costs(500)}
    rows = cost.table({load: more})
    assert [row[0].endswith("; before") for row in rows] == [False] * 3 + [True] * 3
    assert rows[3][2:] == [
        "600 ms (600 to 600, n=1)",
        "500 ms (500 to 500, n=1)",
        "1.200 times (1.200 to 1.200, n=1)",
        "",
        "",
    ]


def done(rank: int, steps: range, ns: int) -> list[runs.Done]:
    return [runs.Done(rank, step, step * ns, 100 + rank, step * ns // 2) for step in steps]


def test_steps_are_counted_from_the_last_warm_one() -> None:
    load = replace(of("b")[0], warm=5, steps=10)
    both = [done(0, range(15), 2_000_000), done(1, range(15), 4_000_000)]
    both[0][:3] = [replace(one, ns=0, cpu_ns=-(10**9)) for one in both[0][:3]]  # before the count
    assert cost.count(both, load, 20.0) == Cost(3.0, 3.0, 2.0)
    with pytest.raises(AssertionError, match="8 steps in place of 10"):
        cost.count([done(0, range(13), 1)], load, 0.0)


def test_one_long_step_moves_a_mean_and_no_median() -> None:
    mine = done(0, range(15), 1_000_000)
    mine = [*mine[:-1], replace(mine[-1], ns=mine[-1].ns + 100_000_000)]
    load = replace(of("b")[0], warm=5, steps=10)
    assert cost.count([mine], load, 0.0).wall == pytest.approx(11.0)
    assert cost.count([mine], replace(load, middle=True), 0.0).wall == pytest.approx(1.0)


def test_the_last_step_is_read_from_the_end_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert runs.last_step(tmp_path, 0) == -1
    path = tmp_path / "out" / "rank-0.times"
    path.write_text("begin 1 2\n")
    assert runs.last_step(tmp_path, 0) == -1
    path.write_text("begin 1 2\n" + "".join(f"done {step} 1 2 3\n" for step in range(1000)) + "done 1000 1")
    assert runs.last_step(tmp_path, 0) == 999


def test_rows_are_chosen_by_letter() -> None:
    assert cost.chosen("a, d") == ["a", "d"]
    with pytest.raises(argparse.ArgumentTypeError, match="no row x; there are a, b, c, d, e, f"):
        cost.chosen("a,x")


def test_some_rows_alone_are_not_written_over_all() -> None:
    assert cost.place(None, cost.ROWS) == tables.RESULTS
    assert cost.place(None, ["a", "d"]) is None
    assert cost.place(Path("/elsewhere"), ["a"]) == Path("/elsewhere")


def test_sentences_tell_what_the_table_has(tmp_path: Path) -> None:
    tables.write(tmp_path, "step_cost", "Cost", cost.HEAD, cost.table(found()), cost.notes(LOADS))

    def median(name: str, run: str, what: str, column: str) -> str:
        return tables.median(name, run, what, column, tmp_path if name == "step_cost" else tables.RESULTS)

    sentence, paragraph = (" ".join(told.SENTENCES[name](median).split()) for name in ("readme", "cost"))
    assert "a step of 500 ms takes 2.0 % longer than under torchrun" in sentence
    assert "`290 µs + 1 µs × parameter tensors`" in sentence and "`290 µs + 1 µs × parameter tensors`" in paragraph
    assert (
        "0.49 ms for a model of 200 tensors, so 0.049 % of a step of one second, and 2.5 % of one of 20 ms" in paragraph
    )
    with pytest.raises(LookupError, match="no line 'z: '"):
        median("step_cost", "z: ", cost.WALL, "cost")


PROFILED = """
import sys, time
from pathlib import Path

sys.path[:0] = [sys.argv[1], sys.argv[2]]
import parts
from house import kitchen

profile = parts.Profile(Path(sys.argv[2]) / "house")
profile.start()
cooking = 0
for _ in range(50):
    begun = time.perf_counter()
    kitchen.cook()
    cooking += time.perf_counter() - begun
    time.sleep(0.003)  # the script's own
profile.stop(Path(sys.argv[3]))
print(cooking)
"""
HOUSE = """
import statistics, time
from house import cellar

def cook():
    statistics.median([3, 1, 2])  # of others, at this function's expense
    return sum(fetch(n) for n in range(2))

def fetch(n):
    time.sleep(0.001)
    return cellar.take(n)
"""
CELLAR = """
def take(n):
    return n if n < 1 else take(n - 1)
"""


def test_a_profile_charges_what_is_called_to_the_caller(tmp_path: Path) -> None:
    house = tmp_path / "house"
    house.mkdir()
    for name, text in (("__init__", ""), ("kitchen", HOUSE), ("cellar", CELLAR)):
        (house / f"{name}.py").write_text(text)
    out = tmp_path / "parts.json"
    words = [str(runs.SCRIPTS), str(tmp_path), str(out)]
    script = subprocess.run(
        [sys.executable, "-c", PROFILED, *words], check=True, timeout=60, capture_output=True, text=True
    )
    cooking = float(script.stdout) * 1e6 / 50
    rows = json.loads(out.read_text())
    assert {row[0] for row in rows} == {"kitchen", "cellar"}
    parts = step_parts.read(rows, 50, 0.0)
    assert parts.calls["kitchen", "fetch"] == 2
    assert parts.calls["cellar", "take"] == 3
    assert 0.8 * cooking < parts.all < 1.02 * cooking, "not the script's own sleep, which is as long again"
    assert parts.functions["kitchen", "cook"] == pytest.approx(parts.all, rel=0.2)
    own = {row[1]: row[2] / 50e3 for row in rows}
    assert own["fetch"] > 0.8 * cooking, "the sleep that it calls is of nobody else's"
    assert own["take"] < 0.2 * cooking and own["cook"] < 0.2 * cooking


def test_modules_are_followed_by_their_dear_functions() -> None:
    rows = [("a.b", "one", 4e6, 6e6, 20), ("a.c", "two", 2e6, 2e6, 10), ("a.d", "cheap", 1e3, 1e3, 10)]
    few, many = (
        step_parts.read(rows, 10, 1000.0),
        step_parts.read([(*row[:2], row[2] * 2, *row[3:]) for row in rows], 10, 2000.0),
    )
    lines = step_parts.table({8: [few], 200: [many]})
    assert [line[0] for line in lines[:4]] == ["**`a.b`**", "`one`", "**`a.c`**", "`two`"]
    assert lines[0][1:] == ["400.0", "2.0", "800.0", "2.0", "2.08"]
    assert lines[-1][0].startswith("a whole step") and len(lines) == 6
