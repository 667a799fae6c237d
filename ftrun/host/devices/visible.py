"""Chooses the devices that a run may use: matches CUDA_VISIBLE_DEVICES with NVML's inventory, as CUDA does.

Numbers count GPUs in the order of the bus. CUDA does the same with CUDA_DEVICE_ORDER=PCI_BUS_ID, and without it if all GPUs
are of one kind. With several kinds, name the devices by UUID, or set that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ftrun.core.system.visible import entries


@dataclass(frozen=True)
class Visible:
    """Names one device of the run. `gpu` is the UUID of the physical GPU, `index` its NVML number; CUDA accepts `uuid`.

    `gi`, `ci`: the MIG instance, None for a whole GPU.
    """

    uuid: str
    gpu: str
    index: int
    name: str
    gi: int | None = None
    ci: int | None = None


def of_inventory(gpus: Sequence[dict[str, Any]]) -> list[list[Visible]]:
    """Return, for each GPU, its MIG instances, or the GPU itself if it has none."""
    return [
        [Visible(m["uuid"], gpu["uuid"], gpu["index"], gpu["name"], m["gi"], m["ci"]) for m in gpu["mig"]]
        or [Visible(gpu["uuid"], gpu["uuid"], gpu["index"], gpu["name"])]
        for gpu in gpus
    ]


def choose(variable: str | None, gpus: Sequence[dict[str, Any]]) -> list[Visible]:
    """Return the devices that `variable` (None: all) names, in its order, up to the first entry that names none or a repeated one."""
    have = of_inventory(gpus)
    if variable is None:
        return [device for devices in have for device in devices]
    chosen: list[Visible] = []
    for part in entries(variable):
        found = _named(part, have)
        if not found or any(device in chosen for device in found):
            break  # as CUDA does
        chosen += found
    return chosen


def _named(part: str, have: list[list[Visible]]) -> list[Visible]:
    if part.isdigit():
        return next((devices for devices in have if devices[0].index == int(part)), [])
    if part.startswith("MIG-GPU-"):  # the old form: MIG-GPU-<uuid>/<gi>/<ci>
        gpu, _, instance = part.removeprefix("MIG-").partition("/")
        return [d for devices in have for d in devices if d.gpu == gpu and f"{d.gi}/{d.ci}" == instance]
    found = [d for devices in have for d in devices if d.uuid.startswith(part)]
    if not found:
        found = [d for devices in have for d in devices if d.gpu.startswith(part)]
        return found if len({d.gpu for d in found}) == 1 else []
    return found if len(found) == 1 else []


def affected(devices: Sequence[Visible], gpu: str, gi: int | None, ci: int | None) -> tuple[list[str], list[str]]:
    """Return the UUIDs of the run's devices that an event on `gpu` affects, and of its others there. `gi`, `ci` None: the whole GPU."""
    on_it = [d for d in devices if d.gpu == gpu]
    about = [d for d in on_it if d.gi is None or gi is None or (d.gi == gi and ci in (None, d.ci))]
    return [d.uuid for d in about], [d.uuid for d in on_it if d not in about]
