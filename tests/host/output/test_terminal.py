"""ftrun on a terminal: what workers see of it, and what a person sees there, beside torchrun."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios

import pyte
import pytest

from ftrun.host.output.block import Block
from ftrun.host.output.terminal import Plain, Terminal
from tests.conftest import Ftrun
from tests.host.output.ptys import Typist


class Screen:
    """A terminal by pyte, and the timers that run out when the test says so."""

    def __init__(self, rows: int = 12, columns: int = 40) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.terminal = Terminal(-1, self._write, self)
        self.terminal.size = lambda: os.terminal_size((columns, rows))  # type: ignore[method-assign]
        self._due: list[object] = []

    def _write(self, data: bytes) -> None:
        self._stream.feed(data.replace(b"\n", b"\r\n"))

    def after(self, seconds: float, handler: object) -> None:
        self._due.append(handler)

    def later(self) -> None:
        due, self._due = self._due, []
        for handler in due:
            handler()  # type: ignore[operator]

    def put(self, block: Block | Plain, *data: bytes) -> list[str]:
        for one in data:
            self.terminal.feed(block, one)
        return self.lines

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display if line.strip()]


def two() -> tuple[Screen, Block, Block]:
    return Screen(), Block(b"[0] ", 0), Block(b"[1] ", 1)


def test_a_terminal_that_does_not_know_its_size() -> None:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    assert Terminal(slave, lambda data: None, Screen()).size() == (80, 24)
    os.close(master)
    os.close(slave)


def test_a_bar_stays_below_the_lines_of_others() -> None:
    screen, bar, other = two()
    assert screen.put(bar, b"\r 10%", b"\r 20%") == ["[0]  20%"]
    assert screen.put(other, b"one\ntwo\n") == ["[1] one", "[1] two", "[0]  20%"]
    screen.terminal.message(b"ftrun: ours\n")
    assert screen.put(bar, b"\r 30%") == ["[1] one", "[1] two", "ftrun: ours", "[0]  30%"]
    assert screen.put(other, b"\r 90%") == ["[1] one", "[1] two", "ftrun: ours", "[0]  30%"], "one bar at a time"
    assert screen.put(bar, b"\r100%\n")[-1] == "[0] 100%"
    assert screen.put(other, b"\r 95%")[-2:] == ["[0] 100%", "[1]  95%"]
    screen.put(other, b"\r     \r")
    assert screen.put(bar, b"end\n")[-2:] == ["[0] 100%", "[0] end"], "a bar that was wiped out leaves nothing"


def test_a_part_of_a_line_is_shown_when_no_more_comes() -> None:
    screen, asking, other = two()
    assert screen.put(asking, b"na") == []
    assert screen.put(asking, b"me? ") == []
    asking.asks = lambda: True
    screen.later()
    assert screen.lines == ["[0] name?"]
    assert screen.put(other, b"line\n") == ["[0] name?", "[1] line", "[0] name?"], "what was typed is not wiped out"
    assert screen.put(other, b"half", b" a line\n")[-2:] == ["[1] half a line", "[0] name?"]
    screen._write(b"bob\n")
    assert screen.put(asking, b"hello bob\n")[-2:] == ["[0] name? bob", "[0] hello bob"]


def test_a_slow_line_is_no_prompt() -> None:
    screen, slow, other = two()
    slow.more = lambda: screen.put(slow, b"b") is not None  # more of it has come meanwhile
    screen.put(slow, b"a")
    screen.later()
    assert screen.lines == []
    slow.more = lambda: False
    screen.later()
    assert screen.lines == ["[0] ab"]
    screen.put(other, b"line\n")
    assert screen.put(slow, b"c\n") == ["[1] line", "[0] abc"], "nobody types behind it: it is taken away, and drawn again"


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_lines_that_are_drawn_again(cut: int) -> None:
    """As rich draws: up, and each line anew. Bytes may come in any pieces."""
    screen, table, other = two()
    data = b"a 1\nb 1\nc 1" + b"\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2K\x1b[32ma 2\x1b[0m\nb 2\nc 2"
    screen.put(table, *(data[at : at + cut] for at in range(0, len(data), cut)))
    screen.later()
    assert screen.lines == ["[0] a 2", "[0] b 2", "[0] c 2"]
    assert screen.put(table, b"\n", b"\x1b[?25h")[-1] == "[0] c 2"
    assert screen.put(other, b"next\n") == ["[0] a 2", "[0] b 2", "[0] c 2", "[1] next"]


def test_bars_below_each_other() -> None:
    """As tqdm draws two of them: down, the line, up again."""
    screen, bars, other = two()
    for step in (1, 2, 3):
        screen.put(bars, b"\r outer %d" % step, b"\n", b"\r inner %d" % step, b"\x1b[A")
        screen.put(other, b"line %d\n" % step)
    assert screen.lines == ["[1] line 1", "[1] line 2", "[1] line 3", "[0]  outer 3", "[0]  inner 3"]


def test_long_lines_and_more_lines_than_the_screen_has() -> None:
    screen, bar, other = two()
    screen.put(bar, b"\r" + b"=" * 60)
    screen.put(other, b"".join(b"line %d\n" % number for number in range(30)))
    assert screen.put(bar, b"\rdone\n")[-2:] == ["[1] line 29", "[0] done"]


def test_the_only_worker_has_the_terminal_for_itself() -> None:
    screen, plain = Screen(), Plain()
    assert screen.put(plain, b"half", b" a line\n(Pdb) ") == ["half a line", "(Pdb)"]
    screen.terminal.message(b"ftrun: ours\n")
    assert screen.lines == ["half a line", "(Pdb)", "ftrun: ours", "(Pdb)"]
    screen.terminal.finish(plain)
    screen.terminal.message(b"ftrun: ours\n")
    assert screen.lines[-1] == "ftrun: ours"


SEES = """
import os, shutil, signal, sys, time
rank = os.environ["RANK"]
print("sees", sys.stdout.isatty(), sys.stderr.isatty(), shutil.get_terminal_size().columns, shutil.get_terminal_size().lines)
if rank == "1":
    for percent in range(0, 101, 50):
        sys.stderr.write(f"\\rbar {percent}%")
        sys.stderr.flush()
        time.sleep(0.02)
    sys.stderr.write("\\n")
