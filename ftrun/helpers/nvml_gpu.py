"""Watches one GPU by NVML: one thread reads its events and another its health, so that a wedged driver blocks only those threads.

It runs in the watcher process (ftrun.helpers.nvml_reader) and reports to the launcher, which judges.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

INTERVAL = 1.0  # seconds between two health samples of a GPU
_WAIT_MS = 1000  # milliseconds of one wait for an event
_ANSWER = 0.03  # seconds that an event waits for its recovery action and processes
_RETRY = 1.0  # seconds between two tries to get a GPU's events
_XID, _ECC, _UNAVAILABLE, _RECOVERY = 8, 2, 16384, 32768
_EVENTS = _XID | _ECC | _UNAVAILABLE | _RECOVERY
_KINDS = {_XID: "xid", _ECC: "ecc", _UNAVAILABLE: "lost", _RECOVERY: "recovery"}
_RECOVERY_FIELD = 230
_ECC_FIELDS = {3: "ecc_single", 4: "ecc_double"}
_REMAP_FIELDS = {142: "remap_correctable", 143: "remap_uncorrectable", 144: "remap_pending", 145: "remap_failure"}
_LINK_FIELDS = (208, 213, 214, 215, 219, 221)
_FIELDS = (*_ECC_FIELDS, *_REMAP_FIELDS, *_LINK_FIELDS)
_THROTTLES = {
    4: "power cap",
    8: "hardware slowdown",
    32: "software thermal",
    64: "hardware thermal",
    128: "power brake",
}
_ANY = 0xFFFFFFFF  # no instance in particular
_LOST, _RESET_REQUIRED, _TIMEOUT = 15, 16, 10

Tell = Callable[[dict[str, Any]], None]


@dataclass
class NvmlDevice:
    """A device for CUDA: a whole GPU, or a MIG instance of one (`gi`, `ci`)."""

    uuid: str
    handle: Any = field(repr=False, default=None)
    gi: int = _ANY
    ci: int = _ANY


class Gpu:
    """One physical GPU. `devices`: the GPU itself, or its MIG instances. `tell` may be called from any thread.

    `call`: the current driver call of its health thread, and its begin; `sample`: the last facts, {} before the first.
    """

    def __init__(self, index: int, tell: Tell) -> None:
        """Look up GPU `index`; raise pynvml.NVMLError if the driver cannot return it."""
        self.index = index
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.uuid: str = pynvml.nvmlDeviceGetUUID(self.handle)
        self.name: str = pynvml.nvmlDeviceGetName(self.handle)
        self.devices = _instances(self.handle) or [NvmlDevice(self.uuid, self.handle)]
        self.mig = self.devices[0].uuid != self.uuid
        self.call: tuple[str, float] | None = None
        self.sample: dict[str, Any] = {}
        self._tell = tell
        self._lost = ""
        self._missing: set[str] = set()  # NVML functions that the driver lacks
        self._counts: dict[str, int] = {}
        self._ecc_told = 0.0
        self._probes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._answering: threading.Thread | None = None

    def facts(self) -> dict[str, Any]:
        """Return the GPU's entry in the inventory."""
        mig = [{"uuid": d.uuid, "gi": d.gi, "ci": d.ci} for d in self.devices] if self.mig else []
        return {"index": self.index, "uuid": self.uuid, "name": self.name, "mig": mig}

    def start(self) -> None:
        for work in (self._watch_events, self._watch_health):
            threading.Thread(target=work, name=f"{work.__name__}-{self.index}", daemon=True).start()

    def probe(self, device: str) -> None:
        """Queue a health check of the device; the health thread reports the answer."""
        self._probes.put(device)

    # -- events ------------------------------------------------------------------------------------------------------

    def _watch_events(self) -> None:
        while True:
            try:
                self._wait_for_events()
            except pynvml.NVMLError as error:
                self._failed(error.value)
                time.sleep(_RETRY)

    def _wait_for_events(self) -> None:
        events = pynvml.nvmlEventSetCreate()
        try:
            wanted = _EVENTS & pynvml.nvmlDeviceGetSupportedEventTypes(self.handle)
            pynvml.nvmlDeviceRegisterEvents(self.handle, wanted, events)
            while True:
                try:
                    data = pynvml.nvmlEventSetWait_v2(events, _WAIT_MS)
                except pynvml.NVMLError as error:
                    if error.value != _TIMEOUT:
                        raise
                    continue
                self._happened(_KINDS.get(data.eventType, ""), int(data.eventData), data)
        finally:
            pynvml.nvmlEventSetFree(events)

    def _happened(self, kind: str, code: int, data: Any = None) -> None:
        if not kind:
            return
        seen = time.monotonic()
        if kind == "ecc":
            self._ecc_told = seen
        gi, ci = (_ANY, _ANY) if data is None else (data.gpuInstanceId, data.computeInstanceId)
        more = self._companions()
        event = {"op": "event", "gpu": self.uuid, "kind": kind, "code": code, "gi": gi, "ci": ci, "seen": seen}
        self._tell({**event, **more})

    def _companions(self) -> dict[str, Any]:
        """Return recovery action and processes, as far as the driver answers in time; a failing one may never answer."""
        found: dict[str, Any] = {"recovery": -1, "pids": self.sample.get("pids", {})}
        if self._answering is not None and self._answering.is_alive():
            return found

        def ask() -> None:
            recovery = self._fields((_RECOVERY_FIELD,)).get(_RECOVERY_FIELD)
            found["recovery"] = -1 if recovery is None else recovery
            found["pids"] = self._processes()

        self._answering = threading.Thread(target=ask, name=f"answer-{self.index}", daemon=True)
        self._answering.start()
        self._answering.join(_ANSWER)
        return dict(found)

    def _failed(self, code: int) -> None:
        """Report a lost GPU, once: it does not come back to this process. Ignore other errors of a call."""
        what = {_LOST: "lost", _RESET_REQUIRED: "reset-required"}.get(code, "")
        if what and what != self._lost:
            self._lost = what
            self._happened(what, code)

    # -- health ------------------------------------------------------------------------------------------------------

    def _watch_health(self) -> None:
        due = time.monotonic()
        while True:
            try:
                device = self._probes.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                due = time.monotonic() + INTERVAL
                self._look()
            else:
                self._tell({"op": "probed", "device": device, **self._probe(device)})

    def _look(self) -> None:
        fields = self._fields(_FIELDS)
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", self.handle)
        counts = {name: fields[n] for n, name in (_ECC_FIELDS | _REMAP_FIELDS).items() if n in fields}
        links = [fields[n] for n in _LINK_FIELDS if n in fields]
        self.sample = {
            "throttle": [word for bit, word in _THROTTLES.items() if reasons and reasons & bit],
            "counts": {**counts, **({"nvlink_errors": sum(links)} if links else {})},
            "pids": self._processes(),
            "devices": [self._device(device) for device in self.devices],
        }
        self._compare(self.sample["counts"])

    def _device(self, device: NvmlDevice) -> dict[str, Any]:
        use = self._ask("nvmlDeviceGetUtilizationRates", device.handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", device.handle)
        return {
            "uuid": device.uuid,
            "utilisation": None if use is None else int(use.gpu),
            "temperature": self._ask("nvmlDeviceGetTemperature", self.handle, 0),
            "memory_used": None if memory is None else int(memory.used),
            "memory_total": None if memory is None else int(memory.total),
        }

    def _compare(self, counts: dict[str, int]) -> None:
        """Report grown error counts, and an ECC event for a driver that only counts."""
        before, self._counts = self._counts, counts
        if not before:
            return
        worse = any(counts.get(name, 0) > before.get(name, 0) for name in ("remap_failure", "ecc_double"))
        if worse and time.monotonic() - self._ecc_told > 2 * INTERVAL:  # else an event reported it already
            self._happened("ecc", 0)
        grown = {name: n for name, n in counts.items() if n != before.get(name, 0)}
        if grown:
            self._tell({"op": "counts", "gpu": self.uuid, "counts": grown})

    def _probe(self, uuid: str) -> dict[str, Any]:
        """Return {"ok", "detail"}; ok: the device answers basic queries and asks for no recovery."""
        device = next((d for d in self.devices if d.uuid == uuid), None)
        if device is None:
            return {"ok": False, "detail": "it is not there any more"}
        try:
            self._strict("nvmlDeviceGetUUID", device.handle)
            self._strict("nvmlDeviceGetMemoryInfo", device.handle)
        except pynvml.NVMLError as error:
            return {"ok": False, "detail": f"NVML error {error.value}"}
        recovery = self._fields((_RECOVERY_FIELD,)).get(_RECOVERY_FIELD, 0)
        return {"ok": recovery == 0, "detail": f"recovery action {recovery}" if recovery else ""}

    def _processes(self) -> dict[str, list[int]]:
        """Return the pids by device, without devices that do not report their processes."""
        found: dict[str, list[int]] = {}
        for device in self.devices:
            entries = self._ask("nvmlDeviceGetComputeRunningProcesses", device.handle)
            if entries is not None:
                found[device.uuid] = [int(entry.pid) for entry in entries]
        return found

    def _fields(self, wanted: tuple[int, ...]) -> dict[int, int]:
        values = self._ask("nvmlDeviceGetFieldValues", self.handle, list(wanted))
        return {int(v.fieldId): _number(v) for v in values or () if v.nvmlReturn == 0}

    def _strict(self, name: str, *arguments: Any) -> Any:
        """Call NVML function `name`, and note the call if this is the health thread; raise pynvml.NVMLError if it fails."""
        health = threading.current_thread().name.startswith("_watch_health")
        if health:
            self.call = (name, time.monotonic())
        try:
            return getattr(pynvml, name)(*arguments)
        finally:
            if health:
                self.call = None

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call NVML function `name`; return None if it fails."""
        if name in self._missing:
            return None
        try:
            return self._strict(name, *arguments)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                self._missing.add(name)
            self._failed(error.value)
            return None


def _instances(handle: Any) -> list[NvmlDevice]:
    """Return the MIG instances of a GPU, [] if it is whole."""
    try:
        if not pynvml.nvmlDeviceGetMigMode(handle)[0]:
            return []
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return []
    found = []
    for number in range(most):
        try:
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            gi, ci = pynvml.nvmlDeviceGetGpuInstanceId(mig), pynvml.nvmlDeviceGetComputeInstanceId(mig)
            found.append(NvmlDevice(pynvml.nvmlDeviceGetUUID(mig), mig, gi, ci))
        except pynvml.NVMLError:
            continue  # no instance has this number
    return found


def _number(value: Any) -> int:
    kinds = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}
    return int(getattr(value.value, kinds.get(value.valueType, "ullVal")))
