"""`job.batches` draws and gives what iterating the loader would."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

from ftrun.worker.state import rng
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


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand(1).item()]


class Augmented(Dataset[torch.Tensor]):
    """Every stream of the process that reads it, streams of its own, and a count. `alone`: it is read by the rank itself."""

    def __init__(self, alone: bool) -> None:
        self.alone, self.count = alone, 0
        self.own: dict[str, Any] = {
            "python": random.Random(1),
            "numpy": [np.random.default_rng(2), np.random.RandomState(3)],
        }
        self.torch: torch.Generator | None = (
            None  # made where it is used: torch 2.13 cannot send one to a spawned process
        )

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        found = [index, *draws()]
        if not self.alone:
            self.count += 1
            more = [self.own["python"].random(), *(one.random() for one in self.own["numpy"])]
            info = get_worker_info()
            assert info is not None and info.dataset is self
            self.torch = self.torch or torch.Generator().manual_seed(4)
            found += [self.count, torch.rand(1, generator=self.torch).item(), *more, info.seed % 1000, info.id]
        return torch.tensor(found, dtype=torch.float64)


class Streamed(IterableDataset[torch.Tensor]):
    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        mine = range(22) if info is None else range(info.id, 22, info.num_workers)
        yield from (torch.tensor([index, *draws()], dtype=torch.float64) for index in mine)


class Stepping(Sampler[int]):
    """It tells nobody its epoch."""

    def __init__(self) -> None:
        self._shift = 0

    def set_epoch(self, epoch: int) -> None:
        self._shift = 5 * epoch

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        return iter((self._shift + n) % 22 for n in range(22))


def init(number: int) -> None:
    np.random.seed(number + torch.initial_seed() % 7)


def augmented(workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(not workers), num_workers=workers, **({"batch_size": 4} | options))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: augmented(0, shuffle=True),
    "shuffled, processes": lambda: augmented(2, shuffle=True),
    "persistent": lambda: augmented(2, shuffle=True, persistent_workers=True, prefetch_factor=1),
    "persistent, own stream": lambda: augmented(
        3, shuffle=True, persistent_workers=True, prefetch_factor=4, generator=torch.Generator().manual_seed(9)
    ),
    "own stream": lambda: augmented(2, shuffle=True, generator=torch.Generator().manual_seed(9), worker_init_fn=init),
    "distributed": lambda: augmented(0, sampler=DistributedSampler(range(44), 2, 1)),  # type: ignore[arg-type]
    "distributed, persistent": lambda: augmented(
        2, sampler=DistributedSampler(range(44), 2, 0), persistent_workers=True, drop_last=True  # type: ignore[arg-type]
    ),
    "a sampler that tells no epoch": lambda: augmented(1, sampler=Stepping()),
    "batches": lambda: augmented(2, batch_size=1, batch_sampler=BatchSampler(SequentialSampler(range(22)), 4, False)),
    "no batches": lambda: augmented(2, batch_size=None, sampler=RandomSampler(range(22)), persistent_workers=True),
    "spawned": lambda: augmented(1, shuffle=True, persistent_workers=True, multiprocessing_context="spawn"),
    "a stream": lambda: DataLoader(Streamed(), 4),
    "a stream, processes": lambda: DataLoader(Streamed(), 4, num_workers=2),
    "a stream, persistent": lambda: DataLoader(Streamed(), 4, num_workers=2, persistent_workers=True),
}


OFTEN = ("shuffled", "persistent", "distributed", "a stream, processes", "a sampler that tells no epoch")


def some(*often: Any, every: list[Any]) -> list[Any]:
    """The others are tried in `make chaos`: a loader takes a second for its processes to begin and end."""
    return [pytest.param(one, marks=() if one in often else pytest.mark.slow) for one in every]


def begun(make: Callable[[], DataLoader[Any]]) -> DataLoader[Any]:
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    return make()


def to_epoch(loader: DataLoader[Any], epoch: int) -> None:
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


def passes(loader: DataLoader[Any]) -> Iterator[tuple[int, list[Any]]]:
    """What a script finds that does without: each batch with what its rank draws after it."""
    for epoch in range(3):
        to_epoch(loader, epoch)
        yield epoch, [(batch.tolist(), draws()) for batch in loader]


def rest(position: LoaderPosition, first: int) -> list[Any]:
    found = []
    for index in range(first, position.length):
        position.ensure(index)
        found.append((position.batch.tolist(), draws()))
    position.finish()
    return found


@pytest.mark.parametrize("kind", some(*OFTEN, every=list(LOADERS)))
def test_a_loader_gives_and_draws_what_it_does_without(kind: str) -> None:
    wanted = list(passes(begun(LOADERS[kind])))
    ours = begun(LOADERS[kind])
    for epoch, batches in wanted:
        to_epoch(ours, epoch)
        assert rest(LoaderPosition(ours), 0) == batches, epoch


@pytest.mark.parametrize("place", some(1, every=[0, 1, 3, "last"]))
@pytest.mark.parametrize("kind", some(*OFTEN, every=list(LOADERS)))
def test_a_replacement_goes_on_with_the_loader_of_its_predecessor(kind: str, place: int | str) -> None:
    wanted = dict(passes(begun(LOADERS[kind])))
    first = begun(LOADERS[kind])
    for epoch in range(2):
        to_epoch(first, epoch)
        position = LoaderPosition(first)
        length = position.length
        here = length - 1 if place == "last" else int(place)
        for index in range(here + 1):
            position.ensure(index)
            streams, slot = rng.capture(), position.capture()
            if index < here:
                draws()
        if epoch == 0:
            draws()
            rest(position, here + 1)
    later = begun(LOADERS[kind])
    to_epoch(later, 1)
    replaced = LoaderPosition(later)
    replaced.put_back(slot, here)
    rng.apply(streams)
    assert rest(replaced, here) == wanted[1][here:]
    to_epoch(later, 2)
    assert rest(LoaderPosition(later), 0) == wanted[2]


@pytest.mark.parametrize("kind", some("persistent", every=["persistent", "shuffled, processes", "a stream, persistent"]))
def test_a_replacement_begins_an_epoch_after_the_one_its_predecessor_ended(kind: str) -> None:
    wanted = dict(passes(begun(LOADERS[kind])))
    position = LoaderPosition(begun(LOADERS[kind]))
    rest(position, 0)
    slot, streams = position.capture(), rng.capture()
    later = begun(LOADERS[kind])
    LoaderPosition(later).put_back(slot, position.length)  # of the loop that is over
    rng.apply(streams)
    assert [rest(LoaderPosition(later), 0) for _ in range(2)] == [wanted[1], wanted[2]]


@pytest.mark.parametrize("kind", ["persistent", "shuffled"])
def test_a_batch_that_the_script_wrote_into_is_read_again(kind: str) -> None:
    wanted = dict(passes(begun(LOADERS[kind])))
    loader = begun(LOADERS[kind])
    rest(LoaderPosition(loader), 0)
    position = LoaderPosition(loader)
    found = []
    for index in range(position.length):
        position.ensure(index)
        position.batch.zero_()
        position.ensure(index)  # its step is done again
        found.append((position.batch.tolist(), draws()))
    assert found == wanted[1]


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


class Many(Augmented):
    """Gives many items at a time, in one tensor. `fails`: where it is asked for none."""

    def __init__(self, fails: bool) -> None:
        super().__init__(False)
        self.fails = fails

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        assert indices or not self.fails
        return torch.tensor([self[index].tolist() for index in indices], dtype=torch.float64)


class Opened(Dataset[torch.Tensor]):
    """Opens what it reads at its first item, in each process."""

    def __init__(self) -> None:
        self.file: Any = None
        self.opened = False
        self.descriptor: int | None = None

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.opened:
            self.file, self.opened = open("/dev/zero", "rb"), True  # noqa: SIM115 it stays open
        if self.descriptor is None:
            self.descriptor = os.open("/dev/zero", os.O_RDONLY)
        return torch.tensor([index, self.file.read(1)[0], os.read(self.descriptor, 1)[0], *draws()], dtype=torch.float64)


def unchanged(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("kind", ["many", "many that fail", "opened"])
def test_replacements_of_replacements_go_on(kind: str) -> None:
    """Twice, in the middle of an epoch."""

    def make() -> LoaderPosition:
        torch.manual_seed(3)
        random.seed(3)
        if kind != "opened":
            return LoaderPosition(DataLoader(Many(kind != "many"), batch_size=3, num_workers=2, collate_fn=unchanged))
        return LoaderPosition(DataLoader(Opened(), batch_size=3, num_workers=2))

    def go(position: LoaderPosition, begin: int, end: int) -> list[Any]:
        found = []
        for index in range(begin, end):
            position.ensure(index)
            found.append(position.batch.tolist())
        return found

    wanted = go(make(), 0, 8)
    one, two, three = make(), make(), make()
    found = go(one, 0, 4)
    two.put_back(one.capture(), 3)
    found += go(two, 4, 6)
    three.put_back(two.capture(), 5)
    found += go(three, 6, 8)
    assert found == wanted
