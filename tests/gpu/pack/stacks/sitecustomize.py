"""Every Python process of a check writes the stacks of all its threads to its stderr when a signal asks for it.

To stderr: a descriptor of its own would be closed in forked workers, and its number used for something else. This file stands
first on the path, registers the handler, and leaves: another sitecustomize of the machine is imported as ever.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("GPU_PACK_STACKS"):
    faulthandler.register(signal.SIGRTMIN + 5, file=2, all_threads=True)  # type: ignore[arg-type]
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
_OWN = sys.modules.pop("sitecustomize")
try:
    importlib.import_module("sitecustomize")
except ImportError:
    sys.modules["sitecustomize"] = _OWN
