"""Reads the workers' output from their pipes, saves it, and passes it on line by line, without ever blocking the loop.

A worker gets a pseudoterminal where ftrun writes to a terminal. Lines are never torn or mixed. A reader that stalls slows the
workers down, as it would without ftrun. The launcher reports a full disk or a closed stdout once, then ignores it.

Theory of operation. A `WorkerLog` has two `_Pipe`s. Each pipe writes all bytes to its log file (`Sink`) at once. For the console it either
feeds a `Terminal`, which redraws progress bars, or collects whole lines and renders them (`Style`) into an `Outlet`. While an outlet's
backlog exceeds BACKLOG_MAX, pipes that the console shows are not read, so the worker's own write blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import tty
from collections.abc import Callable
from pathlib import Path

from ftrun.core import paths
from ftrun.core.system import procfs
from ftrun.core.text import coloured
from ftrun.host.base.loop import EventLoop
from ftrun.host.base.settings import Output
from ftrun.host.output.block import Block
from ftrun.host.output.logfiles import Files, Sink
from ftrun.host.output.logformat import Format, LogPlace, Style
from ftrun.host.output.nonblocking_writer import BACKLOG_MAX, RETRY, Outlet, same_file
from ftrun.host.output.terminal import Plain, Terminal

_READ = 1 << 16
_LINE_MAX = 8 << 20  # bytes; the console gets a longer line in pieces
_PTY_MOST = 1 << 17  # bytes that a pseudoterminal may hold; it does not report how many
_LEAST_COLUMNS = 20  # the least width that we report to a worker whose lines have a prefix
_BAR_EVERY = 10.0  # seconds between two console lines of a progress bar outside of a terminal


class _Pipe:
    """Routes one worker's stdout or stderr from its channel to its destinations. `plain`: its view on a terminal without prefixes."""

    style: Style
    shown: bool  # the console gets it
    filtered: Sink | None  # gets the lines that match a filter
    filtered_prefix: bytes

    def __init__(self, stream: str, outlet: Outlet, place: LogPlace, plain: Plain, logs: Logs) -> None:
        self.stream = stream
        self.outlet = outlet
        self.terminal = logs.terminal_of(outlet, place, stream)
        self.view: Block | Plain | None = None  # its lines on that terminal
        self._plain = plain
        self.fd, self.writer, self._is_pty = _channel(self.terminal is not None)
        os.set_blocking(self.fd, False)
        self._bar_due = False
        self.partial: list[bytes] = []
        self.partial_size = 0
        self.mid_line = False  # its last line is unfinished, and no progress bar
        self.closed = False
        self._logs = logs
        self._place = place
        self._file = Sink(logs.files.file(place, stream))
        self.filtered = None
        self._settle(place)

    def move(self, place: LogPlace) -> None:
        """Attribute lines to `place` from now on, and move a spare's earlier lines there. Also works after the pipe's end."""
        old, files = self._place, self._logs.files
        if not self.closed:
            self._file.close()
        self._file = Sink(files.file(place, self.stream))
        if old.local_rank is None:
            self._file.bring(files.file(old, self.stream).path)
        self._place = place
        if self.closed:
            self._file.close()
        else:
            self._settle(place)

    def _settle(self, place: LogPlace) -> None:
        form = self._logs.format
        self.style = form.style(place, self.stream)
        self.shown = form.shown(place, self.stream)
        if self.terminal is not None and self.shown:
            self.view = (
                self._plain if form.needs_no_prefix(place) else Block(form.prefix(place, self.stream), place.local_rank or 0)
            )
        self.resize()
        if form.wanted(self.stream):
            if self.filtered is not None:
                self.filtered.close()
            self.filtered = Sink(self._logs.files.filtered(place.attempt, self.stream))
            self.filtered_prefix = form.prefix(place, self.stream)

    def pair(self, other: _Pipe, asks: Callable[[], bool], more: Callable[[], bool]) -> None:
        """Connect the views of a worker's two streams. `other`: the worker's other stream; `asks`, `more`: see `Block`."""
        if isinstance(self.view, Block) and self.terminal is other.terminal and isinstance(other.view, Block):
            self.view.twin, self.view.asks, self.view.more = other.view, asks, more

    def resize(self) -> None:
        """Set the size of the worker's terminal to that of ours, less the columns of the prefix."""
        if self.terminal is None or not self._is_pty:
            return
        size, prefix = self.terminal.size(), self.view.prefix if isinstance(self.view, Block) else b""
        columns = max(size.columns - len(prefix), min(_LEAST_COLUMNS, size.columns))
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, columns, 0, 0))

    def take(self, data: bytes) -> None:
        self._file.write(data)
        end = data[data.rfind(b"\n") + 1 :]
        self.mid_line = bool(end) and b"\r" not in end
        if self.terminal is not None and self.view is not None:
            self.terminal.feed(self.view, data)
            if self.filtered is None:
                return
        cut = data.rfind(b"\n") + 1
        if cut == 0:
            self.partial.append(data)
            self.partial_size += len(data)
            if self.partial_size > _LINE_MAX:
                self._end_line()
            elif b"\r" in data and not self._bar_due:
                self._bar_due = True
                self._logs.loop.after(_BAR_EVERY, self._show_bar)
            return
        whole = b"".join((*self.partial, data[:cut]))
        self.partial = [data[cut:]] if cut < len(data) else []
        self.partial_size = len(data) - cut
        self._pass_on(whole)

    def _show_bar(self) -> None:
        """Give a progress bar that is not finished a line with its current state."""
        self._bar_due = False
        if any(b"\r" in piece for piece in self.partial):
            self._end_line()

    def finish(self) -> None:
        """Pass on an unfinished last line."""
        if self.terminal is not None and self.view is not None:
            self.terminal.finish(self.view)
        self._end_line()

    def _end_line(self) -> None:
        if self.partial_size:
            whole = b"".join(self.partial) + b"\n"
            self.partial, self.partial_size = [], 0
            self._pass_on(whole)

    def _pass_on(self, whole: bytes) -> None:
        if not self.shown and self.filtered is None:
            return
        if self.shown and self.view is None:
            states = map(_last_state, whole.split(b"\n")[:-1])
            self.outlet.write(self.style.render([state for state in states if state]))
        if self.filtered is not None:
            wanted, lines = self._logs.format.wanted(self.stream), whole.splitlines(keepends=True)
            hits = [line.rstrip(b"\r\n") + b"\n" for line in lines if any(text in line for text in wanted)]
            self.filtered.write(b"".join([self.filtered_prefix + line for line in hits]))

    def waiting(self) -> int:
        """Return an upper limit of the bytes in the channel."""
        if self._is_pty:
            return _PTY_MOST
        return int(struct.unpack("i", fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)))[0])

    def close(self) -> None:
        self.closed = True
        self.finish()
        self._file.close()
        if self.filtered is not None:
            self.filtered.close()
        os.close(self.fd)


