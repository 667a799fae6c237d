"""Plain torch and Gloo without ftrun's launcher and without torchrun's agent: what everything is compared with.

`python -m tests.e2e.stock` imports torch once and then forks the ranks of each run that a line on its stdin asks for: a program of four
ranks takes a second, where torchrun imports torch five times. Ranks have torchrun's variables and a store that lives outside of them, as
under it. That this ends where torchrun ends is compared in tests/e2e/test_exact.py; with BY_TORCHRUN=1 (`make truth
BY_TORCHRUN=1`) each comparison is with torchrun itself.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# what the scripts of the tests import
_PRELOAD = (
    *("torch._dynamo", "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.distributed.pipelining", "torch.nn.parallel", "torch.utils.data", "numpy", "ftrun"),
)
_READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH", "GLOO_", "LD_", "CUDA", "PYTHON")


# -- the side of the tests -------------------------------------------------------------------------------------------


class Server:
    """A process that has imported torch, and forks the ranks of one run at a time."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = read_at_import(env)
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.e2e.stock"],
            cwd=ROOT,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def serves(self, env: Mapping[str, str]) -> bool:
        """Is it there, and would an interpreter with `env` import the same torch?"""
        return self._process.poll() is None and read_at_import(env) == self._env

    def run(self, folder: Path, ranks: int, words: Sequence[str], env: Mapping[str, str], timeout: float) -> int:
        """Return the exit code that torchrun would have. The ranks run in `folder`, and print to `output.txt` there.

        Raises:
            TimeoutError: The run did not end in time; its processes were killed, and the server with them.
        """
        ask = {"folder": str(folder), "ranks": ranks, "words": list(words), "env": dict(env)}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(ask).encode() + b"\n")
            stdin.flush()
            if not select.select([stdout], [], [], timeout)[0]:
                raise TimeoutError
            answer = stdout.readline()
        except BaseException:  # the end of a test's time, too: the next one must not get this answer
            self.end()
            raise
        assert answer, f"the server of stock runs ended with {self._process.wait()}"
        return int(answer)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch, its libraries and the interpreter read once. A run's import path is its own."""
    return {k: v for k, v in env.items() if k.startswith(_READ_AT_IMPORT) and k != "PYTHONPATH"}


_one: list[Server] = []
_turn = threading.Lock()


def run(folder: Path, ranks: int, words: Sequence[str], env: Mapping[str, str], timeout: float) -> int:
    """A run of `words`, a script or "-m" and a module with its arguments; see `Server.run`."""
    with _turn:
        if not _one or not _one[0].serves(env):
            while _one:
                _one.pop().end()
            _one.append(Server(env))
            atexit.register(_one[0].end)
        return _one[0].run(folder, ranks, words, env, timeout)


# -- the side of the server ------------------------------------------------------------------------------------------


def serve() -> None:
    """Run what each line of stdin asks for, until there is no more."""
    for name in _PRELOAD:
        importlib.import_module(name)
    own = {*os.environ.get("PYTHONPATH", "").split(os.pathsep), "", str(ROOT)}
    path = [entry for entry in sys.path if entry not in own]
    answers = os.dup(1)
    for line in sys.stdin:
        agent = os.fork()
        if agent == 0:
            os.close(answers)
            _agent(json.loads(line), path)
        status = os.waitpid(agent, 0)[1]
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))


def _agent(ask: Any, path: Sequence[str]) -> None:
    """Fork the store and the ranks, and end with 0, or with 1 when one of them failed; the others are ended then."""
    folder, ranks, words = ask["folder"], ask["ranks"], ask["words"]
    os.chdir(folder)
    for fd, name, flags in ((0, os.devnull, os.O_RDONLY), (1, "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        opened = os.open(name, flags, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(ask["env"])
    more = [entry for entry in ask["env"].get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [folder if words[0] == "-m" else str(Path(words[0]).resolve().parent), *more, *path]
    store, port = _store()
    alive = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _rank(rank, ranks, port, words)
        alive[pid] = rank
    failed = False
    while alive:
        pid, status = os.waitpid(-1, 0)
        if pid in alive:
            rank = alive.pop(pid)
            if status and not failed:
                failed = True
                print(f"stock: rank {rank} ended with {os.waitstatus_to_exitcode(status)}", flush=True)
                for other in alive:
                    os.kill(other, signal.SIGKILL)
    os.kill(store, signal.SIGKILL)
    os._exit(int(failed))


def _store() -> tuple[int, int]:
    """A process that serves the store, as torchrun's agent does: its pid and the port."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, b"%d" % store.port)
        signal.pause()  # the agent ends it
    os.close(writer)
    port = int(os.read(reader, 16))
    os.close(reader)
    return pid, port


def _rank(rank: int, ranks: int, port: int, words: Sequence[str]) -> None:
    """Run the script as `__main__`. What is registered for the exit runs; the interpreter is not taken down behind it.

    Where a script ends right after a collective, a thread of Gloo that gives up a tensor may find no interpreter, and abort.
    """
    for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
        os.environ[name] = str(ranks)
    os.environ.update(GROUP_RANK="0", GROUP_WORLD_SIZE="1", ROLE_NAME="default", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0", TORCHELASTIC_RUN_ID="stock")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    code: Any = 0
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # as an interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
