"""Turns the device watcher's messages into events for the machine, the file `devices.json` and messages for the user.

Theory of operation. The watcher is a helper process that calls NVML; the launcher never calls the driver. It first reports the
inventory, then events (XID, ECC, lost devices), samples and answers to probes. This file matches a device with its workers by UUID
and process, or, where NVML does not see our processes (in a container), by the device that each rank got. A watcher that dies is
restarted, up to _DEATHS deaths. A device that leaves quarantine restarts it as well, because its handles do not survive a reset.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.control.events import DeviceBack, DeviceFault, DeviceOut, Devices, Probe, Probed
from ftrun.control.events import Quarantine as QuarantineOrder
from ftrun.control.states import State
from ftrun.core import paths
from ftrun.core.faults import Fault
from ftrun.core.shared import gate
from ftrun.core.shared.board import Head
from ftrun.core.system import files
from ftrun.core.system.visible import VARIABLE, entries
from ftrun.host.base.context import LaunchContext
from ftrun.host.devices import visible
from ftrun.host.devices.quarantine import QuarantineFile
from ftrun.host.services.services import Services
from ftrun.host.workers.pool import WorkerPool

_PATIENCE = 10.0  # seconds that the start of the run waits for the inventory of devices
_PROBE = 8.0  # seconds for a probe
_ECHO = 0.5  # seconds after an event of a device in which the same event counts as an echo
_LOOK = 1.0  # seconds between two looks at the quarantine file
_TOO_YOUNG = 1.0  # seconds; not a younger process but its predecessor may have made the driver fail
_DEATHS = 5  # deaths of the watcher after which it is not restarted
_RECOVERY_CHANGED = 154
_NO_INSTANCE = 0xFFFFFFFF
_DEVICE_FILE = re.compile(r"/dev/(nvidia\d+|nvidiactl|dxg)$")


def present(environ: Mapping[str, str], dev: Path = Path("/dev")) -> bool:
    """May this run use GPUs? Looks only at CUDA_VISIBLE_DEVICES and, if it is unset, at the device files; loads no driver."""
    named = environ.get(VARIABLE)
    if named is not None:
        return bool(entries(named))
    return any(re.fullmatch(r"nvidia\d+|dxg", name) for name in os.listdir(dev))


@dataclass(frozen=True)
class Holder:
    """A living worker that holds a rank. `rank` is the world's; `device`: the UUID of the rank's device, "" = none.

    `pid` 0 = not forked yet; `age` in seconds.
    """

    cell: int
    rank: int
    pid: int
    device: str
    age: float = 60.0


def users(device: str, holders: Sequence[Holder], pids: Mapping[str, Sequence[int]], ever: bool) -> list[Holder]:
    """Return the workers that use a device. `pids`: processes by device; `ever`: NVML has listed processes of ours before."""
    on_it = [h for h in holders if _is_on(h, pids.get(device, ()))]
    if on_it:
        return on_it
    elsewhere = {h.cell for h in holders for d, found in pids.items() if d != device and _is_on(h, found)}
    given = [h for h in holders if h.device == device and h.cell not in elsewhere and h.age > _TOO_YOUNG]
    return given if ever else [h for h in given if uses_gpus(h.pid)]


def _is_on(holder: Holder, pids: Sequence[int]) -> bool:
    return holder.pid > 0 and any(pid == holder.pid or _group(pid) == holder.pid for pid in pids)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def uses_gpus(pid: int, proc: Path = Path("/proc")) -> bool:
    """Does the process have a GPU's device file open?"""
    folder = proc / str(pid) / "fd"
    try:
        return any(_DEVICE_FILE.match(os.readlink(folder / fd)) for fd in os.listdir(folder))
    except OSError:
        return False


