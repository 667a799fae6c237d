"""`job.batches` draws and gives what iterating the loader would."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

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
