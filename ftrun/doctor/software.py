"""Checks Python, kernel, torch, NCCL and ftrun's native library for versions that are known to fail."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

from ftrun import native
from ftrun.core.errors import PlatformError
from ftrun.core.tried import TORCH_FROM, TORCH_RANGE, TORCH_TO, version_of
from ftrun.doctor.asking import ask
from ftrun.doctor.findings import BROKEN, OK, WARNING, Finding
from ftrun.host.devices.counting import gpu_count

AREA = "software"
_NCCL_BAD = ((2, 28, 3), (2, 28, 8))
_KERNEL = (5, 3)  # pidfd_open
_KERNEL_GOOD = (5, 14)  # madvise(MADV_POPULATE_WRITE)
_SECONDS = 120.0


def check() -> Iterator[Finding]:
    yield _python()
    yield _kernel()
    yield _library()
    facts, why = ask("from ftrun.worker.process.facts import main; main()", _SECONDS)
    if facts is None:
        yield Finding(
            AREA, "torch", BROKEN, f"cannot be used: {why}", "pip install 'torch>=2.12' into this environment"
        )
        return
    yield from _torch(facts)
    if facts["gloo"]:
        yield _private(facts)
    yield _nccl(facts)


def _python() -> Finding:
    text = f"{platform.python_version()} ({sys.executable})"
    if not hasattr(os, "pidfd_open"):
        return Finding(
            AREA,
            "python",
            BROKEN,
            f"{text} was built without os.pidfd_open",
            "use a Python built on Linux 5.3 or newer",
        )
    return Finding(AREA, "python", OK, text)


def _kernel() -> Finding:
    release = platform.release()
    if platform.system() != "Linux":
        return Finding(AREA, "kernel", BROKEN, f"{platform.system()} {release}", "ftrun needs Linux")
    if version_of(release) < _KERNEL:
        return Finding(AREA, "kernel", BROKEN, f"Linux {release} has no pidfds", "use Linux 5.3 or newer")
    if version_of(release) < _KERNEL_GOOD:
        return Finding(
            AREA, "kernel", WARNING, f"Linux {release}: memory cannot be faulted in ahead", "use Linux 5.14 or newer"
        )
    return Finding(AREA, "kernel", OK, f"Linux {release}")


def _library() -> Finding:
    if native.available():
        return Finding(AREA, "native library", OK, "libftrun_native.so loads and fits")
    try:
        native.checksum(0, 0)
        text = "is not available"
    except PlatformError as error:
        text = str(error).partition(": install")[0]
    fix = "install a C++17 compiler and reinstall ftrun; in a source checkout: make native"
    return Finding(AREA, "native library", BROKEN, text, fix)


def _torch(facts: dict[str, Any]) -> Iterator[Finding]:
    version = version_of(facts["version"])
    kind = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU only"
    text = f"{facts['version']} ({kind}), imported in {facts['seconds']:g} s"
    if version < TORCH_FROM:
        yield Finding(AREA, "torch", BROKEN, text, "pip install 'torch>=2.12'")
    elif not facts["distributed"] or not facts["gloo"]:
        yield Finding(
            AREA, "torch", BROKEN, f"{text}, built without torch.distributed or Gloo", "install a build that has them"
        )
    elif version[:2] > TORCH_TO:
        yield Finding(AREA, "torch", WARNING, text, f"ftrun was tested with {TORCH_RANGE}; check with ftrun verify")
    else:
        yield Finding(AREA, "torch", OK, text)
    if facts["cuda_error"]:
        yield Finding(
            AREA,
            "torch on CUDA",
            BROKEN,
            facts["cuda_error"],
            "see the driver below; python -c 'import torch; torch.zeros(1).cuda()'",
        )
    elif facts["devices"]:
        yield Finding(AREA, "torch on CUDA", OK, f"{len(facts['devices'])} x {facts['devices'][0]}, a kernel ran")
    elif gpu_count():
        fix = "install a CUDA build of torch" if not facts["cuda"] else "see the driver below, and CUDA_VISIBLE_DEVICES"
        yield Finding(AREA, "torch on CUDA", BROKEN, f"torch sees none of {gpu_count()} GPUs", fix)


def _private(facts: dict[str, Any]) -> Finding:
    """Check the private names of torch and Python that ftrun uses, and report the features that a missing one costs."""
    lacking = facts["private"]
    if not lacking:
        return Finding(AREA, "private names", OK, "all that ftrun uses are there")
    costs = "; ".join(f"{name['name']} is missing (needed for {name['needs']}): {name['without']}" for name in lacking)
    # a name that only some models need is no fault of the installation: protect() refuses those models by name
    state = BROKEN if any(name["needs"] in ("start", "protect", "protect of DDP") for name in lacking) else WARNING
    return Finding(AREA, "private names", state, costs, f"use {TORCH_RANGE}")


def _nccl(facts: dict[str, Any]) -> Finding:
    if facts["nccl"] is None:
        state = WARNING if gpu_count() else OK
        return Finding(AREA, "NCCL", state, "not in this torch" + ("" if gpu_count() else ", and not needed without a GPU"),
                       "install a CUDA build of torch" if gpu_count() else "")  # fmt: skip
    version = tuple(facts["nccl"])
    text = ".".join(map(str, version))
    if _NCCL_BAD[0] <= version <= _NCCL_BAD[1]:
        return Finding(AREA, "NCCL", BROKEN if gpu_count() else WARNING, f"{text} hangs or crashes when a communicator is aborted",
                       "use 2.28.9 or newer, or 2.28.2 or older (pip install nvidia-nccl-cu13)")  # fmt: skip
    return Finding(AREA, "NCCL", OK, text)
