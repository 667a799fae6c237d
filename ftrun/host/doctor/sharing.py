"""Can weights on a GPU outlive a worker? Asked of the CUDA driver itself, in a child: a wedged one never answers."""

from __future__ import annotations

from collections.abc import Iterator

from ftrun.host.doctor import BROKEN, OK, WARNING, Finding
from ftrun.host.doctor.asking import ask
from ftrun.host.settings import gpu_count

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
        name = f"CUDA device {index}"
        if device["usable"]:
            text = (
                f"{device['name']}, {device['uuid']}: weights there outlive a worker (driver: CUDA {found['driver']})"
            )
            yield Finding(AREA, name, OK, text)
        else:
            missing = "virtual memory management" if not device["vmm"] else "64-bit stream writes"
            yield Finding(
                AREA,
                name,
                WARNING,
                f"{device['name']}, {device['uuid']}: no {missing}, so protect() refuses models there",
                "run the script without protect(), or use another device",
            )
