"""The fake CUDA driver: built once, put where the real one would be found, steered by a control file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PRELUDE = """
import ctypes, errno, json, os, random, signal, sys, time
from ftrun import native
from ftrun.native import cuda
UNIT = 2 << 20
def memory(size, device=0):
    base = cuda.reserve(device, 64 * UNIT)
    return base, cuda.create(device, base, size)
"""


def library() -> Path:
    """Folder with the fake libcuda.so.1; built when its sources changed."""
    return _built(
        "fake_cuda",
        "libcuda.so.1",
        [ROOT / "native/src/cuda/abi.hpp", ROOT / "native/src/memory/hash.hpp", *_kernels()],
    )


def _kernels() -> list[Path]:
    return sorted((ROOT / "native/kernels").glob("*.cu"))


def _built(name: str, library: str, needs: list[Path]) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("the fake CUDA libraries need a C++ compiler")
    sources = sorted((HERE / name).iterdir())
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in [*sources, *needs])).hexdigest()[:16]
    folder = ROOT / "build" / f"{name.replace('_', '-')}-{digest}"
    if not (folder / library).exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"unfinished-{os.getpid()}"
        options = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]
        # two runs at a time may build it: each under a name of its own, the last rename wins
        files = [os.fspath(p) for p in sources if p.suffix == ".cpp"]
        subprocess.run([compiler, *options, "-Wno-unknown-pragmas", *files, "-o", os.fspath(unfinished)], check=True)
        unfinished.rename(folder / library)
    return folder


class Control:
    """The control file: `control.set(rate=1e8)`; see fake.hpp for the names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, object] = {}
        self.set()

    def set(self, **values: object) -> None:
        """Change some values; None takes one away. Processes see it at their next call."""
        self._values = {k: v for k, v in {**self._values, **values}.items() if v is not None}
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text("".join(f"{name} {value}\n" for name, value in self._values.items()))
        unfinished.rename(self.path)

    @property
    def env(self) -> dict[str, str]:
        """Variables of a process that is to find the fake driver."""
        return variables(self.path)


def variables(control: Path, old: Mapping[str, str] = os.environ) -> dict[str, str]:
    """As `Control.env`, for a control file that is already there."""
    path = os.pathsep.join(filter(None, (os.fspath(library()), old.get("LD_LIBRARY_PATH", ""))))
    return {"LD_LIBRARY_PATH": path, "FAKE_CUDA_CONTROL": os.fspath(control)}


def child(control: Control | None, code: str, timeout: float = 60.0) -> Any:
    """Run Python code with the fake driver; what it printed last, as JSON."""
    env = {**os.environ, "PYTHONPATH": os.fspath(ROOT), **(control.env if control else {})}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
