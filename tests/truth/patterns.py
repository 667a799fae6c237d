"""Training loops as people write them, and what ftrun must answer after a kill. The rule above all: never a false "yes".

Answers: `yes`, `protected state only`, `no`, `lost` (nobody has the state: exit 1 with the option that would help), `refused`
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


@dataclass(frozen=True)
class Pattern:
    """`often`: runs in every `make test`; the others in `make truth`."""

    what: str
    answer: str
    source: str
    kill: tuple[str, int, int]  # phase, step, rank
    often: bool = False
    then: str = ""  # another fault

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
) -> None:
    head = "x, y = data(step.index)\n" if batch else ""
    after = f"    {between}\n{after}" if between else after
    PATTERNS[name] = Pattern(what, answer, _source(setup, head + body, after, loop), (at, step, rank), often, then)


# ---- what is right, and must be called so ----

for phase in ("forward", "backward", "gate", "update", "idle"):
    add(f"plain-{phase}", f"a plain loop, killed at {phase}", "yes", LEARN, at=phase, often=phase == "update")
add("sgd-momentum", "SGD with momentum", "yes", LEARN, setup=SGD, at="update")
GIVEN = "ddp = DDP(net()); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)\n"
SCHEDULED = GIVEN + "sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)\njob = ftrun.protect(ddp, opt, sched)"
add(
    "scheduler-given",
    "a scheduler given to protect(), stepped after the update",
    "yes",
    LEARN + "; sched.step()",
    setup=SCHEDULED,
    at="update",
    often=False,
)
add(
    "clipping",
    "gradients are clipped",
    "yes",
    "loss = loss_of(ddp(x), y); loss.backward()\nnn.utils.clip_grad_norm_(ddp.parameters(), 0.1)\nopt.step(); opt.zero_grad()",
    at="backward",
)
add(
    "accumulation",
    "two backwards a step, the first under no_sync",
    "yes",
    "with ddp.no_sync():\n    loss_of(ddp(x[:4]), y[:4]).backward()\nloss_of(ddp(x[4:]), y[4:]).backward(); opt.step(); opt.zero_grad()",
    at="backward",
)
add(
    "dropout",
    "dropout draws from torch's stream",
    "yes",
    LEARN,
    setup=STD.replace("net()", "net(nn.Dropout(0.5))"),
    at="backward",
)
add(
    "batchnorm",
    "BatchNorm's running statistics",
    "yes",
    LEARN,
    setup=STD.replace("net()", "net(nn.BatchNorm1d(8))"),
    after="end(model=ddp, opt=opt)",
    at="backward",
)
add(
    "tied",
    "two layers share their weight",
    "yes",
    LEARN,
    setup="class N(nn.Module):\n    def __init__(s):\n        super().__init__(); s.a = nn.Linear(6, 6); s.b = nn.Linear(6, 6); s.b.weight = s.a.weight; s.c = nn.Linear(6, 2)\n    def forward(s, x): return s.c(s.b(s.a(x).relu()))\nddp = DDP(N()); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)\njob = ftrun.protect(model=ddp, optimizer=opt)",
    at="update",
)
add(
    "streams",
    "numpy's and Python's global streams",
    "yes",
    "x = x + float(np.random.rand()) + random.random()\n" + LEARN,
    often=False,
)
add(
    "eval-inside",
    "eval() and train() within a body",
    "yes",
    "ddp.eval(); ddp(x).sum().item(); ddp.train()\n" + LEARN,
    setup=STD.replace("net()", "net(nn.Dropout(0.5))"),
    at="backward",
)
add(
    "mode-from-step-3",
    "a part goes to eval() at step 3 for good",
    "yes",
    "if step.index == 3: ddp.module[1].eval()\n" + LEARN,
    setup=STD.replace("net()", "net(nn.Dropout(0.5))"),
)
add(
    "group-added",
    "a parameter group is added at step 3",
    "yes",
    LEARN.replace("opt.zero", "ddp.zero")
    + "\nif step.index == 3: opt.add_param_group({'params': list(ddp.module[2].parameters()), 'lr': 0.05})",
    setup="ddp = DDP(net()); opt = torch.optim.SGD(ddp.module[0].parameters(), lr=0.1, momentum=0.9)\njob = ftrun.protect(model=ddp, optimizer=opt)",
    often=True,
)
add(
    "group-added-update",
    "the same, killed in the update",
    "yes",
    LEARN.replace("opt.zero", "ddp.zero")
    + "\nif step.index == 3: opt.add_param_group({'params': list(ddp.module[2].parameters()), 'lr': 0.05})",
    setup="ddp = DDP(net()); opt = torch.optim.SGD(ddp.module[0].parameters(), lr=0.1, momentum=0.9)\njob = ftrun.protect(model=ddp, optimizer=opt)",
    at="update",
)
add(
    "state-cleared",
    "the optimizer's state is cleared at step 5",
    "yes",
    LEARN + "\nif step.index == 5: opt.state.clear()",
)
add(
    "state-cleared-update",
    "the same, killed in the next update",
    "yes",
    LEARN + "\nif step.index == 5: opt.state.clear()",
    at="update",
)
add(
    "lr-by-step",
    "the learning rate is set by hand from step.index",
    "yes",
    "for g in opt.param_groups: g['lr'] = 0.1 / (1 + step.index)\n" + LEARN,
    at="update",
)
add(
    "generator-given",
    "a torch.Generator that protect() was given",
    "yes",
    "x = x + torch.randn(1, generator=gen)\n" + LEARN,
    setup="gen = torch.Generator().manual_seed(rank)\nddp = DDP(net()); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)\njob = ftrun.protect(ddp, opt, gen=gen)",
)
METER = "class Meter:\n    def __init__(s): s.n = 0.0\n    def state_dict(s): return {'n': s.n}\n    def load_state_dict(s, d): s.n = d['n']\nmeter = Meter()\nddp = DDP(net()); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)\njob = ftrun.protect(model=ddp, optimizer=opt, meter=meter)"
add(
    "meter-before",
    "a rank's own meter, given to protect(), written before the gate",
    "yes",
    "loss = loss_of(ddp(x), y); meter.n += loss.item(); loss.backward(); opt.step(); opt.zero_grad()",
    setup=METER,
    after="end(model=ddp, opt=opt, meter=meter)",
    at="update",
)
add(
    "two-models",
    "a GAN's two DDP models, one step each",
    "yes",
    "loss_of(ddp(x), y).backward(); loss_of(other(x), y).backward(); opt.step(); opt2.step(); opt.zero_grad(); opt2.zero_grad()",
    setup="ddp, other = DDP(net()), DDP(net()); opt = torch.optim.SGD(ddp.parameters(), lr=0.1); opt2 = torch.optim.AdamW(other.parameters())\njob = ftrun.protect(model=[ddp, other], optimizer=[opt, opt2])",
    after="end(model=ddp, other=other, opt=opt, opt2=opt2)",
    at="update",
)
add(
    "declared",
    "data parallelism by hand, declared by replicas=",
    "yes",
    "loss_of(ddp(x), y).backward()\nfor p in ddp.parameters(): dist.all_reduce(p.grad); p.grad /= world\nopt.step(); opt.zero_grad()",
    setup="ddp = net(); opt = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)\njob = ftrun.protect(ddp, opt, replicas=dist.group.WORLD)",
    at="update",
    often=False,
)
LOADER = STD + "loader = DataLoader(TensorDataset(*data(0, 8 * STEPS)), batch_size=8)\n"
EACH = "for step, (x, y) in job.batches(loader):"
add("batches", "job.batches over a DataLoader", "yes", LEARN, setup=LOADER, loop=EACH, batch=False)
add(
    "batches-spoilt",
    "the batch is written through numpy",
    "yes",
    "loss = loss_of(ddp(x), y); x.numpy()[:] = 0; loss.backward(); opt.step(); opt.zero_grad()",
    setup=LOADER,
    loop=EACH,
    batch=False,
    at="backward",
)
add(
    "batches-own-iter",
    "a DataLoader with its own __iter__",
    "yes",
    LEARN,
    setup=LOADER.replace(
        "loader = DataLoader",
        "class L(DataLoader):\n    def __iter__(s):\n        for x, y in super().__iter__(): yield x * 2, y\nloader = L",
    ),
    loop=EACH,
    batch=False,
    often=False,
)
add(
    "batches-epoch",
    "set_epoch(3) before job.batches",
    "yes",
    LEARN,
    setup=STD
    + "ds = TensorDataset(*data(0, 8 * STEPS * world)); sampler = DistributedSampler(ds); sampler.set_epoch(3)\nloader = DataLoader(ds, batch_size=8, sampler=sampler)\n",
    loop=EACH,
    batch=False,
)

# ---- more that is right ----

for _name, _what in (
    ("RMSprop(ddp.parameters(), lr=0.01, centered=True)", "RMSprop, centred"),
    ("Adagrad(ddp.parameters(), lr=0.05)", "Adagrad, whose state is there from the start"),
    ("AdamW(ddp.parameters(), lr=0.01, amsgrad=True, foreach=True)", "AdamW with amsgrad and foreach"),
    ("Adam(ddp.parameters(), lr=torch.tensor(0.01), fused=True)", "fused Adam with its rate in a tensor"),
    ("Rprop(ddp.parameters())", "Rprop"),
):
    add(
        f"optimizer-{_name.split('(')[0].lower()}",
        _what,
        "yes",
        LEARN,
        setup=STD.replace("AdamW(ddp.parameters(), lr=0.01)", _name),
        at="update",
    )
for _at in ("backward", "update"):
    add(
        f"accumulation-over-steps-{_at}",
        f"an update every second step, killed at {_at}",
        "yes",
        "loss_of(ddp(x), y).backward()\nif step.index % 2: opt.step(); opt.zero_grad()",
        at=_at,
        step=7,
    )
    add(
        f"zero-grad-between-{_at}",
        f"zero_grad() after the `with`, killed at {_at}",
        "yes",
        "loss = loss_of(ddp(x), y); loss.backward(); opt.step()",
        between="opt.zero_grad()",
        at=_at,
    )
    add(
        f"spectral-norm-{_at}",
        f"spectral_norm, which writes its buffers in each forward, killed at {_at}",
        "yes",
        LEARN,
        setup=STD.replace("net()", "net(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))"),
        at=_at,
    )
add(
    "weight-norm",
    "weight_norm",
    "yes",
    LEARN,
    setup=STD.replace("net()", "net(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))"),
    at="update",
)
add(
    "own-buffers",
    "BatchNorm with broadcast_buffers=False: statistics of each rank's own",
    "yes",
    LEARN,
    setup=STD.replace("DDP(net())", "DDP(net(nn.BatchNorm1d(8)), broadcast_buffers=False)"),
    at="update",
)
SCALED = "loss = loss_of(ddp(x), y); scaler.scale(loss).backward(); scaler.step(opt); scaler.update(); opt.zero_grad()"
SCALER = "scaler = torch.amp.GradScaler('cpu', init_scale=4.0, growth_interval=3)\n"
add(
    "scaler-given",
    "a GradScaler given to protect()",
    "yes",
    SCALED,
    setup=GIVEN + SCALER + "job = ftrun.protect(ddp, opt, scaler)",
    after="end(model=ddp, opt=opt, scaler=scaler)",
    at="update",
    often=True,
)
add(
    "extra-state",
    "a counter of a model that its get_extra_state() holds",
    "yes",
    "m.calls += 1\n" + LEARN,
    setup="class N(nn.Sequential):\n    calls = 0\n    def get_extra_state(s): return s.calls\n    def set_extra_state(s, calls): s.calls = calls\nm = N(*net()); ddp = DDP(m); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)\njob = ftrun.protect(model=ddp, optimizer=opt)",
    after="end(model=ddp, opt=opt, calls=m.calls)",
    at="update",
)
PATTERNS["recursive"] = Pattern(
    "a loop in a function, beside a function that calls itself",
    "yes",
    STD
    + """
