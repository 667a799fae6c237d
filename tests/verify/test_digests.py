"""Comparing what two runs recorded: the first place that differs, and what it may come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftrun.verify import digests
from ftrun.verify.digests import Difference

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
