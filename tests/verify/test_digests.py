"""Comparing what two runs recorded: the first place that differs, and what it may come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftrun.verify import digests, verification
from ftrun.verify.digests import Difference
from ftrun.verify.trials import Trial

START = [
    "weight:a",
    "buffer:b",
    "optimizer:m, a",
    "python:scheduler",
    "random:torch",
    "position:loader",
    "batch:loader",
]
GATE = ["output:model 0", "local:a", "gradient:a"]
STEPS, RANKS = 3, 2


def record(folder: Path, change: dict[tuple[int, int, str], dict[str, int]] | None = None) -> None:
    """A run of STEPS steps by RANKS ranks. `change`: (rank, step, point) -> name -> another value."""
    folder.mkdir(parents=True)
    for rank in range(RANKS):
        lines: list[dict[str, Any]] = []
        for step in range(STEPS + 1):
            for point, names in (("start", START), ("gate", GATE)):
                if step == STEPS and point == "gate":
                    continue
                values = {name: 1000 * step + 10 * rank + i for i, name in enumerate(names)}
                values.update((change or {}).get((rank, step, point), {}))
                lines += [{"names": names, "point": point}] if step == 0 else []
                lines.append({"point": point, "loop": 1, "step": step, "attempt": 0, "values": list(values.values())})
        last = {"point": "exit", "loop": 1, "step": STEPS, "attempt": 0}
        lines += [
            {"names": START[:5], "point": "exit"},
            {**last, "values": [7, 7, 7, 7, (change or {}).get((rank, 9, "exit"), {}).get("random:torch", 7)]},
        ]
        (folder / f"rank-{rank}-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def compared(tmp_path: Path, change: dict[tuple[int, int, str], dict[str, int]]) -> Difference:
    record(tmp_path / "clean")
    record(tmp_path / "other", change)
    found = digests.compare(digests.read(tmp_path / "clean"), digests.read(tmp_path / "other"))
    assert found is not None
    return found


def test_a_difference_that_left_nothing_behind_is_no_second_verdict(tmp_path: Path) -> None:
    found = compared(tmp_path, {(1, 1, "start"): {"batch:loader": 5}})
    assert not found.lasting
    trial = Trial("faults", tmp_path, 0, 1.0, fired=1)
    result = verification.Result(verification.EQUAL, tmp_path, [trial], [trial], 2, 3, 5, 1, planned=1)
    result.passing.append(verification.on_the_way(found, digests.LOADER, trial))
    first, second, third = result.lines()
    assert first.startswith("equal at the end: 2 ranks, 3 steps; ") and third == "1 of 1 fault fired"
    assert second == (
        "on the way, at the start of step 1 of the run faults, this was not equal, and left nothing behind: batch of the loader on "
        "rank 1; likely cause: loader position: another batch than in the clean run"
    )


def test_equal_runs(tmp_path: Path) -> None:
    record(tmp_path / "clean")
    record(tmp_path / "other")
    clean = digests.read(tmp_path / "clean")
    assert digests.compare(clean, digests.read(tmp_path / "other")) is None
    assert (clean.steps, clean.first_step, clean.tensors(), clean.streams()) == ([0, 1, 2], 0, 3, 1)
    assert digests.has_loader(clean)


@pytest.mark.parametrize(
    ("step", "point", "names", "first", "cause"),
    [
        (1, "start", ["weight:a", "random:torch"], "random:torch", "rng"),
        (1, "start", ["batch:loader", "position:loader", "random:torch"], "position:loader", "loader-position"),
        (1, "start", ["batch:loader"], "batch:loader", "loader-position"),
        (1, "start", ["random:torch", "batch:loader"], "batch:loader", "loader-position"),
        (2, "start", ["weight:a", "optimizer:m, a"], "weight:a", "update"),
        (2, "start", ["python:scheduler", "weight:a"], "python:scheduler", "python-state"),
        (2, "start", ["buffer:b", "weight:a"], "buffer:b", "buffers"),
        (1, "gate", ["gradient:a"], "gradient:a", "bucket-order"),
        (1, "gate", ["local:a", "gradient:a"], "local:a", "non-deterministic-op"),
        (1, "gate", ["output:model 0", "local:a", "gradient:a"], "output:model 0", "non-deterministic-op"),
    ],
)  # fmt: skip
def test_the_first_place_and_its_cause(
    tmp_path: Path, step: int, point: str, names: list[str], first: str, cause: str
) -> None:
    later = {(1, 2, "gate"): {"gradient:a": 5}, (0, 9, "exit"): {"random:torch": 8}}
    found = compared(tmp_path, {**later, (1, step, point): dict.fromkeys(names, 4711)})
    assert (found.place.step, found.first, found.names[first]) == (step, first, [1])
    assert sorted(found.names) == sorted(names)
    assert digests.cause(found, deterministic=True, has_loader=True) == cause
    assert digests.explain(cause) and digests.in_words(first)
    assert found.lasting and (found.at_end, found.compared) == (1, 10)


def test_gradients_that_differ_since_another_rank_did_are_not_bucket_order(tmp_path: Path) -> None:
    found = compared(tmp_path, {(0, 1, "gate"): {"gradient:a": 1}, (1, 1, "gate"): {"gradient:a": 1, "local:a": 2}})
    assert found.first == "local:a" and found.names == {"local:a": [1], "gradient:a": [0, 1]}


def test_a_script_without_a_loader_reads_from_elsewhere(tmp_path: Path) -> None:
    found = compared(tmp_path, {(1, 1, "gate"): {"output:model 0": 1}})
    assert digests.cause(found, deterministic=True, has_loader=False) == "input"
    assert digests.cause(found, deterministic=False, has_loader=False) == "non-deterministic-op"


def test_a_difference_that_does_not_last(tmp_path: Path) -> None:
    assert not compared(tmp_path, {(1, 1, "gate"): {"gradient:a": 1}}).lasting


def test_a_replacement_goes_on_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Killed while it wrote: the torn line is left out; the next incarnation's record of the step must be the same."""
    record(tmp_path / "clean")
    record(tmp_path / "other")
    path = tmp_path / "other" / "rank-1-1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:9])
    second = tmp_path / "other" / "rank-1-5.jsonl"
    second.write_text(lines[0] + lines[2] + "".join(lines[4:]))
    clean, other = digests.read(tmp_path / "clean"), digests.read(tmp_path / "other")
    found = digests.compare(clean, other)
    assert found is None, found
    second.write_text(lines[0] + lines[2] + "".join(lines[4:]).replace("1010", "99", 1))
    found = digests.compare(clean, digests.read(tmp_path / "other"))
    assert found is not None and found.redone and found.place.step == 1


