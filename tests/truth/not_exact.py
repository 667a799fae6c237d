"""Patterns whose repaired run goes on, and is not known to be, or is not, the uninterrupted one."""

from __future__ import annotations

from tests.e2e.harness import kill
from tests.truth import right
from tests.truth.pattern import LEARN, LOADER, PATTERNS, SCALER, STD, Pattern, add

# ---- state that protect() was never given ----

add(
    "ema",
    "an EMA copy",
    "yes",
    LEARN + "\nwith torch.no_grad():\n    for a, b in zip(ema.parameters(), ddp.module.parameters()): a.lerp_(b, 0.1)",
    setup=STD + "ema = copy.deepcopy(ddp.module)\n",
    after="end(model=ddp, opt=opt, ema=ema)",
    often=True,
)
add(
    "scheduler",
    "a scheduler",
    "yes",
    LEARN + "; sched.step()",
    setup=STD + "sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)\n",
)
add(
    "counter",
    "a counter that only the script prints",
    "yes",
    "n += 1\n" + LEARN,
    setup=STD + "n = 0\n",
    after="end(model=ddp, opt=opt, n=n)",
)
add(
    "losses",
    "a list of losses",
    "yes",
    LEARN + "; losses.append(loss.item())",
    setup=STD + "losses = []\n",
    after="end(model=ddp, opt=opt, losses=losses)",
)
for _at in ("forward", "update", "idle"):
    add(
        f"long-history-{_at}",
        f"lists that are too long to be copied in each step, and rows of numbers, killed at {_at}",
        "yes",
        """
loss = loss_of(ddp(x), y); loss.backward()
losses += [loss.item() * n for n in range(60)]
history["rows"] += [{"step": step.index, "loss": loss.item() + n} for n in range(60)]
opt.step(); opt.zero_grad()
""",
        setup=STD + "losses = [float(n) for n in range(200_000)]\nhistory = {'rows': []}\n",
        after="end(model=ddp, opt=opt, losses=losses, rows=history['rows'])",
        at=_at,
        step=8,
    )
