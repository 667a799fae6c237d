"""The same command line under torchrun and under ftrun: everything a worker can see is equal, but for a table of reasons."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from tests.conftest import processes_of
from tests.e2e.harness import environment, free_port, tool

PROBE = Path(__file__).resolve().parent / "scripts" / "probe.py"
TIMEOUT = 90.0
PORT = "@PORT@"  # one that is free, the same for both
# only torchrun of 2.14 and newer has it
TEMPLATE = "".join(
    "--log-line-prefix-template ${rank}| " for a in get_args_parser()._actions if a.dest == "log_line_prefix_template"
)
# the harness or the machine may set them, and the lines must begin alike
NEUTRAL = (
    "_ PYTHONWARNINGS PYTHONUNBUFFERED OMP_NUM_THREADS TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
).split()


@dataclass(frozen=True)
class Line:
    """A command line, the variables it is given, and what stdin is: the name of a file, or text that comes by a pipe."""

    words: str
    env: dict[str, str] = field(default_factory=dict)
    stdin: str = "/dev/null"
    attempts: int = 1


LINES = {
    "usual": Line("--standalone --nproc-per-node 2 -- probe.py --torch d${local_rank} --nnodes 3 -m", stdin="in.txt"),
    "static": Line(
        f"--nnodes 1 --node_rank 0 --master_addr 127.0.0.1 --master_port {PORT} --nproc_per_node 2 --max_restarts 3 "
        "--monitor-interval 0.3 --role trainer --rdzv_id job-7 -r 3 --log_dir logs probe.py --fail 1",
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "OMP_NUM_THREADS": "3"},
        attempts=2,
    ),
    "c10d": Line(
        "--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-conf timeout=60,read_timeout=30 --nnodes 1:1 "
        "--nproc-per-node 2 --signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 5 --virtual-local-rank -t 3 "
        "--local-ranks-filter 1 --event-log-handler console --logs-specs default scripts/other.py -- -- x",
        {"CUDA_VISIBLE_DEVICES": "5,7", "PYTHONWARNINGS": "error::ResourceWarning", "PYTHONHASHSEED": "7"},
        stdin="text by a pipe",
    ),
    "module": Line(
        "-m scripts.other -- -m --standalone",
        {"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "2", "PET_ROLE": "by variable", "PET_STANDALONE": "1"}
        | {"PYTHONPATH": "@HERE@/scripts:relative", "PET_START_METHOD": "forkserver"},
    ),
    "program": Line(
        "--no-python --nproc-per-node 2 --rdzv-id 1 --tee 0:3 --duplicate-stdout-filters a --duplicate-stderr-filters b "
        f"{TEMPLATE}{sys.executable} -W once probe.py a${{local_rank}} --fail 0",
        {"PYTHONDONTWRITEBYTECODE": "1"},
        stdin="in.txt",
    ),
    "run-path": Line("--run-path --nproc-per-node cpu --local-addr 127.0.0.1 probe.py x"),
}
# what torchrun's options change elsewhere than in a worker's sight, or only on other machines
NOT_HERE = {
    "numa_binding": "binds to nodes that have GPUs; tests/cli/test_numa.py",
    "print_completion": "starts no worker; tests/cli/test_torchrun.py",
}


@dataclass(frozen=True)
class Allowed:
    """A difference with a reason. `check(theirs, ours)` says what must still hold; `lines`: where it may be."""

    what: str
    why: str
    check: Callable[[Any, Any], bool] = lambda theirs, ours: True
    lines: str = " ".join(LINES)


PYTHONS = "usual static c10d module run-path"  # lines whose worker is a Python that ftrun has started


def same_end(theirs: str, ours: str) -> bool:
    return Path(theirs).parts[-3:] == Path(ours).parts[-3:] and os.path.isabs(ours)


TABLE = (
    Allowed("env.FTRUN_RUN_DIR", "where the library finds the launcher", lambda a, b: a is None),
    Allowed("env.FTRUN_CELL", "which of the board's cells is the worker's", lambda a, b: a is None),
    Allowed(
        "env.PYTHONUNBUFFERED",
        "torchrun passes -u to the worker; ours also reaches Pythons that the worker or a program starts, whose lines would "
        "come late and out of order",
        lambda a, b: a is None and b == "1",
    ),
    Allowed("env.MASTER_PORT", "free ports are chosen anew", lambda a, b: a.isdigit() and int(b) > 0, "usual c10d module program run-path"),
    Allowed(
        "env.MASTER_ADDR",
        "our store listens on 127.0.0.1, and a machine may have localhost as ::1",
        lambda a, b: a == "localhost" and b == "127.0.0.1",
        "usual c10d module program",
    ),
    Allowed(
        "env.TORCHELASTIC_RUN_ID",
        "without --rdzv-id torchrun says `none` or a UUID; ours is the run's name, which every message says",
        lambda a, b: bool(b),
        "usual c10d module run-path",
    ),
    Allowed(
        "env.TORCHELASTIC_RUN_ID",
        "torchrun takes the given id away when it makes a run standalone by itself; ours keeps it",
        lambda a, b: len(a) == 36 and b == "1",
        "program",
    ),
    Allowed(
        "python.streams", "what PYTHONUNBUFFERED does", lambda a, b: not a[1][3] and b[1][3] and a[1][:2] == b[1][:2], "program"
    ),
    Allowed(
        "env.TORCHELASTIC_ERROR_FILE",
        "in our log folder instead of one in /tmp or one with a random end; absolute, since a script may change its directory",
        same_end,
    ),
    Allowed(
        "kernel.std*",
        "we read what the workers print, to say who printed it and to write the log files; with -r and -t torchrun gives them files",
        lambda a, b: b == "pipe",
        "static c10d program",
    ),
    Allowed("kernel.descriptors", "the board, a bell, and the connection to the launcher", lambda a, b: b < a + 8, PYTHONS),
    Allowed("kernel.program", "ps and top show the rank", lambda a, b: b.startswith("ftrun rank "), PYTHONS),
    Allowed(
        "kernel.command line",
        "a fork's is written over the fork server's, as one text",
        lambda a, b: b == [" ".join(a[:-1]), ""],
        "usual static c10d module",
    ),
    Allowed("kernel.command line", "torchrun spawns with multiprocessing; ours is as without --run-path", lines="run-path"),
    Allowed("python.orig_argv", "the same", lines="run-path"),
    Allowed(
        "python.warnings",
        "torch is imported before the script; its filters come first, as they would after the script's import",
        lambda a, b: set(a) <= set(b),
        PYTHONS,
    ),
    Allowed(
        "python.streams",
        "line buffering: nothing waits in a buffer in either, as everything is written through",
        lambda a, b: all([*x[:2], *x[3:]] == [*y[:2], *y[3:]] for x, y in zip(a, b, strict=True)),
        "usual static c10d module",
    ),
    Allowed(
        "python.*streams",
        "torchrun spawns with multiprocessing, which closes stdin and buffers stdout; ours are as without --run-path",
        lines="run-path",
    ),
    Allowed("python.threads", "one waits for the launcher's bell", lambda a, b: set(b) - set(a) == {"ftrun-control"}, PYTHONS),
    Allowed("torch.seed", "by chance", lines="usual"),
    Allowed("torch.first number", "by chance", lines="usual"),
    Allowed("kernel.leads its *", "torchrun spawns with multiprocessing; we end groups", lambda a, b: b, "run-path"),
    Allowed("python.multiprocessing", "the same; ours is a main process as without --run-path", lines="run-path"),
    Allowed("python.path", "torchrun leaves its own folder there in place of the script's", lambda a, b: a[1:] == b[1:], "run-path"),
    Allowed("python.main.*", "ours is the same module as without --run-path", lines="run-path"),
)  # fmt: skip


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def run(folder: Path, name: str, line: Line, port: str) -> dict[str, dict[str, Any]]:
    """What the workers of one tool saw: "RANK-ATTEMPT" -> flat facts."""
    env = environment(folder, {**line.env, "PROBE_OUT": str(folder / "seen")})
    env = {k: v.replace("@HERE@", str(folder)) for k, v in env.items()}
    for gone in {*NEUTRAL} - {*line.env}:
        env.pop(gone, None)
    words = [word.replace(PORT, port) for word in line.words.split(" ")]
    file = Path(folder / line.stdin) if (folder / line.stdin).exists() else None
    with open(file or os.devnull) as stdin:
        done = subprocess.run(
            [tool(name), *words], cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT,
            **({"stdin": stdin} if file else {"input": line.stdin}),
        )  # fmt: skip
    assert done.returncode == 0, f"{name} {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    seen = {path.stem: dict(flat(json.loads(path.read_text()))) for path in (folder / "seen").iterdir()}
    shutil.rmtree(folder / "seen")
    return seen


@cache
def both(folder: Path, name: str) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The line's workers under torchrun and under ftrun, in one folder, one after the other."""
    folder = folder / name.replace("-", "_")
    (folder / "scripts").mkdir(parents=True)
    (folder / "in.txt").write_text("hello\n")
    shutil.copy(PROBE, folder / "probe.py")
    shutil.copy(PROBE, folder / "scripts" / "other.py")
    port = str(free_port())
    theirs, ours = (run(folder, which, LINES[name], port) for which in ("torchrun", "ftrun"))
    assert not processes_of(folder / "runs")
    return theirs, ours


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("side-by-side")


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*theirs, *ours}):
        if theirs.get(key) != ours.get(key):
            yield key, theirs.get(key), ours.get(key)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n != "usual" else ()) for n in LINES],
)
def test_workers_see_the_same(name: str, folder: Path) -> None:
    theirs, ours = both(folder, name)
    ranks = os.cpu_count() if "cpu" in LINES[name].words else 2
    assert sorted(theirs) == sorted(ours)
    assert {f"{rank}-{attempt}" for rank in range(ranks or 1) for attempt in range(LINES[name].attempts)} == {*ours}
    unexplained = []
    for worker, facts in theirs.items():
        for key, a, b in differences(facts, ours[worker]):
            entries = [entry for entry in TABLE if fnmatch(key, entry.what) and name in entry.lines.split()]
            if not any(entry.check(a, b) for entry in entries):
                unexplained.append(f"{worker} {key}: torchrun {a!r}, ftrun {b!r}")
    assert not unexplained, "\n".join(unexplained)


