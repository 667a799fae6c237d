"""Carries out a run, from the claim of its name to the clean-up, and leaves no process or file behind.

The fork server is the first helper to start, because its import of torch takes longer than all the rest.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import signal
import socket
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftrun import native
from ftrun.core import ended, paths, runs
from ftrun.core.amounts import count, size
from ftrun.core.errors import PlatformError, UsageError
from ftrun.core.shared.board import Board, Head
from ftrun.core.system import files, procfs, shown_command
from ftrun.core.system.visible import VARIABLE
from ftrun.core.waiting import wait_for
from ftrun.host.account import messages
from ftrun.host.base.context import SERVICES_LOG, LaunchContext
from ftrun.host.base.loop import EventLoop
from ftrun.host.base.settings import Settings, run_name
from ftrun.host.devices.counting import gpu_count
from ftrun.host.nodes.membership.open import Rendezvous, arrange
from ftrun.host.nodes.node_group import Peers, SoleNode
from ftrun.host.output import old_logs
from ftrun.host.output.logfiles import claim_folder
from ftrun.host.output.logs import Logs
from ftrun.host.run import needs_torch
from ftrun.host.run.agent import Agent
from ftrun.host.run.listener import RunListener
from ftrun.host.rundir import rundir
from ftrun.host.rundir.journal import Journal
from ftrun.host.rundir.reserve import trouble
from ftrun.host.services.metrics_exporter import Monitoring
from ftrun.host.services.services import Services
from ftrun.host.workers import fence

_AGENTS_HERE = 66  # 2 more than the most agents of one run on one machine
_SPARE_CELLS = 4096  # incarnations that a run can have beyond the first ones
_OWN_DESCRIPTORS, _EACH_WORKERS = 24, 8  # descriptors of the launcher itself, and for each worker, with some room
_READER_PATIENCE = 5.0  # seconds that a stalled reader of our output gets at the end


def launch(settings: Settings) -> int:
    """Run to the end; return the exit code.

    Raises:
        UsageError: An option has an unusable value. Nothing has started.
        PlatformError: The machine cannot run this; or descriptors ran out or the run's folder was lost, and everything has ended.
    """
    _require_descriptors(settings)
    if settings.gpus:
        os.environ[VARIABLE] = settings.gpus
    stdin = _standard_descriptors()
    nodes = settings.nodes
    meeting = arrange(nodes, settings.run_id, settings.nproc, settings.max_restarts, settings.snapshot_every)
    if meeting is None and nodes.master_port:
        _require_free(nodes.master_port)
    monitoring = Monitoring(settings)
    native.set_subreaper()
    run_dir = _claim(
        _name(settings) if meeting is None else meeting.run_id,
        meeting is not None,
        {
            "argv": list(settings.argv),
            "world_size": settings.nproc,
            "spares": settings.spares,
            "log_dir": os.path.abspath(settings.log_dir),
            "cwd": os.getcwd(),
            "shutdown_timeout": settings.shutdown_timeout,
        },
    )
    try:
        signals_r = _catch_signals(settings)
        with _modes_of_the_terminal():
            return _Run(settings, run_dir, signals_r, stdin, meeting, monitoring).run()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise _too_few_descriptors(settings, error.strerror or "") from None
        if error.errno == errno.E2BIG:
            raise _too_many_variables() from None
        why = trouble(run_dir, error)
        if why:
            raise PlatformError(why, explain="F370") from None
        raise
    finally:
        rundir.remove(run_dir)


def _require_descriptors(settings: Settings) -> None:
    """Raise PlatformError when the limit of open files would stop the run in the middle of its start."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < _descriptors(settings):
        raise _too_few_descriptors(settings, f"the limit is {limit} open files")


def _descriptors(settings: Settings) -> int:
    return _OWN_DESCRIPTORS + _EACH_WORKERS * (settings.nproc + settings.spares)


def _too_few_descriptors(settings: Settings, why: str) -> PlatformError:
    workers = f"{count(settings.nproc, 'worker')} and {count(settings.spares, 'spare')}"
    least = max(1024, 2 * _descriptors(settings))
    return PlatformError(f"too few descriptors for {workers} ({why}): run `ulimit -n {least}` and start again")


