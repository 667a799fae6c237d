"""What a worker has imported before its script changes nothing: the script sees what `python -u script` would show it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Ftrun, Run
from tests.e2e.harness import tool

# a package of the script's that has what others want of the module, and something of its own
PLATFORM = """
import importlib.util, os, sysconfig
_spec = importlib.util.spec_from_file_location("_platform", os.path.join(sysconfig.get_paths()["stdlib"], "platform.py"))
_known = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_known)
globals().update({name: value for name, value in vars(_known).items() if not name.startswith("__")})
"""
SEES = """
import sys
print("torch" in sys.modules)
import bisect, platform, statistics
print(bisect.__file__, statistics.__file__, statistics.mean([1, 2]), platform.__file__)
import random
print("in the library:", random._bisect is bisect.bisect)
import torch, profile, pydoc
print("in torch:", torch.platform is platform, pydoc.platform is platform, hasattr(profile, "run"), sys.path[0])
"""


def printed(run: Run) -> str:
    """What rank 0 of a run that ends well says."""
    assert run.wait(110) == 0, run.stderr
    return "".join(line.partition("] ")[2] + "\n" for line in run.stdout.splitlines() if line.startswith("[rank 0] "))


@pytest.mark.parametrize(
    "argv", [["src/train.py"], *(pytest.param(words, marks=pytest.mark.slow) for words in (["-m", "pkg.mod"], ["src"]))]
)
def test_the_scripts_own_modules_come_first(ftrun: Ftrun, argv: list[str]) -> None:
    """Also for torch and the library, also those that ftrun itself has imported, also packages."""
    folder = ftrun.base if argv[0] == "-m" else ftrun.base / "src"
    (folder / "platform").mkdir(parents=True)
    (folder / "platform" / "__init__.py").write_text(PLATFORM)
    (folder / "profile").mkdir()  # no package: it hides nothing
    (folder / "statistics.py").write_text("def mean(numbers): return 'mine'\n")
    (folder / "bisect.py").write_text("from _bisect import *\nbisect = bisect_right\n")
    (ftrun.base / "pkg").mkdir()
    for file in (ftrun.base / "pkg" / "mod.py", folder / "train.py", folder / "__main__.py"):
        file.write_text(SEES)
    first = argv[0] if argv == ["src"] else folder
    files = [f"{folder}/bisect.py", f"{folder}/statistics.py mine", f"{folder}/platform/__init__.py"]
    run = ftrun.start("--spares", 0, *argv)
    wanted = f"False\n{' '.join(files)}\nin the library: True\nin torch: True True True {first}\n"
    assert printed(run) == wanted
    assert run.stderr.count("modules of the script's are called bisect, platform, statistics; so each worker starts as") == 1


@pytest.mark.slow
def test_a_folder_that_the_script_puts_first(ftrun: Ftrun) -> None:
    """Nobody knows of it before the script runs; what it shadows there is the script's all the same, and torch's."""
    (ftrun.base / "src").mkdir()
    (ftrun.base / "src" / "statistics.py").write_text("def mean(numbers): return 'mine'\n")
    script = ftrun.script(
        "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'src'))\n"
        "import statistics\nprint('sees', statistics.mean([1]))\nimport torch.optim, decimal, numpy\n"
        "print('then', statistics is sys.modules['statistics'], torch.__spec__.name, decimal.__spec__.loader.name, numpy.add(1, 1))\n"
    )
    run = ftrun.start("--spares", 0, script)
    # what stands above the import of torch is done again
    assert printed(run) == "sees mine\nsees mine\nthen True torch decimal 2\n"
    assert "the script has modules called statistics before it imports torch, which a forked worker has done already" in run.stderr


SETS = """
import os
{how}
import torch, torch.distributed as dist
import logging
level = logging.getLogger("torch._dynamo").getEffectiveLevel()
print(torch.get_num_threads(), dist.get_debug_level().name, level, torch.jit._state._enabled.enabled)
"""
VARIABLES = {"OMP_NUM_THREADS": "2", "TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_LOGS": "+dynamo", "PYTORCH_JIT": "0"}
SAYS = "2 INFO 10 False\n"


@pytest.mark.slow
def test_variables_above_the_import_of_torch(ftrun: Ftrun) -> None:
    """Seen in the script's text: the worker starts as a fresh interpreter, and each line of the script runs once."""
    how = "print('begins')\n" + "".join(f"os.environ[{name!r}] = {value!r}\n" for name, value in VARIABLES.items())
    run = ftrun.start("--spares", 0, ftrun.script(SETS.format(how=how)))
    assert printed(run) == f"begins\n{SAYS}"
    assert "the script may set OMP_NUM_THREADS, TORCH_DISTRIBUTED_DEBUG, TORCH_LOGS, PYTORCH_JIT above its import" in run.stderr


