"""Pictures of a real terminal (xterm on a display that nobody sees) and of a real browser (Chromium without a window).

Needs the programs of NEEDED, which `apt-get install chromium xterm xvfb imagemagick fonts-dejavu-core` brings on Debian.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ftrun.core.waiting import wait_for
from tests.browser import command

NEEDED = ("Xvfb", "xterm", "script", "import", "convert", "chromium")
PATIENCE = 60.0  # seconds
_COLOURS = "160"  # of a picture: it is text, and small
_LOOK = ("-fa", "DejaVu Sans Mono", "-fs", "10", "-b", "6", "+sb", "-bg", "#101418", "-fg", "#d8dee4")


def need() -> None:
    """Raises SystemExit when a program is missing."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        sys.exit(f"images: {', '.join(missing)} not found; apt-get install chromium xterm xvfb imagemagick fonts-dejavu-core")


class Display:
    """An X server of its own, as large as the largest terminal."""

    def __enter__(self) -> Display:
        read, write = os.pipe()
        command = ["Xvfb", "-displayfd", str(write), "-screen", "0", "2400x1100x24", "-nolisten", "tcp"]
        self._server = subprocess.Popen(command, pass_fds=(write,), stderr=subprocess.DEVNULL)
        os.close(write)
        with os.fdopen(read) as told:
            self.name = f":{told.readline().strip()}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.terminate()
        self._server.wait()

    def terminal(
        self, command: Sequence[str], env: dict[str, str], cwd: Path, size: str, until: str, out: Path, left: int = 0
    ) -> None:
        """What a terminal of `size` (80x24) shows of a command once `until` is on it. `left`: px; windows must not cover each other."""
        env = {**env, "DISPLAY": self.name, "TERM": "xterm-256color"}
        log = out.with_suffix(".log")
        log.unlink(missing_ok=True)
        # `script` keeps what the terminal is sent, so that we know when the picture is there
        inner = f"script -qefc {shlex.quote(shlex.join(command))} {shlex.quote(str(log))}"
        xterm = ["xterm", *_LOOK, "-geometry", f"{size}+{left}+0", "-title", f"ftrun-{size}", "-e", "sh", "-c", inner]
        window = subprocess.Popen(xterm, env=env, cwd=cwd, stderr=subprocess.DEVNULL)
        try:
            if not wait_for(lambda: log.exists() and until in log.read_text(errors="replace"), PATIENCE, 0.1):
                sys.exit(f"images: {shlex.join(command)} never showed {until!r}")
            time.sleep(0.7)  # for xterm to draw it
            subprocess.run(["import", "-window", f"ftrun-{size}", str(out)], env=env, check=True)
        finally:
            window.kill()
            window.wait()
            log.unlink(missing_ok=True)
        shrink(out)


def browser(page: Path, out: Path, width: int, height: int, dark: bool = False) -> None:
    """A page as Chromium draws it, `dark` as on a system whose user prefers that."""
    with tempfile.TemporaryDirectory(prefix="ftrun-images-") as profile:
        shot = [*command(profile, width, height, dark), f"--screenshot={out}", page.as_uri()]
        subprocess.run(shot, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=PATIENCE * 2)
    subprocess.run(["convert", str(out), "-trim", "-bordercolor", "#181a1f" if dark else "#ffffff", "-border", "12", str(out)], check=True)
    shrink(out)


def shrink(picture: Path) -> None:
    """A small PNG without the time at which it was made."""
    how = ["+dither", "-colors", _COLOURS, "-strip", "-define", "png:exclude-chunks=date,time", "-define", "png:compression-level=9"]
    subprocess.run(["convert", str(picture), *how, f"PNG8:{picture}"], check=True)