def main():
    def depth(n): return n if n < 1 else depth(n - 1)
    for step in job.steps(STEPS):
        with step:
            x, y = data(step.index + depth(3)); loss_of(ddp(x), y).backward(); opt.step(); opt.zero_grad()
main()
"""
    + END,
    ("forward", 6, 2),
)

# ---- state that protect() was never given ----

add(
    "ema",
    "an EMA copy",
    "protected state only",
    LEARN + "\nwith torch.no_grad():\n    for a, b in zip(ema.parameters(), ddp.module.parameters()): a.lerp_(b, 0.1)",
    setup=STD + "ema = copy.deepcopy(ddp.module)\n",
    after="end(model=ddp, opt=opt, ema=ema)",
    often=True,
)
add(
    "scheduler",
    "a scheduler",
    "protected state only",
    LEARN + "; sched.step()",
    setup=STD + "sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)\n",
)
add(
    "counter",
    "a counter that only the script prints",
    "protected state only",
    "n += 1\n" + LEARN,
    setup=STD + "n = 0\n",
    after="end(model=ddp, opt=opt, n=n)",
)
add(
    "losses",
    "a list of losses",
    "protected state only",
    LEARN + "; losses.append(loss.item())",
    setup=STD + "losses = []\n",
    after="end(model=ddp, opt=opt, losses=losses)",
)
add(
    "best",
    "the best loss so far",
    "protected state only",
    LEARN + "; best = min(best, loss.item())",
    setup=STD + "best = 1e9\n",
    after="end(model=ddp, opt=opt, best=best)",
)
add(
    "in-object",
    "a counter on an object of the script",
    "protected state only",
    "t.n += 1\n" + LEARN,
    setup=STD + "class T:\n    n = 0\nt = T(); t.n = 0\n",
    after="end(model=ddp, opt=opt, n=t.n)",
)
add(
    "closure",
    "optimizer.step(closure), as frameworks call it",
    "yes",
    """