def test_ranks_that_left_early_are_missed(tmp_path: Path) -> None:
    record(tmp_path / "clean")
    record(tmp_path / "other")
    path = tmp_path / "other" / "rank-1-1.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    found = digests.compare(digests.read(tmp_path / "clean"), digests.read(tmp_path / "other"))
    assert found is not None and found.missing == [1] and digests.cause(found, True, True) == "missing"


def part(rank: int) -> dict[str, Any]:
    """Of two replicas that have two shards each."""
    cut = {"dim": 0, "shard": rank % 2, "shards": 2, "first": 24 * (rank % 2), "end": 24 if rank % 2 == 0 else 47, "size": 47}
    return {"at": {"replicate": rank // 2, "shard": rank % 2}, "cuts": [cut], "sums": False}


def sharded(folder: Path, change: dict[tuple[int, int, str], dict[str, int]] | None = None) -> None:
    """The same run of a sharded model, of which a rank's own gradients before the sum are not seen."""
    record(folder, change)
    for rank in range(RANKS):
        path = folder / f"rank-{rank}-{rank}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if "names" in line:
                line["names"] = [name.replace("local:a", "local:b") for name in line["names"]]
                line["parts"] = {name: part(rank) for name in line["names"] if name in ("weight:a", "optimizer:m, a", "gradient:a")}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_shard_that_differs_is_named_with_its_rows_and_its_place(tmp_path: Path) -> None:
    sharded(tmp_path / "clean")
    sharded(tmp_path / "other", {(1, 1, "gate"): {"gradient:a": 1}, (0, 2, "start"): {"weight:a": 3}})
    found = digests.compare(digests.read(tmp_path / "clean"), digests.read(tmp_path / "other"))
    assert found is not None and (found.first, found.shard, found.parts) == ("gradient:a", "gradient:a", {1: part(1)})
    assert found.unsummed and digests.cause(found, deterministic=True, has_loader=True) == "sharded-gradient"
    assert verification._shards(found) == [
        "differs in shards of the gradient of a: rank 1 (replicate 0, shard 1: rows 24 to 46 of 47)"
    ]
    said = digests.as_json(found)
    assert said["shard"] == "gradient:a" and said["shards"] == {"1": part(1)} and said["names"] == {"gradient:a": [1]}


def test_the_first_shard_is_named_where_something_else_comes_first(tmp_path: Path) -> None:
    sharded(tmp_path / "clean")
    sharded(tmp_path / "other", {(r, 1, "start"): {"random:torch": 9, "weight:a": 9} for r in (0, 1)})
    found = digests.compare(digests.read(tmp_path / "clean"), digests.read(tmp_path / "other"))
    assert found is not None and (found.first, found.shard, list(found.parts)) == ("random:torch", "weight:a", [0, 1])
    (line,) = verification._shards(found)
    assert line.startswith("differs in shards of the weight a: rank 0 (replicate 0, shard 0: rows 0 to 23 of 47), rank 1 (")


def test_of_many_ranks_some_shards_are_named(tmp_path: Path) -> None:
    parts = {rank: part(rank) for rank in range(64)}
    found = Difference(digests.DigestPlace(1, 3, 1), {"gradient:a": list(parts)}, False, [], 1, 9, "gradient:a", parts)
    (line,) = verification._shards(found)
    assert line.count("rows") == 8 and line.endswith(" and 56 more ranks")


def test_nothing_is_said_of_shards_where_there_are_none(tmp_path: Path) -> None:
    found = compared(tmp_path, {(1, 1, "gate"): {"gradient:a": 1}})
    assert (found.shard, found.parts, found.unsummed) == ("", {}, False) and verification._shards(found) == []
    assert digests.as_json(found)["shard"] is None


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        ({"dim": 0, "shard": 3, "shards": 4, "first": 3, "end": 3, "size": 3}, "none of its 3 rows"),
        ({"dim": 1, "shard": 0, "shards": 4, "first": 0, "end": 1, "size": 4}, "column 0 of 4"),
        ({"dim": 2, "shard": 1, "shards": 2, "first": 4, "end": 8, "size": 8}, "slices 4 to 7 of 8 on dimension 2"),
        ({"dim": 0, "shard": 1, "shards": 2, "first": None, "end": None, "size": 8}, "shard 1 of 2 of its 8 rows"),
    ],
)
def test_cuts_in_words(cut: dict[str, Any], said: str) -> None:
    assert digests.part_in_words({"at": {"tp": 1}, "cuts": [cut], "sums": False}) == f"tp 1: {said}"
    assert digests.part_in_words({"at": {"tp": 1}, "cuts": [], "sums": True}) == "tp 1: all of it, not summed yet"
