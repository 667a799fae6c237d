"""Every option of `ftrun run`, in one table: the command line, abbreviations, variables, the configuration file, the help
and the dry run are all made from it. Nothing here reads anything.

torchrun's options have its names, defaults and PET_ variables; ftrun's own have FTRUN_ variables.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftrun.cli import checks
from ftrun.cli.checks import Check

# sections of the help, in this order
REPAIR = "Repair (ftrun)"
RUN = "Run (ftrun)"
WORKERS = "Workers (as in torchrun)"
OUTPUT = "Output (as in torchrun)"
NODES = "Several nodes (as in torchrun)"
NO_EFFECT = "Accepted for torchrun's sake, without effect"
GROUPS = (REPAIR, RUN, WORKERS, OUTPUT, NODES, NO_EFFECT)
VERIFY = "Verify"  # options of `ftrun verify` alone
OURS = (REPAIR, RUN, VERIFY)
EPILOG = (
    "Options may be shortened and spelled with - or _. Those as in torchrun also come from variables such as PET_NNODES, "
    "ftrun's own from FTRUN_SPARES and the like, all of them from a configuration file; the command line goes first.\n\n"
    "Example: ftrun --nproc-per-node 4 --spares 1 train.py --epochs 3"
)
RUN_EPILOG = EPILOG.replace("Example: ftrun ", "Example: ftrun run ")


@dataclass(frozen=True)
class Option:
    """One option. `metavar` "" = a flag. `default` as one would write it, None = not given.

    `takes` are the types of its value in a TOML file, () = it cannot stand there. `variable` "" = it has none. `since`: the
    first torch whose torchrun has it, where that is not the oldest that ftrun works with.
    """

    name: str
    help: str
    group: str
    default: str | None = None
    metavar: str = ""
    check: Check = checks.text
    takes: tuple[type, ...] = (str,)
    short: str = ""
    variable: str = ""
    since: tuple[int, int] = (0, 0)

    @property
    def key(self) -> str:
        """The name as Python and torchrun's variables spell it."""
        return self.name.replace("-", "_")

    @property
    def is_flag(self) -> bool:
        return not self.metavar

    @property
    def torchrun(self) -> bool:
        """Does torchrun have it too?"""
        return self.group not in OURS

    @property
    def spellings(self) -> tuple[str, ...]:
        """The spellings of an option, with hyphens first, then with underscores."""
        return tuple(dict.fromkeys((f"--{self.name}", f"--{self.key}")))


def _theirs(name: str, group: str, help_: str, default: str | None = None, metavar: str = "", **more: object) -> Option:
    more.setdefault("variable", f"PET_{name.replace('-', '_').upper()}")
    return _option(name, group, help_, default, metavar, more)


def _own(name: str, group: str, help_: str, default: str | None = None, metavar: str = "", **more: object) -> Option:
    more.setdefault("variable", f"FTRUN_{name.replace('-', '_').upper()}")
    return _option(name, group, help_, default, metavar, more)


def _option(name: str, group: str, help_: str, default: str | None, metavar: str, more: dict[str, object]) -> Option:
    if not metavar:
        more = {"check": checks.flag, "takes": (bool,), **more}
    return Option(name, help_, group, default, metavar, **more)  # type: ignore[arg-type]


_WHOLE = {"check": checks.number, "takes": (int,)}
_TIME = {"check": checks.seconds, "takes": (int, float)}
_LISTED = (str, list)

