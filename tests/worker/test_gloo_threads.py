"""Gloo's threads call into Python at the end of each collective: they stay known to the interpreter in between."""

from __future__ import annotations

from tests.conftest import Ftrun

CALLS = 12
SCRIPT = f"""
import threading
import torch, torch.distributed as dist

dist.init_process_group("ftrun")
main, here = threading.get_ident(), threading.local()

def called(future):
    assert threading.get_ident() != main
    here.calls = getattr(here, "calls", 0) + 1  # lives as long as the thread's state does
    if here.calls == 1:
        print("met a thread", flush=True)

for i in range({CALLS}):
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.get_future().add_done_callback(called)  # before the other rank lets it end
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(4))
"""


def test_a_thread_of_gloos_keeps_its_python_state_over_collectives(ftrun: Ftrun) -> None:
    run = ftrun.start("--nproc-per-node", 2, ftrun.script(SCRIPT))
    assert run.wait() == 0, run.stdout + run.stderr
    met = run.stdout.count("met a thread")
    assert 1 <= met <= 2, f"{met} new thread states in {CALLS} collectives, and Gloo has 2 threads for a device"
