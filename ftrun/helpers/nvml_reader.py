"""The watcher of the devices: a process of its own, since a driver call that never returns can not even be killed.

It says what NVML says: the devices, their events at once, their health every second, and calls that do not return. The
launcher (ftrun.host.devices.devices) makes something of it. Ends when the launcher does.
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

PATIENCE = 3.0  # seconds for one driver call before it is told
_INIT_PATIENCE = 8.0  # seconds: a driver that is not kept loaded begins with its GPUs
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
    """Print the inventory as JSON, for a count before there is a run."""
    import json

    print(json.dumps(inventory(lambda message: None)[0]))


def inventory(tell: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message about what is there, and the GPUs; blocks as long as the driver does.

    `error` says why there are none, `unusable` names those that the driver counts and cannot give.
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
    """Talks to the launcher; everything that asks the driver is done by threads that may get stuck."""

    def __init__(self, launcher: socket.socket) -> None:
        self._launcher = launcher
        self._lock = threading.Lock()
        self._gpus: list[Any] = []
        self._began: float | None = time.monotonic()  # of nvmlInit, None once it returned
        self._wedged: dict[str, str] = {}  # GPU ("" = all of them) -> the call that was told

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
