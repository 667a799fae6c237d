"""From a fault to the moment when the launcher knows it by name: median and worst time of each kind, on this machine.

    python tests/bench/detect.py [--quick] [--json FILE] [--only KIND]

The fault's time is written by the rank that strikes itself, just before; the detection's is that of the event in the
journal (ftrun), or of the first line in which the launcher says that a worker failed (torchrun, and NVRx's ft_launcher
where it is installed; both print it at once). Kill and freeze are also done under those, with a collective timeout that
is far shorter than the default, since only that ends a frozen rank there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e import harness

SCRIPT = Path(__file__).resolve().parent / "scripts" / "detect.py"
RANKS = 4
BEAT = 0.2  # seconds, ftrun's default --heartbeat-interval
FLOOR = 2.0  # --hang-floor of these runs; the default is 60 s
STEP = 0.05  # seconds
THEIR_TIMEOUT = 20.0  # seconds of a collective under the others; torch's default is 1800
THEIR_BEATS = 5  # seconds without a heartbeat that NVRx is told to take for a hang
OTHERS_SAY = re.compile(r"failed \(exitcode|closing signal|hung|heartbeat|terminat", re.IGNORECASE)


@dataclass(frozen=True)
class Kind:
    """`fault`: what the journal calls it; `target`: milliseconds, None = no target beside what the run asked for."""

    name: str
    fault: str
    target: float | None
    words: str


KINDS = (
    Kind("exit", "exit", 5, "exit code"),
    Kind("signal", "signal", 5, "SIGKILL"),
    Kind("exception", "exception", 5, "exception in a body"),
    Kind("frozen", "frozen", 2e3 * BEAT, f"SIGSTOP, beats every {BEAT:g} s"),
    Kind("collective", "collective", 1e3 * max(1.0, 3 * STEP), "a collective left out"),
    Kind("nonfinite", "nonfinite", None, "NaN in the loss"),
    Kind("corrupt", "corrupt", None, "a flipped bit of a weight, replicas compared each step"),
    Kind("hang", "hang", None, f"busy Python, --hang-floor {FLOOR:g}"),
    Kind("gil", "gil", None, f"held GIL, --hang-floor {FLOOR:g}"),
)


def fired(folder: Path) -> list[int]:
    """When faults struck, ns."""
    path = folder / "out" / "fired"
    return [int(line.split()[2]) for line in path.read_text().splitlines()] if path.exists() else []


def ours(folder: Path, kind: Kind, times: int) -> list[float]:
    """Milliseconds of each detection under ftrun."""
    (folder / "out").mkdir(parents=True)
    options = ["--nproc-per-node", str(RANKS), "--spares", "1", "--max-replacements", "99", "--check-replicas", "1"]
    options += ["--hang-floor", str(FLOOR), "--heartbeat-interval", str(BEAT)]
    arguments = ["--out", str(folder / "out"), "--kind", kind.name, "--times", str(times), "--step", str(STEP)]
    command = [harness.tool("ftrun"), *options, str(SCRIPT), *arguments]
    outcome = harness.finish(harness.start(folder, command), ranks=0, timeout=120 + 10 * times)
    assert outcome.code == 0, outcome.tail()
    events = [line["event"] for line in outcome.journal if line.get("event", {}).get("fault")]
    wrong = [e for e in events if e["fault"] != kind.fault]
    assert not wrong, f"{kind.name} was taken for {wrong}"
    struck = fired(folder)
    assert len(struck) == times, f"{len(struck)} of {times} faults struck"
    found = []
    for at in struck:
        seen = min(e["t"] * 1e3 for e in events if e["t"] * 1e9 >= at)
        found.append(seen - at / 1e6)
    return found


def theirs(folder: Path, system: str, kind: str, seconds: float) -> float | None:
    """Milliseconds until another launcher says that a worker failed; None when it did not within `seconds`."""
    (folder / "out").mkdir(parents=True)
    if system == "torchrun":
        launcher = [harness.tool("torchrun"), "--standalone"]
    else:
        port = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--ft-initial-rank-heartbeat-timeout=60"]
        launcher = [harness.tool("ft_launcher"), *port, f"--ft-rank-heartbeat-timeout={THEIR_BEATS}"]
    arguments = ["--out", str(folder / "out"), "--kind", kind, "--times", "1", "--step", str(STEP), "--backend", "gloo"]
    arguments += ["--timeout", str(THEIR_TIMEOUT), *(["--nvrx"] if system != "torchrun" else [])]
    process = subprocess.Popen(
        [*launcher, "--nproc-per-node", str(RANKS), str(SCRIPT), *arguments],
        cwd=folder,
        env=harness.environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    said: list[int] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if fired(folder) and OTHERS_SAY.search(line) and not line.startswith("[rank"):
                said.append(time.monotonic_ns())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    deadline = time.monotonic() + seconds
    while not said and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    ended = time.monotonic_ns()
    known = said or process.poll() is not None
    workers = harness.strays(folder)
    for pid in {process.pid, *workers}:  # each leads a process of its own, and a stopped one hears nothing else
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    reader.join(5)
    struck = fired(folder)
    if not struck or not known:
        return None
    return ((said[0] if said else ended) - struck[0]) / 1e6


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "worst": max(values), "n": len(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how soon faults are detected.")
    parser.add_argument("--quick", action="store_true", help="few faults of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--only", choices=[k.name for k in KINDS], help="one kind, and only ftrun")
    args = parser.parse_args()
    times = 3 if args.quick else 12
    results: dict[str, Any] = {"cores": os.cpu_count(), "ranks": RANKS, "quick": args.quick, "ftrun": {}}
    # run directories are in shared memory unless somebody moves them, as the harness does
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    missed = []
    try:
        print(f"ftrun, {RANKS} ranks, steps of about {STEP * 1e3:.0f} ms: fault to its name in the journal", flush=True)
        for kind in KINDS:
            if args.only not in (None, kind.name):
                continue
            figures = spread(ours(root / kind.name, kind, times))
            results["ftrun"][kind.name] = {**figures, "target": kind.target}
            target = "" if kind.target is None else f", target {kind.target:.0f}"
            if kind.target is not None and figures["median"] > kind.target:
                missed.append(kind.name)
            line = f"median {figures['median']:.1f} ms, worst {figures['worst']:.1f} (n={times}{target})"
            print(f"  {kind.name:11s} {line}  {kind.words}", flush=True)
        systems = ["torchrun", *(["ft_launcher"] if Path(harness.tool("ft_launcher")).exists() else [])]
        for system in systems if args.only is None else ():
            beats = "" if system == "torchrun" else f", heartbeat timeout {THEIR_BEATS:g} s"
            print(
                f"{system}: fault to its first word of it; collective timeout {THEIR_TIMEOUT:g} s instead of 1800{beats}"
            )
            for kind_name in ("signal", "frozen"):
                rounds = 1 if args.quick or kind_name == "frozen" else 3
                folders = [root / f"{system}-{kind_name}-{n}" for n in range(rounds)]
                found = [theirs(f, system, kind_name, THEIR_TIMEOUT + 60) for f in folders]
                values = [v for v in found if v is not None]
                results.setdefault(system, {})[kind_name] = spread(values) if values else None
                shown = (
                    f"median {statistics.median(values):.0f} ms" if values else f"not within {THEIR_TIMEOUT + 60:g} s"
                )
                print(f"  {kind_name:11s} {shown}", flush=True)
    finally:
        shutil.rmtree(root)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if missed:
        print(f"beyond the target: {', '.join(missed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
