"""Where the time of a thread goes in ftrun's own code: a profile that charges what ftrun calls to the function that called it.

No function of ftrun is named here, so a profile survives their moving about. Time is charged at each call and return to the
function of ftrun that is innermost on the stack; code of others (torch, numpy, the standard library) is charged to the one that called
it, and to nobody when the script did. The profile's own work is not charged, but for the interpreter's share of an event, which is
measured beforehand and taken off.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Key = tuple[str, str]  # module below the folder in question, qualified name

_NOBODY = ("", "")
_TIMES = 20000  # calls of the loop that measures an event's share
_now = time.perf_counter_ns


class Profile:
    """`home`: the folder of the code in question, whose modules are named from there."""

    def __init__(self, home: Path) -> None:
        self._home = f"{home}/"
        self._share = 0.0  # ns of an event that are charged though they are the interpreter's work for the profile
        self._clear()

    def _clear(self) -> None:
        self._own, self._events, self._whole = Counter[Key](), Counter[Key](), Counter[Key]()
        self._calls, self._depth = Counter[Key](), Counter[Key]()
        self._keys: dict[CodeType, Key | None] = {}
        self._clock = self._seen = 0  # what was charged in all, and events
        # who is charged; whether it was called here, or its callees go on at its expense; clock and events at its call
        self._stack: list[tuple[Key, bool, int, int]] = [(_NOBODY, False, 0, 0)]

    def start(self) -> None:
        """Profile this thread from here on."""
        plain = min(_loop() for _ in range(3))
        seen = []
        for _ in range(3):
            self._clear()
            self._begin()
            _loop()
            sys.setprofile(None)
            seen.append(self._clock)
        self._share = max(0.0, (min(seen) - plain) / (2 * _TIMES))
        self._clear()
        self._begin()

    def _begin(self) -> None:
        self._last = _now()
        sys.setprofile(self._event)

    def stop(self, path: Path) -> None:
        """Write [module, function, own ns, ns with all that it calls, calls] of each function of the folder."""
        sys.setprofile(None)
        rows = [
            [*key, own - self._events[key] * self._share, self._whole[key], self._calls[key]]
            for key, own in self._own.items()
            if key != _NOBODY
        ]
        path.write_text(json.dumps(rows))

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        passed = _now() - self._last
        self._clock += passed
        self._seen += 1
        key = self._stack[-1][0]
        self._own[key] += passed
        self._events[key] += 1
        if event == "call":
            mine = self._key(frame.f_code)
            if mine is not None:
                self._calls[mine] += 1
                self._depth[mine] += 1
            self._stack.append((mine or key, mine is not None, self._clock, self._seen))
        elif event == "return" and len(self._stack) > 1:
            mine, called, clock, seen = self._stack.pop()
            if called:
                self._depth[mine] -= 1
                if not self._depth[mine]:  # else it is in the time of one further out
                    self._whole[mine] += round(self._clock - clock - (self._seen - seen) * self._share)
        self._last = _now()

    def _key(self, code: CodeType) -> Key | None:
        """The function that a piece of code is of, None for code of others."""
        if code not in self._keys:
            self._keys[code] = None
            if code.co_filename.startswith(self._home):
                module = code.co_filename.removeprefix(self._home).removesuffix(".py").replace("/", ".")
                name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the name alone
                self._keys[code] = module, name.partition(".<locals>")[0]
        return self._keys[code]


def _nothing() -> None: ...


def _loop() -> int:
    begun = _now()
    for _ in range(_TIMES):
        _nothing()
    return _now() - begun