else:
    signal.signal(signal.SIGWINCH, lambda *_: print("now", shutil.get_terminal_size().columns))
    name = input("name? ")
    print("\\x1b[31mhello", name, "\\x1b[0m")
"""


def test_workers_see_the_terminal(ftrun: Ftrun) -> None:
    script = ftrun.script(SEES)
    options = ["--nproc-per-node", "2", "--spares", "0", "--run-id", "r", "--log-dir", "logs"]
    person = Typist(ftrun.command(*options, script), ftrun.base, ftrun.env)
    person.until("[rank 0] name?")
    person.until("[rank 1] bar 100%")
    person.resize(30, 90)
    person.until("[rank 0] now 81")
    person.type("bob\n")
    assert person.wait() == 0, person.screen()
    shown = person.screen()
    assert {"[rank 0] sees True True 91 40", "[rank 1] sees True True 91 40", "[rank 0] hello bob"} <= set(shown), shown
    assert sum("bar" in line for line in shown) == 1 and "done in" in shown[-1]
    assert b"\x1b[36mftrun: \x1b[0mrun r" in person.raw and b"\x1b[31mhello" in person.raw
    folder = ftrun.base / "logs" / "r" / "attempt_0"
    assert (folder / "1" / "stderr.log").read_bytes() == b"\rbar 0%\rbar 50%\rbar 100%\n", "a file is as it was written"


def test_one_worker_as_under_torchrun(ftrun: Ftrun) -> None:
    """The worker's own bytes are the same, and so is what stands on the screen."""
    script = ftrun.script(SEES.replace('rank == "1"', 'rank == "0"'))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    seen = []
    for command in (torchrun, ftrun.command("--spares", 0, script)):
        person = Typist(command, ftrun.base, {**ftrun.env, "NO_COLOR": "1"})
        assert person.wait() == 0, person.screen()
        assert b"\x1b[36m" not in person.raw
        seen.append([line for line in person.screen() if "sees" in line or "bar" in line])
    assert seen[0] == seen[1] == ["sees True True 100 40", "bar 100%"]


def test_outside_of_a_terminal_a_bar_is_one_line(ftrun: Ftrun) -> None:
    script = ftrun.script(
        'import sys\nsys.stderr.write("".join(f"\\r{n}%" for n in range(101)) + "\\n" + "\\rwiped\\r     \\r")\n'
    )
    run = ftrun.start("--spares", 0, script)
    assert run.wait() == 0
    assert [line for line in run.stderr.splitlines() if line.startswith("[")] == ["[rank 0] 100%"]
    assert "\r" not in run.stderr


@pytest.mark.parametrize("why", ["dumb", "no pseudoterminal"])
def test_without_a_terminal_to_give(ftrun: Ftrun, why: str) -> None:
    """A terminal that cannot move its cursor gets whole lines only; where no pseudoterminal is to be had, a worker gets a pipe."""
    script = ftrun.script("import sys\nprint('sees', sys.stdout.isatty())\nsys.stderr.write('\\rhalf')\n")
    command, env = ftrun.command("--nproc-per-node", 2, "--spares", 0, script), dict(ftrun.env)
    if why == "dumb":
        command = ["/usr/bin/env", "TERM=dumb", *command]
    else:
        (ftrun.base / "site").mkdir()
        broken = "import os\ndef none():\n    raise OSError(28, 'no space')\nos.openpty = none\n"
        (ftrun.base / "site" / "sitecustomize.py").write_text(broken)
        env["PYTHONPATH"] = str(ftrun.base / "site")
    person = Typist(command, ftrun.base, env)
    assert person.wait() == 0, person.screen()
    assert {line for line in person.screen() if "sees" in line} == {"[rank 0] sees False", "[rank 1] sees False"}
    assert any("half" in line for line in person.screen())
    if why == "dumb":
        assert b"\x1b" not in person.raw


def test_what_goes_to_a_file_only_sees_no_terminal(ftrun: Ftrun) -> None:
    script = ftrun.script("import sys\nprint(sys.stdout.isatty(), sys.stderr.isatty())\n")
    options = ["--spares", "0", "--run-id", "r", "--log-dir", "logs", "--redirects", "1"]
    person = Typist(ftrun.command(*options, script), ftrun.base, ftrun.env)
    assert person.wait() == 0
    assert (ftrun.base / "logs" / "r" / "attempt_0" / "0" / "stdout.log").read_text() == "False True\n"