def test_chance_is_each_ranks_own(folder: Path) -> None:
    """Unseeded ranks that draw the same numbers would all see the same augmented data."""
    for seen in both(folder, "usual"):
        assert seen["0-0"]["torch.seed"] != seen["1-0"]["torch.seed"]
        assert seen["0-0"]["torch.first number"] != seen["1-0"]["torch.first number"]


@pytest.mark.slow
def test_nothing_is_allowed_in_vain(folder: Path) -> None:
    seen = {name: both(folder, name) for name in LINES}
    for entry in TABLE:
        for name in entry.lines.split():
            theirs, ours = seen[name]
            keys = {key for worker in theirs for key, _, _ in differences(theirs[worker], ours[worker])}
            assert any(fnmatch(key, entry.what) for key in keys), f"{entry.what} in line {name}: {entry.why}"


def test_every_option_of_torchrun_is_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()
    for line in LINES.values():
        with monkeypatch.context() as patch:
            for key, value in line.env.items():
                patch.setenv(key, value)
            parser = get_args_parser()
            words = [word for word in line.words.split(" ") if not word.startswith("@")]
            options = {s: action.dest for action in parser._actions for s in action.option_strings}
            used |= {options[word] for word in words if word in options}
            used |= {key.removeprefix("PET_").lower() for key in line.env if key.startswith("PET_")}
    wanted = {action.dest for action in get_args_parser()._actions if action.option_strings} - {"help"}
    assert wanted - used == {*NOT_HERE} & wanted
