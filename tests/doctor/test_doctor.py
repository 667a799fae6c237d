"""`ftrun doctor` on this machine, and on one that lacks something: a fake library, a tight limit, a folder that is not there."""

from __future__ import annotations

import json
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from ftrun.core import tried
from ftrun.doctor import asking, network
from tests.e2e import harness
from tests.faults.fake_nvml import FakeNvml

ROOT = Path(__file__).resolve().parents[2]
STATES = {"ok", "warning", "broken"}
Findings = dict[tuple[str, str], dict[str, Any]]


START = [sys.executable, "-c", "import sys; sys.path.pop(0); from ftrun.cli.main import main; main()"]


def doctor(
    folder: Path, code: int, limit: tuple[int, int] | None = None, start: list[str] = START, **env: str
) -> Findings:
    """`ftrun doctor --json`: (area, name) -> finding. `limit`: (resource, soft value)."""
    done = subprocess.run(
        [*start, "doctor", "--json"],
        cwd=folder,
        env={**harness.environment(folder), **env},
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=None if limit is None else lambda: resource.setrlimit(limit[0], (limit[1], limit[1])),
    )
    assert done.stderr == "", done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == 1
    for finding in found["findings"]:
        assert finding["state"] in STATES and finding["text"]
        assert finding["state"] != "broken" or finding["fix"], finding
    broken = [f for f in found["findings"] if f["state"] == "broken"]
    assert done.returncode == (1 if broken else 0)
    assert done.returncode == code, broken
    return {(f["area"], f["name"]): f for f in found["findings"]}


def test_this_machine(tmp_path: Path) -> None:
    """Where the other tests pass, everything is found that they use, and torch stays out of this process."""
    program = "import sys; from ftrun.cli.main import execute; code = execute(['doctor']); sys.exit(code + 10 * ('torch' in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=harness.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    state = {m[2]: m[1] for m in re.finditer(r"^  (ok|warning|broken) +(\S+)", done.stdout, re.M)}
    for name in (
        "python",
        "kernel",
        "native",
        "torch",
        "pidfd",
        "memfd",
        "SCM_RIGHTS",
        "robust",
        "/proc",
        "file",
        "loopback",
    ):
        assert state[name] == "ok", done.stdout
    assert done.stdout.splitlines()[-1].endswith("0 broken")


def write(folder: Path, files: dict[str, str]) -> str:
    """A folder for PYTHONPATH."""
    for name, text in files.items():
        path = folder / "fake" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder / "fake")


OLD_TORCH = {
    "torch/__init__.py": "__version__ = '2.10.1+cu128'\nfrom . import version, cuda\n",
    "torch/version.py": "cuda = '12.8'\n",
    "torch/cuda.py": "class nccl:\n    version = staticmethod(lambda: (2, 28, 5))\ndevice_count = lambda: 0\n",
    "torch/distributed.py": "is_available = is_gloo_available = is_nccl_available = lambda: True\nclass Backend:\n    FTRUN = 1\n",
}
DRIVER = """
class NVMLError(Exception): pass
class Value:
    def __init__(self, **facts): self.__dict__.update(facts)
def nvmlInit(): pass
def nvmlSystemGetDriverVersion(): return b"470.82.01"
def nvmlSystemGetCudaDriverVersion(): return 11040
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(i):
    if i == 2: raise NVMLError("GPU is lost")
    return i
def nvmlDeviceGetName(i): return "H200"
def nvmlDeviceGetMemoryInfo(i): return Value(used=i * 100 << 30, total=140 << 30)
def nvmlDeviceGetEccMode(i): return [1, 1]
def nvmlDeviceGetFieldValues(i, ids):
    assert ids == [230]
    return [Value(nvmlReturn=0, value=Value(uiVal=1 - i))]
"""


def test_old_libraries_and_a_device_to_reset(tmp_path: Path) -> None:
    found = doctor(tmp_path, code=1, PYTHONPATH=write(tmp_path, {**OLD_TORCH, "pynvml.py": DRIVER}))
    assert found["software", "torch"]["state"] == "broken" and "2.10.1" in found["software", "torch"]["text"]
    assert "2.28.5" in found["software", "NCCL"]["text"] and found["software", "NCCL"]["state"] != "ok"
    assert found["devices", "driver"] == {
        "area": "devices", "name": "driver", "state": "broken", "text": "470.82.01 (CUDA 11.4)",
        "fix": "install driver 525.60.13 or newer",
    }  # fmt: skip
    assert found["devices", "GPU 0"]["fix"] == "nvidia-smi --gpu-reset -i 0"
    assert found["devices", "GPU 1"]["state"] == "warning" and "100.0 of 140.0 GiB" in found["devices", "GPU 1"]["text"]
    assert found["devices", "GPU 2"]["text"] == "GPU is lost"


