"""Small training scripts written at random from a seed, for the search for a false "yes".

    python -m tests.truth.random_scripts [--seed N | --count N]

Each takes a model, an optimizer and a few habits (modes, groups, own state, noise, where a batch comes from), and one kill.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.e2e.harness import kill

_MIDDLES = ("nn.ReLU()", "nn.Dropout(0.3)", "nn.BatchNorm1d(8)", "nn.LayerNorm(8)")
_OPTIMIZERS = (
    "SGD({}, lr=0.1)",
    "SGD({}, lr=0.1, momentum=0.9)",
    "AdamW({}, lr=0.01)",
    "Adagrad({}, lr=0.05)",
    "RMSprop({}, lr=0.01)",
)
# habit -> (lines before the loop, at the start of a body, before backward, after the update, name of state that `end` writes)
_HABITS: dict[str, tuple[str, str, str, str, str]] = {
    "ema": (
        "ema = copy.deepcopy(model)",
        "",
        "",
        "for a, b in zip(ema.parameters(), model.parameters()): a.data.lerp_(b.data, 0.1)",
        "ema",
    ),
    "counter": ("n = 0", "n += 1", "", "", "n"),
    "lr-counter": ("k = 0", "k += 1\nopt.param_groups[0]['lr'] = 0.1 / k", "", "", "k"),
    "lr-index": ("", "opt.param_groups[0]['lr'] = 0.1 / (1 + step.index)", "", "", ""),
    "losses": ("losses = []", "", "", "losses.append(loss.item())", "losses"),
    "toggle": ("", "model[1].train(step.index % 3 != 0)", "", "", ""),
    "mode-later": ("", "if step.index == 4: model[1].eval()", "", "", ""),
    "clip": ("", "", "", "", ""),
    "state-clear": ("", "", "", "if step.index == 4: opt.state.clear()", ""),
    "state-drop": ("", "", "", "if step.index == 5 and opt.state: opt.state.pop(next(iter(opt.state)))", ""),
    "numpy-noise": ("", "x = x + float(np.random.rand())", "", "", ""),
    "torch-noise": ("", "x = x + torch.rand(1)", "", "", ""),
    "own-noise": ("gen = np.random.default_rng(rank)", "x = x + float(gen.normal())", "", "", ""),
    "own-generator": ("tg = torch.Generator().manual_seed(rank)", "x = x + torch.rand(1, generator=tg)", "", "", ""),
    "buffer-write": ("", "", "", "model.seen += 1", ""),
    "own-buffer": ("", "model.seen.add_(rank)", "", "", ""),
    "scheduler": ("sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)", "", "", "sched.step()", "sched"),
    "inside": ("", "", "w.append(float(loss))", "", ""),
    "weights-read": ("", "scale = float(model[0].weight.sum()) * 1e-3\nx = x + scale", "", "", ""),
    "draw-after": ("", "", "", "float(torch.rand(1))", ""),
    "clamp": ("", "", "", "with torch.no_grad():\n    for p in model.parameters(): p.clamp_(-1, 1)", ""),
    "swap-memory": ("", "", "", "if step.index == 3: model[0].weight.data = model[0].weight.data.clone()", ""),
    "freeze": ("", "", "", "if step.index == 3: model[2].bias.grad = None", ""),
}
_PHASES = ("forward", "backward", "gate", "update", "idle")


def script(seed: int) -> tuple[str, list[str]]:
    """The source of a script, without its prelude, and the faults of its killed run."""
    dice = random.Random(seed)
    habits = dice.sample(sorted(_HABITS), dice.randint(1, 4))
    wrapped = dice.random() < 0.85
    given = [h for h in habits if h in ("ema", "scheduler") and dice.random() < 0.5]
    optimizer = dice.choice(_OPTIMIZERS)
    source = dice.choice(("index", "batches", "ahead", "iterator"))
    lines = [f"model = net({dice.choice(_MIDDLES)})", "model.register_buffer('seen', torch.zeros(1))", "w = []"]
    lines += [
        f"ddp = {'DDP(model)' if wrapped else 'model'}",
        f"opt = torch.optim.{optimizer.format('ddp.parameters()')}",
    ]
    lines += [_HABITS[h][0] for h in habits if _HABITS[h][0]]
    extra = "".join(f", {'ema' if h == 'ema' else 'sched'}={'ema' if h == 'ema' else 'sched'}" for h in given)
    replicas = ", replicas=dist.group.WORLD" if not wrapped and dice.random() < 0.5 else ""
    lines += [f"job = ftrun.protect(ddp, opt{replicas}{extra})"]
    if source == "batches":
        lines += ["loader = DataLoader(TensorDataset(*data(0, 8 * STEPS)), batch_size=8)"]
    elif source != "index":
        lines += ["it = iter([data(i) for i in range(50)])"] + (["x, y = next(it)"] if source == "ahead" else [])
    lines += ["for step, (x, y) in job.batches(loader):" if source == "batches" else "for step in job.steps(STEPS):"]
    body = {"index": ["x, y = data(step.index)"], "iterator": ["x, y = next(it)"]}.get(source, [])
    for h in habits:
        body += _HABITS[h][1].splitlines()
    body += ["loss = loss_of(ddp(x), y)"] + (["x, y = next(it)"] if source == "ahead" else [])
    for h in habits:
        body += _HABITS[h][2].splitlines()
    body += ["loss.backward()"]
    if not wrapped:
        body += ["for p in ddp.parameters(): dist.all_reduce(p.grad); p.grad /= world"]
    if "clip" in habits:
        body += ["nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)"]
    body += ["opt.step()", "opt.zero_grad()"]
    for h in habits:
        body += _HABITS[h][3].splitlines()
    lines += ["    with step:", *(f"        {line}" for line in body)]
    kept = "".join(f", {name}={name}" for h in habits if (name := _HABITS[h][4]))
    lines += [f"end(model=model, opt=opt{kept})"]
    fault = kill(dice.randrange(4), dice.choice(_PHASES), dice.randint(2, 9))
    return "\n".join(lines) + "\n", [fault]


def main() -> int:
    from tests.truth import harness

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="this script alone, with its source")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.count) if args.seed is None else [args.seed]
    wrong = 0
    for seed in seeds:
        source, faults = script(seed)
        with tempfile.TemporaryDirectory() as folder:
            runs = harness.three(Path(folder) / "run", source, faults)
        bad = runs.false_yes or runs.silent
        wrong += bad
        equal = "equal" if runs.killed.ranks == runs.stock.ranks else "different"
        said = f"seed {seed}: {runs.killed.answer}, {equal}; clean {runs.clean.answer}, torchrun {runs.stock.code}"
        print(("FALSE: " if bad else "") + said, flush=True)
        if bad or args.seed is not None:
            print(source, runs.killed.output, runs.clean.output, sep="\n")
    print(f"{len(seeds)} scripts, {wrong} false")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
