"""Writes docs/private-names.md: the private names that ftrun uses, and what each torch says of them.

python tests/lint/private_names.py PYTHON...      one interpreter for each torch to ask, the newest first
"""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "private-names.md"
HEAD = """# Private names

Names of torch, CPython and Linux that are no public interface and that ftrun uses all the same. They stand in
`ftrun/worker/torch_compat/torch_private.py`, those of DTensor and FSDP2 in `sharded_private.py` beside it, those of pipelines in
`pipeline_private.py`, those of data loaders in `loader_private.py`, of frames in `frames_private.py`, with the functions that use
them; `make lint` refuses them elsewhere. *Needed for*: **start** – any worker or any group of backend "ftrun"; **protect** –
`protect()` refuses without it; **protect of DDP** – the same, for a model in DistributedDataParallel; **protect of sharded
models** – for one of DTensors; **protect of pipelines** – where
`torch.distributed.pipelining` is imported; **torch.compile** – compiled models beside `protect()`; **answer** – torch asks about or
through that name, and one without it may not ask; **message**, **speed** – as the words say.

Written by `python tests/lint/private_names.py PYTHON...` on {date}. Each was looked for, and tried where it can be, there, by
`python -m tests.worker.torch_compat.private_probes`; `ftrun doctor` looks whether the torch that is installed has them all.

"""


def asked(python: str) -> dict[str, Any]:
    """The answers that one interpreter gives.

    Raises:
        RuntimeError: When it gives none.
    """
    command = [python, "-m", "tests.worker.torch_compat.private_probes", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    if not done.stdout:
        raise RuntimeError(f"{python} gives no answers: {done.stderr[-2000:]}")
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def page(all_answers: list[dict[str, Any]], date: str) -> str:
    """The text of the page."""
    titles = [f"torch {a['torch']} (Python {a['python']})" for a in all_answers]
    lines = [f"| name | needed for | {' | '.join(titles)} | why: to | without |", "|" + "---|" * (4 + len(titles))]
    for entry in zip(*(a["names"] for a in all_answers), strict=True):
        first = entry[0]
        states = " | ".join(e["state"] + (f": {e['detail']}" if e["detail"] else "") for e in entry)
        since = f" (since {first['since']})" if first["since"] else ""
        lines.append(
            f"| `{first['name']}`{since} | {first['needs']} | {states} | {first['why']} | {first['without']} |"
        )
    return HEAD.format(date=date) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    PAGE.write_text(page([asked(python) for python in sys.argv[1:]], dt.date.today().isoformat()))
