"""Private names of torch's DataLoader, beside the functions that use them; see torch_private.py for the rules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ftrun.worker.torch_compat.torch_private import PROTECT, Private

NAMES: list[Private] = []


def has_processes(loader: Any) -> bool:
    """Has a DataLoader with persistent workers started them?"""
    return loader._iterator is not None


def drop_processes(loader: Any) -> None:
    """Make a DataLoader with persistent workers start new ones in its next iteration."""
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
    """Give a DataLoader other batches of indices meanwhile; torch refuses to set them after its construction."""
    attributes = vars(loader)
    own, attributes["batch_sampler"] = attributes["batch_sampler"], batches
    try:
        yield
    finally:
        attributes["batch_sampler"] = own
