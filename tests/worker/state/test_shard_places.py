"""Which rows of a tensor a rank holds, as torch itself computes it, and where on its mesh the rank is.

The others of the world are not there: torch's fake group answers for them. Each rank is tried in a process of its own, since torch keeps
meshes that look the same.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from ftrun.core.shared.mesh import MeshPlace, shape, words
from ftrun.verify.digests import part_in_words
from ftrun.worker.state.meshes import place_of
from ftrun.worker.state.shard_places import shard_place


def as_rank(rank: int, do: Callable[..., None], *arguments: Any) -> None:
    """Do something as one of four ranks."""

    def child(said: Any) -> None:
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
            do(*arguments)
            said.send("")
        except BaseException:
            said.send(traceback.format_exc())

    fork: Any = multiprocessing.get_context("fork")
    heard, said = fork.Pipe(duplex=False)
    process = fork.Process(target=child, args=(said,))
    process.start()
    said.close()
    try:
        assert heard.poll(60) and not (failed := heard.recv()), failed
    finally:
        process.join(10)
        process.kill()


class Net(nn.Module):
    """Uneven over four ranks, and a bias that is too short for all of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, 3)


def by_torch(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and first index of this rank's part."""
    found, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(found), tuple(offset)


def built(layout: str) -> tuple[Net, DeviceMesh]:
    net = Net(16 if "tp" in layout else 13)
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        fully_shard(net, mesh=mesh)
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(net, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout == "fsdp-tp":
            fully_shard(net, mesh=mesh["dp"])
    return net, mesh


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tp", "fsdp-tp"])
@pytest.mark.parametrize("rank", range(4))
def test_rows_are_those_that_torch_says(layout: str, rank: int) -> None:
    as_rank(rank, _rows, layout)


def _rows(layout: str) -> None:
    cut = 0
    net, mesh = built(layout)
    for name, param in net.named_parameters():
        part = shard_place(param)
        assert part is not None and isinstance(param, DTensor), name
        held, offset = by_torch(param)
        for one in part["cuts"]:
            dim = one["dim"]
            assert (one["size"], one["end"] - one["first"]) == (param.shape[dim], held[dim]), (name, part)
            assert not held[dim] or one["first"] == offset[dim], (name, part, offset)
            cut += one["end"] - one["first"] < one["size"]
        whole = [d for d in range(param.ndim) if d not in {one["dim"] for one in part["cuts"]}]
        assert all(held[d] == param.shape[d] for d in whole), (name, part)
    place = place_of(net.parameters(), mesh["dp"] if layout == "tp" else None, 4)
    names = {"fsdp": ["shard"], "hsdp": ["replicate", "shard"]}.get(layout, ["dp", "tp"])
    here = mesh.get_coordinate()
    assert here is not None
    assert place == MeshPlace(dict(zip(names, mesh.shape, strict=True)), dict(zip(names, here, strict=True)))
    assert list(place.sizes) == names
    assert cut >= 3, "hardly anything was cut: this tests nothing"


def test_in_words() -> None:
    as_rank(3, _words_of_hsdp)
    as_rank(3, _words_of_an_empty_shard)


def _words_of_hsdp() -> None:
    net, mesh = built("hsdp")
    part, place = shard_place(net.up.weight), place_of(net.parameters(), None, 4)
    assert part is not None and part_in_words(part) == "replicate 1, shard 1: rows 7 to 12 of 13"
    assert place is not None and (shape(place.sizes), words(place.at)) == ("replicate 2 × shard 2", "replicate 1, shard 1")
    both = shard_place(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0), Shard(1)]))
    assert both is not None and part_in_words(both) == "replicate 1, shard 1: rows 2 to 3 of 4, columns 3 to 5 of 6"
    same = shard_place(distribute_tensor(torch.ones(4), mesh, [Replicate(), Replicate()]))
    assert same is not None and part_in_words(same) == "replicate 1, shard 1: all of it"
    flat = mesh["replicate", "shard"]._flatten("all")  # made of dimensions that are there: it is none of its own
    assert place_of(net.parameters(), flat, 4) == place


def _words_of_an_empty_shard() -> None:
    net, _ = built("fsdp")
    part = shard_place(net.down.bias)
    assert part is not None and part_in_words(part) == "shard 3: none of its 3 rows"


def test_what_is_on_no_mesh() -> None:
    as_rank(1, _no_mesh)


def _no_mesh() -> None:
    net: Any = Net(4)
    assert shard_place(net.up.weight) is None and place_of(net.parameters(), None, 4) is None
    assert place_of(net.parameters(), dist.group.WORLD, 4) is None
    unnamed = place_of(net.parameters(), init_device_mesh("cpu", (4,)), 4)
    assert unnamed == MeshPlace({"replicas": 4}, {"replicas": 1})
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    assert place_of(net.parameters(), grid["dp"], 4) == MeshPlace({"dp": 2}, {"dp": 1}), "as far as it is known"
