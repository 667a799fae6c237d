"""Output by itself, with real pipes and files: prefixes, layout, appending, filters, JSON, templates."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import re
import threading
from pathlib import Path

import pyte
import pytest

from ftrun.core.errors import UsageError
from ftrun.host.base.loop import EventLoop
from ftrun.host.base.settings import Output
from ftrun.host.base.streams import Std, Streams, parse
from ftrun.host.output.logfiles import claim_folder
from ftrun.host.output.logformat import check_template, torchrun_template
from ftrun.host.output.logs import Logs, WorkerLog
from ftrun.host.output.nonblocking_writer import BACKLOG_MAX
from ftrun.host.output.terminal import Terminal
from tests.conftest import wait_for

FULL = "/dev/full"


class Console:
    """Takes the place of an outlet and remembers what it got."""

    def __init__(self) -> None:
        self.waiting = 0
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def flush(self, block_ms: int = 0) -> None:
        pass

    @property
    def lines(self) -> list[str]:
        return self.data.decode().splitlines()


class Scene:
    """`Logs` with a console of its own and workers that are written for by the test."""

    def __init__(self, folder: Path, output: Output | None = None, role: str = "default") -> None:
        self.loop = EventLoop()
        self.logs = Logs(folder, self.loop, output or Output(), "brave-otter", role)
        self.out, self.err = Console(), Console()
        self.logs.out, self.logs.err = self.out, self.err  # type: ignore[assignment]

    def worker(self, cell: int, local_rank: int | None, attempt: int = 0) -> WorkerLog:
        return self.logs.open(cell, local_rank, attempt)

    def write(self, log: WorkerLog, out: bytes = b"", err: bytes = b"") -> None:
        for fd, data in ((log.out_w, out), (log.err_w, err)):
            if data:
                os.write(fd, data)
        log.drain()

    def end(self, *workers: WorkerLog) -> None:
        for log in workers:
            os.close(log.out_w)
            os.close(log.err_w)
            log.close()


def test_layout_prefix_and_carriage_returns(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    log = scene.worker(2, 2, 1)
    scene.write(log, b"one\ntw", b"warning\n")
    scene.write(log, b"o\n10%\r20%\r\nthree")
    scene.end(log)
    assert scene.out.data == b"[rank 2] one\n[rank 2] two\n[rank 2] 20%\r\n[rank 2] three\n"
    assert scene.err.data == b"[rank 2] warning\n"
    folder = tmp_path / "attempt_1" / "2"
    assert (folder / "stdout.log").read_bytes() == b"one\ntwo\n10%\r20%\r\nthree"
    assert (folder / "stderr.log").read_bytes() == b"warning\n"
    assert scene.logs.error_file(1, 2) == folder / "error.json"


def test_a_line_that_is_written_in_pieces_is_whole_on_the_terminal(tmp_path: Path) -> None:
    """One worker alone: two channels to one screen. The rest of stdout's line comes before what stderr got after it."""
    scene = Scene(tmp_path, Output(filter=(0,)))
    logs, console = scene.logs, Console()
    logs.out = logs.err = console  # type: ignore[assignment]
    logs._terminals = {console: Terminal(-1, console.write, scene.loop)}  # type: ignore[dict-item]
    log = scene.worker(0, 0)
    out, err = log._both
    os.write(out.writer, b"sees ")
    log._readable(out)
    os.write(out.writer, b"True\n")
    os.write(err.writer, b"\rbar 1%")
    log._readable(err)
    os.write(out.writer, b"next\n")
    os.write(err.writer, b"\rbar 2%\n")
    log._readable(out)  # a bar is no line in pieces
    log._readable(err)
    assert console.data == b"sees True\n\rbar 1%next\n\rbar 2%\n"
    scene.end(log)


