"""Patterns of public bug reports: each runs under torchrun, converted without a fault, and converted with kills.

A case is right when

- the converted run without a fault ends where torchrun ends, or ftrun refuses the script there (exit code 2, and no traceback of its own);
- with kills it ends where torchrun ends, and says what the table wants;
- where it ends elsewhere, the closing line is not "yes", and names what is not known;
- it comes to an end.

Some scripts are not converted at all ("plain"): a program that torchrun starts must do the same under ftrun.

`SEEN` are the words for what was seen; a case wants some of them. `known_wrong` is what is seen today in a case that is wrong: the
test fails as soon as something else is seen, so whoever mends it takes the word away.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e import harness as e2e
from tests.e2e.harness import kill
from tests.truth import harness
from tests.truth.harness import Seen

SCRIPTS = Path(__file__).parent / "scripts"
RANKS = 2

YES = "equal, said yes"
NAMED = "differs, said what is not known"
EQUAL = "equal, did not say yes"
REFUSED = "refused"
SAME = "as under torchrun"  # of a plain script
FALSE = "differs, said yes"
STILL = "no fault struck"
HANGS = "no end"
OURS = "a traceback from inside ftrun"
SEEN = (
    YES,
    NAMED,
    EQUAL,
    REFUSED,
    SAME,
    FALSE,
    STILL,
    HANGS,
    OURS,
)  # and "clean: exit N", "clean: differs", "killed: exit N"


@dataclass(frozen=True)
class Case:
    """`strike`: rank:epoch:index of a death that the script deals itself; `often`: runs in `make test`."""

    script: str
    wanted: tuple[str, ...] = (YES,)
    faults: tuple[str, ...] = ()
    strike: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    known_wrong: tuple[str, ...] = ()
    often: bool = False

    @property
    def plain(self) -> bool:
        return not self.faults and not self.strike


ONE = (kill(1, "forward", 8),)
TWO = (kill(1, "backward", 8), kill(0, "update", 16))
UPDATE = kill(0, "update", 3)  # in the first epoch

CASES: dict[str, Case] = {
    # the script's own counters and names
    "enumerate-schedule": Case("enumerate_schedule", (REFUSED, YES), ONE),
    "enumerate-accumulation": Case("enumerate_accumulation", (REFUSED, YES), TWO),
    "zip-schedule": Case("zip_schedule", (REFUSED, YES), ONE),
    "limit-batches": Case("limit_batches", (REFUSED, YES), strike="1:2:2"),
    "rebound-name": Case("rebound_name", faults=TWO),
    "trainer-state": Case("trainer_state", faults=TWO),
    "counter-after-update": Case("counter_after_update", (YES, EQUAL), TWO),
    "best-epoch": Case("best_epoch", strike="0:3:2"),
    "replay-buffer": Case("replay_buffer", faults=TWO),
    "epoch-meters": Case("epoch_meters", faults=(kill(1, "backward", 6), kill(0, "update", 3)), often=True),
    "two-loops": Case("two_loops", strike="1:1:2"),
    "progress-bar": Case("progress_bar", faults=TWO),
    # the order of the data
    "shuffle-in-place": Case("shuffle_in_place", faults=(UPDATE,), strike="1:3:2"),
    "counting-sampler": Case("counting_sampler", faults=(UPDATE,), strike="1:3:2"),
    "stream-persistent": Case("stream_persistent", strike="1:1:3"),
    "persistent-workers": Case("persistent_workers", strike="1:1:1", env={"CASE_METHOD": "fork"}),
    # models
    "module-attribute": Case("module_attribute", faults=TWO),
    "averaged-model": Case("averaged_model", faults=TWO),
    "average-in-place": Case("average_in_place", faults=TWO),
    "channels-last": Case("channels_last", faults=TWO),
    "quantization": Case("quantization", (YES, REFUSED), TWO),
    # how the program is made
    "second-backend": Case("second_backend", (YES, REFUSED), ONE),
    "in-a-thread": Case("in_a_thread", (YES, REFUSED), ONE),
    "exec-itself": Case("exec_itself", (SAME,)),
    "environment-first": Case("environment_first", (SAME,)),
    "shadow": Case("shadow/train", (SAME,)),
    # where a number is kept
    **{
        f"container-{kind}": Case("containers", wanted, ONE, env={"CASE_KIND": kind})
        for kind, wanted in (
            ("list", (YES,)),
            ("array", (YES,)),
            ("queue", (YES,)),
            ("userdict", (YES,)),
            ("bytearray", (YES,)),
            ("context", (YES, NAMED)),
            ("cache", (YES, NAMED)),
        )
    },
}


@dataclass(frozen=True)
class Verdict:
    """`seen`: one of `SEEN`; `told`: what ftrun printed."""

    seen: str
    told: str


def _traceback_of_ours(output: str) -> bool:
    return re.search(rf'File "{re.escape(str(e2e.ROOT))}/ftrun/', output) is not None


def _under_ftrun(folder: Path, case: Case, converted: bool, killed: bool = False) -> Seen | None:
    """None when it did not end."""
    env = {"CASE_CONVERTED": str(int(converted)), **case.env}
    if killed:
        env["CASE_KILL"] = case.strike
    script = SCRIPTS / f"{case.script}.py"
    try:
        return harness.under_ftrun(folder, script, case.faults if killed else (), ranks=RANKS, env=env)
    except e2e.StillRunning:
        return None


def judge(folder: Path, case: Case) -> Verdict:
    """Run a case in each way, as far as it is right."""
    script, env = SCRIPTS / f"{case.script}.py", {"CASE_CONVERTED": "0", **case.env}
    stock = harness.by_torch(folder / "stock", script, RANKS, env, torchrun=True)
    assert stock.code == 0 and len(stock.ranks) == RANKS, stock.output
    clean = _under_ftrun(folder / "clean", case, converted=not case.plain)
    if clean is None:
        return Verdict(f"clean: {HANGS}", "")
    if clean.answer == "refused" and not _traceback_of_ours(clean.output):
        return Verdict(REFUSED, clean.output)
    if clean.code or clean.ranks != stock.ranks:
        return Verdict(f"clean: exit {clean.code}" if clean.code else "clean: differs", clean.output)
    if case.plain:
        return Verdict(OURS if _traceback_of_ours(clean.output) else SAME, clean.output)
    killed = _under_ftrun(folder / "killed", case, converted=True, killed=True)
    if killed is None:
        return Verdict(f"killed: {HANGS}", "")
    return Verdict(_of_killed(killed, stock), killed.output)


def _of_killed(killed: Seen, stock: Seen) -> str:
    if killed.code:
        return f"killed: exit {killed.code}"
    if killed.answer == "no incident":
        return STILL
    if _traceback_of_ours(killed.output):
        return OURS
    if killed.ranks == stock.ranks:
        return YES if killed.answer == "yes" else EQUAL
    return FALSE if killed.answer == "yes" or "ended as it should" in killed.output else NAMED