class DeviceWatch:
    """Starts the device watcher and turns its messages into events.

    `state` returns the machine's state; `world_rank` translates a local rank to the world's.
    """

    def __init__(
        self,
        context: LaunchContext,
        services: Services,
        pool: WorkerPool,
        state: Callable[[], State],
        world_rank: Callable[[int], int],
    ) -> None:
        """Read the quarantine.

        Raises:
            ConfigError: The quarantine file cannot be read.
            OSError: The run's own quarantine file cannot be written.
        """
        self.wanted = present(os.environ)
        self._run_dir = context.run_dir
        self._board = context.board
        self._loop = context.loop
        self._emit = context.listener.on_event
        self._log = context.listener.log
        self._note = context.listener.note
        self._services = services
        self._pool = pool
        self._state = state
        self._world_rank = world_rank
        self._devices: list[visible.Visible] = []
        self._quarantine = QuarantineFile(context.run_dir, context.settings.quarantine_file) if self.wanted else None
        self._when_known: list[Callable[[], None]] = []
        self._known = self._quarantine is None or not self._quarantine.reasons
        self._deaths = 0
        self._ever = False
        self._pids: dict[str, list[int]] = {}
        self._newest: dict[tuple[str, str, int], float] = {}
        self._probing: dict[str, object] = {}
        self._waited_for = False
        self._unwritten = False

    def _holders(self) -> list[Holder]:
        """Return the living workers that hold a rank, each with its rank's device."""
        state, now = self._state(), time.monotonic()
        given = state.device or ("",) * len(state.holder)
        found = [(local, self._pool.workers.get(cell)) for local, cell in enumerate(state.holder) if cell is not None]
        return [
            Holder(worker.index, self._world_rank(local), worker.pid, given[local], now - worker.spawned)
            for local, worker in found
            if worker is not None and not worker.ended
        ]

    def start(self) -> None:
        """Start the watcher; do nothing on a machine without GPUs."""
        if not self.wanted:
            return
        self._services.start_nvml()
        self._loop.after(_PATIENCE, self._give_up_waiting)
        self._loop.after(_LOOK, self._look)

    def once_known(self, call: Callable[[], None]) -> None:
        """Call `call` at once, or, with devices in quarantine, after the inventory or _PATIENCE: no world begins before."""
        if self._known:
            call()
        else:
            self._when_known.append(call)

    # -- messages of the watcher -------------------------------------------------------------------------------------

    def on_message(self, message: dict[str, Any]) -> None:
        handler = _HANDLERS.get(message["op"])
        if handler is not None:
            handler(self, message)

    def _inventory(self, message: dict[str, Any]) -> None:
        assert self._quarantine is not None
        self._devices = visible.choose(os.environ.get(VARIABLE), message["gpus"])
        unusable = message["unusable"]
        self._note("devices", devices=[vars(d) for d in self._devices], unusable=unusable, error=message["error"])
        for index, why in unusable.items():
            self._log(f"GPU {index} cannot be used: {why}", "warning")
        if message["error"] and any(name.startswith("nvidia") for name in os.listdir("/dev")):
            self._log(f"NVML cannot be used ({message['error']}); faults of devices are not seen", "warning")
        if self._devices:
            uuids = tuple(d.uuid for d in self._devices)
            bad = tuple(uuid for uuid in uuids if uuid in self._quarantine.reasons)
            self._emit(Devices(time.monotonic(), uuids, bad))
        self._go_on()

    def _go_on(self) -> None:
        self._known = True
        waiting, self._when_known = self._when_known, []
        for call in waiting:
            call()

    def _give_up_waiting(self) -> None:
        if not self._known:
            self._log(f"NVML did not name the devices in {_PATIENCE:g} s; starting without watching them", "warning")
            self._go_on()

    def _event(self, message: dict[str, Any]) -> None:
        gi, ci = (None if message[key] == _NO_INSTANCE else message[key] for key in ("gi", "ci"))
        about, siblings = visible.affected(self._devices, message["gpu"], gi, ci)
        kind, code = message["kind"], int(message["code"])
        self._note("device-event", **{key: message[key] for key in message if key != "op"}, ours=bool(about))
        now = time.monotonic()
        key = (message["gpu"], kind, code)
        echo = now - self._newest.get(key, -_ECHO) < _ECHO
        self._newest[key] = now
        if about and not echo:
            self._remember(message["pids"])
            self.fault(
                _FAULTS[kind], about, siblings, _RECOVERY_CHANGED if kind == "recovery" else code, message["recovery"]
            )

    def fault(self, fault: Fault, about: Sequence[str], siblings: Sequence[str], code: int, recovery: int) -> None:
        """Report a fault of the devices `about` (UUIDs) to the machine. `siblings`: the run's other devices on the same GPU.

        `code`: the XID number, used only with Fault.XID; `recovery`: NVML's recovery action.
        """
        cells = [h.cell for device in about for h in self._users(device)]
        xid = code if fault is Fault.XID else 0
        now = time.monotonic()
        self._emit(
            DeviceFault(
                now,
                fault.value,
                tuple(about),
                tuple(cells),
                tuple(siblings),
                xid,
                recovery,
                gate.unpack(self._board.gate()).last + 1,
            )
        )

    def _users(self, device: str) -> list[Holder]:
        return users(device, self._holders(), self._pids, self._ever)

    def _remember(self, pids: Mapping[str, list[int]]) -> None:
        self._pids.update(pids)
        self._ever = self._ever or any(_is_on(h, found) for h in self._holders() for found in pids.values())

    def _sample(self, message: dict[str, Any]) -> None:
        for sample in message["gpus"].values():
            self._remember(sample["pids"])
        if self._devices:
            self._publish(message["gpus"])

    def _publish(self, samples: Mapping[str, Any]) -> None:
        assert self._quarantine is not None
        facts = {
            d["uuid"]: {**d, "throttle": sample["throttle"]} for sample in samples.values() for d in sample["devices"]
        }
        rows = []
        for device in self._devices:
            row = facts.get(device.uuid, {})
            rank = next((h.rank for h in self._users(device.uuid)), None)
            rows.append(
                {
                    "index": device.index,
                    "uuid": device.uuid,
                    "name": device.name,
                    **{key: row.get(key) for key in _SHOWN},
                    "throttle": row.get("throttle", []),
                    "quarantined": self._quarantine.reasons.get(device.uuid),
                    "rank": rank,
                }
            )
        try:
            files.replace(self._run_dir / paths.DEVICES, json.dumps(rows), private=True)
        except OSError as error:
            if not self._unwritten:
                self._note("devices-not-written", error=str(error))
            self._unwritten = True

    def _wedge(self, message: dict[str, Any]) -> None:
        where = self._place(message["gpu"])
        self._note("driver-wedged", gpu=message["gpu"], call=message["call"], seconds=message["seconds"])
        self._log(
            f"the driver does not return from {message['call']}{where}, {message['seconds']:g} s by now", "warning"
        )
        for device in [d.uuid for d in self._devices if d.gpu == message["gpu"] and d.uuid in self._probing]:
            self._answer(device, False, f"the driver does not return from {message['call']}")

    def _unwedge(self, message: dict[str, Any]) -> None:
        self._note("driver-answers", gpu=message["gpu"], call=message["call"])
        self._log(f"the driver answers again{self._place(message['gpu'])}")

    def _place(self, gpu: str) -> str:
        return f" of {gpu[:12]}" if gpu else ""

    def _counted(self, message: dict[str, Any]) -> None:
        self._note("device-counts", gpu=message["gpu"], counts=message["counts"])

    # -- orders of the machine ---------------------------------------------------------------------------------------

    def quarantine(self, order: QuarantineOrder) -> None:
        if self._quarantine is not None:
            wrong = self._quarantine.add(order.device, order.reason)
            if wrong:
                self._log(wrong, "warning")

    def probe(self, order: Probe) -> None:
        """Order a probe of the device; no answer within _PROBE seconds counts as a failed probe."""
        token = object()
        self._probing[order.device] = token
        self._services.nvml.send({"op": "probe", "device": order.device})

        def too_late() -> None:
            if self._probing.get(order.device) is token:
                self._answer(order.device, False, f"no answer in {_PROBE:g} s")

        self._loop.after(_PROBE, too_late)

    def _probed(self, message: dict[str, Any]) -> None:
        if message["device"] in self._probing:
            self._answer(message["device"], message["ok"], message["detail"])

    def _answer(self, device: str, ok: bool, detail: str) -> None:
        del self._probing[device]
        cells = tuple(h.cell for h in self._users(device))
        self._emit(Probed(time.monotonic(), device, ok, cells, detail))

    def waited_for(self, waiting: bool) -> None:
        """Publish on the board whether the run waits for a device; when a wait begins, tell the user how to end it."""
        self._board[Head.WAITING] = int(waiting)
        if waiting and not self._waited_for and self._quarantine is not None:
            self._log(f"to give a device back to the run, delete its entry in {self._quarantine.path}")
        self._waited_for = waiting

    # -- changes of the quarantine file ------------------------------------------------------------------------------

    def _look(self) -> None:
        assert self._quarantine is not None
        released, added = self._quarantine.look()
        for device, reason in added.items():
            self._emit(DeviceOut(time.monotonic(), device, reason))
        for device in released:
            self._note("device-released", device=device)
            self._emit(DeviceBack(time.monotonic(), device))
            self._renew()
        self._loop.after(_LOOK, self._look)

    def _renew(self) -> None:
        """Restart the watcher, whose handles do not survive a reset of the device. Its death does not count."""
        self._deaths -= 1
        self._services.nvml.kill()

    def ended(self, code: int | None) -> None:
        """Start another watcher after the end of its process, up to _DEATHS deaths."""
        self._deaths += 1
        self._note("watcher-exit", code=code, deaths=self._deaths)
        for device in list(self._probing):
            self._answer(device, False, "the watcher died")
        if self._deaths < _DEATHS:
            self._services.start_nvml()
            return
        self._log("the watcher of the devices died too often; their faults are no longer seen", "warning")
        self._go_on()


_SHOWN = ("utilisation", "temperature", "memory_used", "memory_total")
_FAULTS = {
    "xid": Fault.XID,
    "recovery": Fault.XID,
    "ecc": Fault.ECC,
    "lost": Fault.GPU_LOST,
    "reset-required": Fault.GPU_LOST,
}
_HANDLERS: dict[str, Callable[[DeviceWatch, dict[str, Any]], None]] = {
    "inventory": DeviceWatch._inventory,
    "event": DeviceWatch._event,
    "sample": DeviceWatch._sample,
    "wedged": DeviceWatch._wedge,
    "unwedged": DeviceWatch._unwedge,
    "probed": DeviceWatch._probed,
    "counts": DeviceWatch._counted,
}
