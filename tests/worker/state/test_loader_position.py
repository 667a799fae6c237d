"""`job.batches` draws and gives what iterating the loader would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from ftrun.worker.state.loader_position import LoaderPosition

EPOCHS = 2


def loader(workers: int, own_stream: bool) -> DataLoader[tuple[torch.Tensor, ...]]:
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4) if own_stream else None
    data = TensorDataset(torch.arange(12))
    return DataLoader(data, batch_size=3, shuffle=True, num_workers=workers, generator=generator)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("own_stream", [False, True])
def test_the_same_batches_and_the_same_random_numbers_drawn(workers: int, own_stream: bool) -> None:
    plain = loader(workers, own_stream)
    wanted = [(batch[0].tolist(), torch.rand(1).item()) for _ in range(EPOCHS) for batch in plain]
    ours = LoaderPosition(loader(workers, own_stream))
    found = []
    for index in range(EPOCHS * ours.length):
        ours.ensure(index)
        found.append((ours.batch[0].tolist(), torch.rand(1).item()))
    assert found == wanted


class Wrapping(BatchSampler):
    """As a framework shards a sampler: the sampler inside draws from a stream of its own."""

    def __init__(self, inner: BatchSampler) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.inner

    def __len__(self) -> int:
        return len(self.inner)


def wrapped() -> DataLoader[tuple[torch.Tensor, ...]]:
    data = TensorDataset(torch.arange(12))
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
    return DataLoader(data, batch_sampler=Wrapping(BatchSampler(sampler, 3, drop_last=False)))


def test_a_replacement_goes_on_in_the_order_of_a_sampler_within_a_sampler() -> None:
    first, later = LoaderPosition(wrapped()), LoaderPosition(wrapped())
    for index in range(6):
        first.ensure(index)
    later.put_back(first.capture(), 5)
    assert later.batch[0].tolist() == first.batch[0].tolist()
    for index in (6, 7, 8):
        first.ensure(index)
        later.ensure(index)
        assert later.batch[0].tolist() == first.batch[0].tolist(), index


class Counted:
    """A loader that counts its passes when they come to an end, and gives another order in each."""

    def __init__(self) -> None:
        self.iteration = 0

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        yield from (10 * self.iteration + n for n in range(4))
        self.iteration += 1


def test_a_loader_that_counts_its_passes_comes_to_the_end_of_each() -> None:
    plain, ours = Counted(), Counted()
    wanted = [list(plain) for _ in range(3)]
    found = []
    for _ in range(3):  # a loop for each epoch
        position = LoaderPosition(ours)
        found.append([])
        for index in range(position.length):
            position.ensure(index)
            found[-1].append(position.batch)
        position.finish()
    assert found == wanted