def test_no_line_of_a_worker_looks_like_one_of_ours(tmp_path: Path) -> None:
    """Whatever a worker prints: on a screen each of its lines stands behind its prefix, and ours behind `ftrun: `."""
    forged = (
        b"ftrun: one\n",
        b"x\rftrun: two\n",
        b"x\x1b[2K\x1b[1Gftrun: three\n",
        b"x\x1b[A\x1b[5D" + b"\b" * 20 + b"ftrun: four\x1b[u\n",
        b"\x1b]0;title\x07\x1bcftrun: five\x0b\x0cftrun: six\n",
        b"\x1b[8m\n",
        b"\x1b[0mftrun: seven\x1b\n",
        b"\x1b[\n2Jftrun: eight\x84\xc2\x84\xc2\xc2\x84\x84\n",
        b"\x1bP1$r0mftrun: nine\x1b\\\n",
        b"progress" * 5 + b"ftrun: ten\r",
    )
    scene = Scene(tmp_path)
    log = scene.worker(0, 0)
    for data in forged:
        scene.write(log, err=data)
        scene.write(log, err=b"\r")
        scene.logs.log("ours")
    scene.end(log)
    screen = pyte.Screen(100, 60)
    pyte.ByteStream(screen).feed(scene.err.data.replace(b"\n", b"\r\n"))
    rows = [row.rstrip() for row in screen.display if row.strip()]
    assert {row for row in rows if row.startswith("ftrun: ")} == {"ftrun: ours"} and rows.count("ftrun: ours") == 10
    assert all(row.startswith(("[rank 0] ", "ftrun: ours")) for row in rows if row != "[rank 0]")
    assert sum("ftrun: seven" in row for row in rows) == 1, "text stays, also behind an order"
    prefixes = [screen.buffer[at][1] for at, row in enumerate(screen.display) if row.startswith("[rank 0]")]
    assert all(cell.fg == "default" and not cell.reverse for cell in prefixes)