add(
    "best",
    "the best loss so far",
    "yes",
    LEARN + "; best = min(best, loss.item())",
    setup=STD + "best = 1e9\n",
    after="end(model=ddp, opt=opt, best=best)",
)
add(
    "in-object",
    "a counter on an object of the script",
    "yes",
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
    "yes",
    "count()\n" + LEARN,
    setup=STD + "def make():\n    n = [0]\n    def count(): n[0] += 1; return n[0]\n    return count\ncount = make()\n",
    after="end(model=ddp, opt=opt, n=count())",
)
add(
    "in-function",
    "a loop in a function, with a local counter",
    "yes",
    "n += 1\n" + LEARN,
    setup=STD + "n = 0\n",
    after="end(model=ddp, opt=opt, n=n)",
    at="update",
)
add(
    "numpy-generator",
    "np.random.default_rng() that draws what nothing reads",
    "yes",
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
# what a rank alone has changed behind its gate nobody has when it dies there, and an object that is made late has no place in a slot
_LOST = {"from-none": "best", "made-late": "ema", "in-deque": "last"}
for _name, (_what, _before, _line, _value) in _KEEPERS.items():
    add(
        f"kept-{_name}",
        _what,
        "not known" if _name in _LOST else "yes",
        ("y = y + float(gen.normal())\n" if _name == "label-noise" else "") + LEARN + "\n" + _line,
        setup=STD + _before + "\n",
        after=f"end(model=ddp, opt=opt, kept={_value})",
        at="update",
        named=_LOST.get(_name, ""),
    )
PATTERNS["kept-in-epoch"] = Pattern(
    "losses of an epoch, in a list that each epoch makes anew",
    "not known",
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
    named="losses",
)
add(
    "late-hook",
    "a forward hook that halves, registered at step 4",
    "not known",
    LEARN + "\nif step.index == 4: ddp.module[0].register_forward_hook(lambda m, i, o: o / 2)",
    at="update",
    named="hooks",
)
EITHER = "no or not known"  # whether a step was done twice, and its inputs compared, is a matter of time
for _at in ("update", "idle"):
    add(
        f"own-iterator-{_at}",
        f"batches from a bare iterator, killed at {_at}",
        EITHER,
        "x, y = next(it)\n" + LEARN,
        setup=STD + "it = iter([data(i) for i in range(100)])\n",
        batch=False,
        at=_at,
        named="it",
    )
add(
    "own-generator",
    "batches from a generator function",
    EITHER,
    "x, y = next(it)\n" + LEARN,
    setup=STD + "def each():\n    i = 0\n    while True: yield data(i); i += 1\nit = each()\n",
    batch=False,
    at="update",
    named="it",
)
add(
    "own-loader-iterator",
    "batches from iter(DataLoader)",
    EITHER,
    "x, y = next(it)\n" + LEARN,
    setup=LOADER.replace("8 * STEPS", "40 * STEPS") + "it = iter(loader)\n",
    batch=False,
    at="update",
    named="it",
)
CONNECTION = """
import os, socket
ours, theirs = socket.socketpair()
if os.fork() == 0:
    ours.close(); n = 0
    while theirs.recv(1): theirs.send(bytes([n])); n += 1
    os._exit(0)
theirs.close()
def get(): ours.send(b'.'); return data(ours.recv(1)[0])
"""
SERVICE = """
import os, time
place = os.path.join(os.environ['TRUTH_OUT'], f'count-{rank}'); os.makedirs(os.path.dirname(place), exist_ok=True)
def get():
    n = int(open(place).read()) if os.path.exists(place) else 0
    open(place, 'w').write(str(n + 1)); return data(n)
"""
NOT_KEPT = "a rank's inputs do not come from what is kept"
for _step in (0, 6):
    add(
        f"own-connection-{_step}",
        f"batches over a connection to a process of the rank's own, killed in step {_step}",
        EITHER,
        "x, y = get()\n" + LEARN,
        setup=STD + CONNECTION,
        batch=False,
        at="update",
        step=_step,
        often=_step == 6,
        named=NOT_KEPT,
    )
add(
    "counting-service",
    "batches from a service that counts what it was asked for, killed before the model was called, while the others are not there yet",
    EITHER,
    LEARN,
    setup=STD + SERVICE,
    loop="for step in job.steps(STEPS):\n    x, y = get()",
    between="time.sleep(0.5 if rank != 2 and step.index == 5 else 0)",
    batch=False,
    named=NOT_KEPT,
)
add(
    "optimizer-own",
    "an optimizer that counts its updates in an attribute of its own",
    "not known or no",
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
    named="optimizer 0.t",
)
add(
    "optimizer-own-shard",
    "the same of a sharded model, where no replica shows the difference",
    "not known",
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
    named="optimizer 0.t",
)


# ---- a repaired run that is not the uninterrupted one ----

add(
    "prefetch",
    "the next batch is fetched ahead, by a global counter",
    "yes",
    "loss = loss_of(ddp(x), y); x, y = get(); loss.backward(); opt.step(); opt.zero_grad()",
    setup=STD + "it = 0\ndef get():\n    global it\n    it += 1\n    return data(it)\nx, y = get()\n",
    batch=False,
    at="backward",
)
add(
    "prefetch-iterator",
    "the same, from an iterator",
    "not known",
    "loss = loss_of(ddp(x), y); x, y = next(it); loss.backward(); opt.step(); opt.zero_grad()",
    setup=STD + "it = iter([data(i) for i in range(100)])\nx, y = next(it)\n",
    batch=False,
    named="it",
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
    "yes",
    "x = x + float(gen.normal())\n" + LEARN,
    setup=STD + "gen = np.random.default_rng(rank)\n",
)
add(
    "python-noise",
    "a random.Random of the script's in the inputs",
    "yes",
    "x = x + gen.random()\n" + LEARN,
    setup=STD + "gen = random.Random(rank)\n",
)
add(
    "generator",
    "a torch.Generator that was not given, in the inputs",
    "yes",
    "x = x + torch.randn(1, generator=gen)\n" + LEARN,
    setup=STD + "gen = torch.Generator().manual_seed(rank)\n",
)
add(
    "lr-by-counter",
    "the learning rate is set by an own counter",
    "yes",
    "n += 1\nfor g in opt.param_groups: g['lr'] = 0.1 / n\n" + LEARN,
    setup=STD + "n = 0\n",
    often=False,
)
add(
    "noted-by-the-dead",
    "random numbers used after the update, and the replacement that knew of it killed in its first step",
    "not known",
    LEARN + "\ntorch.rand(1)",
    at="update",
    step=3,
    rank=1,
    then=kill(1, "forward", 4),
    named="random numbers",
)
add(
    "large-constant-from-a-file",
    "a large array that comes from a file, which is rewritten meanwhile",
    "not known",
    right.READS.replace("x = x", "y = y") + LEARN,
    setup=STD + right.FILE + "table = np.full(100_000, target)",
    named="table",
)
add(
    "own-connection-last",
    "a rank's batches over a connection, a loss read behind the `with`: killed before the last step, where nothing can be asked twice",
    "not known",
    "x, y = get() if rank == 2 else data(step.index)\n" + LEARN,
    setup=STD + CONNECTION + "losses = []",
    between="losses.append(loss.item())",
    at="idle",
    step=11,
    batch=False,
    often=False,
    named="nobody knows whether its inputs come from what is kept",
)
