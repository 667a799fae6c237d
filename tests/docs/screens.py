"""Pictures of what a reader sees first, taken in a real browser without a window: `make screens` writes docs/images/screens/*.png anew.

The README as a page (its first screen at 1280×800), and pages of the site that `make docs` has built. Run with the Python that has
the packages of the `docs` extra; needs Chromium.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import markdown

from tests import browser

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
OUT = ROOT / "docs" / "images" / "screens"
SIZE = (1280, 800)
# as code hosts lay a README out
STYLE = """
body { font: 16px/1.5 -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", Helvetica, Arial, sans-serif; color: #1f2328; }
article { max-width: 896px; margin: 0 auto; padding: 24px; } h1, h2 { border-bottom: 1px solid #d1d9e0; padding-bottom: .3em; }
code, pre { font: 85% ui-monospace, "DejaVu Sans Mono", monospace; background: #f6f8fa; border-radius: 6px; }
code { padding: .2em .4em; } pre { padding: 16px; overflow: auto; } pre code { padding: 0; font-size: 100%; }
table { border-collapse: collapse; } th, td { border: 1px solid #d1d9e0; padding: 6px 13px; } img { max-width: 100%; }
sub { color: #59636e; }
"""
PAGES = {"site-home": "index.html", "site-convert": "how-to/convert/epochs.html", "site-cli": "reference/cli.html"}


def readme() -> str:
    text = (ROOT / "README.md").read_text()
    body = markdown.markdown(text, extensions=["tables", "fenced_code", "sane_lists"])
    base = f'<base href="{ROOT.as_uri()}/">'
    return (
        f"<!doctype html><meta charset=utf-8>{base}<title>README</title><style>{STYLE}</style><article>{body}</article>"
    )


def shoot(url: str, name: str, dark: bool = False, size: tuple[int, int] = SIZE) -> None:
    """Raises SystemExit when there is no browser, or when it shows next to nothing."""
    path = OUT / f"{name}.png"
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="ftrun-screens-") as profile:
        command = browser.command(profile, *size, dark=dark)
        if not command:
            sys.exit(f"screens: {browser.NONE}")
        words = ["--virtual-time-budget=4000", f"--screenshot={path}", url]
        subprocess.run([*command, *words], capture_output=True, timeout=120)
    if not path.exists() or path.stat().st_size < 10_000:
        sys.exit(f"screens: {name} shows next to nothing")
    print(f"screens: {path.relative_to(ROOT)}, {path.stat().st_size / 1000:.0f} kB", flush=True)


def main() -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".html", prefix="ftrun-readme-") as page:
        page.write(readme())
        page.flush()
        shoot(Path(page.name).as_uri(), "readme")
    # served, not read from files: there a browser has no search
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}"
        for name, file in PAGES.items():
            shoot(f"{home}/{file}", name)
        shoot(f"{home}/index.html", "site-dark", dark=True)
        shoot(f"{home}/index.html", "site-narrow", size=(420, 800))
        server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
