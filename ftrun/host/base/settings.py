"""Holds the checked settings of a run, plain data that the command line hands to the launcher, and checks names of scripts.

This file reads the file system only to find the script, module or program, and starts nothing.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import re
import signal
import sys
import warnings
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ftrun.control.policy import Overrides
from ftrun.core.errors import UsageError
from ftrun.host.base.streams import Streams

_MOST_SOURCE = 1 << 20  # bytes; the syntax of a longer script is not checked before the run
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Nodes:
    """This node's place among several: torchrun's rendezvous options. `most` 1 = a run on one node.

    `spares`: how many spare nodes are started beside them, `max_replacements`: how many lost nodes are replaced until all start anew.
    `backend` is static, c10d, file, etcd or kubernetes. `rank` None: no --node-rank. Empty strings: the option is not set.
    """

    least: int = 1
    most: int = 1
    backend: str = "static"
    endpoint: str = ""
    conf: dict[str, str] = field(default_factory=dict)
    rank: int | None = None
    master_addr: str = ""
    master_port: int = 0
    local_addr: str = ""
    standalone: bool = False
    spares: int = 0
    max_replacements: int = 3


@dataclass(frozen=True)
class Output:
    """The destinations of the workers' stdout and stderr.

    Without `redirects` and `tee` every line goes to the console with a prefix and to the files. `template` may contain
    {role} {local_rank} {rank} {host} {run} {attempt}; empty = ftrun's own prefix, or torchrun's with --tee. `filter` has the
    local ranks whose lines go to the console, empty = all. `format` is text or json.
    """

    redirects: Streams = field(default_factory=Streams)
    tee: Streams = field(default_factory=Streams)
    filter: tuple[int, ...] = ()
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    template: str = ""
    format: str = "text"


@dataclass(frozen=True)
class Settings:
    """The settings of one run on this node. Times in seconds. `fault_plan` is an absolute path or None.

    `fault_text` is its content: nobody can read a pipe twice, and a file may be gone when a replacement needs it.

    `hang_timeout` None: the launcher learns it from the run, between `hang_floor` and `hang_ceiling`. `nonfinite` is redo, stop or
    ignore; `check_every` is in steps, 0 = as often as the checks' budget allows; `inexact` is go-on or stop.

    `gpus`: CUDA_VISIBLE_DEVICES for this run, "" = as it is.

    `kind` is script, module or program (--no-python). The launcher passes `signals` on to the workers and ends the run; it passes
    `forward` on without any other effect.
    """

    argv: tuple[str, ...]
    kind: str = "script"
    nproc: int = 1
    gpus: str = ""
    spares: int = 1
    max_restarts: int = 0
    max_replacements: int = 3
    snapshot_every: int = 0  # steps between two host snapshots, 0 = none
    run_id: str | None = None
    log_dir: str = "ftrun-logs"
    keep_logs: float | None = 5.0  # gigabytes that the default folder may hold before old logs are removed, None = any
    fault_plan: str | None = None
    fault_text: str = ""
    random_faults: str = ""  # RATE:SEED, "" = none
    stop_timeout: float = 10.0
    heartbeat_interval: float = 0.2
    heartbeat_timeout: float = 10.0
    hang_timeout: float | None = None
    hang_floor: float = 60.0
    hang_ceiling: float = 600.0
    nonfinite: str = "redo"
    check_every: int = 0
    inexact: str = "go-on"
    start_timeout: float = 300.0
    recover_timeout: float = 600.0
    shutdown_timeout: float = 30.0
    exec_workers: bool = False
    role: str = "default"
    virtual_local_rank: bool = False
    numa_binding: str = ""
    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    forward: tuple[int, ...] = ()
    rdzv_id: str = ""  # as given with --rdzv-id; TORCHELASTIC_RUN_ID is this, else the run's name
    metrics_file: str | None = None  # absolute
    metrics_port: int | None = None  # 0 = any free one
    nodes: Nodes = Nodes()
    debug_rank: int | None = None  # the rank that gets stdin and the terminal, for a debugger
    policy: Overrides = field(default_factory=Overrides)
    device_faults: int = 3  # of one device within `window`
    window: float = 3600.0
    wait_for_device: bool = False
    quarantine_file: str | None = None  # absolute
    output: Output = Output()

    def to_json(self) -> dict[str, Any]:
        """For the journal, which others may be shown: without passwords."""
        conf = {name: "***" if name in ("user", "password") else value for name, value in self.nodes.conf.items()}
        return asdict(replace(self, nodes=replace(self.nodes, conf=conf)))


def run_name(rdzv_id: str) -> str:
    """Make a run's name from its --rdzv-id: the same on every node, and valid as a folder's name."""
    if _RUN_ID.fullmatch(rdzv_id):
        return rdzv_id
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", rdzv_id).strip("-._")[:80]
    return f"{plain or 'run'}-{zlib.crc32(rdzv_id.encode()):08x}"  # the checksum tells ids with the same plain part apart


def check_run_id(run_id: str) -> str:
    """Return `run_id`; raise UsageError when it is not valid as a folder's name."""
    if not _RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"run id {run_id!r} must be letters, digits, '.', '_' or '-', start with a letter or digit, and have at most 100"
        )
    return run_id


