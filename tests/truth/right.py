"""Patterns whose repaired run is the uninterrupted one, and must be called so."""

from __future__ import annotations

from tests.e2e.harness import kill
from tests.truth.pattern import END, LEARN, LOADER, METER, PATTERNS, SCALER, SGD, STD, Pattern, add

# ---- what is right, and must be called so ----

for phase in ("forward", "backward", "gate", "update", "idle"):
    add(f"plain-{phase}", f"a plain loop, killed at {phase}", "yes", LEARN, at=phase)
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
CLIMBS = """class SAM(torch.optim.SGD):
    @torch.no_grad()
    def step(s, closure=None):
        group = s.param_groups[0]
        if not group.get("climbed"):
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                s.state[p]["old"] = p.clone(); p.add_(p.grad * (0.05 / (norm + 1e-12)))
        else:
            for p in group["params"]: p.copy_(s.state[p]["old"])
            super().step()
        group["climbed"] = not group.get("climbed")
""" + STD.replace("torch.optim.AdamW(ddp.parameters(), lr=0.01)", "SAM(ddp.parameters(), lr=0.1, momentum=0.9)")
SECOND = """class Two(nn.Module):
    def __init__(s):
        super().__init__(); s.q, s.k = net(), net()
        s.k.load_state_dict(s.q.state_dict()); s.k.requires_grad_(False)
        s.register_buffer("queue", torch.zeros(2, 16)); s.register_buffer("at", torch.zeros(1, dtype=torch.long))
    def move(s):
        for a, b in zip(s.q.parameters(), s.k.parameters()): b.data.copy_(0.9 * b.data + 0.1 * a.data)
    def forward(s, x):
        with torch.no_grad(): keys = s.k(x + 0.1)
        every = [torch.empty_like(keys) for _ in range(world)]; dist.all_gather(every, keys)
        n = int(s.at); s.queue[:, n:n + 4] = torch.stack(every).mean(1).T[:, :4]; s.at[0] = (n + 4) % 16
        return s.q(x) + s.queue.mean(1)
ddp = DDP(Two()); opt = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1)
job = ftrun.protect(model=ddp, optimizer=opt)
"""
for phase, step in [("backward", 5), ("update", 4), ("update", 7)]:
    add(
        f"two-step-sam-{phase}-{step}",
        f"sharpness-aware minimization as F396 says, a climb and an update in steps of their own; killed in {phase} of step {step}",
        "yes",
        LEARN,
        setup=CLIMBS,
        at=phase,
        step=step,
    )
    add(
        f"momentum-encoder-{phase}-{step}",
        f"a momentum encoder and its queue (MoCo), moved behind the update as F309 says; killed in {phase} of step {step}",
        "yes",
        "loss_of(ddp(x), y).backward(); opt.step(); ddp.module.move(); opt.zero_grad()",
        setup=SECOND,
        at=phase,
        step=step,
    )
SHAPES = """class Shapes(nn.Module):
    def __init__(s):
        super().__init__()
        for name, value in dict(grown=torch.empty(0), scale=torch.ones(1), queue=torch.zeros(2, 8), mean=torch.zeros(8), seen=torch.zeros(3)).items():
            s.register_buffer(name, value)
    def forward(s, x):
        now = x.detach()
        if s.grown.numel() == 0: s.grown.resize_(8).zero_()
        if s.scale.numel() == 1: s.scale.resize_(8).fill_(1)
        s.grown.mul_(0.9).add_(now.mean(0), alpha=0.1)
        s.scale.copy_(now.abs().amax(0))
        s.queue = torch.cat([s.queue, now[:1]])[-6:]
        s.mean = 0.9 * s.mean + 0.1 * now.mean(0)
        s.seen = s.seen.double() + 1
        return x / (1 + s.scale) + s.grown + s.queue.mean(0) + s.mean
"""
RESHAPED = SHAPES + STD.replace("net()", "net(Shapes())")
for phase, step in [("backward", 0), ("update", 0), ("forward", 2), ("update", 7)]:
    add(
        f"buffers-reshaped-{phase}-{step}",
        f"buffers take another shape in the first forwards, in place or by assignment; killed in {phase} of step {step}",
        "yes",
        LEARN,
        setup=RESHAPED,
        at=phase,
        step=step,
        then=kill(0, "gate", 9),
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
add(
    "scaler-given",
    "a GradScaler given to protect()",
    "yes",
    SCALED,
    setup=GIVEN + SCALER + "job = ftrun.protect(ddp, opt, scaler)",
    after="end(model=ddp, opt=opt, scaler=scaler)",
    at="update",
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
FILE = """
import os
place = os.path.join(os.environ['TRUTH_OUT'], 'target'); os.makedirs(os.path.dirname(place), exist_ok=True)
if rank == 0: open(place, 'w').write('0.5')
dist.barrier()
target = float(open(place).read()); pid = os.getpid()
class Config: pass
config = Config(); config.scale = 2 * target
"""
READS = "if step.index == 3 and rank == 0: open(place, 'w').write('5.0')\nx = x * target * config.scale * table.mean()\n"
add(
    "constant-from-a-file",
    "numbers that come from a file, which is rewritten meanwhile; the replacement is killed as well, in its first step",
    "yes",
    READS + LEARN,
    setup=STD + FILE + "table = np.full(1000, target)",
    after="assert pid == os.getpid()\n" + END,
    then=kill(2, "forward", 6),
    often=True,
)
PATTERNS["two-loaders"] = Pattern(
    "epochs of two loaders, with a sampler each: what one loop only sees is another's place in the data",
    "yes",
    STD
    + """
sets = [TensorDataset(*data(n, 64)) for n in range(2)]
samplers = [DistributedSampler(one, seed=n) for n, one in enumerate(sets)]
loaders = [DataLoader(one, 4, sampler=samplers[n]) for n, one in enumerate(sets)]
first, second = samplers
for epoch in job.epochs(3):
    first.set_epoch(epoch); second.set_epoch(epoch)
    for loader in loaders:
        for step, (x, y) in job.batches(loader):
            with step:
                loss_of(ddp(x), y).backward(); opt.step(); opt.zero_grad()
"""
    + END,
    ("forward", 3, 2),
    False,
    kill(1, "forward", 2) + "epoch = 1\n",
)
add(
    "reads-behind",
    "behind the `with`, without a look at step.committed, a loss is read that the body has bound; killed between two bodies",
    "yes",
    LEARN,
    between="losses.append(loss.item())",
    setup=STD + "losses = []",
    after="end(model=ddp, opt=opt, losses=losses)",
    at="idle",
)