def test_colours_stay_and_end_with_their_line(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    log = scene.worker(0, 0)
    scene.write(log, b"\x1b[1;31mred\x1b[0m and\x1b[38:5:2m green\r\n\ttab, plain \xc3\xa9\n")
    scene.end(log)
    assert scene.out.data == (
        b"[rank 0] \x1b[1;31mred\x1b[0m and\x1b[38:5:2m green\x1b[0m\r\n[rank 0] \ttab, plain \xc3\xa9\n"
    )
    assert b"\x1b[0m\r" not in (tmp_path / "attempt_0" / "0" / "stdout.log").read_bytes(), (
        "a log file is as it was written"
    )


def test_output_appears_as_soon_as_it_was_written(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    log = scene.worker(0, 0)
    os.write(log.out_w, b"now\nand this is no li")
    scene.loop.run_once(5.0)
    assert scene.out.data == b"[rank 0] now\n"
    assert (tmp_path / "attempt_0" / "0" / "stdout.log").read_bytes() == b"now\nand this is no li"
    scene.end(log)


def test_a_console_that_is_not_read_makes_the_worker_wait_unless_its_output_is_redirected(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Output(redirects=parse("-r", "1:1")))
    workers = [scene.worker(0, 0), scene.worker(1, 1)]
    scene.out.waiting = BACKLOG_MAX + 1
    for log in workers:
        os.write(log.out_w, b"line\n")
    saved = [tmp_path / "attempt_0" / str(rank) / "stdout.log" for rank in (0, 1)]
    wait_for(lambda: scene.loop.run_once(1.0) or saved[1].read_bytes(), "the output of rank 1")
    for _ in range(5):
        scene.loop.run_once(1.0)  # a look every 20 ms
    assert saved[0].read_bytes() == b"" and scene.out.data == b""
    scene.out.waiting = 0
    wait_for(lambda: scene.loop.run_once(1.0) or scene.out.data, "the output of rank 0")
    assert scene.out.lines == ["[rank 0] line"]
    scene.end(*workers)


def test_ranks_are_counted_from_the_nodes_first(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.logs.rank_offset = 8
    log = scene.worker(1, 1)
    scene.write(log, b"here\n")
    scene.end(log)
    assert scene.out.data == b"[rank 9] here\n"
    assert (tmp_path / "attempt_0" / "1" / "stdout.log").exists()


def test_a_spare_that_takes_a_rank_brings_what_it_wrote(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    first, spare = scene.worker(2, 2), scene.worker(4, None)
    scene.write(first, b"a\nlast words")
    scene.write(spare, b"ready\nhal", b"hm\n")
    assert (tmp_path / "attempt_0" / "spare-4" / "stdout.log").read_bytes() == b"ready\nhal"
    os.write(first.out_w, b" of the dead")  # not read yet when the spare is promoted
    spare.take_rank(2, 0)
    scene.write(spare, b"f\nb\n", b"ha\n")
    scene.end(first)
    scene.write(spare, b"c")
    scene.end(spare)
    folder = tmp_path / "attempt_0"
    assert (folder / "2" / "stdout.log").read_bytes() == b"a\nlast words of the dead\nready\nhalf\nb\nc"
    assert (folder / "2" / "stderr.log").read_bytes() == b"hm\nha\n"
    assert not (folder / "spare-4").exists()
    assert scene.out.data == b"[rank 2] a\n[rank 2] last words of the dead\n[rank 2] half\n[rank 2] b\n[rank 2] c\n"
    assert scene.err.data == b"[rank 2] ha\n", "what a spare prints is in its file only"


def test_a_spare_is_promoted_after_its_end_or_into_a_later_attempt(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    dead, alive = scene.worker(4, None), scene.worker(5, None)
    scene.write(dead, b"dead\n")
    scene.write(alive, b"alive\n")
    scene.end(dead)
    dead.take_rank(0, 0)
    alive.take_rank(1, 1)
    scene.end(alive)
    assert (tmp_path / "attempt_0" / "0" / "stdout.log").read_bytes() == b"dead\n"
    assert (tmp_path / "attempt_1" / "1" / "stdout.log").read_bytes() == b"alive\n"
    assert sorted(p.name for p in (tmp_path / "attempt_0").iterdir()) == ["0"]


def test_a_spare_without_a_rank_leaves_only_what_it_wrote(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    silent, loud = scene.worker(4, None), scene.worker(5, None)
    scene.write(loud, err=b"no\n")
    scene.end(silent, loud)
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.log")] == ["attempt_0/spare-5/stderr.log"]


def test_two_incarnations_that_write_at_once_do_not_tear_lines(tmp_path: Path) -> None:
    """A child of the dead rank still holds its pipe while the replacement writes.

    Only a line that was half in the file when the other began gets an end, as there is no other place for it.
    """
    scene = Scene(tmp_path)
    old = scene.worker(0, 0)
    scene.write(old, b"old 1\nold ")
    new = scene.worker(3, 0)
    scene.write(new, b"new 1\nne")
    scene.write(old, b"2\nol")
    scene.write(new, b"w 2\n")
    scene.end(old)
    scene.write(new, b"no lag again")
    assert (tmp_path / "attempt_0" / "0" / "stdout.log").read_bytes() == (
        b"old 1\nold \nnew 1\n2\nnew 2\nol\nno lag again"
    )
    scene.end(new)


def test_a_replacement_begins_a_new_line(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for cell in (0, 3):
        log = scene.worker(cell, 0)
        scene.write(log, b"torn")
        scene.end(log)
    assert (tmp_path / "attempt_0" / "0" / "stdout.log").read_bytes() == b"torn\ntorn"


def test_the_last_words_of_a_dead_rank_come_before_those_of_its_replacement(tmp_path: Path) -> None:
    """Also where its pipe is still open: a half drawn bar would come out after the line of the rank that goes on."""
    scene = Scene(tmp_path)
    old, spare = scene.worker(0, 0), scene.worker(4, None)
    scene.write(old, err=b"epoch 0: 10%\repoch 0: 20%")
    spare.take_rank(0, 0)
    scene.write(spare, err=b"epoch 0: 20%\n")
    scene.end(old)
    scene.write(spare, err=b"epoch 0: 100%\n")
    scene.end(spare)
    assert scene.err.lines == [f"[rank 0] epoch 0: {done}%" for done in (20, 20, 100)]


def test_a_child_that_never_stops_writing_does_not_hold_us(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    log = scene.worker(0, 0)
    stop = threading.Event()

    def flood() -> None:
        os.set_blocking(log.out_w, False)
        while not stop.is_set():
            try:
                os.write(log.out_w, b"y\n" * 2000)
            except BlockingIOError:
                continue
            except BrokenPipeError:
                return

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        wait_for(lambda: scene.loop.run_once(1.0) or scene.out.data, "the flood")
        log.close()
    finally:
        stop.set()
        thread.join(10)
    assert not thread.is_alive()
    os.close(log.out_w)
    os.close(log.err_w)


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (Output(), ["0o", "0e", "1o", "1e"]),
        (Output(redirects=Streams(Std.ALL)), []),
        (Output(redirects=Streams(Std.OUT)), ["0e", "1e"]),
        (Output(redirects=parse("-r", "0:3,1:1")), ["1e"]),
        (Output(redirects=Streams(Std.ALL), tee=Streams(Std.ERR)), ["0e", "1e"]),
        (Output(filter=(1,)), ["1o", "1e"]),
        (Output(filter=(1,), tee=Streams(Std.ALL)), ["1o", "1e"]),
    ],
)
def test_what_the_console_shows(tmp_path: Path, output: Output, shown: list[str]) -> None:
    scene = Scene(tmp_path, output)
    workers = [scene.worker(rank, rank) for rank in (0, 1)]
    for rank, log in enumerate(workers):
        scene.write(log, b"%do\n" % rank, b"%de\n" % rank)
        folder = tmp_path / "attempt_0" / str(rank)
        assert (folder / "stdout.log").read_bytes() == b"%do\n" % rank
        assert (folder / "stderr.log").read_bytes() == b"%de\n" % rank
    scene.end(*workers)
    console = scene.out.lines + scene.err.lines
    assert sorted(re.sub(r"^\[.*\][: ]", "", line) for line in console) == sorted(shown)


def test_tee_has_the_prefix_of_torchrun(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Output(tee=parse("--tee", "0:1")), role="trainer")
    workers = [scene.worker(0, 0), scene.worker(1, 1)]
    for log in workers:
        scene.write(log, b"out\n", b"err\n")
    scene.end(*workers)
    assert scene.out.lines == ["[trainer0]:out", "[rank 1] out"]
    assert scene.err.lines == ["[rank 0] err", "[rank 1] err"]


def test_filtered_files_hold_matching_lines_of_every_rank(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Output(stdout_filters=("apple", "pear,"), redirects=Streams(Std.OUT)))
    workers = [scene.worker(0, 0), scene.worker(1, 1)]
    scene.write(workers[0], b"an apple\nnothing\n3 pear,s\rmore", b"apple\n")
    scene.write(workers[1], b"app")
    scene.write(workers[1], b"le\n")
    scene.end(*workers)
    folder = tmp_path / "attempt_0"
    assert sorted((folder / "filtered_stdout.log").read_text().splitlines()) == [
        "[rank 0] 3 pear,s", "[rank 0] an apple", "[rank 1] apple"
    ]  # fmt: skip
    assert not (folder / "filtered_stderr.log").exists()
    assert scene.out.data == b""


def test_json_lines(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Output(format="json"), role="trainer")
    scene.logs.rank_offset = 4
    log, spare = scene.worker(1, 1, 2), scene.worker(9, None)
    scene.write(log, b'say "hi" \xc3\xa9\n\xff\xfe bytes\n\r10%\r\n', b"bad\n")
    scene.write(spare, b"waiting\n")
    scene.logs.log("rank 2 died\nand more", "warning")
    scene.end(log, spare)
    out = [json.loads(line) for line in scene.out.lines]
    for raw in out:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", raw.pop("time"))
    facts = {"run": "brave-otter", "role": "trainer", "stream": "stdout"}
    mine = {**facts, "rank": 5, "local_rank": 1, "attempt": 2}
    assert out == [
        {**mine, "line": 'say "hi" é'},
        {**mine, "line": "\ufffd\ufffd bytes"},
        {**mine, "line": "10%"},
        {**facts, "rank": None, "local_rank": None, "spare": 9, "attempt": 0, "line": "waiting"},
    ]
    err = [json.loads(line) for line in scene.err.lines]
    assert [(raw["stream"], raw["line"]) for raw in err] == [("stderr", "bad"), ("ftrun", "rank 2 died\nand more")]
    assert err[1]["level"] == "warning" and err[1]["run"] == "brave-otter"
    saved = (tmp_path / "attempt_2" / "1" / "stdout.log").read_bytes()
    assert saved == b'say "hi" \xc3\xa9\n\xff\xfe bytes\n\r10%\r\n', "files keep what was written"


def test_template(tmp_path: Path) -> None:
    text = check_template("--line-prefix", "{{{run}}} {role}/{attempt} {host}:{local_rank}>{rank} ")
    scene = Scene(tmp_path, Output(template=text, tee=Streams(Std.ALL)), role="r")
    scene.logs.rank_offset = 2
    log = scene.worker(1, 1, 3)
    scene.write(log, b"x\n")
    scene.end(log)
    host = os.uname().nodename
    assert scene.out.lines == [f"{{brave-otter}} r/3 {host}:1>3 x"]


@pytest.mark.parametrize("text", ["{name}", "{", "{rank:03d}", "{rank.real}", "{0}", "{}", "{rank!z}", "}"])
def test_bad_template(text: str) -> None:
    with pytest.raises(UsageError, match=r"--line-prefix.*\{local_rank\}"):
        check_template("--line-prefix", text)


def test_the_template_of_torchrun() -> None:
    ours = torchrun_template("[${role_name}-$rank]{x} ${other} $$1 $local_rank:")
    assert check_template("x", ours).format(role="r", rank="3", local_rank="1") == "[r-3]{x} ${other} $1 1:"


def test_a_full_disk_is_said_once_and_the_console_goes_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for rank in (0, 1):
        (tmp_path / "attempt_0" / str(rank)).mkdir(parents=True)
        (tmp_path / "attempt_0" / str(rank) / "stdout.log").symlink_to(FULL)
    workers = [scene.worker(0, 0), scene.worker(1, 1)]
    for log in workers:
        scene.write(log, b"a\n")
        scene.write(log, b"b\n", b"saved\n")
    spare = scene.worker(5, None)
    scene.write(spare, b"from the spare\n")
    spare.take_rank(0, 0)
    scene.end(*workers, spare)
    assert len(scene.out.lines) == 4
    said = [line for line in scene.err.lines if line.startswith("ftrun: ")]
    assert len(said) == 1 and os.strerror(errno.ENOSPC) in said[0]
    assert (tmp_path / "attempt_0" / "0" / "stderr.log").read_bytes() == b"saved\n"
    kept = tmp_path / "attempt_0" / "spare-5" / "stdout.log"
    assert kept.read_bytes() == b"from the spare\n", "what could not be moved stays"


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "attempt_0").write_text("in the way")
    scene = Scene(tmp_path)
    log = scene.worker(0, 0)
    scene.write(log, b"shown\n")
    scene.end(log)
    assert scene.out.lines == ["[rank 0] shown"]
    assert [line for line in scene.err.lines if "attempt_0/0/stdout.log" in line and "not saved" in line]


def test_nothing_of_an_earlier_run_is_overwritten(tmp_path: Path) -> None:
    first = claim_folder(tmp_path / "logs", "mine")
    second, third = (claim_folder(tmp_path / "logs", "mine") for _ in range(2))
    assert first == tmp_path / "logs" / "mine"
    assert len({first, second, third}) == 3
    assert all(re.fullmatch(r"mine_[0-9a-f]{8}", p.name) and p.is_dir() for p in (second, third))
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        claim_folder(tmp_path / "file", "mine")


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Output(stdout_filters=("x",), stderr_filters=("x",)))
    gc.collect()  # what other tests left is not counted
    before = len(os.listdir("/proc/self/fd"))
    workers = [scene.worker(0, 0), scene.worker(1, None), scene.worker(2, None)]
    for log in workers:
        assert fcntl.fcntl(log.out_w, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        scene.write(log, b"x\n" * 10)
    workers[1].take_rank(0, 0)
    scene.end(*workers)
    assert len(os.listdir("/proc/self/fd")) == before
