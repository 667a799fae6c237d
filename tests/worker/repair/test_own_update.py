"""The update of a dead rank that has no replica: made where it is known which one it is, and in no other case.

A run that is repaired ends on the bits of torchrun, or it ends with the option that would have helped.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import injected
from tests.e2e import harness
from tests.truth.harness import PRELUDE, RANKS, Seen, by_torch

SPARSE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rest = nn.Embedding(50, 6, sparse=True), net()
    def forward(self, places):
        return self.rest(self.table(places))
model = Model()
opts = [torch.optim.SparseAdam(model.table.parameters(), lr=0.01), torch.optim.SGD(model.rest.parameters(), lr=0.1)]
job = ftrun.protect(model, opts)
for step in job.steps(STEPS):
    with step:
        generator = torch.Generator().manual_seed(10 * step.index + rank)
        loss = model(torch.randint(0, 50, (8,), generator=generator)).square().mean(); loss.backward()
        dist.all_reduce(loss.detach())
        if step.index % 3 != 2:
            for opt in opts: opt.step()
        model.zero_grad()
end(model=model, opts=opts)
"""
HEAD = """
models = [net()]
opts = [torch.optim.AdamW(models[0].parameters(), lr=0.01)]
if rank == world - 1:
    models.append(nn.Linear(2, 2)); opts.append(torch.optim.SGD(models[1].parameters(), lr=0.1))
job = ftrun.protect(models, opts)
for step in job.steps(STEPS):
    with step:
        x, y = data(step.index)
        for model in models: x = model(x)
        loss = loss_of(x, y); loss.backward()
        dist.all_reduce(loss.detach())
        for opt in opts: opt.step()
        for opt in opts: opt.zero_grad()
end(models=models, opts=opts)
"""
TURNS = SPARSE.replace("for opt in opts: opt.step()", "for opt in opts[: 1 + step.index % 2]: opt.step()")
SECOND = """
model = net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model, opt)
for step in job.steps(STEPS):
    with step:
        x, y = data(step.index)
        loss = loss_of(model(x), y); loss.backward()
        dist.all_reduce(loss.detach())
        if rank == 3 or step.index % 2 == 0: opt.step()
        opt.zero_grad()
end(model=model, opt=opt)
"""
CLAMP = """
model = nn.Linear(6, 2, bias=False)
nn.init.zeros_(model.weight)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model, opt)
for step in job.steps(STEPS):
    with step:
        pull = (1.0 if step.index <= 3 else -0.1) * (1.0 if rank == 2 else 1e-3)
        loss = -(model.weight.sum() * pull); loss.backward()
        dist.all_reduce(loss.detach())
        opt.step()
        with torch.no_grad(): model.weight.clamp_(-0.35, 0.35)
        opt.zero_grad()
end(model=model)
"""


def killed(folder: Path, source: str, pauses: str) -> Seen:
    """The script with a rank that dies at its gate, while the others go on."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "script.py"
    script.write_text(PRELUDE + source)
    line = harness.script_command(folder, script, (), (), ranks=RANKS, options=["--max-replacements", "10"])
    env = {"TRUTH_OUT": str(folder / "out"), **injected.env(pauses, path=harness.ROOT)}
    outcome = harness.finish(harness.start(folder, line, env), ranks=0, timeout=120)
    files = {r: folder / "out" / f"{r}.json" for r in range(RANKS)}
    return Seen(outcome.code, {r: json.loads(f.read_text()) for r, f in files.items() if f.exists()}, outcome.output)


def test_sparse_gradients_outlive_a_death_at_the_gate(tmp_path: Path) -> None:
    """Of two optimizers that step together, and not in every body; and a death at the gate behind the last body, which nothing follows."""
    seen = killed(tmp_path / "ours", SPARSE, "pass:4:1,pass:7:3,pass:12:2")
    assert seen.answer == "yes" and len(re.findall(r"died at (the gate of step|the end of the loop)", seen.output)) == 3, seen.output
    assert seen.output.count("made from the gradients that it had sealed") >= 2, seen.output
    assert seen.ranks == by_torch(tmp_path / "stock", tmp_path / "ours" / "script.py").ranks, seen.output


@pytest.mark.parametrize(
    ("source", "pauses"),
    [
        (HEAD, "pass:4:3"),
        pytest.param(HEAD, "pass:0:3", marks=pytest.mark.slow),
        pytest.param(SECOND, "pass:5:3", marks=pytest.mark.slow),
        pytest.param(TURNS, "pass:4:1", marks=pytest.mark.slow),
        (CLAMP, "pass:3:2"),
    ],
    ids=["one optimizer more", "one more, in the first step", "another rhythm", "not always both", "a clamp that has not bitten"],
)
def test_an_update_that_the_other_ranks_do_not_tell_is_not_made(tmp_path: Path, source: str, pauses: str) -> None:
    seen = killed(tmp_path, source, pauses)
    assert seen.code == 75 and "take host snapshots (--snapshot-every" in seen.output, seen.output
    assert " takes over rank " not in seen.output and not seen.ranks, seen.output


@pytest.mark.slow
def test_a_write_that_shows_only_later_makes_an_earlier_repair_doubtful(tmp_path: Path) -> None:
    """Through `.data`, where torch counts no writes."""
    seen = killed(tmp_path, CLAMP.replace("weight.clamp_", "weight.data.clamp_"), "pass:3:2")
    assert seen.code == 0 and seen.answer == "not known" and "the dead rank may have done so, too" in seen.output, seen.output
