"""The private names of torch's DataLoader that ftrun relies on, beside the functions that use them. See torch_private.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ftrun.worker.torch_compat.torch_private import PROTECT, Private

NAMES: list[Private] = []


def has_processes(loader: Any) -> bool:
    """Does a DataLoader with persistent workers have them already?"""
    return loader._iterator is not None


def drop_processes(loader: Any) -> None:
    """Have a DataLoader with persistent workers make new ones when it is iterated next."""
    loader._iterator = None


NAMES.append(
    Private(
        "torch.utils.data:DataLoader", ("_iterator",), "torch", PROTECT,
        "begin a loader with persistent workers at the batch of a step that is done again",
        "the loader goes on behind that batch", of_instance=True,
    )
)  # fmt: skip


@contextlib.contextmanager
def with_batches(loader: Any, batches: Any) -> Iterator[None]:
    """Let a DataLoader be iterated over other batches of indices meanwhile, which torch refuses to set on one that is made."""
    attributes = vars(loader)
    own, attributes["batch_sampler"] = attributes["batch_sampler"], batches
    try:
        yield
    finally:
        attributes["batch_sampler"] = own