OPTIONS: tuple[Option, ...] = (
    _own("spares", REPAIR, "Warm spare workers.", "1", "K", **_WHOLE),
    _own("max-replacements", REPAIR, "Replacements per rank and hour; beyond it exit code 75.", "3", "N", **_WHOLE),
    _own(
        "spare-nodes", REPAIR, "Nodes started beside --nnodes that wait to take a lost one's place (on every node the same).",
        "0", "N", **_WHOLE,
    ),
    _own(
        "node-loss", REPAIR, "With spare nodes: repair a lost node's ranks in place, or restart all ranks.", "repair", "restart|repair",
        check=checks.one_of("restart", "repair"),
    ),
    _own("max-node-replacements", REPAIR, "Lost nodes that are replaced in place; after that all ranks restart.", "3", "N", **_WHOLE),
    _own(
        "snapshot-every", REPAIR,
        "Keep the state in host memory every K steps, for the loss of all its replicas at once (0: never).",
        "0", "K", **_WHOLE,
    ),
    _own(
        "on-exhausted", REPAIR, "Without a healthy device: end with code 75, or wait for one (shrink is not supported yet).",
        "fail", "fail|shrink|wait", check=checks.exhausted,
    ),
    _own("xid-policy", REPAIR, "What to do about which Xid, from a TOML file.", None, "FILE"),
    _own("quarantine-file", REPAIR, "Keep devices that failed out of later runs: they stand in this file.", None, "FILE"),
    _own(
        "heartbeat-interval", REPAIR, "Seconds between two beats of a worker; two missed ones show a frozen process.",
        "0.2", "S", check=checks.beat, takes=(int, float),
    ),
    _own("heartbeat-timeout", REPAIR, "Seconds without a beat that are too many though no reason is seen.", "10", "S", **_TIME),
    _own(
        "hang-timeout", REPAIR, "Seconds without any progress; auto: learned from the length of a step.",
        "auto", "S|auto", check=checks.seconds_or_auto, takes=(int, float, str),
    ),
    _own("hang-floor", REPAIR, "The least that auto may come to.", "60", "S", **_TIME),
    _own(
        "hang-ceiling", REPAIR, "The most, and the patience with first steps, compilation, job.call and code between steps.",
        "600", "S", **_TIME,
    ),
    _own(
        "nonfinite", REPAIR, "Gradients that are not finite: do the step again and then stop, stop at once, or ignore them.",
        "redo", "redo|stop|ignore", check=checks.one_of("redo", "stop", "ignore"),
    ),
    _own(
        "check-every", REPAIR,
        "Check everything in every Nth step; 0 = as often as 0.5 % of the time pays for, replicas in every 100th.", "0", "N", **_WHOLE,
    ),
    _own(
        "inexact", REPAIR, "A repair after which the result may not be called exact: go on and say so, or end with code 75.",
        "go-on", "go-on|stop", check=checks.one_of("go-on", "stop"),
    ),
    _own("stop-timeout", REPAIR, "Seconds a worker gets to leave its step.", "10", "S", **_TIME),
    _own("recover-timeout", REPAIR, "Seconds a repair may make no progress; then who holds it up is replaced.", "600", "S", **_TIME),
    _own("start-timeout", REPAIR, "Seconds a worker gets to start.", "300", "S", **_TIME),
    # FTRUN_FAULT_PLAN is what the workers get
    _own("fault-plan", REPAIR, "Inject the faults of a TOML plan.", None, "FILE", variable=""),
    _own(
        "random-faults", REPAIR, "Inject random faults: how likely a step has one, 0 to 1.", None, "RATE",
        check=checks.probability, takes=(int, float),
    ),
    _own("fault-seed", REPAIR, "Seed of the random faults.", "1", "S", **_WHOLE),
    _own(
        "run-id", RUN, "Name of the run (default: the one of --rdzv-id, else random).", None, "ID",
        check=checks.run_name,
    ),
    _own(
        "config", RUN, "Options from a TOML file (default: [tool.ftrun] of ./pyproject.toml).", None, "FILE", takes=()
    ),
    _own(
        "debug-rank", RUN, "Give this rank stdin and the terminal: breakpoint() stops there, and is passed over in the others.",
        None, "R", **_WHOLE,
    ),
    _own("metrics-file", RUN, "Keep the run's figures in a file for Prometheus.", None, "FILE"),
    _own(
        "metrics-port", RUN, "Serve them on 127.0.0.1 as well (0: any free port).", None, "PORT",
        check=checks.port, takes=(int,),
    ),
    _own("dry-run", RUN, "Show what would be run, with --json as JSON, and start nothing.", variable="", takes=()),
    _own("json", RUN, "With --dry-run.", variable="", takes=()),
    _own("log-format", RUN, "Lines of the workers as text or JSON.", "text", "text|json", check=checks.one_of("text", "json")),
    _own(
        "log-prefix", RUN, "What stands before a worker's line: text with {role} {local_rank} {rank} {host} {run} {attempt}.",
        None, "TEMPLATE", check=checks.prefix,
    ),
    _own(
        "keep-logs", RUN, "Remove logs that are older than 30 days from ftrun-logs while it holds more than this; all: never.",
        "5", "GB|all", check=checks.gigabytes, takes=(int, float, str),
    ),
    _own(
        "forward-signals", RUN, "Signals to pass on to the workers without ending the run, as in USR1,USR2.",
        None, "NAMES", check=checks.signals_or_none, takes=_LISTED,
    ),
    _own(
        "worker-start", RUN, "Fork workers from a server that has torch, or start an interpreter each.",
        "forkserver", "forkserver|exec", check=checks.one_of("forkserver", "exec"),
    ),
    _own("version", RUN, "Show the version and exit.", variable="", takes=()),
    _theirs(
        "nproc-per-node", WORKERS, "Workers on this node; gpu:1,3: one on each of these GPUs.", "1", "N|auto|gpu|gpu:LIST|cpu|xpu",
        check=checks.workers, takes=(int, str),
    ),
    _theirs("max-restarts", WORKERS, "Restarts of all workers.", "0", "M", **_WHOLE),
    _theirs("module", WORKERS, "SCRIPT is a module, as in python -m.", short="-m"),
    _theirs("no-python", WORKERS, "SCRIPT is a program of any kind.", takes=(bool,)),
    _theirs("run-path", WORKERS, "Run the script with runpy (ftrun always does); goes before --no-python and -m."),
    _theirs("virtual-local-rank", WORKERS, "Each worker sees only its GPU, as device 0, with LOCAL_RANK=0."),
    _theirs(
        "numa-binding", WORKERS, "Bind workers to the processors near their GPU.",
        None, "node|socket|exclusive|core-complex",
        check=checks.one_of("node", "socket", "exclusive", "core-complex"), variable="",
    ),
    _theirs(
        "signals-to-handle", WORKERS, "Signals that end the run and are passed on to the workers.",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "NAMES", check=checks.signals, takes=_LISTED,
    ),
    _theirs(
        "shutdown-timeout", WORKERS, "Seconds the workers get to end after a signal.", "30", "S",
        check=checks.patience, takes=(int, float),
    ),
    _theirs("role", WORKERS, "Role of the workers, for their line prefix and ROLE_NAME.", "default", "NAME"),
    _theirs(
        "log-dir", OUTPUT, "Where the workers' output is kept.",
        "ftrun-logs", "DIR",
    ),
    _theirs(
        "redirects", OUTPUT, "Streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both, or 0:3,1:1 by local rank.",
        "0", "STREAMS", check=checks.streams, takes=(int, str), short="-r",
    ),
    _theirs(
        "tee", OUTPUT, "Streams that go to files and, with torchrun's prefix, to the console.",
        "0", "STREAMS", check=checks.streams, takes=(int, str), short="-t",
    ),
    _theirs(
        "log-line-prefix-template", OUTPUT,
        "The prefix in torchrun's form: ${role_name} ${local_rank} ${rank} ${hostname}; --log-prefix goes before it.",
        "", "TEMPLATE", since=(2, 14),
    ),
    _theirs(
        "local-ranks-filter", OUTPUT, "Show only these local ranks on the console.", "", "RANKS",
        check=checks.ranks, takes=(int, str, list),
    ),
    _theirs(
        "duplicate-stdout-filters", OUTPUT, "Copy lines of stdout that hold one of these texts into one more file.",
        "", "TEXTS", check=checks.filters, takes=_LISTED,
    ),
    _theirs(
        "duplicate-stderr-filters", OUTPUT, "The same for stderr.", "", "TEXTS", check=checks.filters, takes=_LISTED
    ),
    _theirs(
        "print-completion", OUTPUT, "Print the completion file of a shell and exit, as ftrun completions does.",
        None, "bash|zsh|fish", variable="", takes=(), since=(2, 14),
    ),
    _theirs("nnodes", NODES, "Nodes.", "1:1", "N|MIN:MAX", check=checks.nodes, takes=(int, str)),
    _theirs(
        "rdzv-backend", NODES, "How the nodes find each other: static, c10d, file, etcd or kubernetes.",
        "static", "NAME", check=checks.backend,
    ),
    _theirs(
        "rdzv-endpoint", NODES, "Where: HOST[:PORT] (c10d: 29400; etcd: 2379, several with commas), for file a path that all nodes see.",
        "", "WHERE",
    ),
    _theirs("rdzv-id", NODES, "The same name for every node of one run.", "none", "ID", takes=(int, str)),
    _theirs(
        "rdzv-conf", NODES, "More settings: key=value,key=value.", "", "PAIRS", check=checks.pairs, takes=(str, dict)
    ),
    _theirs("standalone", NODES, "This node only; goes before --rdzv-backend, --rdzv-endpoint and --rdzv-id."),
    _theirs("node-rank", NODES, "This node's number (static).", "0", "N", **_WHOLE),
    _theirs("master-addr", NODES, "Address of node 0 (static).", "127.0.0.1", "HOST"),
    _theirs("master-port", NODES, "Port on node 0 (static; default: 29500).", None, "PORT", check=checks.port, takes=(int,)),
    _theirs("local-addr", NODES, "Address of this node for the others.", None, "HOST"),
    _theirs(
        "monitor-interval", NO_EFFECT, "ftrun is told of a failure, it does not poll.", "0.1", "S",
        check=checks.patience, takes=(int, float),
    ),
    _theirs(
        "start-method", NO_EFFECT, "See --worker-start.", "spawn", "spawn|fork|forkserver",
        check=checks.one_of("spawn", "fork", "forkserver"),
    ),
    _theirs(
        "event-log-handler", NO_EFFECT, "ftrun keeps a journal of every event.", "null", "NAME",
        check=checks.one_of("null", "console", "dynamic_rendezvous"),
    ),
    _theirs(
        "logs-specs", NO_EFFECT, "Only default; ftrun loads no log plugins.", None, "NAME",
        check=checks.logs_specs, variable="",
    ),
)  # fmt: skip

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}