def closure():
    opt.zero_grad()
    loss = loss_of(ddp(x), y)
    loss.backward()
    return loss
loss = opt.step(closure)
""",
    at="update",
    often=True,
)
add(
    "in-closure",
    "a counter in a closure",
    "protected state only",
    "count()\n" + LEARN,
    setup=STD + "def make():\n    n = [0]\n    def count(): n[0] += 1; return n[0]\n    return count\ncount = make()\n",
    after="end(model=ddp, opt=opt, n=count())",
)
add(
    "in-function",
    "a loop in a function, with a local counter",
    "protected state only",
    "n += 1\n" + LEARN,
    setup=STD + "n = 0\n",
    after="end(model=ddp, opt=opt, n=n)",
    at="update",
)
add(
    "numpy-generator",
    "np.random.default_rng() that draws what nothing reads",
    "protected state only",
    "gen.normal()\n" + LEARN,
    setup=STD + "gen = np.random.default_rng(rank)\n",
    after="end(model=ddp, opt=opt, gen=gen.bit_generator.state)",
)
add(
    "ignored",
    "an EMA copy that protect() was told to leave out",
    "yes",
    LEARN + "\nwith torch.no_grad():\n    for a, b in zip(ema.parameters(), ddp.module.parameters()): a.lerp_(b, 0.1)",
    setup="ddp = DDP(net()); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01); ema = copy.deepcopy(ddp.module)\njob = ftrun.protect(ddp, opt, ignore=[ema])",
)

# where a script keeps what it changes
_KEEPERS = {
    "from-none": ("a best loss that is None at first", "best = None", "best = loss.item() if best is None else min(best, loss.item())", "best"),
    "made-late": ("an EMA copy that is made at step 4", "ema = None", "if step.index >= 4:\n    ema = ema or copy.deepcopy(ddp.module)\n    for a, b in zip(ema.parameters(), ddp.module.parameters()): a.data.lerp_(b.data, 0.1)", "ema or 0"),
    "object-in-object": ("a meter on an object of the script", "class M: n = 0\nclass T: pass\nt = T(); t.m = M()", "t.m.n += 1", "t.m.n"),
    "models-in-list": ("EMA copies in a list", "emas = [copy.deepcopy(ddp.module)]", "for a, b in zip(emas[0].parameters(), ddp.module.parameters()): a.data.lerp_(b.data, 0.1)", "emas"),
    "objects-in-dict": ("meters in a dict", "class M: n = 0\nms = {'loss': M()}", "ms['loss'].n += 1", "ms['loss'].n"),
    "in-array": ("counts in a numpy array", "counts = np.zeros(3)", "counts[0] += 1", "counts.tolist()"),
    "in-deque": ("the last losses in a deque", "import collections\nlast = collections.deque(maxlen=50)", "last.append(loss.item())", "list(last)"),
    "in-namespace": ("a counter in a SimpleNamespace", "import types\nargs = types.SimpleNamespace(n=0)", "args.n += 1", "args.n"),
    "in-class": ("a counter on a class", "class T: n = 0", "T.n += 1", "T.n"),
    "in-default": ("a counter in a default argument", "def count(memo=[0]): memo[0] += 1; return memo[0]", "count()", "count()"),
    "in-slots": ("a counter on an object with __slots__", "class T: __slots__ = ('n',)\nt = T(); t.n = 0", "t.n += 1", "t.n"),
    "in-partial": ("a counter behind functools.partial", "import functools\ndef add(m): m[0] += 1\ncount = functools.partial(add, [0])", "count()", "count.args"),
    "in-model": ("a number on the protected model that protect() does not know", "net_ = ddp.module; net_.calls = 0", "net_.calls += 1", "net_.calls"),
    "scaler": ("a GradScaler", SCALER, "scaler.scale(loss.detach()); scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)) if False else None; scaler.update(scaler.get_scale() / 2)", "scaler"),
    "label-noise": ("numpy's default_rng() in the targets, which no model is called with", "gen = np.random.default_rng(rank)", "", "gen.bit_generator.state"),
}  # fmt: skip
for _name, (_what, _before, _line, _value) in _KEEPERS.items():
    add(
        f"kept-{_name}",
        _what,
        "protected state only",
        ("y = y + float(gen.normal())\n" if _name == "label-noise" else "") + LEARN + "\n" + _line,
        setup=STD + _before + "\n",
        after=f"end(model=ddp, opt=opt, kept={_value})",
        at="update",
    )
PATTERNS["kept-in-epoch"] = Pattern(
    "losses of an epoch, in a list that each epoch makes anew",
    "protected state only",
    STD
    + """
