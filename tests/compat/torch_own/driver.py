"""One worker of torch's own distributed tests: each test in a process group of its own, on Gloo or on ftrun's group.

torch's test class spawns the processes of each test. Here a launcher has started them: `DistributedTest._DistTestBase`
is run by ranks that are there already. Each rank writes one line of JSON for each test.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["BACKEND"] = "gloo"  # which tests there are is asked when the module is imported

import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils
from torch.testing._internal.distributed import distributed_test

SKIPS = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
NOT_STARTED = 30.0  # seconds until a rank that does not come to the next test is given up
LONGEST = 20  # seconds of a group's timeout: nothing here takes as long


class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """The tests, as torch's own program for Gloo has them."""


def names() -> list[str]:
    """Every test there is."""
    return sorted(name for name in dir(Case) if name.startswith("test_"))


def meet(folder: Path, what: str, rank: int, size: int) -> None:
    """Wait until every rank has come here.

    Raises:
        TimeoutError
    """
    (folder / f"{what}.{rank}").touch()
    deadline = time.monotonic() + NOT_STARTED
    while len(list(folder.glob(f"{what}.*"))) < size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not every rank came to {what} within {NOT_STARTED:.0f} s")
        time.sleep(0.01)


def run(name: str, backend: str, folder: Path, rank: int, size: int) -> dict[str, Any]:
    """Run one test in a fresh group and destroy that."""
    scratch = folder / name
    for part in ("barrier", "test_dir", "init_dir"):
        (scratch / part).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(scratch)
    os.environ["INIT_METHOD"] = f"file://{scratch}/init_dir/shared_init_file"
    distributed_test.Barrier.barrier_id = 0
    case = Case(name)
    case.rank = rank
    case.file_name = f"{scratch}/store"
    seconds = min(distributed_test.CUSTOM_PG_TIMEOUT.get(name, LONGEST), LONGEST)
    begun = time.monotonic()
    meet(folder, f"{name}.begin", rank, size)
    outcome, why = "pass", ""
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{case.file_name}",
            world_size=size,
            rank=rank,
            timeout=timedelta(seconds=seconds),
        )
        case._barrier()
        common_utils.set_rng_seed()
        getattr(case, name)()
        case._barrier()
    except unittest.SkipTest as skipped:
        outcome, why = "skip", str(skipped)
    except SystemExit as ended:
        outcome, why = ("skip", SKIPS[ended.code]) if ended.code in SKIPS else ("fail", f"exit {ended.code}")
    except Exception as error:
        outcome, why = "fail", f"{type(error).__name__}: {error}".splitlines()[0][:300]
        traceback.print_exc()
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        outcome, why = "fail", f"destroy_process_group: {type(error).__name__}: {error}"
        traceback.print_exc()
    gc.collect()
    meet(folder, f"{name}.end", rank, size)
    return {"test": name, "outcome": outcome, "why": why, "seconds": round(time.monotonic() - begun, 2)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("tests", nargs="*")
    arguments = parser.parse_args()
    if arguments.backend == "ftrun":
        import ftrun  # noqa: F401  registers the backend
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / f"rank-{rank}.jsonl").open("a") as report:
        for name in arguments.tests or names():
            print(f"{name} begins on rank {rank}", file=sys.stderr, flush=True)
            found = run(name, arguments.backend, arguments.out, rank, size)
            print(json.dumps(found), file=report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
