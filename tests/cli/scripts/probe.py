"""Writes what a worker sees to PROBE_OUT/RANK-ATTEMPT.json: process, interpreter, variables. Says nothing about time or chance.

Arguments: `--torch` looks into torch as well, `--fail N` raises in every rank while the restart count is below N.
"""

from __future__ import annotations

import gc
import json
import locale
import logging
import multiprocessing
import os
import resource
import signal
import stat
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

KINDS = ((stat.S_ISREG, "file"), (stat.S_ISFIFO, "pipe"), (stat.S_ISCHR, "device"), (stat.S_ISSOCK, "socket"))


def descriptor(fd: int) -> str:
    mode = os.fstat(fd).st_mode
    kind = next(name for test, name in KINDS if test(mode))
    return f"{kind} {os.readlink(f'/proc/self/fd/{fd}')}" if kind in ("file", "device") else kind


def handlers() -> dict[str, str]:
    names = {signal.SIG_DFL: "default", signal.SIG_IGN: "ignored", signal.default_int_handler: "KeyboardInterrupt"}
    return {s.name: names.get(signal.getsignal(s), repr(signal.getsignal(s))) for s in signal.Signals if s < 32}


def limits() -> dict[str, Any]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def stream(file: Any) -> list[Any]:
    return [file.encoding, file.errors, file.line_buffering, file.write_through, file.isatty(), file.name, file.mode]


def kernel_side() -> dict[str, Any]:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return {
        "cwd": os.getcwd(),
        "umask": status["Umask"],
        "nice": os.nice(0),
        "policy": os.sched_getscheduler(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "limits": limits(),
        "groups": os.getgroups(),
        "capabilities": status["CapEff"],
        "blocked signals": status["SigBlk"],
        "leads its session": os.getsid(0) == os.getpid(),
        "leads its group": os.getpgid(0) == os.getpid(),
        "oom score": Path("/proc/self/oom_score_adj").read_text(),
        "timer slack": Path("/proc/self/timerslack_ns").read_text() if os.access("/proc/self/timerslack_ns", 4) else "",
        "stdin": descriptor(0),
        "stdout": descriptor(1),
        "stderr": descriptor(2),
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "program": Path("/proc/self/comm").read_text(),
        "command line": Path("/proc/self/cmdline").read_text().split("\0"),
    }


def interpreter_side() -> dict[str, Any]:
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "executable": sys.executable,
        "prefix": sys.prefix,
        "flags": repr(sys.flags),
        "xoptions": sys._xoptions,
        "warnings": [*map(repr, warnings.filters)],
        "no bytecode": sys.dont_write_bytecode,
        "hash seeded": os.environ.get("PYTHONHASHSEED"),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "collector": [gc.isenabled(), gc.get_threshold()],
        "threads": [thread.name for thread in threading.enumerate()],
        "streams": [stream(file) for file in (sys.stdin, sys.stdout, sys.stderr)],
        "same streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
        "signals": handlers(),
        "locale": locale.setlocale(locale.LC_ALL),
        "logging": [logging.root.level, [type(h).__name__ for h in logging.root.handlers], logging.root.disabled],
        "multiprocessing": [multiprocessing.get_start_method(allow_none=True), multiprocessing.current_process().name],
        "main": {
            "name": __name__,
            "file": __file__,
            "package": __package__,
            "spec": getattr(__spec__, "name", None),
            "is __main__": main.__dict__ is globals(),
            "annotations": "__annotations__" in globals(),
            "loader": type(__loader__).__name__,
            "builtins": type(__builtins__).__name__,
            "cached": globals().get("__cached__"),
        },
    }


def torch_side() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    return {
        "launched": dist.is_torchelastic_launched(),
        "initialized": [dist.is_initialized(), torch.cuda.is_initialized()],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "seed": torch.initial_seed(),
        "first number": torch.rand(()).item(),
        "dtype": str(torch.get_default_dtype()),
        "exact": [torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()],
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
    }


def wait_for_all(folder: Path, attempt: int) -> None:
    """The first failure ends the others: all must have written before it."""
    deadline = time.monotonic() + 30.0
    while len([*folder.glob(f"*-{attempt}.json")]) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
        time.sleep(0.01)


def main() -> None:
    early = {"kernel": kernel_side(), "python": interpreter_side(), "env": dict(os.environ)}
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if "--torch" in sys.argv:
        early["torch"] = torch_side()
    path = Path(os.environ["PROBE_OUT"]) / f"{os.environ['RANK']}-{attempt}.json"
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(early))
    path.with_suffix(".new").rename(path)
    if "--fail" in sys.argv and attempt < int(sys.argv[sys.argv.index("--fail") + 1]):
        wait_for_all(path.parent, attempt)
        raise RuntimeError("as asked")


if __name__ == "__main__":
    main()
