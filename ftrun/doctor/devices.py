"""Checks the driver and the GPUs by NVML, in a child process, since a wedged driver never answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftrun.core.tried import version_of
from ftrun.doctor.asking import ask
from ftrun.doctor.findings import BROKEN, OK, WARNING, Finding
from ftrun.host.devices.counting import gpu_count

AREA = "devices"
_SECONDS = 15.0
_ABSENT = ("Library Not Found", "LibraryNotFound", "Driver Not Loaded", "DriverNotLoaded")
_DRIVER = (525, 60, 13)  # the first with CUDA 12.0: ftrun needs its cuGetProcAddress_v2
_RECOVERY = {
    1: "needs a reset",
    2: "needs a reboot of the machine",
    3: "must be drained of peer access",
    4: "must be drained and reset",
}
_FIX = {
    1: "nvidia-smi --gpu-reset -i {}",
    2: "reboot the machine",
    3: "end what uses it",
    4: "end what uses it, then nvidia-smi --gpu-reset -i {}",
}


def facts() -> dict[str, Any]:
    """Return driver and devices, from NVML; runs in the child.

    Raises:
        pynvml.NVMLError: There is no driver.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
    except pynvml.NVMLError:
        cuda = 0
    return {
        "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "?",
        "gpus": [_gpu(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount())],
    }


def _gpu(pynvml: Any, index: int) -> dict[str, Any]:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return {"index": index, "error": str(error)}

    def ask_for(function: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, function)(handle, *arguments)
        except (pynvml.NVMLError, AttributeError):
            return None

    memory = ask_for("nvmlDeviceGetMemoryInfo")
    recovery = ask_for("nvmlDeviceGetFieldValues", [230])  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
    ecc = ask_for("nvmlDeviceGetEccMode")
    return {
        "index": index,
        "name": _text(ask_for("nvmlDeviceGetName") or "?"),
        "memory": None if memory is None else [memory.used, memory.total],
        "recovery": recovery[0].value.uiVal if recovery and recovery[0].nvmlReturn == 0 else None,
        "ecc": None if ecc is None else bool(ecc[0]),
        "error": "",
    }


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def check() -> Iterator[Finding]:
    here = gpu_count()
    found, why = ask("import json; from ftrun.doctor.devices import facts; print(json.dumps(facts()))", _SECONDS)
    if found is None:
        if here:
            yield Finding(
                AREA,
                "NVML",
                BROKEN,
                f"{here} GPUs in /dev, and NVML says: {why}",
                "check the driver with nvidia-smi; reboot when it hangs",
            )
        elif any(absent in why for absent in _ABSENT):
            yield Finding(AREA, "GPUs", OK, "none: workers run on the CPU")
        else:
            yield Finding(AREA, "NVML", WARNING, f"there is no GPU in /dev, and NVML says: {why}", "check the driver")
        return
    driver = f"{found['driver']} (CUDA {found['cuda']})"
    if version_of(found["driver"]) < _DRIVER:
        yield Finding(AREA, "driver", BROKEN, driver, "install driver 525.60.13 or newer")
    else:
        yield Finding(AREA, "driver", OK, driver)
    for gpu in found["gpus"]:
        yield _finding(gpu)
    if not found["gpus"]:
        yield Finding(
            AREA,
            "GPUs",
            WARNING if here else OK,
            "NVML lists none",
            "give the container its GPUs (--gpus all)" if here else "",
        )


def _finding(gpu: dict[str, Any]) -> Finding:
    name = f"GPU {gpu['index']}"
    if gpu["error"]:
        return Finding(AREA, name, BROKEN, gpu["error"], "take the device out of service, then reset it or reboot")
    used, total = gpu["memory"] or (0, 0)
    text = f"{gpu['name']}, {used / 2**30:.1f} of {total / 2**30:.1f} GiB used, ECC {'on' if gpu['ecc'] else 'off or none'}"
    action = gpu["recovery"] or 0
    if action:
        return Finding(AREA, name, BROKEN, f"{text}; it {_RECOVERY.get(action, f'asks for recovery action {action}')}",
                       _FIX.get(action, "see nvidia-smi -q").format(gpu["index"]))  # fmt: skip
    if total and used > total / 2:
        return Finding(AREA, name, WARNING, text, "another program holds much of its memory: see nvidia-smi")
    return Finding(AREA, name, OK, text)