for epoch in range(2):
    losses = []
    for step in job.steps(STEPS // 2):
        with step:
            x, y = data(step.index + epoch); loss = loss_of(ddp(x), y); loss.backward(); opt.step(); opt.zero_grad()
            losses.append(loss.item())
end(model=ddp, opt=opt, losses=losses)
""",
    ("update", 3, 2),
)
add(
    "late-hook",
    "a forward hook that halves, registered at step 4",
    "protected state only",
    LEARN + "\nif step.index == 4: ddp.module[0].register_forward_hook(lambda m, i, o: o / 2)",
    at="update",
)
EITHER = "no or protected state only"  # whether a step was done twice, and its inputs compared, is a matter of time
for _at in ("update", "idle"):
    add(
        f"own-iterator-{_at}",
        f"batches from a bare iterator, killed at {_at}",
        EITHER,
        "x, y = next(it)\n" + LEARN,
        setup=STD + "it = iter([data(i) for i in range(100)])\n",
        batch=False,
        at=_at,
    )
add(
    "own-generator",
    "batches from a generator function",
    EITHER,
    "x, y = next(it)\n" + LEARN,
    setup=STD + "def each():\n    i = 0\n    while True: yield data(i); i += 1\nit = each()\n",
    batch=False,
    at="update",
)
add(
    "own-loader-iterator",
    "batches from iter(DataLoader)",
    EITHER,
    "x, y = next(it)\n" + LEARN,
    setup=LOADER.replace("8 * STEPS", "40 * STEPS") + "it = iter(loader)\n",
    batch=False,
    at="update",
)

# ---- a repaired run that is not the uninterrupted one ----

add(
    "prefetch",
    "the next batch is fetched ahead, by a global counter",
    "no",
    "loss = loss_of(ddp(x), y); x, y = get(); loss.backward(); opt.step(); opt.zero_grad()",
    setup=STD + "it = 0\ndef get():\n    global it\n    it += 1\n    return data(it)\nx, y = get()\n",
    batch=False,
    at="backward",
    often=True,
)
add(
    "prefetch-iterator",
    "the same, from an iterator",
    "no",
    "loss = loss_of(ddp(x), y); x, y = next(it); loss.backward(); opt.step(); opt.zero_grad()",
    setup=STD + "it = iter([data(i) for i in range(100)])\nx, y = next(it)\n",
    batch=False,
)
add(
    "own-iterator",
    "batches from a bare iterator",
    "no",
    "x, y = next(it)\n" + LEARN,
    setup=STD + "it = iter([data(i) for i in range(100)])\n",
    batch=False,
)
add(
    "numpy-noise",
    "np.random.default_rng() in the inputs",
    "no",
    "x = x + float(gen.normal())\n" + LEARN,
    setup=STD + "gen = np.random.default_rng(rank)\n",
)
add(
    "python-noise",
    "a random.Random of the script's in the inputs",
    "no",
    "x = x + gen.random()\n" + LEARN,
    setup=STD + "gen = random.Random(rank)\n",
)
add(
    "generator",
    "a torch.Generator that was not given, in the inputs",
    "no",
    "x = x + torch.randn(1, generator=gen)\n" + LEARN,
    setup=STD + "gen = torch.Generator().manual_seed(rank)\n",
)
add(
    "lr-by-counter",
    "the learning rate is set by an own counter",
    "no",
    "n += 1\nfor g in opt.param_groups: g['lr'] = 0.1 / n\n" + LEARN,
    setup=STD + "n = 0\n",
    often=False,
)

# ---- nobody has the state ----

add(
    "stages",
    "equal-shaped stages of a pipeline, killed in the update",
    "lost",
    LEARN,
    setup="torch.manual_seed(rank); ddp = net(); opt = torch.optim.SGD(ddp.parameters(), lr=0.1)\njob = ftrun.protect(model=ddp, optimizer=opt)",
    at="update",
    often=True,
)
add(
    "stages-forward",
    "the same, killed in forward: its own memory is whole",
    "yes",
    LEARN,
    setup="torch.manual_seed(rank); ddp = net(); opt = torch.optim.SGD(ddp.parameters(), lr=0.1)\njob = ftrun.protect(model=ddp, optimizer=opt)",
)
EXPERT = "ddp = DDP(net()); torch.manual_seed(100 + rank); expert = nn.Linear(2, 2)\nopt = torch.optim.SGD([*ddp.parameters(), *expert.parameters()], lr=0.1)\njob = ftrun.protect(model=[ddp, expert], optimizer=opt)"
TRAIN = "loss_of(expert(ddp(x)), y).backward(); opt.step(); opt.zero_grad()"
add(
    "expert",
    "a DDP trunk with a rank's own expert, killed in the update",
    "lost",
    TRAIN,
    setup=EXPERT,
    after="end(model=ddp, e=expert)",
    at="update",
)
add("expert-forward", "the same, killed in forward", "yes", TRAIN, setup=EXPERT, after="end(model=ddp, e=expert)")
add(
    "expert-equal",
    "experts that start equal and part later",
    "lost",
    TRAIN,
    setup=EXPERT.replace("torch.manual_seed(100 + rank)", "torch.manual_seed(100)"),
    after="end(model=ddp, e=expert)",
    at="update",
)
add(
    "meter-after",
    "a rank's own meter, written after the gate, killed in the update",
    "lost",
    LEARN + "; meter.n += loss.item()",
    setup=METER,
    after="end(model=ddp, opt=opt, meter=meter)",
    at="update",
    often=True,
)

# ---- refused in the step in which it happens, in a clean run too ----

add(
    "rare-meter",
    "a rank's own meter that only this rank changes after the gate, and seldom; killed in the update",
    "lost",
    LEARN + "\nif rank == 2 and step.index in (3, 6): meter.n += 1",
    setup=METER,
    after="end(model=ddp, opt=opt, meter=meter)",
    at="update",
)
add(
    "rare-buffer",
    "a rank's own buffer that only this rank writes after the gate, and seldom; killed in the update",
    "no",
    LEARN + "\nif rank == 2 and step.index in (3, 6): m.seen += 1",
    setup="m = net(); m.register_buffer('seen', torch.zeros(()))\nddp = DDP(m, broadcast_buffers=False); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)\njob = ftrun.protect(model=ddp, optimizer=opt)",
    at="update",
)
add(
    "new-memory",
    "p.data = other after optimizer.step()",
    "refused",
    LEARN + "\nif step.index == 4:\n    for p in ddp.parameters(): p.data = p.data.clamp(-0.5, 0.5)",
    at="update",
    often=True,
)
add(
    "second-optimizer",
    "a second optimizer that protect() was not given",
    "refused",
    "loss_of(ddp(x), y).backward(); opt.step(); opt2.step(); opt.zero_grad()",
    setup=STD + "opt2 = torch.optim.SGD(ddp.parameters(), lr=0.1)\n",
)
add(
    "protect-first",
    "protect() before DistributedDataParallel",
    "refused",
    LEARN,
    setup="m = net(); opt = torch.optim.SGD(m.parameters(), lr=0.1)\njob = ftrun.protect(model=m, optimizer=opt)\nddp = DDP(m)",
    often=False,
)
add(
    "new-parameter",
    "a parameter is replaced at step 4",
    "refused",
    "if step.index == 4: ddp.module[0].weight = nn.Parameter(torch.zeros(8, 6))\n" + LEARN,
)
add(
    "late-buffer",
    "a buffer is registered in the first forward",
    "refused",
    LEARN,
    setup="class N(nn.Module):\n    def __init__(s): super().__init__(); s.l = nn.Linear(6, 2)\n    def forward(s, x):\n        if not hasattr(s, 'seen'): s.register_buffer('seen', torch.zeros(1))\n        return s.l(x)\nddp = DDP(N()); opt = torch.optim.SGD(ddp.parameters(), lr=0.1)\njob = ftrun.protect(model=ddp, optimizer=opt)",
)
add(
    "foreign-parameter",
    "a group with a parameter that no protected model has",
    "refused",
    LEARN + "\nif step.index == 3: opt.add_param_group({'params': [nn.Parameter(torch.zeros(2))]})",
)
add(
    "late-data",
    "weights are written through .data before the update, from step 4 on",
    "refused",
    "if step.index >= 4: ddp.module[0].weight.data.mul_(0.99)\n" + LEARN,
)
add(
    "late-data-between",
    "weights are written through .data between two steps, from step 4 on",
    "refused",
    LEARN,
    between="if step.index >= 4: ddp.module[0].weight.data.mul_(0.99)",
)
add(
    "late-momentum",
    "the optimizer's moments are written before the update, from step 4 on",
    "refused",
    "loss_of(ddp(x), y).backward()\nif step.index >= 4:\n    for s in opt.state.values(): s['exp_avg'].mul_(0.5)\nopt.step(); opt.zero_grad()",
)
add(
    "buffer-between",
    "a buffer of the model is written between two steps",
    "refused",
    LEARN,
    setup="m = net(); m.register_buffer('seen', torch.zeros(()))\nddp = DDP(m, broadcast_buffers=False); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)\njob = ftrun.protect(model=ddp, optimizer=opt)",
    between="m.seen += 1",
    at="update",
)
# ---- the script's own errors, as under torchrun ----

UNUSED = "class N(nn.Module):\n    def __init__(s): super().__init__(); s.a = nn.Linear(6, 2); s.b = nn.Linear(6, 2)\n    def forward(s, x): return s.a(x)\nddp = DDP(N()); opt = torch.optim.SGD(ddp.parameters(), lr=0.1)\njob = ftrun.protect(model=ddp, optimizer=opt)"
add("unused", "a parameter that the loss never reaches", "error", LEARN, setup=UNUSED, often=True)
add(
    "raises-after",
    "an exception after the update",
    "error",
    LEARN + "\nif step.index == 4 and rank == 1: raise ValueError('after the update')",
    at="",
    often=False,
)
add(
    "raises-between",
    "an exception after a body (a checkpoint that cannot be written)",
    "error",
    LEARN,
    between="if step.index == 4 and rank == 1: raise OSError('between two bodies')",
    at="",
)
add(
    "raises-after-loop",
    "an exception after the loop",
    "error",
    LEARN,
    after="if rank == 1: raise OSError('after the loop')\n" + END,
    at="",
)
add(
    "raises-always",
    "the same exception in a step and in its second try",
    "error",
    "if step.index == 4 and rank == 1: raise ValueError('before the update')\n" + LEARN,
    at="",
)
add(
    "optimizer-own",
    "an optimizer that counts its updates in an attribute of its own",
    "protected state only or no",
    LEARN,
    setup="""
class Decaying(torch.optim.SGD):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs); self.t = 0
    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups: group["lr"] = 0.1 / self.t
        return super().step(closure)
