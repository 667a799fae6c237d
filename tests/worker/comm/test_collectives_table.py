"""The table of collectives against the installed torch, and what is done for Gloo's lack beside NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroup, ReduceOp, ReduceOptions
from torch.distributed.distributed_c10d import Backend

from ftrun.worker.comm.backend import Inner
from ftrun.worker.comm.collective_replay import Recorder
from ftrun.worker.comm.collectives import COLLECTIVES, averaging_integers
from ftrun.worker.comm.process_group import SwapGroup
from ftrun.worker.memory import serialization
from ftrun.worker.repair.recovery_points import Slots
from ftrun.worker.torch_compat import torch_private

NOT_COLLECTIVES = """
    BackendType CUSTOM GLOO MPI NCCL UCC UNDEFINED XCCL _add_ephemeral_timeout _backend_id _device_types
    _enable_collectives_timing _end_coalescing _get_backend _get_backend_name _get_sequence_number_for_group _has_hooks _id
    _pybind11_conduit_v1_ _register_backend _register_on_completion_hook _set_default_backend _set_group_desc
    _set_group_name _set_sequence_number_for_group _start_coalescing _wait_for_pending_works abort bound_device_id boxed
    get_backend get_group_store get_reconfigure_handle group_desc group_name merge_remote_group monitored_barrier name
    new_window rank reconfigure register_abort_hook register_post_hook register_pre_hook set_timeout shutdown size
    split_group supports_abort_hooks supports_completion_hooks supports_reconfigure supports_window unbox
    unregister_abort_hook unregister_post_hook unregister_pre_hook use_pg_for_symm_mem_rendezvous
""".split()


def test_every_method_of_a_torch_group_is_known() -> None:
    """A new torch's method fails here: it belongs in the table of collectives, or among those that move no tensors."""
    methods = {name for name in dir(ProcessGroup) if not name.startswith("__")}
    assert methods - set(COLLECTIVES) - set(NOT_COLLECTIVES) == set()


def test_every_collective_of_this_torch_passes_through_ours() -> None:
    for name in COLLECTIVES:
        if hasattr(ProcessGroup, name):
            assert name in SwapGroup.__dict__, name


@pytest.mark.parametrize(
    ("values", "wanted"), [([7, -7, 8], [1, -1, 2]), ([2**62, -(2**62), 0], [2**62 // 4, -(2**62) // 4, 0])]
)
def test_an_average_of_integers_is_rounded_toward_zero(values: list[int], wanted: list[int]) -> None:
    options, out = AllreduceOptions(), torch.tensor(values)
    options.reduceOp = ReduceOp.AVG
    with averaging_integers([out], 4, 0, ([out], options), {}) as divide:
        assert options.reduceOp == ReduceOp.SUM
    assert options.reduceOp == ReduceOp.AVG, "the caller's options are theirs"
    assert divide is not None
    divide()
    assert out.tolist() == wanted


def test_only_the_root_of_a_reduce_has_an_average() -> None:
    options, out = ReduceOptions(), torch.tensor([9])
    options.reduceOp, options.rootRank = ReduceOp.AVG, 1
    for rank, wanted in ((0, 9), (1, 4)):
        with averaging_integers([out], 2, rank, ([out],), {"opts": options}) as divide:
            pass
        assert divide is not None
        divide()
        assert out.tolist() == [wanted]


def test_what_gloo_averages_itself_is_left_to_it() -> None:
    options, out = AllreduceOptions(), torch.ones(2)
    options.reduceOp = ReduceOp.AVG
    with averaging_integers([out], 4, 0, ([out], options), {}) as divide:
        assert divide is None and options.reduceOp == ReduceOp.AVG
    with averaging_integers([torch.ones(2, dtype=torch.long)], 4, 0, ([out], AllreduceOptions()), {}) as divide:
        assert divide is None, "a sum"


HYBRID = torch.sparse_coo_tensor([[3, 1]], [[1.0, 2.0], [-0.0, 4.0]], (5, 2))
TENSORS = {
    "sparse": torch.eye(4).to_sparse(),
    "sparse with dense rows": HYBRID,
    "sparse, empty": torch.zeros(3, 2).to_sparse(),
    "sparse, one place twice": torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,)),
    "complex": torch.tensor([1 + 2j, -3j]),
    "conjugate": torch.tensor([1 + 2j, -3j]).conj(),
    "bool": torch.tensor([[True, False]]),
    "bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_recorded_result_is_handed_out_as_it_was(tensor: torch.Tensor) -> None:
    kept, again = Recorder(), Recorder()
    kept.reserve("allreduce").store([tensor])
    slots = Slots.create(0)
    for record in kept.opening(["world"]):
        slots.log.append(serialization.plain(record))
    again.load([*map(serialization.decode, slots.log.records())])
    output = torch.zeros_like(tensor)
    again.replay("allreduce", [output])
    assert output.layout == tensor.layout
    if tensor.is_sparse:
        assert torch.equal(output._indices(), tensor._indices())
        output, tensor = output._values(), tensor._values()
    assert torch.equal(output, tensor)
    if tensor.is_floating_point():
        assert torch.equal(output.signbit(), tensor.signbit())  # -0.0 is not 0.0


class _Legacy:
    """A communicator as NCCL's classes have been."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def name(self) -> str:
        return "nccl2"

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class _Newer(_Legacy):
    def abort(self) -> None:
        self.calls.append("abort")


@pytest.mark.parametrize(("kind", "wanted"), [(_Newer, ["abort"]), (_Legacy, ["shutdown"])])
def test_a_communicator_is_aborted_by_what_it_offers_and_once(kind: type[_Legacy], wanted: list[str]) -> None:
    communicator = kind()
    inner = Inner(None, [torch.device("cpu"), torch.device("cuda")], [], None, None, communicator)
    inner.abort()
    inner.abort()
    assert communicator.calls == wanted


def test_nccl_is_what_this_torch_registers_under_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def creator(options: Any, backend_options: Any) -> str:
        asked.append((options.group_rank, options.group_size, options.timeout, options.store, backend_options))
        return "made"

    store = torch.distributed.HashStore()
    group = ProcessGroup(store, 1, 2)
    monkeypatch.setitem(Backend._plugins, "NCCL", Backend._BackendPlugin(creator, True))
    assert torch_private.nccl(store, 1, 2, timedelta(seconds=5), group) == "made"
    assert [(a[0], a[1], a[2], a[4]) for a in asked] == [(1, 2, timedelta(seconds=5), None)]