def test_variables_that_something_else_sets(ftrun: Ftrun) -> None:
    """The script's text does not say so: found at the import of torch."""
    ftrun.script(f"import os\nos.environ.update({VARIABLES!r})\nos.chdir('/')\n", "settings.py")
    how = "print('begins', os.getcwd(), 'TORCH_LOGS' in os.environ)\nimport settings"
    run = ftrun.start("--spares", 0, ftrun.script(SETS.format(how=how)))
    assert printed(run) == f"begins {ftrun.base} False\n" * 2 + SAYS
    assert "sets OMP_NUM_THREADS, PYTORCH_JIT, TORCH_DISTRIBUTED_DEBUG, TORCH_LOGS before it imports torch" in run.stderr
    assert not [line for line in run.journal() if line.get("event", {}).get("kind") == "Died"]


def test_variables_that_change_nothing(ftrun: Ftrun) -> None:
    """Those that nobody reads at an import, or that are set to what they were: the worker stays a fork."""
    how = "os.environ.update(WANDB_MODE='off', NCCL_DEBUG='WARN', CUDA_VISIBLE_DEVICES='0', OMP_NUM_THREADS='1')"
    script = ftrun.script(SETS.format(how=how) + "print(os.environ['NCCL_DEBUG'])\n")
    run = ftrun.start("--spares", 0, script, OMP_NUM_THREADS="1")
    assert printed(run) == "1 OFF 30 True\nWARN\n"
    assert "fresh interpreter" not in run.stderr


