"""The user's program in its module `__main__`: files, folders, packages, what outlives the last line, groups of stock torch."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import Ftrun

# everything that needs `__main__` after the last line has run, and the script's path after a chdir
LIVES_ON = """
import atexit, inspect, json, os, pickle, sys, threading
os.chdir("/")

class Thing:
    pass

def late(when):
    copy = pickle.loads(pickle.dumps(Thing()))
    print(when, type(copy) is Thing, sys.modules["__main__"].__dict__ is globals(), flush=True)

def linger():
    threading.main_thread_is_done.wait(10)
    late("thread")

threading.main_thread_is_done = threading.Event()
atexit.register(late, "atexit")
threading.Thread(target=linger).start()
print("file", __file__, inspect.getsource(Thing).strip().replace("\\n", ""), flush=True)
threading.Timer(0.3, threading.main_thread_is_done.set).start()
"""
GROUP = """
import os, sys, torch, torch.distributed as dist
if sys.argv[1] == "env://":
    dist.init_process_group("gloo", init_method="env://")
else:
    where = "tcp://" + os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
    dist.init_process_group("gloo", init_method=where, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
t = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(t)
print("sum", t.item(), dist.get_backend(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("start", ["forkserver", "exec"])
def test_the_module_stays_until_the_end(ftrun: Ftrun, start: str) -> None:
    ftrun.script(LIVES_ON)
    run = ftrun.start("--spares=0", f"--worker-start={start}", "train.py")
    assert run.wait() == 0, run.stderr
    lines = [line.removeprefix("[rank 0] ") for line in run.stdout.splitlines()]
    assert lines == [f"file {ftrun.base}/train.py class Thing:    pass", "thread True True", "atexit True True"]


@pytest.mark.parametrize("start", ["forkserver", "exec"])
def test_idle_threads_of_an_executor_do_not_hold_up_the_end(ftrun: Ftrun, start: str) -> None:
    """Few scripts shut theirs down, and torch.compile has one: Python ends such threads before it waits for others."""
    ftrun.script(
        "import atexit\nfrom concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\n"
        "atexit.register(print, 'atexit')\nprint(pool.submit(int, '3').result())\n"
        "last = pool.submit(lambda: (__import__('time').sleep(0.3), print('late', flush=True)))\n"
    )
    run = ftrun.start("--spares=0", f"--worker-start={start}", "train.py")
    assert run.wait() == 0, run.stderr
    assert [line.removeprefix("[rank 0] ") for line in run.stdout.splitlines()] == ["3", "late", "atexit"]


@pytest.mark.slow
def test_folder_package_and_relative_path(ftrun: Ftrun) -> None:
    """`ftrun folder`, `ftrun -m package` and `ftrun -m package.part`."""
    for name in ("folder", "package"):
        (ftrun.base / name).mkdir()
    show = "import json, sys\nprint('S' + json.dumps([sys.argv, __name__, __package__, sys.path[0]]))\n"
    ftrun.script("", "package/__init__.py")
    for name in ("folder/__main__.py", "package/__main__.py", "package/part.py"):
        ftrun.script(show, name)
    base = str(ftrun.base)
    for words, seen in {
        ("folder",): (["folder", "x"], "__main__", "", "folder"),
        ("-m", "package"): ([f"{base}/package/__main__.py", "x"], "__main__", "package", base),
        ("-m", "package.part"): ([f"{base}/package/part.py", "x"], "__main__", "package", base),
    }.items():
        run = ftrun.start("--spares=0", *words, "x")
        assert run.wait() == 0, run.stderr
        found = json.loads(re.findall(r"S(\[.*\])", run.stdout)[0])
        assert tuple(found) == seen


@pytest.mark.slow
def test_modules_that_cannot_be_run(ftrun: Ftrun) -> None:
    (ftrun.base / "package").mkdir()
    ftrun.script("", "package/__init__.py")
    ftrun.script("import no_such_library\n", "broken.py")
    for name, message in {
        "package.such": "No module named package.such",
        "package": "'package' is a package and cannot be directly executed",
        "broken": "No module named 'no_such_library'",
    }.items():
        run = ftrun.start("--spares=0", "--max-restarts=0", "-m", name)
        assert run.wait() == 1
        assert message in run.stderr


@pytest.mark.parametrize("method", ["env://", "tcp://"])
def test_stock_gloo(ftrun: Ftrun, method: str) -> None:
    run = ftrun.start("--nproc-per-node=2", ftrun.script(GROUP), method)
    assert run.wait() == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [f"[rank {rank}] sum 3.0 gloo" for rank in (0, 1)]


def test_a_script_that_is_a_link_finds_what_lies_beside_the_real_file(ftrun: Ftrun) -> None:
    real, links = ftrun.base / "real", ftrun.base / "links"
    real.mkdir()
    links.mkdir()
    (real / "beside.py").write_text("FOUND = 'beside the real file'\n")
    (links / "beside.py").write_text("FOUND = 'beside the link'\n")
    (real / "linked.py").write_text("import beside\nprint(beside.FOUND, flush=True)\n")
    (links / "linked.py").symlink_to(real / "linked.py")
    run = ftrun.start("--nproc-per-node", 1, "--spares", 0, links / "linked.py")
    assert run.wait() == 0, run.stderr
    assert "beside the real file" in run.stdout


# no protect(): ftrun cannot know what a step is, but an optimizer can tell that it took one
TRAINS = """
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("ftrun")
opt = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
dist.all_reduce(torch.ones(1))
if sys.argv[1] == "stepped":
    opt.step()
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
print("came to the end", flush=True)
"""


@pytest.mark.parametrize(("how", "asked", "again"), [("stepped", 0, False), ("stepped", 1, True), ("begun", 0, True)])
def test_what_was_learned_is_thrown_away_only_if_that_was_asked_for(
    ftrun: Ftrun, how: str, asked: int, again: bool
) -> None:
    script = ftrun.script(TRAINS)
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, "--max-restarts", asked, script, how)
    assert run.wait() == (0 if again else 1), run.stderr
    assert run.stdout.count("came to the end") == (2 if again else 0)
    stepped = [line for line in run.journal() if line.get("event", {}).get("kind") == "Stepped"]
    assert bool(stepped) == (how == "stepped")
    if not again:
        assert "ftrun did not retry: no restart is allowed (--max-restarts 0)" in run.stderr
