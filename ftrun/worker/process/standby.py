"""Park a spare the moment the script asks for its rank; until then it runs the script like everyone.

Meanwhile `os.environ` is an instance of a subclass that detects every read of a rank variable, from any thread (some
scripts train beside their main thread), and the main thread's copies of the whole environment. It ignores copies that a library
makes during its import (tqdm reads its own variables so): a spare would park there, before it has built anything.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

from ftrun.core.environment import RANK_KEYS
from ftrun.core.paths import OWN_FILES
from ftrun.worker.link.callers import frames, is_script
from ftrun.worker.torch_compat.torch_private import watch_environment

_plain = type(os.environ)
_promote: Callable[[], None] | None = None
_waits = threading.Lock()  # the parked thread holds it: others that ask meanwhile wait for it
_parked = 0  # id of that thread
_owner = 0  # the spare's pid: a process that it forks has no rank to wait for


def _asked(by_name: bool = True) -> None:
    """Park. Not `by_name`: after a copy of the whole environment, which a library's own threads make, too."""
    global _parked, _promote
    if _promote is None or _parked == threading.get_ident() or os.getpid() != _owner:
        return
    if not by_name and threading.current_thread() is not threading.main_thread():
        return
    with _waits:
        if _promote is not None:
            _parked = threading.get_ident()
            _promote()
            _promote = None
            watch_environment(_plain)


def _while_a_library_is_imported() -> bool:
    """Does a library's import run now: is its `<module>` frame nearer than any frame of the script?"""
    for frame in frames():
        code = frame.f_code
        if is_script(code.co_filename):
            return False
        if code.co_name == "<module>" and not code.co_filename.startswith(OWN_FILES):
            return True
    return False


class _Watched(_plain):  # type: ignore[misc, valid-type]
    """os.environ of a spare."""

    def __getitem__(self, key: str) -> str:
        if key in RANK_KEYS:
            _asked()
        return str(_plain.__getitem__(self, key))

    def __contains__(self, key: object) -> bool:
        if key in RANK_KEYS:
            _asked()
        return bool(_plain.__contains__(self, key))

    def __iter__(self) -> Iterator[str]:
        if not _while_a_library_is_imported():
            _asked(by_name=False)
        return iter(_plain.__iter__(self))

    def copy(self) -> dict[str, str]:
        _asked(by_name=False)
        return dict(_plain.copy(self))


def watch(promote: Callable[[], None]) -> None:
    """Call `promote` (which sets the rank variables and returns) at the first read of a rank."""
    global _owner, _promote
    _owner, _promote = os.getpid(), promote
    watch_environment(_Watched)


def ask_now() -> None:
    """Park here if this is a spare without a rank (for calls that need a rank but read no variable)."""
    _asked()
