"""How long from an Xid of the (fake) driver until the controller has it: `python tests/bench/detect_xid.py [--rounds N]`.

A real run of four ranks; log-only Xids on all devices in turn; the launcher's journal says when each one came.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench import tables  # noqa: E402
from tests.e2e import harness  # noqa: E402
from tests.faults.fake_nvml import FakeNvml  # noqa: E402

TARGET_MS = 50.0
CODES = (37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 160, 161)  # each is news to a device but once
SCRIPT = "import os, time\nprint('up', os.environ['RANK'], flush=True)\ntime.sleep(600)\n"
PATIENCE = 60.0


def seen(journal: Path) -> dict[tuple[str, int], float]:
    """(device, Xid) -> when the controller was told."""
    found: dict[tuple[str, int], float] = {}
    for line in journal.read_text().splitlines():
        event = json.loads(line).get("event", {}) if line.endswith("}") else {}
        if event.get("kind") == "DeviceFault":
            found[event["devices"][0], event["code"]] = event["t"]
    return found


def measure(folder: Path, count: int) -> list[float]:
    """Milliseconds of `count` events."""
    nvml = FakeNvml(folder, 4)
    script = folder / "idle.py"
    script.write_text(SCRIPT)
    command = [harness.tool("ftrun"), "--nproc-per-node", "4", "--spares", "0", "--max-restarts", "0", str(script)]
    running = harness.start(folder, command, nvml.env)
    try:
        journal = running.run_dir() / "journal.jsonl"
        _until(lambda: running.output.count("up ") >= 4, "four ranks")
        _until(lambda: (journal.parent / "devices.json").exists(), "a first look at the devices")
        found = []
        for number in range(count):
            gpu, code = number % 4, CODES[number // 4]
            at = nvml.xid(gpu, code)
            key = (nvml.uuids[gpu], code)
            _until(lambda k=key: k in seen(journal), f"Xid {code}")
            found.append((seen(journal)[key] - at) * 1000)
            time.sleep(0.05)
        return found
    finally:
        running.process.send_signal(signal.SIGTERM)
        try:
            running.process.wait(40)
        except subprocess.TimeoutExpired:
            running.process.kill()


def _until(condition: object, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {PATIENCE:g} s for {what}")
        time.sleep(0.005)


def main() -> int:
    args = tables.arguments("Measure how soon an Xid is known.").parse_args()
    with tempfile.TemporaryDirectory(prefix="ftrun-xid-") as folder:
        found = measure(Path(folder), min(args.rounds or 64, 4 * len(CODES)))
    row = ["Xid of the simulated driver to the launcher's event", tables.figure(found), f"{TARGET_MS:g} ms"]
    notes = "A run of four ranks; log-only Xids on all devices in turn, from a fake NVML library; the journal says when each came."
    tables.write(
        args.results, "detection_xid", "From an Xid to its detection", ["what", "time", "target"], [row], notes
    )
    return 0 if statistics.median(found) <= TARGET_MS else 1


if __name__ == "__main__":
    sys.exit(main())