TRAINS = """
import os, sys
import settings
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
FT = sys.argv[1] == "ftrun"
dist.init_process_group(sys.argv[1])
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(dist.get_rank())
def work():
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if FT:
    import ftrun
    for step in ftrun.protect(model=model, optimizer=optimizer).steps(12):
        with step:
            work()
else:
    for step in range(12):
        work()
total = sum(p.double().sum().item() for p in model.parameters())
print(f"END {dist.get_rank()} {torch.get_num_threads()} {total.hex()}\\n", end="")  # in one piece: both ranks write into one pipe
"""
PLAN = """
[[fault]]
kind = "kill"
rank = 1
step = 3
at = "backward"
[[fault]]
kind = "kill"
rank = 0
step = 7
at = "update"
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_workers_that_began_anew_are_repaired(ftrun: Ftrun) -> None:
    """Beginning anew is no death, and a replacement is a fresh interpreter as well."""
    ftrun.script("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nprint('BEGINS')\n", "settings.py")
    script = ftrun.script(TRAINS)
    command = [tool("torchrun"), "--standalone", "--nproc-per-node", "2", str(script), "gloo"]
    done = subprocess.run(command, cwd=ftrun.base, env=ftrun.env, capture_output=True, text=True, timeout=120, check=False)
    wanted = sorted(line[line.index("END") :] for line in done.stdout.splitlines() if "END" in line)
    assert len(wanted) == 2, done.stderr
    (ftrun.base / "plan.toml").write_text(PLAN)
    run = ftrun.start("--spares", 1, "--nproc-per-node", 2, "--fault-plan", ftrun.base / "plan.toml", script, "ftrun")
    assert run.wait(240) == 0, run.stderr
    assert sorted(line[line.index("END") :] for line in run.stdout.splitlines() if "END" in line) == wanted
    died = [line["event"]["worker"] for line in run.journal() if line.get("event", {}).get("kind") == "Died"]
    assert died[:2] == [1, 0] and not {0, 1, 2} & {*died[2:]} and "2 incidents" in run.stderr
    # both ranks twice; who replaces them began once, or twice as the first spare
    assert run.stdout.count("BEGINS") <= 2 * 2 + 2 + 1 + 1 and run.stderr.count("the script sets OMP_NUM_THREADS") == 1


def test_the_process_looks_as_under_torchrun(ftrun: Ftrun) -> None:
    """ps and pgrep -f find it by its script and arguments, of a fork and of a fresh interpreter, however long they are."""
    long = "x" * 3000
    script = ftrun.script(
        "import os, subprocess, sys\n"
        "print(sys.orig_argv == [sys.executable, '-u', *sys.argv], os.environ['FTRUN_RUN_DIR'] != '')\n"
        "print(subprocess.run(['ps', '-ww', '-o', 'args=', '-p', str(os.getpid())], capture_output=True, text=True).stdout)\n"
        "print(open('/proc/self/environ').read().count('FTRUN_RUNS_ROOT='))\n"
    )
    for how, words in (("forkserver", ["--lr", "0.1"]), ("forkserver", [long]), ("exec", [long])):
        run = ftrun.start("--spares", 0, "--worker-start", how, script, *words, logs=False)
        assert printed(run) == f"True True\n{' '.join([sys.executable, '-u', str(script), *words])}\n\n1\n"


@pytest.mark.parametrize("how", ["forkserver", "exec"])
def test_a_long_command_line_and_a_large_environment(ftrun: Ftrun, how: str) -> None:
    script = ftrun.script(
        "import os, sys\nprint(len(sys.argv), sum(map(len, sys.argv[1:])), sum(len(os.environ[f'V{i}']) for i in range(8)))\n"
    )
    variables = {f"V{i}": "v" * 100_000 for i in range(8)}
    run = ftrun.start("--spares", 0, "--worker-start", how, script, *["a" * 100_000] * 4, *map(str, range(20_000)), **variables)
    assert printed(run) == "20005 488890 800000\n"


def test_an_environment_that_no_process_can_be_started_with(ftrun: Ftrun) -> None:
    """A few bytes below what Linux allows: ftrun was started, and its workers, which get some more, cannot be."""
    script = ftrun.script("print('ran')\n")
    command = ftrun.command("--spares", 0, script)

    def filled(size: int) -> dict[str, str]:
        return ftrun.env | {f"V{at}": "v" * min(100_000, size - at) for at in range(0, size, 100_000)}

    low, high = 100_000, 8_000_000  # what fits, and what does not
    while high - low > 20:
        size = (low + high) // 2
        try:
            subprocess.run(["/bin/true", *command[1:]], env=filled(size), check=True)
            low = size
        except OSError:
            high = size
    done = subprocess.run(command, cwd=ftrun.base, env=filled(low - 100), capture_output=True, text=True, timeout=60)
    assert done.returncode == 69 and "Traceback" not in done.stderr, done.stderr
    assert "ftrun: error: the environment is too large to start a process with: its " in done.stderr
    assert "[ftrun explain F201]" in done.stderr


NOWHERE = "No module named pkg.nope"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pkg.nope", NOWHERE),
        ("pkg", "No module named pkg.__main__; 'pkg' is a package and cannot be directly executed"),
        ("pkg.bad", None),
        ("pkg.broken.mod", None),
    ],
)
def test_a_module_that_cannot_be_run(ftrun: Ftrun, name: str, says: str | None) -> None:
    """As Python says it, without a line of how we run it."""
    (ftrun.base / "pkg" / "broken").mkdir(parents=True)
    (ftrun.base / "pkg" / "__init__.py").touch()
    (ftrun.base / "pkg" / "bad.py").write_text("print(1)\nx = = 3\n")
    (ftrun.base / "pkg" / "broken" / "__init__.py").write_text("import no_such_thing\n")
    run = ftrun.start("--spares", 0, "-m", name)
    assert run.wait() == 1
    if says is None:
        done = subprocess.run(
            [sys.executable, "-m", name], cwd=ftrun.base, env=ftrun.env, capture_output=True, text=True, timeout=60, check=False
        )
        says = done.stderr.splitlines()[-1]
        assert says.startswith(("SyntaxError", "ModuleNotFoundError"))
    else:
        says = f"[rank 0] {sys.executable}: {says}\n"
        assert "Traceback" not in run.stderr
    assert says in run.stderr
    root = str(Path(__file__).resolve().parents[3] / "ftrun")
    assert root not in run.stderr, run.stderr


def test_what_the_script_sets_once_torch_is_there_is_its_own_affair(ftrun: Ftrun) -> None:
    """By then it may have made its process group; what torch imports later begins nothing anew."""
    script = ftrun.script(
        "import os, torch\nprint('once')\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = f'/tmp/mine-{os.environ[\"RANK\"]}'\n"
        "import sympy\nprint('end', sympy.Integer(2) + 1)\n"
    )
    assert printed(ftrun.start("--spares", 0, script)) == "once\nend 3\n"
