"""Writes docs/how-to/convert/*.md: what changes in a program for ftrun, a page a kind. `python -m tests.programs.convert`."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGES = FOLDER.parents[1] / "docs" / "how-to" / "convert"
KINDS = (
    "loop",
    "resume",
    "epochs",
    "prefetch",
    "trainer",
    "nanogpt",
    "accelerate_loop",
    "hf_trainer",
    "lightning_trainer",
)
FRAMEWORKS = ("accelerate_loop", "hf_trainer", "lightning_trainer")  # they need the packages of the `compat` extra
_TITLES = {
    "loop": "A plain loop",
    "resume": "A loop that writes checkpoints and goes on from them",
    "epochs": "Epochs, an evaluation, a checkpoint",
    "prefetch": "Variables that live from step to step",
    "trainer": "A Trainer class",
    "nanogpt": "nanoGPT",
    "accelerate_loop": "accelerate",
    "hf_trainer": "transformers' Trainer",
    "lightning_trainer": "Lightning",
}
_NOTES = {
    "loop": "What had the number of the step has it from `body.index`: an iterator of the script's own would begin anew in a replacement.",
    "resume": "What stands between `for` and `with` runs again with its step, so a rank that dies in its checkpoint writes it again. "
    "A replacement finds a newer checkpoint than its rank began with: `start` stays what the rank began with.",
    "epochs": "A replacement begins in the epoch that runs: `job.epochs`. The evaluation communicates, so all ranks make it again when one "
    "dies in it: `job.call`. What follows runs at least once on each rank. `best` is kept with the step, as is all that the loop changes.",
    "prefetch": "The batch that was fetched ahead, the counter and the lowest loss stay as they are: what the loop changes is kept with "
    "the step. The counter counts, also in a replacement, and ends the loop as before.",
    "nanogpt": "`iter_num`, the batch that was fetched ahead and `best_val_loss` stay as they are: what the loop changes is kept with the "
    "step. `t0` and `running_mfu` are for the log only, and are written after the update, each rank its own: without `ignore` a death in "
    "the update puts them back as they were before it, and the closing line says *not known*, with their names. The evaluation on one rank "
    "does not communicate, so it stays where it is, and is made again with its step. nanoGPT's `train.py --backend=ftrun` does for the "
    "second line. This is its loop on a small model; nanoGPT's own files are not part of the tests.",
    "accelerate_loop": "The process group is made before accelerate makes its own. `rng_types=[]`: a prepared loader would "
    "broadcast random numbers whenever it begins, which a replacement cannot do alone; with the same seed on all ranks the order "
    "is the same without. The evaluation communicates: `job.call`. `best` is kept with the step. `make compat` runs these two.",
    "lightning_trainer": "The Trainer is a subclass of Lightning's own, with strategy `ddp`; `fit` protects the model, and "
    "`trainer.job` is the job. A validation, the end of an epoch and a checkpoint come between two steps, and may be made again after "
    "a fault; callbacks are kept by their `state_dict()`, and what `self.log` has collected is kept with the step. "
    "`on_train_batch_end` runs in the update, where nothing may communicate; checkpoints and `Timer` are called behind it. One "
    "DataLoader with a length; no manual optimization, and no torchmetrics object in `self.log` of a training step. `make compat` "
    "runs these two.",
    "hf_trainer": "Both names are subclasses of transformers' own. `train()` protects model, optimizer and scheduler, and `trainer.job` is "
    "the job. Callbacks, logs, evaluations and checkpoints come between two steps, and may be made again after a fault; callbacks that "
    "are `ExportableState`, such as EarlyStoppingCallback, are kept with the steps. DeepSpeed, FSDP, `auto_find_batch_size` and data sets "
    "without a length are refused. `make compat` runs these two.",
    "trainer": "`protect` stands behind `DDP(...)`. The snapshot is loaded and saved by the class as before, and what its attributes hold "
    "is kept with the step.",
}
_HEAD = """# What changes in a program

