"""A training loop as people write them, and what ftrun must answer after a kill. The rule above all: never a false "yes".

Answers: `yes`, `not known`, `no`, `lost` (nobody has the state: exit 1 with the option that would help), `refused`
(exit 2 in a clean run as well), `error` (the script's own, as under torchrun). `A or B`: either is right.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.e2e.harness import kill

STD = """
ddp = DDP(net()); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)
job = ftrun.protect(model=ddp, optimizer=opt)
"""
SGD = STD.replace("AdamW(ddp.parameters(), lr=0.01)", "SGD(ddp.parameters(), lr=0.1, momentum=0.9)")
END = "end(model=ddp, opt=opt)"
LEARN = "loss = loss_of(ddp(x), y); loss.backward(); opt.step(); opt.zero_grad()"
METER = "class Meter:\n    def __init__(s): s.n = 0.0\n    def state_dict(s): return {'n': s.n}\n    def load_state_dict(s, d): s.n = d['n']\nmeter = Meter()\nddp = DDP(net()); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)\njob = ftrun.protect(model=ddp, optimizer=opt, meter=meter)"
LOADER = STD + "loader = DataLoader(TensorDataset(*data(0, 8 * STEPS)), batch_size=8)\n"
SCALER = "scaler = torch.amp.GradScaler('cpu', init_scale=4.0, growth_interval=3)\n"


@dataclass(frozen=True)
class Pattern:
    """`often`: runs in every `make test`; the others in `make truth`. `named`: what a closing line "not known" must name."""

    what: str
    answer: str
    source: str
    kill: tuple[str, int, int]  # phase, step, rank
    often: bool = False
    then: str = ""  # another fault
    named: str = ""

    @property
    def faults(self) -> list[str]:
        phase, step, rank = self.kill
        return [one for one in (kill(rank, phase, step), self.then) if one] if phase else []


def _source(setup: str, body: str, after: str, loop: str) -> str:
    lines = body.strip("\n").splitlines()
    return "\n".join([setup.strip(), loop, "    with step:", *(f"        {line}" for line in lines), after, ""])


PATTERNS: dict[str, Pattern] = {}


def add(
    name: str,
    what: str,
    answer: str,
    body: str,
    *,
    setup: str = STD,
    after: str = END,
    at: str = "forward",
    step: int = 6,
    rank: int = 2,
    often: bool = False,
    loop: str = "for step in job.steps(STEPS):",
    batch: bool = True,
    between: str = "",
    then: str = "",
    named: str = "",
) -> None:
    head = "x, y = data(step.index)\n" if batch else ""
    after = f"    {between}\n{after}" if between else after
    PATTERNS[name] = Pattern(what, answer, _source(setup, head + body, after, loop), (at, step, rank), often, then, named)
