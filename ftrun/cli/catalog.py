"""Every command: the module that registers it, and its line in `ftrun --help`. Plain data; imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass

RUN, WATCH, TEST, MANAGE = "Run", "Watch", "Test", "Manage"
SECTIONS = (RUN, WATCH, TEST, MANAGE)


@dataclass(frozen=True)
class Listed:
    """`module` is in ftrun.cli.commands; `summary` fits a line of 80 columns beside section and name."""

    module: str
    section: str
    summary: str


COMMANDS: dict[str, Listed] = {
    "run": Listed("run", RUN, "Run a training script; `ftrun train.py` is short for it."),
    "status": Listed("status", WATCH, "Show what a run does now, live on a terminal."),
    "runs": Listed("runs", WATCH, "List the live runs, with --all those that ended."),
    "timeline": Listed("timeline", WATCH, "Draw an incident: who failed, when, why, what it cost."),
    "events": Listed("events", WATCH, "List what happened in a run."),
    "metrics": Listed("metrics", WATCH, "Print a run's figures for Prometheus."),
    "verify": Listed("verify", TEST, "Run a script clean and with faults, compare all tensors."),
    "inject-fault": Listed("inject", TEST, "Strike a live run with a fault."),
    "doctor": Listed("doctor", TEST, "Look at what ftrun needs of this machine."),
    "stop": Listed("runs", MANAGE, "End a run, and wait for its end."),
    "drain": Listed("drain", MANAGE, "Move a rank to a spare, between two steps."),
    "explain": Listed("explain", MANAGE, "Explain a message's code, or a run's values."),
    "completions": Listed("completions", MANAGE, "Print the completion file of a shell."),
}

# what most runs need, in few words; `ftrun run --help` has every option with its default
COMMON = (
    ("--nproc-per-node N", "Workers on this node: a number, gpu, gpu:0,2, cpu, auto."),
    ("--nnodes N", "Nodes, or MIN:MAX."),
    ("--rdzv-endpoint HOST", "Where the nodes meet, with --rdzv-backend c10d."),
    ("--spares K", "Warm spare workers (1 without it)."),
    ("--max-restarts M", "Restarts of all workers, where a repair is not possible."),
    ("--run-id ID", "The run's name (a random one without it)."),
    ("--log-dir DIR", "Where the workers' output is kept."),
    ("--dry-run", "Show what would be run, and start nothing."),
)
