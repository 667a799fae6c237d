"""The default log folder: not in version control, nothing removed that is new, little or of others; ended runs by name."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftrun.core import ended
from ftrun.host.output import old_logs
from tests.conftest import Ftrun

DAY = 86400.0


def journal_of(run: str) -> str:
    return json.dumps({"t": 1.0, "wall": 1.0, "run": run, "config": {}}) + "\n"


def run_of(base: Path, name: str, days: float, run: str | None = None, size: int = 1000) -> Path:
    """The logs of a run that ended `days` ago, of `size` bytes; `run`: its name, if that is not the folder's."""
    folder = base / name
    (folder / "attempt_0" / "0").mkdir(parents=True)
    (folder / "attempt_0" / "spare-3").mkdir()
    for file in ("services.log", "attempt_0/0/error.json", "attempt_0/filtered_stderr.log"):
        (folder / file).write_text("x\n")
    (folder / "attempt_0" / "0" / "stdout.log").write_bytes(b"x" * size)
    (folder / "journal.jsonl").write_text(journal_of(run or name))
    os.utime(folder / "journal.jsonl", (time.time() - days * DAY,) * 2)
    return folder


def test_only_old_logs_that_are_surely_ours_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    base = tmp_path / "ftrun-logs"
    for i in range(60):
        run_of(base, f"new-{i}", i / 2.1)
    old = [run_of(base, f"old-{i}", 40 - i) for i in range(3)] + [run_of(base, "old_0123abcd", 36, "old")]
    for name in ("my-best", "new-0-copy", "new-0_0123abcde"):
        run_of(base, name, 300, "new-0")
    kept = {name: run_of(base, name, 200) for name in ("live", "mine", "linked", "strange", "elsewhere")}
    (kept["live"] / "journal.jsonl").unlink()
    (kept["mine"] / "attempt_0" / "0" / "model.pt").touch()
    (kept["linked"] / "attempt_0" / "0" / "stderr.log").symlink_to(tmp_path / "other")
    (kept["strange"] / "journal.jsonl").write_text("Dear diary\n")
    kept["elsewhere"].rename(tmp_path / "elsewhere")
    (base / "elsewhere").symlink_to(tmp_path / "elsewhere")
    (base / "notes.txt").touch()
    before = {path.name for path in base.iterdir()} | {".gitignore"}
    size = sum(path.lstat().st_size for path in base.rglob("*") if path.is_symlink() or path.is_file())
    for most in (math.inf, size + 100.0):  # nothing is too much
        assert old_logs.tidy(base, most) == []
    assert old_logs.tidy(base, size - 500.0) == ["old-0"], "no more than it takes, the oldest first"
    assert old_logs.tidy(base, 0.0) == ["old-1", "old-2", "old_0123abcd"]
    assert {path.name for path in base.iterdir()} == before - {path.name for path in old}
    assert (tmp_path / "elsewhere" / "journal.jsonl").exists()
    (base / ".gitignore").write_text("mine\n")
    assert old_logs.tidy(base, 0.0) == []
    assert (base / ".gitignore").read_text() == "mine\n"


def test_logs_are_kept_and_what_went_is_known_by_name(ftrun: Ftrun) -> None:
    script = ftrun.script("print('out')\n")
    base = ftrun.base / "ftrun-logs"
    for i in range(45):
        run_of(base, f"run-{i:02}", i, size=10_000)
    usual = ftrun.start("--spares", 0, script, logs=False)
    assert usual.wait() == 0 and "removed" not in usual.stderr
    assert len([*base.glob("run-*")]) == 45
    run = ftrun.start("--spares", 0, "--keep-logs", 0.0004, script, logs=False)
    assert run.wait() == 0
    gone = [f"run-{44 - i}" for i in range(45) if not (base / f"run-{44 - i:02}").exists()]
    assert 0 < len(gone) < 14, gone
    said = "that ended more than 30 days ago, since ftrun-logs held more than 0.0004 GB (--keep-logs GB|all): run-44"
    assert f"ftrun: removed the logs of {len(gone)} runs {said}" in run.stderr
    for command in ("timeline", "events", "status"):
        asked = ftrun.call(command, "run-44")
        assert asked.returncode == 4 and "run run-44 ended on " in asked.stderr and "ftrun removed its logs on " in asked.stderr
        assert "ftrun explain F103" in asked.stderr
    name = next(line for line in run.stderr.splitlines() if "ftrun: run " in line).split()[2].rstrip(",")
    shutil.rmtree(base / name)
    assert "its logs are not there any more" in ftrun.call("timeline", name).stderr
    assert f"no run named {name}x" in ftrun.call("timeline", f"{name}x").stderr


