"""Faults inside of ftrun's workers, put in from outside: no file of ftrun/ knows of them.

A run whose PYTHONPATH begins with the folder `site` imports `sitecustomize` there in every process; see that file for what can be had.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.injected.site import sitecustomize as inside

SITE = Path(inside.__file__).parent


def env(die: str = "", without: str = "", path: str | Path = "") -> dict[str, str]:
    """Variables for a run.

    Args:
        die: `point:gate number:rank,...`: that rank dies there by SIGKILL, once a run. Its points are `inside.POINTS`; for "swap"
            the other ranks leave that gate to the named one, since any rank may open it.
        without: A part that is left out, one of `inside.PARTS`: so a test proves that it would notice, and a benchmark what it costs.
        path: What else PYTHONPATH is to name.
    """
    assert not (unknown := {one.partition(":")[0] for one in die.split(",") if one} - {*inside.POINTS}), unknown
    assert not without or without in inside.PARTS, without
    folders = filter(None, (str(SITE), str(path), os.environ.get("PYTHONPATH", "")))
    return {"PYTHONPATH": os.pathsep.join(folders), inside.DIE: die, inside.WITHOUT: without}
