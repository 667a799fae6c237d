"""Every Python block of README and docs runs: under plain Python, and (slow) under ftrun with a rank killed in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, blocks
from tests.e2e import harness

PRELUDE = (ROOT / "tests" / "docs" / "prelude.py").read_text()
BLOCKS = blocks("python")
OWN_GROUP = 'dist.init_process_group("ftrun")\n'
# One interpreter that has torch; each script in a child of its own: stdin holds their paths.
RUNNER = """
import os, runpy, sys
import torch, torch.distributed, torch.nn.parallel, torch.utils.data
torch.optim.SGD([torch.zeros(1)])  # imports torch._dynamo
failed = 0
for path in sys.stdin.read().split():
    if not (pid := os.fork()):
        os.chdir(os.path.dirname(path))
        code = 1
        try:
            runpy.run_path(path, run_name="__main__")
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    code = os.waitpid(pid, 0)[1]
    print("ran", path, code, flush=True)
"""


def script(block: Block) -> str:
    """A block with what it takes for granted; the README's, which is whole, with fewer steps."""
    if block.page == "README.md":
        return block.text.replace("job.steps(5000)", "job.steps(200)")
    prelude = PRELUDE
    if OWN_GROUP in block.text:  # it shows the lines that the prelude has
        prelude = PRELUDE.partition(OWN_GROUP)[0] + PRELUDE.partition(OWN_GROUP)[2].replace(
            "ddp = DistributedDataParallel(model)\n", ""
        )
        prelude = prelude.partition("sampler = ")[0] + "\n\ndef batch_for" + prelude.partition("\n\ndef batch_for")[2]
    return prelude + "\n" + block.text


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    harness.check_no_strays(tmp_path)


def test_blocks_run_under_plain_python(folder: Path) -> None:
    paths = []
    for block in BLOCKS:
        path = folder / block.name.replace("/", "-") / "script.py"
        path.parent.mkdir()
        path.write_text(script(block))
        paths.append(str(path))
    assert len(paths) >= 6
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input="\n".join(paths), env=harness.environment(folder), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    ended = dict(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ran "))
    assert ended == dict.fromkeys(paths, "0"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_block_survives_a_kill(folder: Path, block: Block) -> None:
    (folder / "train.py").write_text(script(block))
    (folder / "plan.toml").write_text(harness.kill(1, "backward", 5))
    command = [harness.tool("ftrun"), "--nproc-per-node", "2", "--fault-plan", "plan.toml", "train.py"]
    running = harness.start(folder, command)
    assert running.wait(90) == 0, running.output
    assert "rank 1 died in backward of " in running.output
    assert "bit-identical to an uninterrupted run: yes" in running.output