def test_devices_that_nvml_shows(tmp_path: Path) -> None:
    """The real pynvml; only the driver's library is not the real one."""
    nvml = FakeNvml(tmp_path, gpus=2)
    nvml.set(1, recovery=2)
    found = doctor(tmp_path, 1, PYTHONPATH=write(tmp_path, OLD_TORCH), **nvml.env)
    assert found["devices", "GPU 0"]["state"] != "broken" and "Fake" in found["devices", "GPU 0"]["text"]
    assert found["devices", "GPU 1"]["state"] == "broken" and found["devices", "GPU 1"]["fix"] == "reboot the machine"


def test_what_this_process_may_not_have(tmp_path: Path) -> None:
    torch = write(tmp_path, {"torch.py": "raise ImportError('libcudart.so.13: cannot open shared object file')\n"})
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    found = doctor(
        tmp_path, code=1, limit=(resource.RLIMIT_NOFILE, 256), PYTHONPATH=torch, FTRUN_RUNS_ROOT=str(tmp_path / "open"),
        GLOO_SOCKET_IFNAME="nowhere0", NCCL_SOCKET_IFNAME="=nowhere0",
    )  # fmt: skip
    assert found["software", "torch"]["text"].endswith("libcudart.so.13: cannot open shared object file")
    assert found["memory", "open files"]["state"] == "warning"
    assert found["memory", "run folder"]["state"] == "broken" and "chmod 700" in found["memory", "run folder"]["text"]
    assert found["network", "Gloo"]["state"] == found["network", "NCCL"]["state"] == "broken"


def test_without_the_native_library(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "ftrun", tmp_path / "ftrun", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # -S: not the finder of an editable installation, which knows where the library is
    paths = [str(tmp_path), sysconfig.get_path("purelib")]
    program = f"import sys; sys.path[:0] = {paths!r}; from ftrun.cli.main import main; main()"
    found = doctor(tmp_path, 1, start=[sys.executable, "-S", "-c", program])
    assert found["software", "native library"]["state"] == "broken"
    assert found["container", "robust futex"]["state"] == "warning"
    assert found["container", "pidfd"]["state"] == "ok"


def rendezvous(endpoint: object) -> dict[str, Any]:
    return {f.name: f for f in network.rendezvous(str(endpoint))}


def test_where_nodes_meet(tmp_path: Path) -> None:
    here = rendezvous(tmp_path)
    assert here["hard links"].state == here["clock"].state == "ok"
    assert not list(tmp_path.iterdir())  # nothing is left there
    assert rendezvous(tmp_path / "gone")["folder"].state == "broken"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "somebody listens" in rendezvous(f"127.0.0.1:{port}")["endpoint"].text
    assert "nobody listens" in rendezvous(f"127.0.0.1:{port}")["endpoint"].text
    assert rendezvous("no-such-host.invalid:29400")["endpoint"].state == "broken"


@pytest.mark.parametrize(
    ("wanted", "names", "chosen"),
    [
        ("", "lo docker0 eth0", "eth0"),
        ("", "lo eth0 ib0", "ib0"),
        ("", "lo docker0", "docker0"),
        ("", "lo", "lo"),
        ("eth1", "lo eth0 eth1", "eth1"),
        ("eth", "lo eth0 eth1", "eth0"),
        ("=eth", "lo eth0", ""),
        ("^lo,eth0", "lo eth0 eth1", "eth1"),
        ("", "", ""),
    ],
)
def test_the_interface_that_nccl_takes(wanted: str, names: str, chosen: str) -> None:
    assert network.nccl_choice(wanted, names.split()) == chosen


def test_a_driver_that_never_answers() -> None:
    assert asking.ask("import time; time.sleep(60)", 0.3) == (None, "no answer within 0.3 s")
    assert asking.ask("raise SystemExit('broken here')", 20) == (None, "broken here")


def test_versions() -> None:
    assert tried.version_of("2.13.0+cpu") == (2, 13, 0)
    assert tried.version_of("6.8.0-31-generic") == (6, 8, 0)