`ftrun train.py` runs a program as it is, as torchrun does; after a failure all its workers start again. For repair in place it is
converted, in about six lines: what the loop changes is [kept with the step](../variables.md) without a word. Each of these programs
(`tests/programs`) is run by the tests: as it is, under torchrun; and converted, under ftrun, with kills in steps, in evaluations and around
checkpoints, and where it writes a checkpoint, a clean restart from it. Weights, optimizer, random numbers and checkpoints are the same.
Converted programs run under torchrun, too.

| kind of program | lines that change |
|---|---|
"""
_TAIL = """
A script that [Slurm](../several-nodes.md) starts is one of these: nothing changes in it for Slurm.

## The same four lines everywhere

1. `import ftrun`.
2. `dist.init_process_group("ftrun")` in place of "nccl" or "gloo". What needs no rank stands above it.
3. `job = ftrun.protect(ddp, optimizer, scheduler)`, behind `DistributedDataParallel`. A `GradScaler` and objects of your own go there
   too.
4. `for step in job.steps(total):` or `for step, batch in job.batches(loader):` in place of the loop, and `with step:` around its body.

## When ftrun refuses

What cannot be done again exactly is refused in the step in which it happens, in a run without failures as well, with the line:

| it says | change |
|---|---|
| a collective after `optimizer.step()` in the body | move it before `optimizer.step()`, or into `job.call` after the loop |
| a collective between two bodies outside `job.call` | `job.call(fn)` |
| a process group is made after the first step | make all groups before the loop |
| something given to `protect` changed between two bodies | `scheduler.step()` and the like go into the body |
| LBFGS, or an optimizer that communicates in `step()` | another optimizer; these cannot be done again |
| DDP with `static_graph`, `mixed_precision` or a communication hook | leave it out; autocast is fine |
| `step.committed` inside the body | test it after the `with` |
| FSDP1 or DeepSpeed | FSDP2 (`fully_shard`); or run it without `protect`, with `--max-restarts` |

[Limits](../../limits.md) has them all, and [a step that is done again](../../concepts/redo.md) says why.
"""


def changes(kind: str) -> list[str]:
    """Lines of a diff that ignores indentation, and blank lines."""
    before, after = (
        [line for line in (FOLDER / f"{kind}{tail}.py").read_text().splitlines() if line] for tail in ("", "_converted")
    )
    matcher = difflib.SequenceMatcher(None, [line.strip() for line in before], [line.strip() for line in after], False)
    lines: list[str] = []
    for what, a, b, c, d in matcher.get_opcodes():
        if what != "equal":
            if lines:
                lines.append("")
            lines += [f"- {line}".rstrip() for line in before[a:b]] + [f"+ {line}".rstrip() for line in after[c:d]]
    return lines


def added(kind: str) -> int:
    """Lines of the converted program that are not in the other one."""
    return sum(line.startswith("+") for line in changes(kind))


def pages() -> dict[str, str]:
    """File name -> text."""
    rows = "".join(f"| [{_TITLES[kind]}]({kind}.md) | {added(kind)} |\n" for kind in KINDS)
    return {"index.md": _HEAD + rows + _TAIL} | {f"{kind}.md": _page(kind) for kind in KINDS}


def _page(kind: str) -> str:
    said = ast.get_docstring(ast.parse((FOLDER / f"{kind}.py").read_text()))
    diff = "\n".join(changes(kind))
    return (
        f"# {_TITLES[kind]}\n\n{said} {added(kind)} lines; lines that are only moved to the right are left out:\n\n"
        f"```diff\n{diff}\n```\n\n{_NOTES[kind]}\n\n"
        f"The whole programs: `tests/programs/{kind}.py` and `tests/programs/{kind}_converted.py`.\n"
    )


if __name__ == "__main__":
    PAGES.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text)
