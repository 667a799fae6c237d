"""A program that is an installed package keeps its variables as a script does; what libraries beside it remember is theirs."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import kill
from tests.truth import harness as truth

_PROGRAM = """
from tests.truth.prelude import *
from prog import settings
from lib import remember
class Trainer:
    def __init__(self): self.n = 0
def main():
    ddp = DDP(net()); opt = torch.optim.SGD(ddp.parameters(), lr=0.1); trainer = Trainer(); rate = 0.1
    job = ftrun.protect(ddp, opt)
    for step in job.steps(STEPS):
        with step:
            x, y = data(step.index)
            trainer.n += 1; rate *= 0.9; settings.calls += 1
            opt.param_groups[0]["lr"] = rate / trainer.n + settings.calls / 100
            loss = loss_of(ddp(x), y); loss.backward()
            remember(loss.item())
            opt.step(); opt.zero_grad()
    end(model=ddp, opt=opt, n=trainer.n, rate=rate, calls=settings.calls)
"""
_LIBRARY = "last = None\nseen = []\ndef remember(value):\n    global last\n    last = value\n    seen.append(open('/dev/null'))\n"


@pytest.fixture
def installed(folder: Path) -> Path:
    """A folder that packages were installed to."""
    place = folder / "installed"
    for name in ("prog", "lib", "prog-1.0.dist-info"):
        (place / name).mkdir(parents=True)
    (place / "prog" / "__init__.py").touch()
    (place / "prog" / "settings.py").write_text("calls = 0\n")
    (place / "prog" / "training.py").write_text(_PROGRAM)
    (place / "prog" / "__main__.py").write_text("from prog.training import main\nmain()\n")
    (place / "lib" / "__init__.py").write_text(_LIBRARY)
    return place


def test_an_installed_package_keeps_its_variables(installed: Path, folder: Path) -> None:
    paths = {"PYTHONPATH": f"{installed}:{harness.ROOT}"}
    command = ["-m", "prog"]
    stock = truth._seen(harness.by_torch(folder / "stock", command, 0, truth._environment(folder / "stock", paths)), 4)
    line = harness.script_command(folder, Path("prog"), (), [kill(2, "update", 6), kill(1, "backward", 8)], options=["-m"])
    killed = truth._seen(harness.finish(harness.start(folder, line, truth._environment(folder, paths)), ranks=0), 4)
    assert stock.code == killed.code == 0, killed.output
    assert killed.answer == "yes" and killed.ranks == stock.ranks, killed.output
    assert len(stock.ranks) == 4 and "not kept" not in killed.output and "lib" not in killed.output.split(), killed.output


def test_what_belongs_to_the_program(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftrun.worker.link import callers

    def main(file: str, package: str | None = None, **more: object) -> None:
        module = types.ModuleType("__main__")
        vars(module).update(__file__=file, __package__=package, **more)
        monkeypatch.setitem(sys.modules, "__main__", module)

    monkeypatch.setattr(sys, "path", ["/project", str(installed), *sys.path[1:]])
    training, library = str(installed / "prog" / "training.py"), str(installed / "lib" / "__init__.py")
    main("/project/train.py")
    assert all(map(callers.is_script, ("/project/train.py", "/project/parts/model.py", "/elsewhere/src/own.py")))
    assert not callers.is_script(training) and not callers.is_script(library) and not callers.is_script(json.__file__)

    main(str(installed / "prog" / "__main__.py"), "prog")
    package = types.ModuleType("prog")
    package.__path__ = [str(installed / "prog")]
    monkeypatch.setitem(sys.modules, "prog", package)
    assert callers.is_script(training) and not callers.is_script(library)

    monkeypatch.setattr(callers, "_COMMANDS", "/environment/bin/")
    function = types.FunctionType((lambda: None).__code__, {"__name__": "prog.training"}, "main")
    function.__module__ = "prog.training"
    main("/environment/bin/prog", None, main=function)
    assert callers.is_script(training) and not callers.is_script(library)

    monkeypatch.setattr(callers, "_LIBRARIES", (str(installed) + "/",))
    main(training)  # called by its path
    assert callers.is_script(training) and callers.is_script(str(installed / "prog" / "settings.py")) and not callers.is_script(library)
