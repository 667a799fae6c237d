"""Show the live view of `ftrun status` on a terminal, from files and the board.

The interval between two looks grows with the CPU time of a look, so that watching stays below 1 % of one core (5 % with
more than 64 ranks), however large the run or slow the machine.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

from ftrun.core.runs import RunInfo
from ftrun.view import fold, keys, snapshot, state, text
from ftrun.view.paint import painted
from ftrun.view.screen import screen
from ftrun.view.status.header import BRIEF
from ftrun.view.text import BAD, HEAD, PLAIN, QUIET, WARN, Line

_SHARE_FEW, _SHARE_MANY = 0.008, 0.04  # CPU share, of one core
_FEW = 64  # ranks
_SHORT = 16  # a screen with fewer lines leaves out the script's name and the step times, not ranks
_NICE = 5  # training has priority
_HELP = (
    "q        leave (the run goes on)",
    "p        pause and go on",
    "↑ ↓      choose an incident; in one: scroll, with PgUp, PgDn, Home and End by more",
    "Enter    show that incident, ← → the ones beside it, Escape goes back",
    "?        this help",
    "Ctrl-Z   suspend; fg brings the view back",
)


# keys that scroll an incident by a line, a page, or to an end; and keys that choose another incident
_SCROLLS = {
    keys.UP: -1, "k": -1, keys.DOWN: 1, "j": 1, keys.PAGE_UP: -2, "b": -2, keys.PAGE_DOWN: 2, " ": 2,
    keys.HOME: -3, "g": -3, keys.END: 3, "G": 3,
}
_CHOOSES = {keys.UP: -1, keys.DOWN: 1, keys.LEFT: -1, keys.RIGHT: 1}


def watch(run: RunInfo, interval: float) -> str:
    """Show `run` until the user presses q or the run ends; return its last state. `interval`: least seconds between looks.

    Raises:
        OSError: The board cannot be opened.
        PlatformError: The board has another version or layout.
    """
    from rich.console import Console
    from rich.live import Live

    with contextlib.suppress(OSError):
        os.nice(_NICE)
    console = Console(highlight=False)
    view = _View(run, interval)
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def draw() -> None:
        lines = view.lines(console.width, console.height)
        live.update(painted(*lines), refresh=True)

    try:
        with keys.terminal(sys.stdin.fileno(), live.stop, lambda: live.start()) as keyboard, live:
            while not view.over:
                before = time.thread_time()
                view.look()
                draw()
                view.cost(time.thread_time() - before)
                _until_due(view, keyboard, draw)
    finally:
        view.close()
    for line in view.farewell():
        print(text.for_encoding(text.plain(line), sys.stdout.encoding))
    return view.state


def _until_due(view: _View, keyboard: keys.Keyboard, draw: Any) -> None:
    """Answer keys until the next look is due."""
    while not view.over:
        left = view.due - time.monotonic()
        if left <= 0:
            return
        begin = time.thread_time()
        pressed = keyboard.wait(left)
        for key in pressed:
            view.press(key)
        if (pressed or view.due - time.monotonic() > 0) and not view.over:
            draw()
            view.due += (time.thread_time() - begin) / view.share


class _View:
    """The state of the view: the newest picture, the chosen incident, pause and help."""

    def __init__(self, run: RunInfo, interval: float) -> None:
        self._watcher = snapshot.RunWatcher(run)
        self._interval = interval
        self._picture: dict[str, Any] | None = None
        self._selected: int | None = None
        self._opened: int | None = None  # number of the incident that fills the screen
        self._help = False
        self._paused = False
        self._left = False
        self._ended = False
        self._height = 24
        self._top = 0  # first visible line of an incident that is longer than the screen
        self._length = 0  # number of its lines
        self.due = 0.0

    @property
    def over(self) -> bool:
        return self._left or self._ended

    @property
    def state(self) -> str:
        return str(self._picture["state"]) if self._picture else state.ENDED

    @property
    def share(self) -> float:
        """The CPU share of one core that the view may use."""
        return _SHARE_MANY if self._picture and self._picture["world_size"] > _FEW else _SHARE_FEW

    def close(self) -> None:
        self._watcher.close()

    def look(self) -> None:
        """Read the run again, unless paused."""
        run = self._watcher.run
        if self._paused and self._picture is not None:
            return
        alive = run.alive()
        with contextlib.suppress(FileNotFoundError):
            self._picture = self._watcher.look(max(4, self._height))
        self._ended = not alive

    def cost(self, seconds: float) -> None:
        """Schedule the next look, after one that took `seconds` of CPU time with its drawing."""
        self.due = time.monotonic() + max(self._interval, seconds / self.share)

    def press(self, key: str) -> None:
        found = self._picture["incidents"] if self._picture else []
        if key == "q" and (self._help or self._opened is not None):
            self._help, self._opened = False, None
        elif key == "q":
            self._left = True
        elif key == "p":
            self._paused = not self._paused
        elif key == "?":
            self._help = not self._help
        elif key == keys.ESCAPE:
            self._help, self._opened, self._selected = False, None, None
        elif self._opened is not None and key in _SCROLLS:
            page = max(1, self._height - 2)
            self._top += {1: 1, -1: -1, 2: page, -2: -page, 3: self._length, -3: -self._length}[_SCROLLS[key]]
            self._top = max(0, min(self._top, self._length - (self._height - 1)))
        elif key in _CHOOSES and found:
            step = _CHOOSES[key]
            self._selected = max(0, min(len(found) - 1, (-1 if self._selected is None else self._selected) + step))
            if self._opened is not None:
                self._opened, self._top = int(found[self._selected]["number"]), 0
        elif key == keys.ENTER and found:
            self._selected, self._top = self._selected or 0, 0
            self._opened = None if self._opened is not None else int(found[self._selected]["number"])

    def lines(self, width: int, height: int) -> list[Line]:
        """Return the lines of the screen, exactly `height` of them."""
        self._height = height
        if self._help:
            body: list[Line] = [[("Keys", HEAD)], [], *([(line, PLAIN)] for line in _HELP)]
        elif self._picture is None:
            body = [[("the run is about to begin", QUIET)]]
        elif self._opened is not None:
            body = self._incident(width)
        else:
            body = _fitted(self._picture, width, height - 1, self._selected)
        foot = [("PAUSED  ", BAD)] if self._paused else []
        if self._opened is not None and not self._help:
            body, scrolled = self._scrolled(body, height - 1)
            foot += [*scrolled, ("←→ other incident  q back  ? help", QUIET)]
        else:
            foot.append(("q leave  p pause  ↑↓ ↵ incident  ? help", QUIET))
        return [*body[: height - 1], *([[]] * max(0, height - 1 - len(body))), text.cut(foot, width)]

    def _incident(self, width: int) -> list[Line]:
        from ftrun.view.timeline.model import story
        from ftrun.view.timeline.terminal import drawing

        account = self._watcher.history.account
        assert self._opened is not None
        return drawing(story(account, self._opened), width)

    def _scrolled(self, body: list[Line], room: int) -> tuple[list[Line], Line]:
        """Return the visible part of an incident, and the scroll position for the last line."""
        self._length = len(body)
        self._top = max(0, min(self._top, len(body) - room))
        if len(body) <= room:
            return body, []
        end = self._top + room
        more = f"{'▲' if self._top else ' '}{'▼' if end < len(body) else ' '}"
        where = f"lines {self._top + 1}-{end} of {len(body)} {more}  "
        return body[self._top : end], [(where, WARN), ("↑↓ PgUp PgDn scroll  ", QUIET)]

    def farewell(self) -> list[Line]:
        """Return the lines that stay on the terminal after the view has closed."""
        if self._picture is None or not self._ended:
            return []
        name = self._picture["run"]
        code = self._watcher.history.account.exit_code
        how = "was cut off" if code is None else f"ended with exit code {code}"
        more = f"; its incidents: ftrun timeline {name}" if self._picture["incidents_total"] else ""
        return [[(f"run {name} {how}{more}", WARN)]]


def _fitted(picture: dict[str, Any], width: int, height: int, selected: int | None) -> list[Line]:
    """Return the whole screen if it fits; else fold ranks, so that the newest incidents stay visible."""
    whole = screen(picture, width, selected)
    if len(whole) <= height:
        return screen(picture, width, selected, height - len(whole))
    chart = BRIEF if height < _SHORT else 0
    keep = min(len(picture["incidents"]), 3 if selected is None else selected + 1)
    first = 0 if selected is None else max(0, selected - 2)
    shown = {**picture, "incidents": picture["incidents"][first : max(keep, first + 1)]}
    spares = [w for w in picture["workers"] if w["rank"] is None]
    ranks = [w for w in picture["workers"] if w["rank"] is not None]
    within = None if selected is None else selected - first
    over = len(screen(shown, width, within, chart)) - height
    if over > 0 and ranks:
        odd_first = sorted(ranks, key=_gravity)
        room = max(1, len(ranks) - over - 1)
        kept, hidden = sorted(odd_first[:room], key=lambda w: int(w["rank"])), odd_first[room:]
        folded = {
            "ranks": picture["folded"]["ranks"] + len(hidden),
            "doing": _counted(picture["folded"]["doing"], hidden),
        }
        shown = {**shown, "workers": [*kept, *spares], "folded": folded}
    return screen(shown, width, within, chart)[:height]


def _gravity(worker: dict[str, Any]) -> tuple[int, int]:
    """Return a sort key that puts the gravest ranks first."""
    why = worker["stands_out"]
    return (fold.REASONS.index(why) if why else len(fold.REASONS)), worker["rank"]


def _counted(doing: list[list[Any]], hidden: list[dict[str, Any]]) -> list[list[Any]]:
    """Add the `hidden` ranks to the counts by activity of the folded ranks."""
    counts = {what: int(number) for what, number in doing}
    for worker in hidden:
        what = fold.doing(worker["phase"], worker["step"])
        counts[what] = counts.get(what, 0) + 1
    return [[what, number] for what, number in sorted(counts.items(), key=lambda c: -c[1])]
