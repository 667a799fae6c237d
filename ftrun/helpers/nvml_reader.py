"""The watcher of the devices: a process of its own, since a thread in a driver call that never returns cannot even be killed.

Theory of operation. The main thread talks to the launcher and never calls the driver. A thread makes the inventory and starts two threads
for each GPU (nvml_gpu.py), which report events at once and sample the GPU's health every second. The main thread publishes the samples
and reports a call that does not return in time as wedged, and its return as unwedged. The launcher (ftrun.host.devices.devices) judges
the reports. The watcher ends when the launcher does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from typing import Any

from ftrun.core.shared import wire

PATIENCE = 3.0  # seconds for one driver call before it is reported as wedged
_INIT_PATIENCE = 8.0  # seconds for nvmlInit: a driver that is not kept loaded first initializes its GPUs
_LOOK = 0.25
_INIT = "nvmlInit"


def main() -> None:
    """Serve until the launcher is gone. Descriptor 3: launcher."""
    from ftrun import native

    launcher = socket.socket(fileno=3)
    os.set_inheritable(3, False)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # it ends when the launcher ends
    if native.available():
        native.set_name("ftrun nvml")
    wire.send(launcher, {"op": "ready"})
    Watcher(launcher).serve()


def count_devices() -> None:
    """Print the inventory as JSON, for a count before a run begins."""
    import json

    print(json.dumps(inventory(lambda message: None)[0]))


def inventory(tell: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the inventory message and the GPUs; block as long as the driver does.

    In the message, `error` is the reason why there are no GPUs, and `unusable` maps each GPU that the driver cannot open to the reason.
    """
    import pynvml

    from ftrun.helpers.nvml_gpu import Gpu

    gpus, unusable = [], {}
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return {"op": "inventory", "gpus": [], "unusable": {}, "error": str(error)}, []
    for index in range(count):
        try:
            gpus.append(Gpu(index, tell))
        except pynvml.NVMLError as error:
            unusable[str(index)] = str(error)
    facts = [gpu.facts() for gpu in gpus]
    return {"op": "inventory", "gpus": facts, "unusable": unusable, "error": ""}, gpus


class Watcher:
    """The loop that talks to the launcher; only other threads, which may get stuck, call the driver."""

    def __init__(self, launcher: socket.socket) -> None:
        self._launcher = launcher
        self._lock = threading.Lock()
        self._gpus: list[Any] = []
        self._began: float | None = time.monotonic()  # begin of nvmlInit, None when the inventory is complete
        self._wedged: dict[str, str] = {}  # GPU ("" = all of them) -> the call that was reported as wedged

    def serve(self) -> None:
        threading.Thread(target=self._begin, name="begin", daemon=True).start()
        due = time.monotonic()
        while True:
            readable, _, _ = select.select([self._launcher], [], [], _LOOK)
            if readable:
                self._hear()
            self._look_for_wedges()
            if time.monotonic() >= due:
                due = time.monotonic() + 1.0
                self._publish()

    def _begin(self) -> None:
        message, gpus = inventory(self._tell)
        self._gpus, self._began = gpus, None
        self._tell(message)
        for gpu in gpus:
            gpu.start()

    def _hear(self) -> None:
        try:
            frame = wire.receive(self._launcher)
        except OSError:
            frame = None
        if frame is None:
            os._exit(0)
        if frame[0]["op"] == "alive?":
            self._tell({"op": "alive"})
            return
        device = frame[0]["device"]
        for gpu in self._gpus:
            if any(d.uuid == device for d in gpu.devices):
                gpu.probe(device)

    def _look_for_wedges(self) -> None:
        now = time.monotonic()
        calls = {gpu.uuid: gpu.call for gpu in self._gpus}
        if self._began is not None:
            calls[""] = (_INIT, self._began)

        def late(gpu: str, since: float) -> bool:
            return now - since > (PATIENCE if gpu else _INIT_PATIENCE)

        stuck = {gpu: call for gpu, call in calls.items() if call is not None and late(gpu, call[1])}
        for gpu, (name, since) in stuck.items():
            if self._wedged.get(gpu) != name:
                self._wedged[gpu] = name
                self._tell({"op": "wedged", "gpu": gpu, "call": name, "seconds": round(now - since, 1)})
        for gpu in [gpu for gpu in self._wedged if gpu not in stuck]:
            self._tell({"op": "unwedged", "gpu": gpu, "call": self._wedged.pop(gpu)})

    def _publish(self) -> None:
        samples = {gpu.uuid: gpu.sample for gpu in self._gpus if gpu.sample}
        self._tell({"op": "sample", "gpus": samples, "wedged": sorted(self._wedged)})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            with self._lock:
                wire.send(self._launcher, message)
        except OSError:
            os._exit(0)  # the launcher is gone


if __name__ == "__main__":
    count_devices()