ddp = DDP(net()); opt = Decaying(ddp.parameters(), lr=0.1)
job = ftrun.protect(model=ddp, optimizer=opt)
""",
)
add(
    "optimizer-own-shard",
    "the same of a sharded model, where no replica shows the difference",
    "protected state only",
    "loss_of(model(x), y).backward(); opt.step(); opt.zero_grad()",
    setup="""
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
class Decaying(torch.optim.SGD):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs); self.t = 0
    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups: group["lr"] = 0.1 / self.t
        return super().step(closure)
model = net(); fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
opt = Decaying(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=opt)
""",
    after="end(model=[p.detach().to_local() for p in model.parameters()])",
    often=True,
)
add(
    "optimizer-own-kept",
    "the same where the count is a group's",
    "yes",
    LEARN,
    setup="""
class Decaying(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups: group["t"] = group.get("t", 0) + 1; group["lr"] = 0.1 / group["t"]
        return super().step(closure)
ddp = DDP(net()); opt = Decaying(ddp.parameters(), lr=0.1)
job = ftrun.protect(model=ddp, optimizer=opt)
""",
)
add(
    "noted-by-the-dead",
    "random numbers used after the update, and the replacement that knew of it killed in its first step",
    "no",
    LEARN + "\ntorch.rand(1)",
    at="update",
    step=3,
    rank=1,
    then=kill(1, "forward", 4),
)
