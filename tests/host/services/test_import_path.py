"""A worker finds modules where a script under torchrun finds them, entry by entry, in each kind of environment.

The environments are real ones with a copy of ftrun in their site-packages. torch, and a package of the test's, are there as well
as on PYTHONPATH, as on a cluster whose module system provides them.
"""

from __future__ import annotations

import json
import shutil
import site
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, processes_of
from tests.e2e.harness import environment

SCRIPT = """
import json, sys
import torch, thing, beside
print("SEEN " + json.dumps([sys.path, torch.__file__, thing.__file__, beside.__file__]))
"""
TIMEOUT = 60.0


@dataclass
class Place:
    """An interpreter, the variables that belong to it, and its folder of packages."""

    python: str
    packages: Path
    env: dict[str, str] = field(default_factory=dict)


def venv(base: Path, *options: str) -> Place:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *options, base / "env"], check=True, timeout=TIMEOUT)
    (packages,) = (base / "env" / "lib").glob("python*/site-packages")
    return Place(str(base / "env" / "bin" / "python"), packages)


def user(base: Path) -> Place:
    """What `pip install --user` makes."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = base / "home" / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    return Place(sys._base_executable, packages, {"PYTHONUSERBASE": str(base / "home")})  # type: ignore[attr-defined]


PLACES = {
    "venv": lambda base: venv(base),
    "system packages": lambda base: venv(base, "--system-site-packages"),
    "user": user,
}


def seen(place: Place, folder: Path, env: dict[str, str], *command: str) -> list[object]:
    done = subprocess.run(
        [place.python, *command], cwd=folder, env={**environment(folder), **place.env, **env},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if "SEEN " in line]
    assert (done.returncode, len(lines)) == (0, 1), done.stderr
    return list(json.loads(lines[0].partition("SEEN ")[2]))


@pytest.mark.parametrize(
    ("where", "more"),
    [
        ("venv", {}),
        pytest.param("venv", {"PYTHONSAFEPATH": "1"}, marks=pytest.mark.slow),
        pytest.param("system packages", {}, marks=pytest.mark.slow),
        pytest.param("system packages", {"PYTHONNOUSERSITE": "1"}, marks=pytest.mark.slow),
        pytest.param("user", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_as_under_torchrun(where: str, more: dict[str, str], tmp_path: Path) -> None:
    place = PLACES[where](tmp_path)
    shutil.copytree(ROOT / "ftrun", place.packages / "ftrun", ignore=shutil.ignore_patterns("__pycache__"))
    (place.packages / "rest.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    folder, modules, scripts = tmp_path / "work", tmp_path / "modules", tmp_path / "scripts"
    for made in (folder, folder / "relative", modules, scripts):
        made.mkdir()
    for packages in (place.packages, modules):
        (packages / "torch").symlink_to(Path(torch.__file__).parent)
        (packages / "thing.py").touch()
    (folder / "relative" / "thing.py").touch()
    safe = sys.version_info >= (3, 11) and "PYTHONSAFEPATH" in more
    for beside in (scripts, folder / "relative"):
        (beside / "beside.py").touch()
    (scripts / "train.py").write_text(SCRIPT)
    env = {"PYTHONPATH": f"{modules}:relative:", **more}
    script = str(scripts / "train.py")
    theirs = seen(place, folder, env, "-m", "torch.distributed.run", "--standalone", script)
    assert theirs[1:] == [
        str(modules / "torch" / "__init__.py"),
        str(modules / "thing.py"),
        str((folder / "relative" if safe else scripts) / "beside.py"),
    ]
    for start in ("forkserver", "exec"):
        assert seen(place, folder, env, "-m", "ftrun", f"--worker-start={start}", script) == theirs
    assert not processes_of(folder / "runs")
