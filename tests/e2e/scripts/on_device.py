"""Runs a script as a worker that uses the fake device of its local rank: `on_device.py SCRIPT ARGS...`.

What a CUDA context is to NVML is here a file: <control file>.procs/<UUID>/<pid>. The device is the one that CUDA would
take: entry LOCAL_RANK of CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def take_device() -> str:
    """Appear as a process on the device of this rank; its UUID."""
    control = Path(os.environ["FTRUN_FAKE_NVML"])
    entry = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ["LOCAL_RANK"])]
    if entry.isdigit():
        gpus = [line for line in control.read_text().splitlines() if line.startswith("gpu ")]
        entry = next(word[5:] for word in gpus[int(entry)].split() if word.startswith("uuid="))
    folder = Path(f"{control}.procs") / entry
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(os.getpid())).touch()
    return entry


if __name__ == "__main__":
    print(f"rank {os.environ['RANK']} uses {take_device()}", flush=True)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
