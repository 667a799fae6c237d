"""What scripts ask of a group beside the usual: the answers are Gloo's, errors come at once, a group can be made again."""

from __future__ import annotations

import pytest

from tests.conftest import Ftrun

BEGIN = """
import os, time
from datetime import timedelta
import torch, torch.distributed as dist

def init(seconds=20):
    dist.init_process_group("ftrun", timeout=timedelta(seconds=seconds))
init()
rank, size = dist.get_rank(), dist.get_world_size()
"""


def run(ftrun: Ftrun, script: str, ranks: int = 2) -> str:
    """Its stdout; every rank must have printed `done`."""
    ended = ftrun.start(
        "--nproc-per-node", ranks, "--spares", 0, ftrun.script(BEGIN + script + "\nprint('done', flush=True)")
    )
    assert ended.wait() == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("done") == ranks, ended.stdout + ended.stderr
    assert "start again" not in ended.stderr
    return ended.stdout


CALLS = """
sparse = torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 2.0], (size + 1,))
dist.all_reduce(sparse)
assert sparse.to_dense().tolist() == [1.0] + [3.0] * (size - 1) + [2.0], sparse

z = torch.tensor([1j * rank, 2.0])
dist.all_reduce(z)
assert z.tolist() == [1j * sum(range(size)), 2.0 * size]

counter = torch.tensor([rank - 2, 7 * rank, -7 * rank])  # truncated, as NCCL does
dist.all_reduce(counter, op=dist.ReduceOp.AVG)
assert counter.tolist() == [int(x / size) for x in (sum(range(size)) - 2 * size, 7 * sum(range(size)), -7 * sum(range(size)))]
real = torch.tensor([float(rank)])
dist.all_reduce(real, op=dist.ReduceOp.AVG)
assert real.item() == (size - 1) / 2

out = torch.empty(2)
work = dist.reduce_scatter_tensor(out, torch.arange(2.0 * size) + rank, async_op=True)
work.get_future().wait()
assert work.is_completed() and work.is_success()
wanted = [size * (2.0 * rank + i) + sum(range(size)) for i in range(2)]
assert out.tolist() == wanted, (out, wanted)
dist.reduce_scatter_tensor(out, torch.arange(2.0 * size) + rank)
dist.reduce_scatter(out, list((torch.arange(2.0 * size) + rank).chunk(size)))
assert out.tolist() == wanted
whole = torch.empty(1, dtype=torch.long)
dist.reduce_scatter_tensor(whole, torch.arange(size) - rank, op=dist.ReduceOp.AVG)
assert whole.item() == int((size * rank - sum(range(size))) / size)

with dist._coalescing_manager():
    a, b = torch.ones(2), torch.full((3,), 2.0)
    dist.all_reduce(a)
    dist.all_reduce(b)
assert a.tolist() == [size] * 2 and b.tolist() == [2.0 * size] * 3

found = [None] * size
dist.all_gather_object(found, {"rank": rank})
assert found == [{"rank": r} for r in range(size)]

if rank == 0:
    senders = set()
    for _ in range(size - 1):
        got = torch.empty(1)
        sender = dist.recv(got)
        assert got.item() == sender
        senders.add(sender)
    assert senders == set(range(1, size)), senders
else:
    dist.send(torch.tensor([float(rank)]), 0)

dist.group.WORLD.monitored_barrier(timedelta(seconds=10))
try:
    dist.monitored_barrier()  # torch 2.15 asks the group; before, it asked for the name
except ValueError as error:
    assert "GLOO" in str(error) and not hasattr(dist, "gather_single")
"""


def test_calls_beside_the_usual(ftrun: Ftrun) -> None:
    run(ftrun, CALLS, 4)


REFUSED = """
begin = time.monotonic()
for op in (dist.ReduceOp.BAND, dist.ReduceOp.AVG):
    try:
        if op == dist.ReduceOp.AVG:
            dist.all_to_all([torch.empty(1)] * size, [torch.empty(2)] * size)
        else:
            dist.all_reduce(torch.ones(2), op=op)  # not of real numbers
    except RuntimeError as error:
        print("said", error)
    else:
        raise AssertionError(op)
assert time.monotonic() - begin < 3
dist.all_reduce(torch.ones(1))  # the group is as good as before
"""


def test_a_mistake_is_told_at_once_and_spoils_nothing(ftrun: Ftrun) -> None:
    run(ftrun, REFUSED)


CALLBACK = """
from ftrun.worker.comm import collective_replay

def fail(tensor):
    raise TypeError("no bytes of this one")

collective_replay._packed = fail
try:
    dist.all_reduce(torch.ones(2))
except TypeError as error:
    assert str(error) == "no bytes of this one"
else:
    raise AssertionError("nothing was raised")
"""


def test_an_exception_in_a_callback_ends_the_collective_with_it(ftrun: Ftrun) -> None:
    run(ftrun, CALLBACK)


AGAIN = """
for round in range(3):
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        time.sleep(1.5)  # is not there
    else:
        begin = time.monotonic()
        try:
            FAILING
        except RuntimeError as error:
            print("said", round, type(error).__name__, error)
            assert time.monotonic() - begin < 10
        else:
            raise AssertionError("nobody else was there")
    dist.destroy_process_group()
    init(1 if round < 2 else 20)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size, total
"""
FAILING = {
    "world": "dist.all_reduce(torch.ones(1))",
    "subgroup": "dist.all_reduce(torch.ones(1), group=pair)",
    "reduce_scatter": "dist.reduce_scatter_tensor(torch.empty(1), torch.ones(size))",
    "receive": "dist.recv(torch.ones(1), 0)",
}


@pytest.mark.parametrize(
    "failing", [pytest.param(f, id=n, marks=() if n == "world" else pytest.mark.slow) for n, f in FAILING.items()]
)
def test_a_group_is_made_again_after_a_timeout(failing: str, ftrun: Ftrun) -> None:
    short = "dist.destroy_process_group(); init(1)\n"
    said = run(ftrun, short + AGAIN.replace("FAILING", failing))
    assert said.count("said") == 3, said


MANY = """
for round in range(40):
    dist.destroy_process_group(dist.new_group())  # nobody says a word in it: the fast do not cut off the slow
dist.all_reduce(torch.ones(1))
for round in range(3):
    alone = dist.new_group([rank], use_local_synchronization=True) if rank <= round else None  # counts of groups part
    dist.destroy_process_group()
    init()
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group())
    assert total.item() == size
"""


def test_groups_are_made_and_destroyed_many_times(ftrun: Ftrun) -> None:
    run(ftrun, MANY, 4)


FAILED = """
if rank == 0:
    time.sleep(1.5)
else:
    try:
        dist.new_group([0, 1], timeout=timedelta(seconds=1))
    except Exception as error:
        print("said", error)
    else:
        raise AssertionError("rank 0 was not there")
dist.destroy_process_group()
init()
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == size
"""


def test_a_group_that_could_not_be_made_leaves_no_trace(ftrun: Ftrun) -> None:
    assert "said" in run(ftrun, FAILED)
