"""The timeline of a real incident in a real browser: it is drawn, nothing is cut off, the pointer shows times.

Needs Chromium (or Chrome); skipped where there is none. The browser runs without a window and without the network.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import browser
from tests.e2e import harness
from tests.e2e.harness import SCRIPTS, kill

pytest.importorskip("ftrun.cli.commands.timeline", reason="this version draws no timeline")
# what is looked at, in the page itself: texts that leave the drawing, what was painted, and the tip under the pointer
LOOK = """
const drawing = document.querySelector("svg");
const frame = drawing.getBoundingClientRect();
const cut = [...drawing.querySelectorAll("text")].filter((text) => {
  const box = text.getBoundingClientRect();
  return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
}).map((text) => text.textContent);
const fills = {};
for (const shape of drawing.querySelectorAll("rect, path, polygon, ellipse")) {
  const box = shape.getBoundingClientRect();
  if (box.width && box.height) fills[getComputedStyle(shape).fill] = (fills[getComputedStyle(shape).fill] || 0) + 1;
}
const tips = [];
for (const part of document.querySelectorAll("[data-tip]")) {
  const box = part.getBoundingClientRect();
  const at = { bubbles: true, clientX: box.left + box.width / 2, clientY: box.top + box.height / 2 };
  part.dispatchEvent(new PointerEvent("pointermove", at));
  const tip = document.getElementById("tip");
  if (tip && getComputedStyle(tip).display !== "none") tips.push(tip.textContent);
}
const found = { cut, fills, tips, width: frame.width, height: frame.height, texts: drawing.textContent };
document.documentElement.setAttribute("data-found", JSON.stringify(found));
"""
FORWARD, STOP = "rgb(0, 191, 255)", "rgb(255, 0, 0)"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log folder of a run in which rank 1 was killed in the backward pass of step 4."""
    folder = tmp_path_factory.mktemp("incident")
    (folder / "plan.toml").write_text(kill(1, "backward", 4))
    options = ["--fault-plan", "plan.toml", "--nproc-per-node", "2", "--run-id", "seen"]
    running = harness.start(folder, [harness.tool("ftrun"), *options, str(SCRIPTS / "compared.py")])
    assert running.wait(60) == 0, running.output
    harness.check_no_strays(folder)
    return folder / "ftrun-logs" / "seen"


def draw(logs: Path, form: str, path: Path) -> str:
    command = [harness.tool("ftrun"), "timeline", str(logs), "--format", form, "-o", str(path)]
    done = subprocess.run(command, env=harness.environment(path.parent), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return path.read_text()


def browse(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = browser.command(folder / "profile", 1400, 1000)
    if not command:
        pytest.skip(browser.NONE)
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=60)


def look(page: str, folder: Path) -> dict[str, Any]:
    """Open the page with LOOK at its end; what LOOK found. Fails when the page reports an error or asks for the network."""
    path = folder / "page.html"
    path.write_text(page)
    done = browse(folder, "--enable-logging=stderr", "--dump-dom", path.as_uri())
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return dict(
        json.loads(found[1].replace("&quot;", '"').replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    )


def check(found: dict[str, Any]) -> None:
    assert found["width"] > 600 and found["height"] > 200
    assert found["cut"] == []
    assert found["fills"].get(FORWARD, 0) >= 3 and found["fills"].get(STOP, 0) >= 1, found["fills"]
    for words in ("rank 0", "rank 1", "Controller", "Forward", "Restoration"):
        assert words in found["texts"], words


@pytest.mark.slow
def test_svg(logs: Path, tmp_path: Path) -> None:
    svg = draw(logs, "svg", tmp_path / "incident.svg")
    inside = svg[svg.index("<svg") :]
    check(look(f"<!doctype html><body>{inside}</body><script>{LOOK}</script>", tmp_path))
    # as a file of its own, which is stricter about its syntax
    shot = tmp_path / "shot.png"
    browse(tmp_path, f"--screenshot={shot}", (tmp_path / "incident.svg").as_uri())
    assert shot.stat().st_size > 10_000  # a page that says what is wrong with the file is smaller


def test_html(logs: Path, tmp_path: Path) -> None:
    page = draw(logs, "html", tmp_path / "incident.html")
    assert not re.search(r"""(?:src|href)\s*=\s*["']|@import|url\((?!#)""", page), "the page asks for another file"
    found = look(page.replace("</body>", f"<script>{LOOK}</script></body>"), tmp_path)
    check(found)
    tips = " | ".join(found["tips"])
    assert re.search(r"rank 1: Forward of step 4, .* ms", tips), tips
    assert re.search(r"rank 0: Stop", tips), tips
