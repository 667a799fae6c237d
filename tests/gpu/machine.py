"""Is there a GPU, and what is it: for the tests and benches that need a real one."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from ftrun.native import cuda

ROOT = Path(__file__).resolve().parents[2]


def missing() -> str:
    """Why GPU tests cannot run here, "" when they can."""
    report = cuda.report()
    if "error" in report:
        return f"needs an NVIDIA GPU: {report['error']}"
    if not report["devices"]:
        return "needs an NVIDIA GPU: the driver knows none"
    if report["devices"][0]["name"].startswith("Fake"):
        return "needs an NVIDIA GPU: the driver is the tests' fake one"
    import torch

    if not torch.cuda.is_available():
        return f"needs torch with CUDA: torch {torch.__version__} here finds no GPU"
    return ""


def facts() -> dict[str, str]:
    """Machine, torch, driver, commit: printed with every result."""
    import torch

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    report = cuda.report()
    device = report["devices"][0] if report.get("devices") else {"name": "none", "memory": 0}
    return {
        "gpu": f"{device['name']}, {int(device['memory']) >> 20} MiB",
        "driver": f"CUDA {report.get('driver', 'none')}, kernel module {_module()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "commit": commit or "unknown (no git here)",
    }


def _module() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("Module")[1].split()[0]
    except (OSError, IndexError):
        return "unknown"
