"""The default log folder: not in version control, the newest runs kept, nothing of others touched; ended runs by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftrun.core import ended
from ftrun.host.output import old_logs
from tests.conftest import Ftrun

STEPPED = '{"t": 2.0, "event": {"kind": "Stepped", "t": 2.0, "worker": 0}}\n'


def journal_of(run: str) -> str:
    return json.dumps({"t": 1.0, "wall": 1.0, "run": run, "config": {}}) + "\n"


def run_of(base: Path, name: str, age: float, run: str | None = None, stepped: bool = True) -> Path:
    """The logs of a run that ended `age` seconds ago; `run`: its name, if that is not the folder's."""
    folder = base / name
    (folder / "attempt_0" / "0").mkdir(parents=True)
    (folder / "attempt_0" / "spare-3").mkdir()
    for file in ("services.log", "attempt_0/0/stdout.log", "attempt_0/0/error.json", "attempt_0/filtered_stderr.log"):
        (folder / file).write_text("x\n")
    (folder / "journal.jsonl").write_text(journal_of(run or name) + STEPPED * stepped)
    os.utime(folder / "journal.jsonl", (1e9 - age, 1e9 - age))
    return folder


def test_only_old_logs_that_are_surely_ours_go(tmp_path: Path) -> None:
    base = tmp_path / "ftrun-logs"
    new = [run_of(base, f"new-{i}", i) for i in range(old_logs.KEPT)]
    old = [run_of(base, f"old-{i}", 1000 + i) for i in range(2)] + [run_of(base, "old_0123abcd", 1003, "old")]
    failed = [run_of(base, f"failed-{i}", 0.5, stepped=False) for i in range(old_logs.KEPT)]
    old.append(run_of(base, "failed", 1, stepped=False))
    copies = [run_of(base, f"{name}", 3000, "new-0") for name in ("my-best", "new-0-copy", "new-0_0123abcde")]
    kept = {name: run_of(base, name, 2000) for name in ("live", "mine", "linked", "strange", "elsewhere")}
    (kept["live"] / "journal.jsonl").unlink()
    (kept["mine"] / "attempt_0" / "0" / "model.pt").touch()
    (kept["linked"] / "attempt_0" / "0" / "stderr.log").symlink_to(tmp_path / "other")
    (kept["strange"] / "journal.jsonl").write_text("Dear diary\n")
    kept["elsewhere"].rename(tmp_path / "elsewhere")
    (base / "elsewhere").symlink_to(tmp_path / "elsewhere")
    (base / "notes.txt").touch()
    assert old_logs.tidy(base) == len(old)
    left = {path.name for path in base.iterdir()}
    assert left == {*(p.name for p in (*new, *failed, *copies)), *kept, "notes.txt", ".gitignore"} and not any(
        p.exists() for p in old
    )
    assert (tmp_path / "elsewhere" / "journal.jsonl").exists()
    (base / ".gitignore").write_text("mine\n")
    assert old_logs.tidy(base) == 0
    assert (base / ".gitignore").read_text() == "mine\n"


def test_a_run_is_found_by_its_name_from_any_folder(ftrun: Ftrun) -> None:
    """Everything that a real run leaves is known to be ours; a folder that was named is left alone."""
    script = ftrun.script("import sys\nprint('out')\nsys.exit(3)\n")
    base = ftrun.base / "ftrun-logs"
    for i in range(old_logs.KEPT + 1):
        run_of(base, f"old-{i:02}", 1000 + i, stepped=False)
        run_of(ftrun.base / "named", f"old-{i:02}", 1000 + i, stepped=False)
    options = ("--spares", 0, "--duplicate-stdout-filters", "o", "--run-id")
    failed = ftrun.start(*options, "brave-otter", script, logs=False)
    assert failed.wait() == 1 and "ftrun: removed the logs of 1 old run from ftrun-logs" in failed.stderr
    assert (base / ".gitignore").exists() and not (base / "old-20").exists() and (base / "old-19").exists()
    assert old_logs._ended(base / "brave-otter") and old_logs._is_ours(base / "brave-otter")
    assert ftrun.start(*options, "other", "--log-dir", "named", script, logs=False).wait() == 1
    assert (ftrun.base / "named" / "old-20").exists() and not (ftrun.base / "named" / ".gitignore").exists()
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
