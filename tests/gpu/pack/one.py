"""One check, in this process: `python -m tests.gpu.pack.one NAME FOLDER SHARED [--fake]`, or `--probe` for the machine's facts.

Exit codes: 0 as it should be, 1 not so, 3 this machine cannot answer.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.gpu import machine
from tests.gpu.pack.here import Here, NotHere
from tests.gpu.pack.table import CHECKS, Check, Needs

NOT_HERE = 3


def main(argv: Sequence[str]) -> int:
    if argv[0] == "--probe":
        print(json.dumps({"missing": machine.missing(), "facts": machine.facts(), "lacks": lacks()}))
        return 0
    name, folder, shared = argv[:3]
    check = next(check for check in CHECKS if check.name == name)
    here = Here(Path(folder), Path(shared), "--fake" in argv)
    try:
        function(check)(here, *check.given)
    except NotHere as why:
        here.note("why", why)
        return NOT_HERE
    except BaseException as error:  # pytest's own failures are no Exception
        traceback.print_exc()
        here.note("why", (str(error).strip() or type(error).__name__).splitlines()[0])
        return 1
    return 0


def function(check: Check):  # type: ignore[no-untyped-def]
    """What the check calls."""
    module, _, name = check.function.partition(".")
    return getattr(importlib.import_module(f"tests.gpu.pack.checks.{module}"), name)


def lacks() -> dict[str, str]:
    """Needs that this machine does not meet, and why."""
    import torch
    import torch.distributed as dist

    found = {}
    if not torch.cuda.is_available():
        found[Needs.TORCH.name] = "torch here has no CUDA device"
    if Needs.TORCH.name in found or not dist.is_nccl_available():
        found[Needs.NCCL.name] = "torch here has no NCCL"
    if Needs.NCCL.name in found or torch.cuda.device_count() < 2:
        found[Needs.TWO.name] = "one GPU, and NCCL refuses two ranks on one"
    return found


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what a check left in the driver may never return from its end
