"""The table of collectives: which methods of a torch group communicate, and what Gloo's lack beside NCCL's.

`tests/worker/comm/test_collectives_table.py` compares the table with the methods of the installed torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import ReduceOp

from ftrun.worker.comm.collective_replay import tensors_of

COLLECTIVES = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single",
    "all_gather_single_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "all_to_all_single",
    "barrier", "broadcast", "gather", "gather_into_tensor", "gather_single", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send", "recv", "recv_anysource",
)  # fmt: skip
"""Every method that moves tensors and returns a Work. A torch that is older than one of them lacks it."""

DIRECT = ("send", "recv", "recv_anysource")
"""Those between two ranks: they count as waited for in `wait` only."""


def fill_local(name: str, args: tuple[Any, ...]) -> None:
    """Complete a collective in local mode, as if every peer had this rank's values (DDP's constructor compares and broadcasts)."""
    if "allgather" not in name and "all_gather" not in name:
        return
    outputs, inputs = tensors_of(args[0]), tensors_of(args[1])
    if len(outputs) % len(inputs) == 0 and all(o.shape == inputs[0].shape for o in outputs):
        for i, output in enumerate(outputs):
            output.copy_(inputs[i * len(inputs) // len(outputs)])
    else:
        for output, source in zip(outputs, inputs, strict=False):
            output.view(-1, *source.shape).copy_(source.expand(output.numel() // source.numel(), *source.shape))


@contextlib.contextmanager
def averaging_integers(
    outputs: list[torch.Tensor], size: int, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Callable[[], None] | None]:
    """Make Gloo average integers as NCCL does: it sums, and the quotient is rounded toward zero.

    Gloo divides them as real numbers and then fails. Torch does not know that backend "ftrun" is Gloo on the CPU, so a script
    that averages a counter would have to find out first.

    Args:
        outputs: The tensors that the collective writes.
        size: Size of the group.
        rank: This rank in the group.
        args: Arguments of the collective; the options among them ask for a sum while the context lasts.
        kwargs: Its keyword arguments, likewise.

    Yields:
        The function to call once the sum is there; None if the collective averages no integers.
    """
    options = next((o for o in (*args, *kwargs.values()) if hasattr(o, "reduceOp")), None)
    whole = outputs and not (outputs[0].is_floating_point() or outputs[0].is_complex())
    if options is None or not whole or options.reduceOp != ReduceOp.AVG:
        yield None
        return
    mine = getattr(options, "rootRank", rank) == rank

    def divide() -> None:
        with torch.inference_mode():  # a thread of Gloo's runs this, without the caller's mode
            for output in outputs if mine else ():
                output.div_(size, rounding_mode="trunc")

    options.reduceOp = ReduceOp.SUM
    try:
        yield divide
    finally:
        options.reduceOp = ReduceOp.AVG
