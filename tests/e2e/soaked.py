"""The programs that the soak runs: DDP, FSDP2 with snapshots, a pipeline, and epochs with loader workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.e2e import harness


@dataclass(frozen=True)
class Program:
    """`steps`: gates that it passes at least; `told`: arguments of the script; `options`: of ftrun."""

    script: Path
    steps: int
    told: tuple[str, ...]
    options: tuple[str, ...] = ()

    def command(self, folder: Path, spares: int = 2) -> list[str]:
        """The command under ftrun. As many replacements as it takes: the soak asks for repairs, not for a budget."""
        options = ("--max-replacements", "100000", *self.options)
        told = ["--backend", "ftrun", "--out", str(folder / "out"), *self.told]
        return harness.script_command(folder, self.script, told, spares=spares, options=options)

    def plain(self, folder: Path) -> harness.Outcome:
        """The uninterrupted run on stock torch."""
        command = [str(self.script), "--backend", "gloo"]
        command += ["--out", str(folder / "out"), *harness.unhurried(self.told)]
        paths = {"PYTHONPATH": f"{harness.ROOT}:{harness.SCRIPTS}"}
        return harness.by_torch(folder, command, env=paths, timeout=10 * harness.TIMEOUT)


# On a busy machine a frozen helper is missed late, and the training goes on meanwhile: so many that the last signal finds it at work.
STEPS = 900


def ddp(steps: int = STEPS, stretch: float = 0.003) -> Program:
    return Program(harness.REFERENCE, steps, ("--steps", str(steps), "--stretch", str(stretch)))


PROGRAMS = {
    "ddp": ddp(),
    "fsdp2": Program(harness.SCRIPTS / "sharded.py", STEPS, ("--steps", str(STEPS)), ("--snapshot-every", "5")),
    # where both ranks of a stage are struck at once, nobody but the snapshot has its state
    "pipeline": Program(
        harness.SCRIPTS / "pipelined.py", STEPS, ("--schedule", "1f1b", "--steps", str(STEPS)), ("--snapshot-every", "5")
    ),
    "epochs": Program(harness.SCRIPTS / "loaded.py", STEPS, ("--epochs", "36", "--batches", "25", "--stretch", "0.01")),
}
