"""`stock.py RANKS SCRIPT ARGS...`: what `torchrun --standalone --nproc-per-node RANKS SCRIPT ARGS...` does, for less work.

Agent, rendezvous and the workers' environment are torchrun's own. Only the workers are forked from a process that has
imported torch, where torchrun starts an interpreter for each. tests/e2e/test_exact.py compares the two.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys
import uuid

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def worker(script: str, *arguments: str) -> None:
    multiprocessing.set_start_method(None, force=True)  # how workers were started is not how the script's loaders are
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    ranks, *words = sys.argv[1:]
    multiprocessing.set_forkserver_preload(
        ["torch._dynamo", "torch.distributed.launcher.api", "torch.nn.parallel", "numpy", "ftrun"]
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(ranks),
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="forkserver",
    )
    elastic_launch(config, worker)(*words)


if __name__ == "__main__":
    main()
