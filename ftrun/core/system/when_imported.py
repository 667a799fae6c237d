"""Calls a function right after a module was imported, whoever imports it first; at once when it is there already."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call `call(module)` once module `name` is there; what it raises comes out of that import."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder:
    """Finds nothing itself: it sees that somebody looks for the module, and lets the others find it."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._call(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