def test_a_run_is_found_by_its_name_from_any_folder(ftrun: Ftrun) -> None:
    """Everything that a real run leaves is known to be ours; a folder that was named is left alone."""
    script = ftrun.script("import sys\nprint('out')\nsys.exit(3)\n")
    base = ftrun.base / "ftrun-logs"
    for folder in (base, ftrun.base / "named"):
        run_of(folder, "old", 1000)
    options = ("--spares", 0, "--keep-logs", 0, "--duplicate-stdout-filters", "o", "--run-id")
    failed = ftrun.start(*options, "brave-otter", script, logs=False)
    assert failed.wait() == 1 and "ftrun: removed the logs of 1 run that ended" in failed.stderr
    assert (base / ".gitignore").exists() and not (base / "old").exists()
    assert old_logs._ended(base / "brave-otter") and old_logs._is_ours(base / "brave-otter")
    assert ftrun.start(*options, "other", "--log-dir", "named", script, logs=False).wait() == 1
    assert (ftrun.base / "named" / "old").exists() and not (ftrun.base / "named" / ".gitignore").exists()
    elsewhere = ftrun.base / "elsewhere"
    elsewhere.mkdir()
    rows = json.loads(ftrun.call("runs", "--all", "--json", folder=elsewhere).stdout)
    assert [(row["run"], row["exit_code"], row["logs"]) for row in rows] == [
        ("other", 1, str(ftrun.base / "named" / "other")),
        ("brave-otter", 1, str(base / "brave-otter")),
    ]
    listed = ftrun.call("runs", "--all", folder=elsewhere).stdout
    assert f"brave-otter  exit code {1}  " in listed and str(base / "brave-otter") in listed
    assert ftrun.call("runs", folder=elsewhere).stdout == ""
    told = ftrun.call("events", "brave-otter", folder=elsewhere)
    assert told.returncode == 0 and "exit 3" in told.stdout, told
    assert "run other ended" in ftrun.call("status", "other", folder=elsewhere).stdout


def test_a_damaged_list_of_ended_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = tmp_path / "logs" / "one"
    logs.mkdir(parents=True)
    (logs / "journal.jsonl").write_text(journal_of("one"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert ended.ended_runs() == [] and ended.can_be_named()
    ended.add({"started": 5.0, "logs": str(logs), "argv": ["train.py"], "cwd": "/"}, 0)
    path = tmp_path / "state" / "ftrun" / "ended.jsonl"
    path.write_bytes(b'{"run": 3}\nnot json\n\xff\n[]\n' + path.read_bytes() * 2 + b'{"torn')
    (run,) = ended.ended_runs()
    assert (run.name, run.began, run.code, run.argv) == ("one", 5.0, 0, ("train.py",))
    (logs / "journal.jsonl").unlink()
    assert ended.ended_runs() == []
    (logs / "journal.jsonl").write_text(journal_of("one"))
    path.write_bytes(b"\xff" * 300_000 + b"\n" + b"torn")
    for code in (7, 8):
        ended.add({"started": 5.0, "logs": str(logs)}, code)
    assert ended.ended_runs()[0].code == 8 and path.read_bytes().count(b"\n") == 4
    path.write_bytes(b"\xff\n" * 200_000)
    ended.add({"started": 5.0, "logs": str(logs)}, 9)
    assert ended.ended_runs()[0].code == 9 and path.read_bytes().count(b"\n") == 200


def test_a_list_of_ended_runs_that_cannot_be_kept(tmp_path: Path) -> None:
    """A home that may not be searched, and logs that may not, cost the name and nothing else."""
    home, logs = tmp_path / "home", tmp_path / "logs"
    home.mkdir(mode=0)
    logs.mkdir()
    (logs / "journal.jsonl").write_text(journal_of("one"))
    script = f"""import os
from ftrun.core import ended
raw = {{"started": 5.0, "logs": {str(logs)!r}}}
if os.getuid() == 0:
    os.chmod({str(tmp_path)!r}, 0o777), os.chmod({str(tmp_path.parent)!r}, 0o755), os.chmod({str(tmp_path.parent.parent)!r}, 0o755)
    os.setresuid(65534, 65534, 65534)
ended.add(raw, 0)
assert not ended.can_be_named() and ended.ended_runs() == []
"""
    env = {**os.environ, "HOME": str(home)}
    env.pop("XDG_STATE_HOME", None)
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    home.chmod(0o700)
    assert done.returncode == 0, done.stderr
