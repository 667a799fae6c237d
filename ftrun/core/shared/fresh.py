"""Turns a worker's process into a fresh interpreter, which finds its spec in memory, by a descriptor in a variable.

Not in the variable itself: the kernel allows 128 KiB for one, and a command line may be longer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from ftrun.core.shared import wire

_VARIABLE = "FTRUN_SPEC"


def become(spec: dict[str, Any], variables: Mapping[str, str]) -> NoReturn:
    """Go on as `spec["interpreter"]`, an argument vector. `variables`: the environment.

    Raises:
        OSError
    """
    fd = wire.enclose(json.dumps(spec).encode())
    os.set_inheritable(fd, True)
    os.execve(spec["interpreter"][0], spec["interpreter"], {**variables, _VARIABLE: str(fd)})


def spec() -> dict[str, Any]:
    """The spec that `become` was given, in the interpreter that it began."""
    found: dict[str, Any] = json.loads(wire.disclose(int(os.environ.pop(_VARIABLE))))
    return found