def check_script(path: str) -> None:
    """Raise UsageError when the training script is missing, unreadable, not Python, or neither a file nor a folder with __main__.py."""
    script = Path(path)
    try:
        if script.is_dir():
            if (script / "__main__.py").is_file():
                return
            raise UsageError(f"{path} is a directory, not a script (and has no __main__.py)", explain="F105")
        if script.exists() and not script.is_file():
            raise UsageError(f"script {path} is a pipe or a device; every worker has to read it, so give a file", explain="F105")
        with script.open("rb") as file:
            _check_syntax(path, file.read(_MOST_SOURCE + 1))
    except FileNotFoundError:
        raise UsageError(f"script {path} does not exist", explain="F105") from None
    except PermissionError:
        raise UsageError(f"script {path} cannot be read (permission denied)", explain="F105") from None
    except OSError as error:
        raise UsageError(f"script {path} cannot be read ({error.strerror})") from None


def _check_syntax(path: str, source: bytes) -> None:
    """Raise UsageError for source that this Python cannot compile. Byte code, archives and very long scripts pass unchecked."""
    if path.endswith(".pyc") or len(source) > _MOST_SOURCE:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers give them
            compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        if pkgutil.get_importer(os.path.abspath(path)) is not None:
            return  # an archive that holds a __main__.py
        line = getattr(error, "lineno", None)
        at, what = "" if line is None else f":{line}", getattr(error, "msg", str(error))
        version = ".".join(map(str, sys.version_info[:2]))
        raise UsageError(f"script {path}{at} is not Python {version}: {what}", explain="F105") from None
    except (RecursionError, MemoryError):
        return  # the workers will fail with it


def check_module(name: str) -> None:
    """Raise UsageError when there is no module of that name. Looks only for its top-level package, and imports nothing."""
    if name.endswith(".py") and os.path.isfile(name):
        raise UsageError(f"-m takes the name of a module: say -m {name[:-3].replace(os.sep, '.')}, or leave out -m", explain="F105")
    if sys.flags.ignore_environment:
        return  # the workers may have more places to look in
    before = list(sys.path)
    if not getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH, since Python 3.11
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name.partition(".")[0]) is not None
    except ValueError:
        found = bool(name.partition(".")[0])  # some importer has imported it and left no spec
    finally:
        sys.path[:] = before
    if not found:
        raise UsageError(f"there is no module {name}: not in this folder, on PYTHONPATH, or installed for {sys.executable}", explain="F105")


def check_program(name: str) -> None:
    """Raise UsageError when the program of --no-python does not exist or is not executable."""
    import shutil

    if shutil.which(name) is not None:
        return
    if os.path.isdir(name):
        raise UsageError(f"{name} is a directory, not a program", explain="F105")
    if os.sep in name and os.path.exists(name):
        raise UsageError(f"program {name} may not be executed; run: chmod +x {name}", explain="F105")
    if os.sep not in name and os.path.exists(name):
        raise UsageError(f"program {name} is not on the PATH; a program in this folder is named ./{name}", explain="F105")
    raise UsageError(f"program {name} does not exist" + ("" if os.sep in name else " on the PATH"), explain="F105")
