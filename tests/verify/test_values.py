"""Comparing the script's own values of two runs at the ends of loops: equal, different, or not compared."""

from __future__ import annotations

import json
from pathlib import Path

from ftrun.verify import digests, values
from ftrun.verify.values import ComparedValues

Own = dict[str, int]  # KIND:NAME -> digest


def record(folder: Path, *loops: Own, ranks: int = 2, change: dict[tuple[int, int], Own] | None = None, live: int = 0) -> digests.Digests:
    """A run whose loops end with these values. `change`: (rank, loop) -> all of them there."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        lines = []
        for loop, own in enumerate(loops, 1):
            found = (change or {}).get((rank, loop), own)
            lines += [{"names": ["weight:a", "live:n"], "point": "start"}, {"names": [*found], "point": "end"}]
            place = {"loop": loop, "step": 3 * loop, "attempt": 0}
            lines += [{"point": "start", **place, "values": [7, live]}, {"point": "end", **place, "values": [*found.values()]}]
        lines += [{"names": ["weight:a"], "point": "exit"}, {"point": "exit", "loop": 9, "step": 9, "attempt": 0, "values": [7]}]
        (folder / f"rank-{rank}-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return digests.read(folder)


def compared(tmp_path: Path, ours: Own, theirs: Own) -> ComparedValues:
    return values.compare(record(tmp_path / "clean", ours), record(tmp_path / "other", theirs))


def test_equal_values(tmp_path: Path) -> None:
    own = {"value:best": 1, "value:losses": 2, "other:pid": 3}
    found = compared(tmp_path, own, {**own, "other:pid": 4})
    assert found.equal == {"best", "losses"} and not found.different and not found.uncompared, "pid is a constant of each process"


def test_one_that_only_one_run_keeps_is_compared_with_what_the_other_has(tmp_path: Path) -> None:
    """A replacement that lost a value which changed early never saw it change."""
    assert compared(tmp_path / "1", {"value:best": 1}, {"other:best": 1}).equal == {"best"}
    found = compared(tmp_path / "2", {"value:best": 1}, {"other:best": 5})
    assert [*found.different] == ["best"] and not found.equal


def test_what_one_run_has_not_is_neither(tmp_path: Path) -> None:
    found = compared(tmp_path, {"value:best": 1, "value:n": 2}, {"value:n": 2})
    assert found.equal == {"n"} and not found.different and [*found.uncompared] == ["best"]


def test_a_copy_that_cannot_be_compared_is_neither(tmp_path: Path) -> None:
    found = compared(tmp_path, {"value:best": 1}, {"uncompared:best": 0})
    assert not found.equal and not found.different and found.uncompared == {"best": "its copy cannot be compared"}
    assert values.in_words(found) == ["not compared: best (its copy cannot be compared)"]


def test_the_first_loop_and_the_ranks_of_a_difference(tmp_path: Path) -> None:
    own = {"value:best": 1, "value:n": 2}
    clean = record(tmp_path / "clean", own, own, own, ranks=4)
    changed = {(rank, loop): {**own, "value:best": 9} for rank in (1, 2) for loop in (2, 3)} | {(3, 3): {**own, "value:n": 9}}
    other = record(tmp_path / "other", own, own, own, ranks=4, change=changed)
    found = values.compare(clean, other)
    lines = ["value best differs on ranks 1, 2 at the end of loop 2", "value n differs on rank 3 at the end of loop 3"]
    assert values.in_words(found) == lines
    first = values.difference(found, clean, other)
    assert first is not None and first.names == {"value:best": [1, 2]} and first.place.loop == 2 and first.at_end == 0
    assert digests.compare(clean, other) is None, "no tensor differs"
    assert digests.cause(first, True, False) == "not-kept" and digests.in_words(first.first) == "value best"
    assert values.as_json(found)["different"] == {"best": {"loop": 2, "ranks": [1, 2]}, "n": {"loop": 3, "ranks": [3]}}


def test_what_differs_between_two_clean_runs_is_neither(tmp_path: Path) -> None:
    clean = record(tmp_path / "clean", {"value:times": 1, "value:n": 2})
    again = record(tmp_path / "again", {"value:times": 3, "value:n": 2}, live=1)
    other = record(tmp_path / "other", {"value:times": 5, "value:n": 2}, live=2)
    unstable = values.unstable(clean, again)
    assert unstable == {"times", "n"}, "n differed at the start of a step"
    assert digests.compare(clean, other) is not None and digests.compare(clean, other, unstable) is None
    found = values.compare(clean, other, {"times"})
    assert found.equal == {"n"} and found.uncompared == {"times": "differs between two runs without faults, too"}


def test_a_rank_that_did_not_come_to_the_end_is_not_compared(tmp_path: Path) -> None:
    clean, other = record(tmp_path / "clean", {"value:n": 2}), record(tmp_path / "other", {"value:n": 2}, ranks=1)
    assert values.compare(clean, other).uncompared == {"n": "not there in both runs"}
