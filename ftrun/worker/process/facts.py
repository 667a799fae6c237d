"""Print the facts about torch that `ftrun doctor` needs, as one JSON object; this runs in a process of its own."""

from __future__ import annotations

import json
import time
from typing import Any


def private_names() -> list[Any]:
    """Return the entries of every file of torch_compat, as in docs/private-names.md."""
    from ftrun.worker.torch_compat import (
        frames_private,
        loader_private,
        pipeline_private,
        sharded_private,
        torch_private,
    )

    files = (torch_private, frames_private, loader_private, pipeline_private, sharded_private)
    return [entry for file in files for entry in file.NAMES]


def main() -> None:
    """Print the facts.

    Raises:
        Exception: Whatever importing torch raises.
    """
    began = time.monotonic()
    import torch
    import torch.distributed as dist

    facts: dict[str, Any] = {
        "version": str(torch.__version__),
        "seconds": round(time.monotonic() - began, 2),
        "cuda": torch.version.cuda,
        "distributed": dist.is_available(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": None,
        "devices": [],
        "cuda_error": "",
        "private": [],
    }
    if dist.is_available() and dist.is_nccl_available():
        facts["nccl"] = list(torch.cuda.nccl.version())
    if torch.version.cuda is not None:
        try:
            count = torch.cuda.device_count()
            facts["devices"] = [torch.cuda.get_device_name(i) for i in range(count)]
            if count:
                torch.zeros(1, device="cuda").add_(1).item()
        except RuntimeError as error:
            facts["cuda_error"] = str(error).splitlines()[0]
    if facts["gloo"]:
        lacking = [one for one in private_names() if one.lacking()]
        facts["private"] = [{"name": one.name, "needs": one.needs, "without": one.without} for one in lacking]
    print(json.dumps(facts))
