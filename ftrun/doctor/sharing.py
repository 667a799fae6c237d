"""Checks whether weights on a GPU can outlive a worker. A child process asks the CUDA driver, since a wedged driver never answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftrun.doctor.asking import ask
from ftrun.doctor.findings import BROKEN, OK, WARNING, Finding
from ftrun.host.devices.counting import gpu_count

AREA = "devices"
_SECONDS = 15.0


def check() -> Iterator[Finding]:
    found, why = ask("import json; from ftrun.native import cuda; print(json.dumps(cuda.report()))", _SECONDS)
    error = why if found is None else found.get("error", "")
    if found is None or error:
        if gpu_count():
            yield Finding(
                AREA,
                "CUDA driver",
                BROKEN,
                f"weights on a GPU cannot outlive a worker: {error}",
                "install a driver of CUDA 12.0 or newer (525.60.13), and see that the container has libcuda.so.1",
            )
        return
    for index, device in enumerate(found["devices"]):
        yield _finding(f"CUDA device {index}", device, found["driver"])


def _finding(name: str, device: dict[str, Any], driver: str) -> Finding:
    who = f"{device['name']}, {device['uuid']}"
    if device["usable"]:
        text = f"{who}: weights there outlive a worker (driver: CUDA {driver})"
        return Finding(AREA, name, OK, text)
    missing = "virtual memory management" if not device["vmm"] else "64-bit stream writes"
    fix = "run the script without protect(), or use another device: virtual GPUs often lack this"
    return Finding(AREA, name, WARNING, f"{who}: no {missing}, so protect() refuses models there", fix)