def _too_many_variables() -> PlatformError:
    held = size(sum(len(os.fsencode(f"{name}={value}")) for name, value in os.environ.items()))
    return PlatformError(
        f"the environment is too large to start a process with: its {len(os.environ)} variables take {held}; unset what is not "
        "needed, or run `ulimit -s 32768` and start again (Linux allows a quarter of that for variables and arguments, up to 6 MB)"
    )


def _name(settings: Settings) -> str | None:
    """Return the run's name; number a taken one from --rdzv-id, because two runs of torchrun may share an id."""
    name = settings.run_id
    if settings.rdzv_id and name == run_name(settings.rdzv_id):
        more = 2
        while runs.find_run(name) is not None:
            name = f"{settings.run_id}-{more}"
            more += 1
    return name


def _claim(run_id: str | None, shared: bool, facts: dict[str, Any]) -> Path:
    """Make the run directory. Each node of a run gets its own name, even where nodes share a folder or a machine."""
    if not shared or run_id is None:
        return rundir.claim(run_id, facts)
    name = f"{run_id}-{os.uname().nodename.partition('.')[0]}"
    for number in range(2, _AGENTS_HERE):
        try:
            return rundir.claim(name if number == 2 else f"{name}-{number - 1}", facts)
        except UsageError:
            continue
    return rundir.claim(name, facts)


def _fork_server_mode(settings: Settings) -> str:
    if settings.exec_workers:
        return "exec"
    return "preload" if needs_torch.wants_torch(settings.kind, settings.argv) else "light"