def _channel(like_terminal: bool) -> tuple[int, int, bool]:
    """Make a channel: return our end, the worker's end, and whether it is a pseudoterminal (a pipe where the system gives none)."""
    if like_terminal:
        with contextlib.suppress(OSError):
            fd, writer = os.openpty()
            tty.setraw(writer)  # bytes arrive as they were written
            return fd, writer, True
    return *os.pipe(), False


def _last_state(line: bytes) -> bytes:
    """Return the last state of a line that a progress bar redraws, with its line end; b"" for a bar that erased itself."""
    text = line.removesuffix(b"\r")
    if b"\r" in text:
        text = next((state for state in reversed(text.split(b"\r")) if state), b"")
        if not text.strip():
            return b""
    return text + (b"\r\n" if line.endswith(b"\r") else b"\n")


class WorkerLog:
    """Logs one incarnation's two streams. Give `out_w` and `err_w` away; `Helper.send` closes them."""

    def __init__(self, place: LogPlace, logs: Logs) -> None:
        self.place = place
        self._logs = logs
        plain = Plain()
        self._both = (_Pipe("stdout", logs.out, place, plain, logs), _Pipe("stderr", logs.err, place, plain, logs))
        self.pid = 0  # 0 = not forked yet
        self._pair()
        self._pipes = list(self._both)
        self.out_w, self.err_w = (pipe.writer for pipe in self._both)
        for pipe in self._pipes:
            self._listen(pipe)

    def take_rank(self, local_rank: int, attempt: int) -> None:
        """Give the log to a rank: append the worker's earlier output to that rank's files, and go on there."""
        old, self.place = self.place, LogPlace(self.place.cell, local_rank, attempt)
        self._logs.drain(self.place)
        for pipe in self._both:
            pipe.move(self.place)
        self._pair()
        if old.local_rank is None:
            self._logs.files.remove_empty(old)

    def _pair(self) -> None:
        out, err = self._both
        out.pair(err, self._asks, lambda: self._more(out))
        err.pair(out, self._asks, lambda: self._more(err))

    def _asks(self) -> bool:
        return procfs.reads_stdin(self.pid)

    def _more(self, pipe: _Pipe) -> bool:
        return pipe in self._pipes and self._read(pipe) > 0

    def _listen(self, pipe: _Pipe) -> None:
        if pipe in self._pipes:
            self._logs.loop.watch(pipe.fd, lambda: self._readable(pipe))

    def _readable(self, pipe: _Pipe) -> None:
        if pipe.shown and pipe.outlet.waiting > BACKLOG_MAX:
            # stop reading for a moment, so that the worker's own write blocks
            self._logs.loop.forget(pipe.fd)
            self._logs.loop.after(RETRY, lambda: self._listen(pipe))
            return
        for other in [one for one in self._pipes if one is not pipe and isinstance(one.view, Plain) and one.mid_line]:
            self._read(other)  # `python -u` writes a line in pieces; two channels do not preserve the order of their bytes
        self._read(pipe)

    def _read(self, pipe: _Pipe) -> int:
        """Read once and pass the data on; return its size in bytes, 0 for an empty or ended pipe."""
        try:
            data = os.read(pipe.fd, _READ)
        except BlockingIOError:
            return 0
        except OSError:  # a pseudoterminal that no process has open any more
            data = b""
        if data:
            pipe.take(data)
        else:
            self._close(pipe)
        return len(data)

    def _close(self, pipe: _Pipe) -> None:
        self._logs.loop.forget(pipe.fd)
        self._pipes.remove(pipe)
        pipe.close()
        if not self._pipes:
            self._logs.closed(self)

    def drain(self) -> None:
        """Read the current content of the pipes and no more: a child that goes on writing must not keep us."""
        for pipe in list(self._pipes):
            left = pipe.waiting()
            while left > 0 and (size := self._read(pipe)):
                left -= size

    def last_words(self) -> None:
        """Read the current content of the pipes and end the last line: another worker goes on in its place."""
        self.drain()
        for pipe in self._pipes:
            pipe.finish()

    def resize(self) -> None:
        for pipe in self._pipes:
            pipe.resize()

    def close(self) -> None:
        """Read the current content and stop listening, even if a grandchild still holds a pipe."""
        self.drain()
        for pipe in list(self._pipes):
            self._close(pipe)


