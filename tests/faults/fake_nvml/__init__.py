"""A fake NVML library, built on first use and driven by a file while a run goes on. See nvml.cpp for the file."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.cpp")
_FOLDER = Path(__file__).resolve().parents[3] / "build" / "fake-nvml"
XID, ECC, UNAVAILABLE, RECOVERY = 8, 2, 16384, 32768


def library() -> Path:
    """The folder for LD_LIBRARY_PATH; compiled when the source is newer."""
    target = _FOLDER / "libnvidia-ml.so.1"
    if not target.exists() or target.stat().st_mtime < SOURCE.stat().st_mtime:
        _FOLDER.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "c++")
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *flags, "-o", str(unfinished), str(SOURCE)], check=True, timeout=120)
        os.replace(unfinished, target)
    return _FOLDER


class FakeNvml:
    """Devices in a control file. `env` is what a run needs to see them; every change is seen within a millisecond."""

    def __init__(self, folder: Path, gpus: int = 5, mig: Sequence[int] = ()) -> None:
        """`mig[i]`: instances of GPU i, 0 = it is whole."""
        self.control = folder / "nvml.txt"
        self.gpus = [{"uuid": f"GPU-{chr(97 + i) * 8}-0000", "name": "Fake", "recovery": "0"} for i in range(gpus)]
        self.migs: list[dict[str, str]] = []
        for gpu, count in enumerate(mig):
            self.gpus[gpu]["mig"] = str(int(count > 0))
            for gi in range(1, count + 1):
                uuid = f"MIG-{chr(97 + gpu)}{gi}000000-0000"
                self.migs.append({"gpu": str(gpu), "uuid": uuid, "gi": str(gi), "ci": "0"})
        self.events: list[dict[str, str]] = []
        self.write()

    @property
    def uuids(self) -> list[str]:
        return [gpu["uuid"] for gpu in self.gpus]

    @property
    def env(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(library()), os.environ.get("LD_LIBRARY_PATH"))))
        visible = ",".join([mig["uuid"] for mig in self.migs] or [str(i) for i in range(len(self.gpus))])
        return {"FTRUN_FAKE_NVML": str(self.control), "LD_LIBRARY_PATH": path, "CUDA_VISIBLE_DEVICES": visible}

    def write(self) -> None:
        """A reader sees the old file or the new one."""
        rows = [("gpu", gpu) for gpu in self.gpus] + [("mig", mig) for mig in self.migs]
        lines = [" ".join((kind, *(f"{k}={v}" for k, v in words.items()))) for kind, words in rows]
        lines += [" ".join(("event", *(f"{k}={v}" for k, v in words.items()))) for words in self.events]
        if self.control.exists():  # what tests/injected appended
            lines += [line for line in self.control.read_text().splitlines() if line[:1].isdigit()]
        unfinished = self.control.with_suffix(".new")
        unfinished.write_text("\n".join(lines) + "\n")
        os.replace(unfinished, self.control)

    def set(self, gpu: int, **words: object) -> None:
        self.gpus[gpu].update({key: str(value) for key, value in words.items()})
        self.write()

    def event(self, gpu: int, kind: int, data: int = 0, **words: object) -> float:
        """Something happens on a GPU; the monotonic time at which it did."""
        facts = {"seq": len(self.events) + 1, "gpu": gpu, "type": kind, "data": data, **words}
        self.events.append({key: str(value) for key, value in facts.items()})
        at = time.monotonic()
        self.write()
        return at

    def xid(self, gpu: int, code: int, **words: object) -> float:
        return self.event(gpu, XID, code, **words)