def _require_free(port: int) -> None:
    """Raise UsageError when the store could not listen on --master-port."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        order = {"host": "127.0.0.1", "port": port, "error": os.strerror(error.errno or 0)}
        raise UsageError(messages.cannot_listen(order), explain="F106") from None


class _Run:
    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        signals_r: int,
        stdin: int | None,
        meeting: Rendezvous | None,
        monitoring: Monitoring,
    ) -> None:
        self._monitoring = monitoring
        self._meeting = meeting
        self._settings = settings
        self._run_dir = run_dir
        self._signals_r = signals_r
        self._loop = EventLoop()
        env = dict(os.environ)
        env[paths.ENV_RUN_DIR] = str(run_dir)
        env["PYTHONUNBUFFERED"] = "1"
        for key in (paths.ENV_FAULT_PLAN, paths.ENV_RANDOM_FAULTS):
            env.pop(key, None)  # an enclosing run may have set them
        if settings.fault_plan is not None:
            files.write_private(run_dir / paths.FAULT_PLAN, settings.fault_text)
        self._limited = settings.nproc > 1 and "OMP_NUM_THREADS" not in env
        if self._limited:
            env["OMP_NUM_THREADS"] = "1"
        shown = shown_command.command(settings.kind, settings.argv)
        self._services = Services(run_dir, env, _fork_server_mode(settings), self._on_message, stdin, shown)
        self._agent: Agent | None = None

    def run(self) -> int:
        logs: Logs | None = None
        try:
            folder, why_not = self._log_folder()
            with contextlib.suppress(OSError):
                self._services.log_to(folder / SERVICES_LOG)
            self._services.start_fork_server()
            settings = self._settings
            names = self._run_dir.name, settings.role
            logs = Logs(folder, self._loop, settings.output, *names, settings.nproc, settings.debug_rank)
            board = self._board()
            self._services.start_fd_store()
            journal = Journal(self._run_dir / paths.JOURNAL)
            self._log = logs.log
            self._welcome(folder, why_not)
            if self._settings.log_dir == paths.LOG_DIR and not why_not:
                most = settings.keep_logs
                removed = old_logs.tidy(folder.parent, math.inf if most is None else most * 1e9)
                if removed:
                    self._log(messages.removed_logs(removed, settings.log_dir, most or 0.0))
            self._monitor()
            listener = RunListener(journal, logs)
            context = LaunchContext(self._settings, self._run_dir, folder, board, self._loop, listener)
            nodes = SoleNode(context) if self._meeting is None else Peers(context, self._meeting)
            agent = self._agent = Agent(context, listener, self._services, journal, logs, nodes, self._monitoring)
            self._loop.watch(self._signals_r, self._signal, urgent=True)
            code = agent.run()
            logs.close(_READER_PATIENCE)
            agent.summarize()
            self._keep_journal(journal, folder, code)
            return code
        finally:
            self._monitoring.close(self._services)
            self._clean_up()
            if logs is not None:
                logs.close(_READER_PATIENCE)

    def _board(self) -> Board:
        board = Board.create(self._run_dir / paths.BOARD, _SPARE_CELLS + self._settings.nproc + self._settings.spares)
        board[Head.LAUNCHER_PID] = os.getpid()
        board[Head.WORLD_SIZE] = self._settings.nproc
        return board

    def _log_folder(self) -> tuple[Path, str]:
        base, why_not = Path(self._settings.log_dir), ""
        try:
            folder = claim_folder(base, self._run_dir.name)
        except OSError as error:
            folder = claim_folder(self._run_dir, "logs")
            why_not = f"logs cannot be kept in {base} ({error.strerror}); they end with the run"
        rundir.amend(self._run_dir, {"logs": str(folder.absolute())})
        return folder, why_not

    def _welcome(self, folder: Path, why_not: str) -> None:
        settings = self._settings
        text = messages.folder_shown(folder)
        device = "cuda" if gpu_count() else "cpu"
        self._log(messages.started(self._run_dir.name, settings.nproc, settings.spares, device, text))
        if why_not:
            self._log(why_not, "warning")
        if self._limited:
            self._log(messages.threads_limited())

    def _monitor(self) -> None:
        why_not = self._monitoring.start(self._services)
        if why_not:
            self._log(why_not, "warning")
        elif self._monitoring.where:
            self._log(self._monitoring.where)

    def _on_message(self, service: str, message: dict[str, Any]) -> None:
        if self._agent is not None:
            self._agent.on_message(service, message)

    def _signal(self) -> None:
        assert self._agent is not None
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._signals_r, 256)
        for number in data:
            if number == signal.SIGCHLD:
                self._agent.reap()
            elif number == signal.SIGWINCH and number not in self._settings.forward:
                self._agent.resized()
            elif number in self._settings.forward:
                self._agent.forward(number)
            elif number in self._settings.signals:
                self._agent.signalled(number)

    def _keep_journal(self, journal: Journal, folder: Path, code: int) -> None:
        journal.note("end")
        try:
            journal.copy_to(folder / paths.JOURNAL)
            run = runs.read_run(self._run_dir)
            if run is not None:
                ended.add(run.raw, code)
        except OSError as error:
            self._log(f"the journal is not kept: {error.strerror}; nothing can show this run later", "warning")
        if journal.broken:
            self._log(f"the journal is incomplete: {journal.broken}", "warning")

    def _clean_up(self) -> None:
        """End every process that is left, whatever happened before."""
        self._services.end()
        wait_for(self._nobody_left, 5.0, 0.001)

    def _nobody_left(self) -> bool:
        # we inherit the children of a dead fork server
        left = [p for p in procfs.children("self") if p in self._services.pids() or fence.is_ours(p)]
        for pid in left:
            procfs.kill_group(pid)
        for _ in procfs.reaped():
            pass
        return not left


def _standard_descriptors() -> int | None:
    """Occupy descriptors 0 to 2, so that no file of ours gets one; return 0 if we started with a stdin, else None."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(fd)
    return None if sys.__stdin__ is None else 0


@contextlib.contextmanager
def _modes_of_the_terminal() -> Iterator[None]:
    """Restore the terminal's modes at the end: a worker that reads from it may change them and die before it restores them."""
    modes = termios.tcgetattr(0) if os.isatty(0) else None
    try:
        yield
    finally:
        with contextlib.suppress(OSError, termios.error):
            if modes is not None and os.tcgetpgrp(0) == os.getpgrp() and termios.tcgetattr(0) != modes:
                termios.tcsetattr(0, termios.TCSANOW, modes)


def _catch_signals(settings: Settings) -> int:
    """Return a descriptor in which the signals arrive as bytes from now on."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for signum in {*settings.signals, *settings.forward, signal.SIGCHLD, signal.SIGWINCH}:
        # nohup and background shells make a program ignore SIGHUP or SIGINT: keep that
        if signum == signal.SIGCHLD or signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    return reader


def require_usable() -> None:
    """Raise PlatformError when this machine cannot run ftrun at all, UsageError when this Python cannot."""
    if not sys.platform.startswith("linux"):
        raise PlatformError("ftrun needs Linux (futexes, pidfds, /proc)")
    if not native.available():
        native.set_subreaper()  # raises with the reason
    if not hasattr(os, "pidfd_open"):
        raise UsageError("this Python lacks os.pidfd_open")