class Logs:
    """Handles the output of all workers of a run, and our own messages. `folder` exists and belongs to this run only."""

    def __init__(
        self, folder: Path, loop: EventLoop, output: Output, run: str, role: str = "default", workers: int = 0,
        debug_rank: int | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.loop = loop
        self.format = Format(output, run, role, workers, debug_rank)
        self.files = Files(folder, self._unsaved)
        self._unsaved_said = False
        self._open: list[WorkerLog] = []
        self._coloured = coloured(2)
        self.out = Outlet(1, loop, self._stdout_gone)
        # one queue when both are the same file, because two would tear each other's lines
        self.err = self.out if same_file(1, 2) else Outlet(2, loop, lambda why: None)
        self._terminals = {}
        self._dumb = os.environ.get("TERM") == "dumb"  # it cannot move its cursor
        if output.format == "text":
            outlets = {outlet for outlet in (self.out, self.err) if os.isatty(outlet.fd)}
            self._terminals = {outlet: Terminal(outlet.fd, outlet.write, loop) for outlet in outlets}

    def terminal_of(self, outlet: Outlet, place: LogPlace, stream: str) -> Terminal | None:
        """Return the terminal of this stream, for a spare the one that it will have as a rank; None for no terminal."""
        if self._dumb and not self.format.needs_no_prefix(place):  # a dumb terminal only takes bytes as they are
            return None
        return self._terminals.get(outlet) if self.format.on_console(place, stream) else None

    def resized(self) -> None:
        """Pass a new size of our terminal on to the workers' terminals."""
        for log in self._open:
            log.resize()

    @property
    def rank_offset(self) -> int:
        """Rank of this node's local rank 0; set it before `open` for a world's workers."""
        return self.format.rank_offset

    @rank_offset.setter
    def rank_offset(self, offset: int) -> None:
        self.format.rank_offset = offset

    def open(self, cell: int, local_rank: int | None, attempt: int) -> WorkerLog:
        """Make the log and pipes of a new worker; `local_rank` None: a spare."""
        place = LogPlace(cell, local_rank, attempt)
        if local_rank is not None:
            self.drain(place)
        log = WorkerLog(place, self)
        self._open.append(log)
        return log

    def error_file(self, attempt: int, local_rank: int) -> Path:
        """Return the path of the file in which that worker leaves its error."""
        return paths.error_file(self.folder, attempt, local_rank)

    def drain(self, place: LogPlace) -> None:
        """Read the last output of earlier workers of this rank."""
        for log in list(self._open):
            held = log.place
            if held.cell != place.cell and (held.local_rank, held.attempt) == (place.local_rank, place.attempt):
                log.last_words()

    def log(self, line: str, level: str = "info") -> None:
        """Write a message of ours to stderr; `level` is info, warning or error."""
        text, terminal = self.format.message(line, level, self._coloured), self._terminals.get(self.err)
        if terminal is None:
            self.err.write(text)
        else:
            terminal.message(text)

    def _stdout_gone(self, why: str) -> None:
        self.log(f"stdout is gone ({why}); the run goes on without it", "warning")

    def _unsaved(self, path: Path, why: str) -> None:
        if not self._unsaved_said:
            self._unsaved_said = True
            self.log(f"workers' output is not saved any more: {path}: {why}; the run goes on", "warning")

    def closed(self, log: WorkerLog) -> None:
        self._open.remove(log)
        if log.place.local_rank is None:
            self.files.remove_empty(log.place)

    def close(self, patience: float) -> None:
        """Close all logs and pass on the rest; a reader that takes nothing for `patience` seconds loses it."""
        for log in list(self._open):
            log.close()
        for outlet in (self.out, self.err):
            outlet.flush(block_ms=int(patience * 1000))
