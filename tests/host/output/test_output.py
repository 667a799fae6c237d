"""Real runs and what becomes of their output: layout, redirects, tee, filters, JSON, promoted spares, stdin, volume."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ftrun.cli.options import BY_NAME
from ftrun.doctor.software import version_of
from tests.conftest import DEADLINE, Ftrun, wait_for

TORCH = version_of(torch.__version__)[:2]

# a run by its settings: what the command line makes of its options is tested elsewhere
DRIVER = """
import sys
sys.path.pop(0)
from ftrun.host.run.launcher import launch
from ftrun.host.base.settings import Output, Settings
from ftrun.host.base.streams import Std, Streams, parse
sys.exit(launch(Settings({settings})))
"""

PRINTS = """
import os, sys
rank = os.environ["RANK"]
print("out apple", rank)
print("err pear", rank, file=sys.stderr)
"""

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(ftrun: Ftrun) -> Launch:
    """launch(script, settings as Python text, input=...): a whole run, its output captured."""

    def run(script: Path, settings: str, input: str = "", **env: str) -> subprocess.CompletedProcess[str]:  # noqa: A002
        text = f"argv=({os.fspath(script)!r},), log_dir='logs', {settings}"
        return subprocess.run(
            [sys.executable, "-c", DRIVER.format(settings=text)],
            cwd=ftrun.base,
            env={**ftrun.env, **env},
            input=input,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )

    return run


def files(folder: Path) -> dict[str, str]:
    """Every log file of a run but our own: path in the folder -> content."""
    found = {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}
    return {name: text for name, text in found.items() if name not in ("journal.jsonl", "services.log")}


def said(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("ftrun: ")]


def test_layout_and_error_file(ftrun: Ftrun, launch: Launch) -> None:
    script = ftrun.script(
        PRINTS + "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('mine')\nsys.exit(int(rank))\n"
    )
    for attempt in (1, 2):
        result = launch(script, "run_id='twice', nproc=2, spares=0")
        assert result.returncode == 1, result.stderr
        assert len(list((ftrun.base / "logs").iterdir())) == attempt
    first = ftrun.base / "logs" / "twice"
    second = next(p for p in first.parent.iterdir() if p != first)
    assert re.fullmatch("twice_[0-9a-f]{8}", second.name)
    assert f"logs in ./logs/{second.name}\n" in result.stderr
    for folder in (first, second):
        assert (folder / "journal.jsonl").exists()
        found = files(folder)
        assert found["attempt_0/1/error.json"] == "mine"
        assert found["attempt_0/1/stdout.log"] == "out apple 1\n"
        assert found["attempt_0/1/stderr.log"] == "err pear 1\n"


def test_each_attempt_has_its_files(ftrun: Ftrun, launch: Launch) -> None:
    script = ftrun.script(
        "import os, sys, time\nn = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nprint('attempt', n)\n"
        "assert f'/attempt_{n}/' in os.environ['TORCHELASTIC_ERROR_FILE']\n"
        "if n == 0 and os.environ['RANK'] == '0': sys.exit(3)\nif n == 0: time.sleep(60)\n"
    )
    result = launch(script, "run_id='r', nproc=2, spares=0, max_restarts=1")
    assert result.returncode == 0, result.stderr
    found = files(ftrun.base / "logs" / "r")
    assert found["attempt_0/0/stdout.log"] == "attempt 0\n"
    assert found["attempt_1/0/stdout.log"] == found["attempt_1/1/stdout.log"] == "attempt 1\n"


def test_redirect_tee_filters_and_ranks(ftrun: Ftrun, launch: Launch) -> None:
    result = launch(
        ftrun.script(PRINTS),
        "run_id='r', nproc=3, spares=0, role='train', output=Output(redirects=parse('-r', '0:3,1:2'), "
        "tee=parse('-t', '1:1'), filter=(0, 1), stdout_filters=('apple',), stderr_filters=('pear 1', 'pear 2'))",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[train1]:out apple 1"]
    assert said(result.stderr) == []
    found = files(ftrun.base / "logs" / "r")
    for rank in "012":
        assert found[f"attempt_0/{rank}/stdout.log"] == f"out apple {rank}\n"
        assert found[f"attempt_0/{rank}/stderr.log"] == f"err pear {rank}\n"
    assert sorted(found["attempt_0/filtered_stdout.log"].splitlines()) == [
        "[rank 0] out apple 0",
        "[rank 2] out apple 2",
        "[train1]:out apple 1",
    ]
    assert sorted(found["attempt_0/filtered_stderr.log"].splitlines()) == [
        "[rank 1] err pear 1",
        "[rank 2] err pear 2",
    ]


def test_same_files_and_lines_as_torchrun(ftrun: Ftrun, launch: Launch) -> None:
    """Only where torchrun writes a file: without its options it keeps none."""
    script = ftrun.script(PRINTS)
    options = ["--log-dir", "theirs", "--nproc-per-node", "3", "--tee", "0:3,1:3", "--redirects", "2:3"]
    options += ["--local-ranks-filter", "0,2", "--duplicate-stdout-filters", "apple 0", "--role", "train"]
    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, os.fspath(script)],
        cwd=ftrun.base, env=ftrun.env, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert theirs.returncode == 0, theirs.stderr
    ours = launch(
        script,
        "run_id='ours', nproc=3, spares=0, role='train', output=Output(tee=parse('t', '0:3,1:3'), "
        "redirects=parse('r', '2:3'), filter=(0, 2), stdout_filters=('apple 0',))",
    )
    assert ours.returncode == 0, ours.stderr
    assert sorted(ours.stdout.splitlines()) == sorted(theirs.stdout.splitlines()) == ["[train0]:out apple 0"]
    assert said(ours.stderr) == [line for line in theirs.stderr.splitlines() if line.startswith("[")]
    (folder,) = (ftrun.base / "theirs").iterdir()
    assert files(ftrun.base / "logs" / "ours") == files(folder)


def test_template_of_torchrun_is_heard(ftrun: Ftrun) -> None:
    theirs = "<${role_name}/${rank}>"
    result = ftrun.call("--spares=0", ftrun.script(PRINTS), TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=theirs)
    assert result.stdout == "<default/0>out apple 0\n"
    line = ("--log-line-prefix-template", "$${rank} ${hostname} ", "--tee=3")
    told = ftrun.call("--spares=0", *line, ftrun.script(PRINTS), TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=theirs)
    assert told.stdout == f"${{rank}} {os.uname().nodename} out apple 0\n"


@pytest.mark.skipif(BY_NAME["log-line-prefix-template"].since > TORCH, reason="a torchrun that does not have it")
def test_template_as_torchrun_shows_it(ftrun: Ftrun) -> None:
    line = (
        "--nproc-per-node=2",
        "--tee=3",
        "--role=r",
        "--log-line-prefix-template=${hostname}<$role_name${rank}/$local_rank {x} $$> ",
    )
    script = ftrun.script(PRINTS)
    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *line, os.fspath(script)],
        cwd=ftrun.base, env=ftrun.env, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert theirs.returncode == 0, theirs.stderr
    ours = ftrun.call("--spares=0", *line, script)
    assert sorted(ours.stdout.splitlines()) == sorted(theirs.stdout.splitlines()) != []


def test_json(ftrun: Ftrun, launch: Launch) -> None:
    script = ftrun.script(PRINTS + "if rank == '1': sys.exit(3)\nimport time; time.sleep(60)\n")
    result = launch(script, "run_id='r', nproc=2, spares=0, output=Output(format='json')")
    assert result.returncode == 1
    out = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted((raw["rank"], raw["stream"], raw["line"]) for raw in out) == [
        (0, "stdout", "out apple 0"),
        (1, "stdout", "out apple 1"),
    ]
    err = [json.loads(line) for line in result.stderr.splitlines()]
    assert {raw["line"] for raw in err if raw["stream"] == "stderr"} == {"err pear 0", "err pear 1"}
    ours = [raw for raw in err if raw["stream"] == "ftrun"]
    assert ours[0]["line"].startswith("run r, 2 workers") and ours[0]["level"] == "info"
    assert [raw["level"] for raw in ours if "rank 1 failed: exit 3" in raw["line"]] == ["error"]
    assert {raw["run"] for raw in out + err} == {"r"}


@pytest.mark.parametrize("spares", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_replacement_goes_on_in_the_ranks_files(ftrun: Ftrun, spares: int) -> None:
    go = ftrun.base / "go"
    script = ftrun.script(
        "import os, signal, time\nimport torch, torch.distributed as dist, ftrun\n"
        "cell = os.environ['FTRUN_CELL']\nprint('built', cell)\n"
        "model = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "dist.init_process_group('ftrun')\n"
        "ddp = torch.nn.parallel.DistributedDataParallel(model)\n"
        "job = ftrun.protect(model=ddp, optimizer=opt)\n"
        "print('joined', cell, os.environ['TORCHELASTIC_ERROR_FILE'])\n"
        "for step in job.steps(6):\n"
        "    with step:\n"
        "        if step.index == 3 and cell == '1':\n"
        f"            while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "            print('half a line', end='')\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        opt.zero_grad()\n"
        "        ddp(torch.ones(1, 2)).sum().backward()\n"
        "        opt.step()\n"
        "print('done', cell)\n"
    )
    run = ftrun.start("--nproc-per-node", 2, "--spares", spares, "--max-replacements", 1, "--run-id", "r", script)
    folder = ftrun.base / "logs" / "r" / "attempt_0"
    spare = folder / "spare-2" / "stdout.log"
    if spares:
        wait_for(lambda: spare.exists() and spare.read_text() == "built 2\n", "the spare's own file")
    go.touch()
    assert run.wait() == 0, run.stderr
    error = folder / "1" / "error.json"
    assert (folder / "1" / "stdout.log").read_text() == (
        f"built 1\njoined 1 {error}\nhalf a line\nbuilt 2\njoined 2 {error}\ndone 2\n"
    )
    assert not spare.parent.exists()
    assert run.stdout.count("built 2") == (0 if spares else 1) and "[rank 1] done 2" in run.stdout


STDIN = "import os, sys\nprint(os.environ['RANK'], 'read', repr(sys.stdin.read()))\n"


@pytest.mark.parametrize("mode", ["exec_workers=False", "exec_workers=True"])
def test_stdin_is_inherited(ftrun: Ftrun, launch: Launch, mode: str) -> None:
    result = launch(ftrun.script(STDIN), f"nproc=1, spares=0, {mode}", input="hello\n")
    assert result.stdout == "[rank 0] 0 read 'hello\\n'\n", result.stderr
    result = launch(ftrun.script(STDIN), f"nproc=3, spares=0, {mode}", input="hello\n")
    assert result.stdout.count("'hello\\n'") == 1 and result.stdout.count("''") == 2, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exec_workers=False", "exec_workers=True"])
def test_a_spare_reads_stdin_once_it_has_a_rank(ftrun: Ftrun, mode: str) -> None:
    script = ftrun.script(
        "import os, signal, sys\nimport torch, torch.distributed as dist, ftrun\n"
        "cell = os.environ['FTRUN_CELL']\n"
        "if cell == '2': print('as a spare', repr(sys.stdin.readline()))\n"
        "model = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "dist.init_process_group('ftrun')\n"
        "ddp = torch.nn.parallel.DistributedDataParallel(model)\n"
        "job = ftrun.protect(model=ddp, optimizer=opt)\n"
        "for step in job.steps(4):\n"
        "    with step:\n"
        "        if step.index == 2 and cell == '1':\n"
        "            print('first', repr(sys.stdin.readline()))\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        opt.zero_grad()\n"
        "        ddp(torch.ones(1, 2)).sum().backward()\n"
        "        opt.step()\n"
        "if cell == '2': print('second', repr(sys.stdin.readline()))\n"
    )
    text = f"argv=({os.fspath(script)!r},), log_dir='logs', run_id='r', nproc=2, spares=1, {mode}"
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(settings=text)],
        cwd=ftrun.base, env=ftrun.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        seen = []
        spare = ftrun.base / "logs" / "r" / "attempt_0" / "spare-2" / "stdout.log"
        wait_for(lambda: spare.exists() and spare.read_text() == "as a spare ''\n", "what the spare read")
        process.stdin.write("one\n")
        process.stdin.flush()
        lines = iter(process.stdout.readline, "")
        for line in lines:
            seen.append(line)
            if "first" in line:
                process.stdin.write("two\n")
                process.stdin.close()
        errors = process.stderr.read()
        assert process.wait(DEADLINE) == 0, errors
    assert seen == ["[rank 1] first 'one\\n'\n", "[rank 1] second 'two\\n'\n"], errors


def test_lines_come_and_go_at_once(ftrun: Ftrun) -> None:
    script = ftrun.script("import sys\nfor line in sys.stdin: print('heard', line, end='')\n")
    text = f"argv=({os.fspath(script)!r},), log_dir='logs', spares=0, output=Output(tee=Streams(Std.ALL))"
    times = []
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(settings=text)],
        cwd=ftrun.base, env=ftrun.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        for number in range(50):
            began = time.monotonic()
            process.stdin.write(f"{number}\n")
            assert process.stdout.readline() == f"[default0]:heard {number}\n"
            times.append(time.monotonic() - began)
        process.stdin.close()
        assert process.wait(DEADLINE) == 0
    assert sorted(times)[25] < 0.05, "torchrun looks every 0.1 s"


def test_a_debugger_can_be_used_on_a_terminal(ftrun: Ftrun) -> None:
    script = ftrun.script("import sys\nvalue = 41\nassert sys.stdin.isatty()\nbreakpoint()\nprint('went on', value)\n")
    text = f"argv=({os.fspath(script)!r},), log_dir='logs', spares=0"
    ours, terminal = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(settings=text)],
        cwd=ftrun.base, env=ftrun.env, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        os.close(terminal)
        os.write(ours, b"value += 1\nc\n")
        out, err = process.communicate(timeout=DEADLINE)
    os.close(ours)
    assert process.returncode == 0, err
    assert "went on 42" in out


@pytest.mark.parametrize("closed", ["0<&-", "0<&- 1>&-", "1>&- 2>&-"])
def test_closed_descriptors_at_the_start(ftrun: Ftrun, closed: str) -> None:
    """No file of ours may get the number of a descriptor that workers or messages are written to."""
    script = ftrun.script(STDIN + "print('err', file=sys.stderr)\n")
    text = f"argv=({os.fspath(script)!r},), log_dir='logs', run_id='r', nproc=2, spares=1"
    driver = ftrun.script(DRIVER.format(settings=text).replace("sys.path.pop(0)", ""), "driver.py")
    result = subprocess.run(
        ["sh", "-c", f'exec "$0" "$1" {closed}', sys.executable, os.fspath(driver)],
        cwd=ftrun.base,
        env=ftrun.env,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert result.returncode == 0, result.stderr
    found = files(ftrun.base / "logs" / "r")
    for rank in "01":
        assert found[f"attempt_0/{rank}/stdout.log"] == f"{rank} read ''\n"
        assert found[f"attempt_0/{rank}/stderr.log"] == "err\n"


def test_a_folder_that_cannot_be_used_is_said(ftrun: Ftrun, launch: Launch) -> None:
    (ftrun.base / "logs").write_text("a file")
    result = launch(ftrun.script(PRINTS), "spares=0")
    assert result.returncode == 0
    assert "logs cannot be kept in logs (" in result.stderr
    assert result.stdout == "[rank 0] out apple 0\n"


@pytest.mark.parametrize("form", ["text", "json"])
def test_many_lines_are_never_torn(ftrun: Ftrun, launch: Launch, form: str) -> None:
    count, every = 10_000, 5000
    script = ftrun.script(
        "import os, sys\nrank = os.environ['RANK']\n"
        f"for i in range({count}):\n"
        "    print(rank, i, rank * (i % 300))\n"
        f"    if i % {every} == 0: sys.stdout.write('\\r%d%%\\r' % i); print(rank * 1_000_000)\n"
    )
    result = launch(script, f"run_id='r', nproc=4, spares=0, output=Output(format={form!r})")
    assert result.returncode == 0, result.stderr
    seen: dict[str, list[str]] = {rank: [] for rank in "0123"}
    for line in re.split("[\r\n]", result.stdout):
        if form == "json" and line:
            raw = json.loads(line)
            rank, text = str(raw["rank"]), raw["line"]
        elif line:
            rank, text = line[6], line.removeprefix(f"[rank {line[6]}] ")
        if line and text and not text.endswith("%") and not re.fullmatch(r"(\d)\1{999999}", text):
            seen[rank].append(text)
    for rank, lines in seen.items():
        assert lines == [f"{rank} {i} {rank * (i % 300)}" for i in range(count)]
        saved = (ftrun.base / "logs" / "r" / "attempt_0" / rank / "stdout.log").read_bytes()
        assert saved.count(b"\n") == count + count // every and saved.count(b"\r") == 2 * (count // every)


def test_the_guardian_keeps_the_journal_where_the_logs_are(ftrun: Ftrun) -> None:
    (ftrun.base / "logs" / "r").mkdir(parents=True)
    script = ftrun.script("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    run = ftrun.start("--spares", 0, "--run-id", "r", script)
    run.wait_output("up")
    folder = Path(json.loads(ftrun.call("status", "--once", "--json").stdout)["log_dir"])
    assert folder.parent == ftrun.base / "logs" and folder.name.startswith("r_")
    run.signal(signal.SIGKILL)
    run.wait()
    wait_for(lambda: (folder / "journal.jsonl").exists(), "the journal")
