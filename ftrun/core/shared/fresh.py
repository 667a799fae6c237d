"""Turns a worker's process into a fresh interpreter. A variable names a descriptor of the memory that holds the interpreter's spec.

The variable does not hold the spec itself: the kernel allows 128 KiB for one, and a command line may be longer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from ftrun.core.shared import wire

_VARIABLE = "FTRUN_SPEC"


def become(spec: dict[str, Any], variables: Mapping[str, str]) -> NoReturn:
    """Replace this process by `spec["interpreter"]`, an argument vector. `variables`: the environment.

    Raises:
        OSError: The interpreter cannot be started.
    """
    fd = wire.enclose(json.dumps(spec).encode())
    os.set_inheritable(fd, True)
    os.execve(spec["interpreter"][0], spec["interpreter"], {**variables, _VARIABLE: str(fd)})


def spec() -> dict[str, Any]:
    """Return the spec that was passed to `become`, in the interpreter that it started."""
    found: dict[str, Any] = json.loads(wire.disclose(int(os.environ.pop(_VARIABLE))))
    return found
