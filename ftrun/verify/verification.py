"""Runs `ftrun verify`: makes the clean run and the runs with faults, compares their digests, and reports the verdict.

Theory of operation. The clean run comes first; it fixes the ranks, steps and tensors, and the kills are planned from its steps. Each run
with faults is compared with it. A kill whose moment did not come goes into a further run. At the first difference the script runs a
second time without faults, and values that differ between the two clean runs are compared no more. A difference that remains ends the
verification if it reaches the script's end or one of the script's own values: the verdict is UNSTABLE if the clean runs differ as well,
else DIFFERENT. A difference that leaves nothing behind is reported only. A run with faults that fails ends the verification with FAILED.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ftrun.core.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError, UsageError
from ftrun.core.text import printable, tell
from ftrun.faults import everyphase
from ftrun.faults.everyphase import Kill
from ftrun.host.base.settings import Settings
from ftrun.verify import digests, trials, values
from ftrun.verify.digests import Difference, Digests
from ftrun.verify.progress import ProgressBar
from ftrun.verify.trials import Trial
from ftrun.verify.values import ComparedValues

EQUAL, DIFFERENT, UNSTABLE, FAILED = "equal", "different", "not-deterministic", "failed"
_SCHEMA = 1
_PLACEHOLDER = "${verify}"
_SHARDS = 8  # the report names the shards of that many ranks
_AGAIN = "again"  # the second run without faults
_TRIES = 3  # the most further runs for kills that did not fire


@dataclass
class Result:
    """The verdict and its evidence. `trial`: the run that differed from the clean one, or failed; None if all were equal."""

    verdict: str
    folder: Path
    runs: list[Trial]
    faulted: list[Trial]
    ranks: int
    steps: int
    tensors: int
    streams: int
    planned: int
    trial: Trial | None = None
    difference: Difference | None = None
    cause: str = ""
    passing: list[str] = field(default_factory=list)
    values: ComparedValues = field(default_factory=ComparedValues)

    @property
    def code(self) -> int:
        return EXIT_OK if self.verdict == EQUAL else EXIT_FAILED

    @property
    def fired(self) -> int:
        return sum(trial.fired for trial in self.faulted)

    def lines(self) -> list[str]:
        """Return the report for people."""
        faults = f"{self.fired} of {_count(self.planned, 'fault')} fired"
        if self.verdict == EQUAL:
            equal = "equal at the end" if self.passing else "equal"
            own = len(self.values.equal)
            are = f"; {_count(own, 'value')} of the script's own {'is' if own == 1 else 'are'} equal at the end of each loop"
            return [
                f"{equal}: {_count(self.ranks, 'rank')}, {_count(self.steps, 'step')}; {_count(self.tensors, 'tensor')} and "
                f"{_count(self.streams, 'random stream')} of each rank are bit for bit the same with faults as without{are if own else ''}",
                *values.in_words(self.values),
                *self.passing,
                faults,
            ]
        assert self.trial is not None
        end = [faults, f"digests and logs: {self.folder}"]
        if self.verdict == FAILED:
            failed = f"failed: the run {self.trial.name} ended with exit code {self.trial.code}, the one without faults did not"
            return [failed, *(_told(FAILED, self.difference, self.cause) if self.difference else ()), *end]
        assert self.difference is not None
        return [*_told(self.verdict, self.difference, self.cause), *values.in_words(self.values), *end]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": _SCHEMA,
            "verdict": self.verdict,
            "ranks": self.ranks,
            "steps": self.steps,
            "tensors_per_rank": self.tensors,
            "random_streams_per_rank": self.streams,
            "values": values.as_json(self.values),
            "faults": {
                "planned": self.planned,
                "fired": self.fired,
                "unfired": [fault for trial in self.faulted for fault in trial.unfired],
            },
            "runs": [
                {"name": t.name, "exit_code": t.code, "seconds": round(t.seconds, 3), "incidents": t.incidents,
                 "restarts": t.restarts, "folder": str(t.folder)}
                for t in self.runs
            ],
            "different_run": self.trial.name if self.trial else None,
            "difference": digests.as_json(self.difference) if self.difference else None,
            "cause": self.cause or None,
            "passing_differences": self.passing,
        }  # fmt: skip


def _take_in(known: ComparedValues, found: ComparedValues) -> None:
    """Merge the values of one more equal run: a value that one run could not compare stays uncompared."""
    known.uncompared |= found.uncompared
    known.equal = (known.equal | found.equal) - known.uncompared.keys()


def _found(difference: Difference) -> tuple[str, str]:
    """Return where two runs first differ, and what differs there, both in words."""
    place = difference.place
    where = "at the script's end" if place == digests.EXIT else f"in step {place.step}"
    if place.point == 0:
        where = f"at the start of step {place.step}"
    if place.ends_loop:
        where = f"at the end of loop {place.loop}"
    if difference.missing:
        what = f"{_ranks(difference.missing)} {'was' if len(difference.missing) == 1 else 'were'} not there"
    else:
        others = len(difference.names) - 1
        more = f", and {_count(others, 'more thing')} in the same place" if others else ""
        what = f"{digests.in_words(difference.first)} on {_ranks(difference.names[difference.first])}{more}"
    return f"{where} (done again after a fault)" if difference.redone else where, what


def on_the_way(difference: Difference, cause: str, trial: Trial) -> str:
    where, what = _found(difference)
    return (
        f"on the way, {where} of the run {trial.name}, this was not equal, and left nothing behind: {what}; "
        f"likely cause: {digests.explain(cause)}"
    )


def _told(verdict: str, difference: Difference, cause: str) -> list[str]:
    where, what = _found(difference)
    first = {
        DIFFERENT: f"different: first {where}: {what}",
        UNSTABLE: f"not deterministic: two runs without faults differ first {where}: {what}",
        FAILED: f"before it failed it was different, first {where}: {what}",
    }[verdict]
    lines = [first, *_shards(difference), f"likely cause: {digests.explain(cause)}"]
    if verdict == UNSTABLE:
        lines.append("no run of this script can be compared with another one until it gives the same result twice")
    if difference.compared and verdict != FAILED:
        lines.append(f"at the end {difference.at_end} of {difference.compared} tensors and streams differ")
    return lines


def _shards(difference: Difference) -> list[str]:
    """Return a line that names the part of the differing sharded tensor on each rank."""
    if not difference.parts:
        return []
    shown = [f"rank {rank} ({digests.part_in_words(part)})" for rank, part in list(difference.parts.items())[:_SHARDS]]
    more = len(difference.parts) - len(shown)
    others = f" and {_count(more, 'more rank')}" if more else ""
    return [f"differs in shards of the {digests.in_words(difference.shard)}: {', '.join(shown)}{others}"]


class Verification:
    """One `ftrun verify`. `options`: the command-line options for each run; `plan`: the user's fault plan, None = a kill in every phase."""

    def __init__(self, settings: Settings, options: list[str], plan: Path | None) -> None:
        self._settings = settings
        self._options = options
        self._plan = plan
        self._folder = Path()
        self._runs: list[Trial] = []
        self._again: Digests | None = None  # of the second run without faults
        self._unstable: set[str] = set()  # the script's own values that differ between the two runs without faults

    def run(self) -> Result:
        """Verify the script.

        Raises:
            UsageError: The script cannot be compared, or the log folder cannot be written.
            ConfigError: No fault of the plan fired, or a run refused its plan.
            Interrupted: A signal ended a run.
            OSError: A log or plan file cannot be read or written.
        """
        base = Path(self._settings.log_dir).absolute() / f"verify-{Path(self._settings.argv[0]).stem}"
        try:
            self._folder = trials.usable_name(base)
        except OSError as error:
            raise UsageError(f"cannot write to {base.parent}: {error.strerror}; see --log-dir") from None
        with ProgressBar("verify") as progress:
            return self._judge(progress)

    def _judge(self, progress: ProgressBar) -> Result:
        clean_trial = self._trial("clean", [], progress)
        self._need(clean_trial)
        clean = digests.read(clean_trial.digests)
        self._need_digests(clean, clean_trial)
        plans = self._plans(clean)
        result = Result(
            EQUAL, self._folder, self._runs, [], len(clean.ranks), len(clean.steps), clean.tensors(), clean.streams(),
            planned=0,
        )  # fmt: skip
        tries = _TRIES
        for number, kills in enumerate(plans, 1):  # the list may grow
            name = "faults" if number == 1 and len(plans) == 1 else f"faults-{number}"
            trial = self._trial(name, [f"--fault-plan={self._plan or self._written(number, kills)}"], progress)
            result.planned += trial.fired
            missed = everyphase.missed(kills, trial.unfired) if not trial.code else []
            if missed and tries:
                tries -= 1
                plans.append(missed)
                trial = replace(trial, unfired=())
            result.planned += len(trial.unfired)
            result.faulted.append(trial)
            if trial.code:
                _show_end(trial)
                if trial.code in (EXIT_USAGE, EXIT_CONFIG):
                    error = UsageError if trial.code == EXIT_USAGE else ConfigError
                    raise error(f"the run {name} was refused, see above and {trial.folder / trials.OUTPUT}")
                result.verdict, result.trial = FAILED, trial
                before = digests.compare(clean, digests.read(trial.digests))
                if before is not None and before.names:
                    result.difference, result.cause = before, self._cause(before, True, clean)
                return result
            found = self._read(clean, trial)
            difference, own = self._compared(clean, found)
            if difference is not None or own.different:
                again = self._run_again(clean, progress)
                difference, own = self._compared(clean, found)
                lasting = difference if difference is not None and difference.lasting else values.difference(own, clean, found)
                if lasting is not None:
                    return self._explained(replace(result, values=own, trial=trial), clean, again, difference or lasting)
            _take_in(result.values, own)
            if difference is not None:
                result.passing.append(on_the_way(difference, self._cause(difference, True, clean), trial))
        if not result.fired:
            raise ConfigError(
                f"{self._plan}: no fault of the plan fired, so nothing was verified; the steps are "
                f"{clean.steps[0]} to {clean.steps[-1]}"
            )
        for fault in (fault for trial in result.faulted for fault in trial.unfired):
            tell(f"verify: warning: did not fire: {fault}")
        for trial in self._runs:
            shutil.rmtree(trial.digests, ignore_errors=True)
        return result

    def _explained(self, result: Result, clean: Digests, again: Digests, difference: Difference) -> Result:
        """Give `result` its verdict and cause. `difference`: of `result.trial`, the run with faults."""
        chance, _ = self._compared(clean, again)
        result.verdict, result.difference = DIFFERENT, difference
        if chance is not None:
            result.verdict, result.difference = UNSTABLE, digests.compare(clean, again)
            result.trial = next(trial for trial in self._runs if trial.name == _AGAIN)
        assert result.difference is not None
        result.cause = self._cause(result.difference, chance is None, clean)
        return result

    def _run_again(self, clean: Digests, progress: ProgressBar) -> Digests:
        """Return the digests of a second run without faults, made once: recovery is not blamed for differences between two clean runs."""
        if self._again is None:
            trial = self._trial(_AGAIN, [], progress)
            self._need(trial)
            self._again = self._read(clean, trial)
            self._unstable = values.unstable(clean, self._again)
        return self._again

    def _cause(self, difference: Difference, deterministic: bool, clean: Digests) -> str:
        return digests.cause(difference, deterministic, digests.has_loader(clean))

    # -- one run -----------------------------------------------------------------------------------------------------

    def _trial(self, name: str, more: list[str], progress: ProgressBar) -> Trial:
        settings = self._settings
        script, *arguments = settings.argv
        argv = [script, *(argument.replace(_PLACEHOLDER, name) for argument in arguments)]
        progress.begin(name)
        trial = trials.run(
            name,
            self._folder / name,
            [*self._options, *more],
            ["--", *argv],
            settings.nproc,
            settings.shutdown_timeout,
            progress.show,
        )
        faults = f", {_count(trial.fired, 'fault')}" if more else ""
        progress.done(f"{name}: exit code {trial.code} after {trial.seconds:.1f} s{faults}")
        self._runs.append(trial)
        return trial

    def _need(self, trial: Trial) -> None:
        """Raise UsageError if a run without faults failed."""
        if trial.code != EXIT_OK:
            _show_end(trial)
            raise UsageError(
                f"the run {trial.name}, without faults, ended with exit code {trial.code}, so there is nothing to "
                f"compare with; see {trial.folder / trials.OUTPUT}"
            )

    def _need_digests(self, found: Digests, trial: Trial) -> None:
        script = self._settings.argv[0]
        if not found.ranks:
            raise UsageError(
                f"{script} never called ftrun.protect, or began no step after it: there is nothing to compare "
                "(ftrun cannot recover such a script in place either)"
            )
        if not found.steps:
            raise UsageError(f"{script} finished no step of job.steps or job.batches: there is nothing to compare")
        absent = [rank for rank in range(self._settings.nproc) if digests.EXIT not in found.ranks.get(rank, {})]
        if absent:
            raise UsageError(
                f"{_ranks(absent)} of the run {trial.name} did not reach the end of {script} (os._exit?); see {trial.folder}"
            )

    def _compared(self, clean: Digests, found: Digests) -> tuple[Difference | None, ComparedValues]:
        own = values.compare(clean, found, self._unstable)
        own.uncompared = {**self._runs[0].not_kept, **own.uncompared}
        return digests.compare(clean, found, self._unstable), own

    def _read(self, clean: Digests, trial: Trial) -> Digests:
        """Read the digests of a run; raise UsageError if it did not begin with the clean run's first step."""
        found = digests.read(trial.digests)
        if found.first_step is not None and found.first_step != clean.first_step:
            raise UsageError(
                f"the run {trial.name} began with step {found.first_step}, the clean one with step {clean.first_step}: the script "
                "found a checkpoint of an earlier run; keep the runs apart with ${verify} in its arguments, which is "
                "the name of the run"
            )
        return found

    def _plans(self, clean: Digests) -> list[list[Kill]]:
        """Return the planned kills of each run; a user's plan gets one run without planned kills."""
        if self._plan is not None:
            return [[]]
        if len(clean.ranks) == 1:
            phases = ", ".join(everyphase.NEED_ANOTHER)
            tell(f"verify: with one rank nobody can be killed in {phases}: that takes another one")
        return everyphase.plans(clean.steps, len(clean.ranks))

    def _written(self, number: int, kills: list[Kill]) -> Path:
        path = self._folder / f"plan-{number}.toml"
        path.write_text(everyphase.as_toml(kills))
        return path


def _show_end(trial: Trial) -> None:
    for line in trial.last_lines():
        print(f"  {printable(line)}", file=sys.stderr)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
