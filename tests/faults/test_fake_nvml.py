"""The fake library under the real pynvml: what the other tests rely on, and the lines that tests/injected appends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.faults.fake_nvml import FakeNvml

PROGRAM = """
import os, pynvml as p
def append(line):
    with open(os.environ["FTRUN_FAKE_NVML"], "a") as file:
        file.write(line + "\\n")
p.nvmlInit()
one = p.nvmlDeviceGetHandleByIndex(1)
print(p.nvmlDeviceGetCount(), p.nvmlDeviceGetUUID(one), [v.nvmlReturn for v in p.nvmlDeviceGetFieldValues(one, [230, 3])])
events = p.nvmlEventSetCreate()
p.nvmlDeviceRegisterEvents(one, 8 | 2, events)
def wait():
    try:
        found = p.nvmlEventSetWait_v2(events, 200)
        print(found.eventType, found.eventData)
    except p.NVMLError as error:
        print("error", error.value)
wait()
append("0 xid 48")
append("1 xid 31")
wait()
append("1 ecc")
wait()
append("1 lost")
wait()
"""


def test_events_and_errors(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path, 2)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**os.environ, **nvml.env}, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    said = done.stdout.splitlines()
    assert said == [f"2 {nvml.uuids[1]} [0, 3]", "error 10", "8 31", "2 0", "error 15"]
