"""Patterns whose run ends: nobody has the state, the script is refused, or it fails by itself."""

from __future__ import annotations

from tests.truth.pattern import END, LEARN, METER, STD, add

# ---- nobody has the state ----

add(
    "stages",
    "equal-shaped stages of a pipeline, killed in the update",
    "lost",
    LEARN,
    setup="torch.manual_seed(rank); ddp = net(); opt = torch.optim.SGD(ddp.parameters(), lr=0.1)\njob = ftrun.protect(model=ddp, optimizer=opt)",
    at="update",
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
    "not known",
    LEARN + "; meter.n += loss.item()",
    setup=METER,
    after="end(model=ddp, opt=opt, meter=meter)",
    at="update",
    named="meter.n",
)

# ---- refused in the step in which it happens, in a clean run too ----

add(
    "rare-meter",
    "a rank's own meter that only this rank changes after the gate, and seldom; killed in the update",
    "not known",
    LEARN + "\nif rank == 2 and step.index in (3, 6): meter.n += 1",
    setup=METER,
    after="end(model=ddp, opt=opt, meter=meter)",
    at="update",
    named="meter.n",
)
add(
    "rare-buffer",
    "a rank's own buffer that only this rank writes after the gate, and seldom; killed in the update",
    "not known",
    LEARN + "\nif rank == 2 and step.index in (3, 6): m.seen += 1",
    setup="m = net(); m.register_buffer('seen', torch.zeros(()))\nddp = DDP(m, broadcast_buffers=False); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)\njob = ftrun.protect(model=ddp, optimizer=opt)",
    at="update",
    named="seen",
)
add(
    "new-memory",
    "p.data = other after optimizer.step()",
    "refused",
    LEARN + "\nif step.index == 4:\n    for p in ddp.parameters(): p.data = p.data.clamp(-0.5, 0.5)",
    at="update",
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
    "resized-buffer",
    "a buffer of several elements is resized in place at step 4",
    "refused",
    "if step.index == 4: m.seen.resize_(9)\n" + LEARN,
    setup="m = net(); m.register_buffer('seen', torch.zeros(3))\nddp = DDP(m); opt = torch.optim.SGD(ddp.parameters(), lr=0.1)\njob = ftrun.protect(model=ddp, optimizer=opt)",
)
add(
    "lazy",
    "a layer that takes its shape in the first forward",
    "refused",
    LEARN,
    setup="m = nn.LazyLinear(2); opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)\njob = ftrun.protect(model=m, optimizer=opt); ddp = DDP(m)",
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
add("unused", "a parameter that the loss never reaches", "error", LEARN, setup=UNUSED)
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
