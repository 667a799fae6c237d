"""Counts the devices that a run may use, for --nproc-per-node: from files in /dev and /sys, or else from NVML in a child process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ftrun.core.errors import UsageError
from ftrun.core.system.visible import VARIABLE, entries
from ftrun.host.devices.visible import choose

_COUNT = "from ftrun.helpers import nvml_reader; nvml_reader.count_devices()"

_COUNT_PATIENCE = 20.0  # seconds


def count_by_nvml(environ: Mapping[str, str]) -> int:
    """Return the number of devices that a run may use by NVML, for machines whose GPUs have no /dev/nvidia<N>; 0 without an answer.

    A child process asks, because the driver may never return.
    """
    from ftrun.host.services import spawn

    try:
        done = subprocess.run(
            spawn.command(_COUNT), capture_output=True, text=True, timeout=_COUNT_PATIENCE, check=True
        )
        gpus = json.loads(done.stdout)["gpus"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return 0
    return len(choose(environ.get(VARIABLE), gpus))


MAX_WORKERS = 4096
_GPUS = "gpu:"


def worker_count(text: str) -> int:
    """Return the number of workers for the value of --nproc-per-node: a number, `cpu`, `gpu`, `gpu:1,3`, `xpu` or `auto`.

    Raises:
        UsageError: The value is none of these or out of range, or the machine has no such devices.
    """
    kind = text.strip().lower()
    if kind.startswith(_GPUS):
        return len(chosen_gpus(kind).split(","))
    if kind == "cpu":
        return len(os.sched_getaffinity(0))
    if kind in ("gpu", "auto"):
        gpus = gpu_count()
        if gpus:
            return gpus
        if kind == "gpu":
            found = count_by_nvml(os.environ)
            if not found:
                raise UsageError("--nproc-per-node gpu: this machine shows no GPU (no /dev/nvidia0, and none by NVML)")
            return found
        return len(os.sched_getaffinity(0))
    if kind == "xpu":
        count = xpu_count()
        if not count:
            raise UsageError(
                "--nproc-per-node xpu: this machine shows no Intel GPU (no render device in /sys/class/drm)"
            )
        return count
    try:
        count = int(kind)
    except ValueError:
        raise UsageError(f"--nproc-per-node must be a number, auto, cpu, gpu, gpu:0,1 or xpu, not {text!r}") from None
    if not 1 <= count <= MAX_WORKERS:
        raise UsageError(f"--nproc-per-node must be between 1 and {MAX_WORKERS}, not {count}")
    return count


def chosen_gpus(text: str) -> str:
    """Return CUDA_VISIBLE_DEVICES for the value of --nproc-per-node: the devices that `gpu:1,3` names, "" for any other value.

    The numbers are those that torch gives the devices: with CUDA_VISIBLE_DEVICES set they count its entries.

    Raises:
        UsageError: A number is no number, stands there twice, or no GPU has it.
    """
    kind = text.strip().lower()
    if not kind.startswith(_GPUS):
        return ""
    names = [name.strip() for name in kind.removeprefix(_GPUS).split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", name) for name in names):
        raise UsageError(f"--nproc-per-node {text}: write the numbers of the GPUs, as in gpu:0,2")
    numbers = [int(name) for name in names]
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"--nproc-per-node {text} names a GPU twice; each worker has one of its own")
    there = gpu_count() or count_by_nvml(os.environ)
    named = os.environ.get(VARIABLE)
    visible = list(map(str, range(there))) if named is None else entries(named)[:there]
    there = len(visible)
    if max(numbers) >= there:
        seen = f"{there} GPUs, 0 to {there - 1}" if there > 1 else "one GPU, 0" if there else "no GPU"
        raise UsageError(f"--nproc-per-node {text}: there is no GPU {max(numbers)}; this machine shows {seen}")
    return ",".join(visible[n] for n in numbers)


def gpu_count() -> int:
    """Return the number of GPUs that this process may use, by the /dev/nvidia<N> files and CUDA_VISIBLE_DEVICES. Loads no driver."""
    named = os.environ.get(VARIABLE)
    present = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))
    return present if named is None or not present else len(entries(named))


def xpu_count(devices: Path = Path("/sys/class/drm")) -> int:
    """Return the number of Intel GPUs by their render devices. Loads no driver."""
    count = 0
    for vendor in devices.glob("renderD*/device/vendor"):
        with contextlib.suppress(OSError):
            count += vendor.read_text().strip() == "0x8086"
    return count
