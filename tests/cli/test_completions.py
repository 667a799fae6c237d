"""The files in completions/ are what the app is now, and real shells complete with them."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from ftrun.cli import completion
from ftrun.core import paths
from tests.conftest import Ftrun
from tests.e2e import harness

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "completions"


def need(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell} on this machine")
    return found


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_files_are_what_the_app_makes(shell: str) -> None:
    path = FILES / completion.SHELLS[shell]
    assert path.read_text() == completion.made_for(shell), f"ftrun completions {shell} > {path.relative_to(ROOT)}"


def test_every_option_of_every_command_is_there() -> None:
    bash, zsh, fish = completion.bash(), completion.zsh(), completion.fish()
    for command in completion.commands():
        for option in command.options:
            name = option.shown
            assert name in bash and f"'{name}" in zsh and f" -l {name[2:]} " in fish, (command.name, name)


BASH = """
source {file}
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_ftrun 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def in_bash(folder: Path, words: str, env: dict[str, str] | None = None) -> list[str]:
    """What bash offers for the last of `words` (as bash splits a line: an empty one is '')."""
    program = BASH.format(file=FILES / "ftrun.bash", words=words)
    done = subprocess.run(
        [need("bash"), "--norc", "-c", program], cwd=folder, env=env, capture_output=True, text=True, timeout=20
    )
    assert not done.stderr, done.stderr
    return done.stdout.split()


def in_fish(folder: Path, line: str, env: dict[str, str] | None = None) -> list[str]:
    program = f"source {FILES / 'ftrun.fish'}; complete -C '{line}'"
    environment = {**(env or os.environ), "HOME": str(folder)}
    done = subprocess.run(
        [need("fish"), "--no-config", "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
    )
    return [row.partition("\t")[0] for row in done.stdout.splitlines()]


def in_zsh(folder: Path, line: str, **env: str) -> str:
    """What a terminal shows after `line` and two Tab keys."""
    shell = need("zsh")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(env, TERM="dumb", HOME=str(folder), ZDOTDIR=str(folder), PS1="READY> ", COLUMNS="200")
        os.execv(shell, [shell, "-f", "-i"])
    shown = ""
    try:
        for sent in (
            "unsetopt zle_bracketed_paste; autoload -Uz compinit; compinit -u -D; LISTMAX=1000; PS1='GO> '\n",
            f"source {FILES / '_ftrun'}; echo sour''ced\n",
        ):
            os.write(terminal, sent.encode())
        shown = _read_until(terminal, "sourced")
        os.write(terminal, f"{line}\t\t".encode())
        return _read_until(terminal, "", quiet=1.0)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)
        assert "command not found" not in shown, shown


def _read_until(terminal: int, text: str, quiet: float = 0.0, seconds: float = 20.0) -> str:
    """Output up to `text`; or, if that is empty, until something came and then nothing for `quiet` seconds."""
    deadline = time.monotonic() + seconds
    got = ""
    while time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], quiet or 0.2)
        if ready:
            got += os.read(terminal, 65536).decode(errors="replace")
        elif not text and got:
            return got
        if text and text in got:
            return got
    pytest.fail(f"zsh did not show {text!r}: {got}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a script, a plan and a folder."""
    (tmp_path / "train.py").touch()
    (tmp_path / "plan.toml").touch()
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("ftrun stat", ["status"]),
        ("ftrun --spar", ["--spare-nodes", "--spares"]),
        ("ftrun run --hang-t", ["--hang-timeout"]),
        ("ftrun status --js", ["--json"]),
        ("ftrun --worker-start ''", ["forkserver", "exec"]),
        ("ftrun --worker-start = f", ["forkserver"]),
        ("ftrun --log_format j", ["json"]),
        ("ftrun --spares 2 trai", ["train.py"]),
        ("ftrun --fault-plan p", ["plan.toml"]),
        ("ftrun --log-dir l", ["logs"]),
        ("ftrun verify --kill", ["--kill-every-phase"]),
        ("ftrun verify --faults p", ["plan.toml"]),
        ("ftrun completions z", ["zsh"]),
        ("ftrun train.py --spar", []),  # an option of the script, not ours
        ("ftrun train.py plan", ["plan.toml"]),
        ("ftrun status status --on", ["--once"]),
        ("ftrun inject-fault fre", ["freeze"]),
        ("ftrun inject-fault kill --at back", ["backward"]),
        ("ftrun timeline --format s", ["svg"]),
    ],
)
def test_bash(folder: Path, words: str, wanted: list[str]) -> None:
    assert sorted(in_bash(folder, words)) == sorted(wanted)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("ftrun stat", ["status"]),
        ("ftrun --spar", ["--spare-nodes", "--spares"]),
        ("ftrun status --js", ["--json"]),
        ("ftrun --worker-start f", ["forkserver"]),
        ("ftrun train.py --spar", []),
        ("ftrun --spares 2 --worker-start=exec --max-repl", ["--max-replacements"]),
        ("ftrun verify --kill", ["--kill-every-phase"]),
        ("ftrun inject-fault fre", ["freeze"]),
    ],
)
def test_fish(folder: Path, line: str, wanted: list[str]) -> None:
    assert in_fish(folder, line) == wanted


def test_zsh(folder: Path) -> None:
    assert "forkserver" in in_zsh(folder, "ftrun --worker-start fo")
    assert "freeze" in in_zsh(folder, "ftrun inject-fault fre")
    assert "--kill-every-phase" in in_zsh(folder, "ftrun verify --kill-ev")
    assert "ftrun status" in in_zsh(folder, "ftrun stat").replace("\x07", "")


def test_names_of_live_runs(ftrun: Ftrun, folder: Path) -> None:
    """`ftrun status <Tab>` offers the runs that live."""
    script = ftrun.script("import time; print('up', flush=True); time.sleep(600)")
    run = ftrun.start("--run-id", "fair-otter", "--spares", "0", script)
    run.wait_output("up")
    env = {**ftrun.env, "PATH": f"{Path(harness.tool('ftrun')).parent}:{os.environ['PATH']}"}
    assert in_bash(folder, "ftrun status ''", env) == ["fair-otter"]
    assert in_bash(folder, "ftrun stop f", env) == ["fair-otter"]
    if shutil.which("fish"):
        assert "fair-otter" in in_fish(folder, "ftrun stop fair", env)
    if shutil.which("zsh"):
        assert "stop fair-otter" in in_zsh(folder, "ftrun stop fa", FTRUN_RUNS_ROOT=str(ftrun.runs_root)).replace(
            "\x07", ""
        )
    run.signal(15)
    run.wait()
    assert in_bash(folder, "ftrun status ''", env) == []


def test_names_of_runs_are_looked_for_where_ftrun_keeps_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(paths.ENV_RUNS_ROOT, raising=False)
    for runtime in (str(folder), ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        name = f"kept-{os.getpid()}"
        kept = paths.runs_root() / name
        kept.mkdir()
        try:
            (kept / paths.RUN_FILE).write_text(json.dumps({"run_id": name, "pid": os.getpid(), "start": 0}))
            assert name in in_bash(folder, "ftrun status k")
            (kept / paths.RUN_FILE).write_text(json.dumps({"run_id": name, "pid": 2**30, "start": 0}))
            assert name not in in_bash(folder, "ftrun status k")
        finally:
            shutil.rmtree(kept)
