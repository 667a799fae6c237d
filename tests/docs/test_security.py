"""SECURITY.md: each test that it names exists, and two that belong nowhere else."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from pathlib import Path

import pytest
import torch

import ftrun
from ftrun.core.errors import UsageError
from ftrun.worker.process.sharded_checkpoints import CheckpointPart, ShardedFolder
from tests.conftest import Ftrun, processes_of
from tests.docs.blocks import ROOT
from tests.test_documents import exists

TEXT = (ROOT / "SECURITY.md").read_text()
LISTENING = "0A"  # the state in /proc/net/tcp


def test_the_tests_that_it_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+)\.py::(\w+)`", TEXT)
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")][1:]
    assert len(named) >= len(rows) >= 10
    assert [name for path, name in named if not exists(f"{path.replace('/', '.')}.{name}")] == []
    assert [row for row in rows if "`tests/" not in row] == []


def listening(root: Path) -> set[str]:
    """Addresses, as /proc/net writes them, on which processes of the runs in `root` listen."""
    where = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING:
                    where[f"socket:[{words[9]}]"] = words[1].partition(":")[0]
    found = set()
    for pid in processes_of(root):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(where.get(os.readlink(f"/proc/{pid}/fd/{fd}")))
    return {address for address in found if address}


def test_a_run_on_one_node_listens_on_this_machine_only(ftrun: Ftrun) -> None:
    """Store, Gloo and metrics, while two ranks hold a group."""
    script = ftrun.script(
        "import os, time, torch, torch.distributed as dist\nimport ftrun\n"
        "dist.init_process_group('ftrun')\ndist.all_reduce(torch.ones(1))\nprint('connected', flush=True)\n"
        f"while not os.path.exists({str(ftrun.base)!r} + '/go'): time.sleep(0.01)\n"
    )
    run = ftrun.start("--nproc-per-node", 2, "--metrics-port", 0, script)
    run.wait_output("connected", 2)
    found = listening(ftrun.runs_root)
    (ftrun.base / "go").touch()
    assert run.wait() == 0, run.stderr
    assert found == {"0100007F"}, "127.0.0.1 and nothing else"


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("exploded",))


def test_a_checkpoint_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr("ftrun.worker.process.protect._job", None)
    job = ftrun.protect(model, optimizer)
    torch.save({"step": 1, "models": [Bomb()], "optimizers": [], "stateful": {}}, "bad.pt")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        job.load("bad.pt")
    assert not (tmp_path / "exploded").exists()
    job.save("good.pt", step=3)
    assert job.load("good.pt") == job.start_step == 3


@pytest.mark.parametrize("call", [os.mkdir, torch.save])  # the second is in a module that descriptions do name
def test_a_sharded_checkpoint_is_not_unpickled(tmp_path: Path, call: object) -> None:
    """torch.distributed.checkpoint itself reads its description of the tensors as a pickle."""
    exploded = tmp_path / "exploded"
    bomb = type("Bomb", (), {"__reduce__": lambda self: (call, (str(exploded),) if call is os.mkdir else (1, str(exploded)))})
    folder = ShardedFolder(tmp_path / "folder", 0, 1)
    folder.write(3, "a", CheckpointPart({}, {("step",): 3}))
    assert folder.load([], [], torch.device("cpu")) == (3, {})
    for name in (".metadata", "__0.metadata"):
        (tmp_path / "folder" / "step-3-of-1-a" / name).write_bytes(pickle.dumps(bomb()))
        with pytest.raises(UsageError, match=r"description of its tensors names (posix\.mkdir|torch\.serialization\.save)"):
            folder.load([], [], torch.device("cpu"))
        (tmp_path / "folder" / "step-3-of-1-a" / ".metadata").unlink(missing_ok=True)  # it is made anew from those of all ranks
    assert not exploded.exists()
