"""`stock.py RANKS SCRIPT ARGS...`: the script on stock torch and Gloo, without ftrun's launcher and torchrun's agent.

Ranks are forked from one process that has imported torch, with the variables of `init_process_group("env://")`; rank 0
serves the store. That this ends where `torchrun` ends is compared in tests/e2e/test_exact.py.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

from tests.e2e.harness import free_port

# what the reference script imports
_PRELOAD = ("torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "numpy", "ftrun")


def run_as(rank: int, ranks: int, port: int, words: list[str]) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    ranks, *words = sys.argv[1:]
    for name in _PRELOAD:
        importlib.import_module(name)
    port = free_port()
    for rank in range(int(ranks)):
        if os.fork() == 0:
            run_as(rank, int(ranks), port, words)
            return
    sys.exit(any([os.wait()[1] for _ in range(int(ranks))]))


if __name__ == "__main__":
    main()
