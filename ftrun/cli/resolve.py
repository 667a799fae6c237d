"""Resolves the value of each option and its origin, and makes the Settings. Starts nothing, writes nothing.

Command line before variable (PET_ for torchrun's options, FTRUN_ for ftrun's own) before configuration file before default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftrun.cli import policyfile
from ftrun.cli.config import ConfigFile
from ftrun.cli.options import OPTIONS, Option
from ftrun.core.environment import virtual_variables
from ftrun.core.errors import ConfigError, UsageError
from ftrun.core.system.procfs import has_stdin
from ftrun.faults import oom
from ftrun.faults.plan import Plan
from ftrun.host.base.settings import Nodes, Output, Settings, check_module, check_program, check_script, run_name
from ftrun.host.output.logformat import torchrun_template

COMMAND_LINE, DEFAULT = "command line", "default"
# variables that torchrun reads beside PET_
_MORE_VARIABLES = {
    "shutdown-timeout": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    "log-line-prefix-template": "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
}
_DEBUGGING = 86400.0  # seconds that the others wait at least
# options whose values are fields of Settings
_AS_THEY_ARE = (
    "max-restarts max-replacements snapshot-every log-dir keep-logs stop-timeout heartbeat-interval heartbeat-timeout hang-timeout "
    "hang-floor hang-ceiling nonfinite check-every inexact start-timeout recover-timeout shutdown-timeout role virtual-local-rank "
    "metrics-port"
).split()
_NOT_A_NAME = "none"  # torchrun's default for --rdzv-id


class Values:
    """Every option's checked value, `values["spares"]`; `text` as it was written and `source`: where it was set.

    Raises:
        UsageError: For a bad value from the command line or a variable.
        ConfigError: For one from the file.
    """

    def __init__(self, given: Mapping[str, str], environ: Mapping[str, str], config: ConfigFile) -> None:
        self.text: dict[str, str | None] = {}
        self.source: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        for option in OPTIONS:
            text, source = _said(option, given, environ, config)
            self.text[option.name], self.source[option.name] = text, source
            self._values[option.name] = _checked(option, text, source, config)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def given(self, name: str) -> bool:
        """Was it set anywhere?"""
        return self.source[name] != DEFAULT


def _said(
    option: Option, given: Mapping[str, str], environ: Mapping[str, str], config: ConfigFile
) -> tuple[str | None, str]:
    if option.name in given:
        return given[option.name], COMMAND_LINE
    if option.variable and environ.get(option.variable):
        return environ[option.variable], option.variable
    more = _MORE_VARIABLES.get(option.name, "")
    if environ.get(more):
        return environ[more], more
    if option.name in config.values:
        return config.values[option.name], str(config.path)
    return option.default, DEFAULT


def _checked(option: Option, text: str | None, source: str, config: ConfigFile) -> Any:
    if text is None:
        return False if option.is_flag else None
    try:
        return option.check(f"--{option.name}", text)
    except UsageError as error:
        if config.path is not None and source == str(config.path):
            raise ConfigError(f"{config.where(option.name)}: {error}") from None
        if source in (COMMAND_LINE, DEFAULT):
            raise
        raise UsageError(f"{error} (from {source})", explain=error.explain) from None


def settings(values: Values, script: str, args: tuple[str, ...], config: ConfigFile | None = None) -> Settings:
    """The settings for the launcher.

    Raises:
        UsageError: For options that do not go together, or a missing script.
    """
    from ftrun.host.devices.counting import chosen_gpus

    kind = _kind(values)
    gpus = chosen_gpus(values.text["nproc-per-node"] or "")
    if kind == "program":
        check_program(script)
    elif kind == "module":
        check_module(script)
    else:
        check_script(script)
    plan, text = values["fault-plan"], ""
    if plan is not None:
        from ftrun.faults.plan import parse_plan, read_text

        plan = os.fspath(Path(plan).absolute())
        text = read_text(plan)
        read = parse_plan(text, plan)
        if not read.faults:
            raise ConfigError(f"{plan}: there is no [[fault]] in it, so nothing would be injected")
        read.check_ranks(values["nproc-per-node"] * values["nnodes"][1])
        _check_possible(read)
    both = [s.name for s in values["signals-to-handle"] if s in (values["forward-signals"] or ())]
    if both:
        raise UsageError(f"{both[0]} cannot end the run and be only forwarded: take it out of --signals-to-handle")
    if values["virtual-local-rank"]:
        virtual_variables(gpus or os.environ.get("CUDA_VISIBLE_DEVICES"), values["nproc-per-node"] - 1)
    if os.path.exists(values["log-dir"]) and not os.path.isdir(values["log-dir"]):
        raise UsageError(f"--log-dir {values['log-dir']} is a file; name a folder (it is made if it is missing)")
    nodes = _nodes(values)
    debug_rank = values["debug-rank"]
    if debug_rank is not None:
        _check_debugging(debug_rank, values["nproc-per-node"], nodes.most)
    wait = values["on-exhausted"] == "wait"
    if wait and nodes.most > 1:
        raise UsageError(
            "--on-exhausted wait is for one node; several nodes go on without the one that ends (exit code 75)"
        )
    chosen = policyfile.read(config or ConfigFile(), values["xid-policy"])
    quarantine = values["quarantine-file"]
    if quarantine is not None:
        from ftrun.host.devices.quarantine import check

        check(Path(quarantine))
    spares = 0 if kind == "program" else values["spares"]  # what is no Python cannot be warmed up
    rdzv_id = "" if values["standalone"] else _rdzv_id(values["rdzv-id"])
    as_they_are = {name.replace("-", "_"): values[name] for name in _AS_THEY_ARE}
    if debug_rank is not None:  # waiting for a person takes long
        as_they_are |= {name: max(_DEBUGGING, as_they_are[name]) for name in ("start_timeout", "stop_timeout", "recover_timeout")}
    return Settings(
        **as_they_are,
        debug_rank=debug_rank,
        argv=(script, *args),
        kind=kind,
        nproc=values["nproc-per-node"],
        gpus=gpus,
        spares=spares,
        run_id=values["run-id"] or (run_name(rdzv_id) if rdzv_id else None),
        rdzv_id=rdzv_id,
        fault_plan=plan,
        fault_text=text,
        random_faults=f"{values['random-faults']}:{values['fault-seed']}" if values["random-faults"] else "",
        exec_workers=values["worker-start"] == "exec",
        numa_binding=values["numa-binding"] or "",
        signals=values["signals-to-handle"],
        forward=values["forward-signals"] or (),
        metrics_file=os.path.abspath(values["metrics-file"]) if values["metrics-file"] else None,
        nodes=nodes,
        policy=chosen.overrides,
        device_faults=3 if chosen.device_faults is None else chosen.device_faults,
        window=3600.0 if chosen.window is None else chosen.window,
        wait_for_device=wait,
        quarantine_file=None if quarantine is None else os.fspath(Path(quarantine).absolute()),
        output=Output(
            redirects=values["redirects"],
            tee=values["tee"],
            filter=values["local-ranks-filter"],
            stdout_filters=values["duplicate-stdout-filters"],
            stderr_filters=values["duplicate-stderr-filters"],
            template=_template(values),
            format=values["log-format"],
        ),
    )


def _template(values: Values) -> str:
    """Ours goes before torchrun's, unless only torchrun's stands on the command line."""
    theirs = torchrun_template(values["log-line-prefix-template"])
    said_now = [values.source[name] == COMMAND_LINE for name in ("log-prefix", "log-line-prefix-template")]
    return theirs if theirs and said_now == [False, True] else values["log-prefix"] or theirs


def _check_debugging(rank: int, ranks: int, nodes: int) -> None:
    """Raises UsageError where --debug-rank would have nobody to talk to."""
    if nodes > 1:
        raise UsageError("--debug-rank works in a run on one node")
    if rank >= ranks:
        raise UsageError(f"--debug-rank {rank}: there are ranks 0 to {ranks - 1} (--nproc-per-node {ranks})")
    if not has_stdin():
        raise UsageError("--debug-rank: there is no stdin to type into (it is closed, or /dev/null); start it on a terminal")


def _check_possible(plan: Plan) -> None:
    """Raises ConfigError for a fault that this machine has no way to inject."""
    for fault in plan.faults:
        if fault.kind == "oom" and (why := oom.why_not()):
            raise ConfigError(f"{plan.path}:{fault.line}: {why}")


def _kind(values: Values) -> str:
    if values["run-path"]:
        return "script"
    if values["no-python"] and values["module"]:
        raise UsageError("--no-python and --module do not go together: a module is run by Python")
    return "program" if values["no-python"] else "module" if values["module"] else "script"


def _rdzv_id(text: str) -> str:
    return "" if text == _NOT_A_NAME else text


def _nodes(values: Values) -> Nodes:
    least, most = values["nnodes"]
    nodes = Nodes(
        least=least,
        most=most,
        backend=values["rdzv-backend"],
        endpoint=values["rdzv-endpoint"],
        conf=values["rdzv-conf"],
        rank=values["node-rank"] if values.given("node-rank") else None,
        master_addr=values["master-addr"] if values.given("master-addr") else "",
        master_port=(values["master-port"] or 0) if values["rdzv-backend"] == "static" else 0,
        local_addr=values["local-addr"] or "",
        standalone=values["standalone"],
        spares=values["spare-nodes"],
        max_replacements=values["max-node-replacements"] if values["node-loss"] == "repair" else 0,
    )
    if nodes.standalone:
        if least > 1:
            raise UsageError(f"--standalone runs on this node alone, and --nnodes asks for {least}")
        return replace(nodes, most=1, backend="c10d", endpoint="", rank=None, master_port=0)
    _check_nodes(nodes, values["max-restarts"])
    return nodes


def _check_nodes(nodes: Nodes, max_restarts: int) -> None:
    from ftrun.cli import checks

    if nodes.endpoint and nodes.backend not in ("file", "etcd", "kubernetes"):
        checks.endpoint("--rdzv-endpoint", nodes.endpoint)
    if nodes.rank is not None and nodes.backend == "static" and nodes.rank >= nodes.most:
        raise UsageError(f"--node-rank must be below the number of nodes ({nodes.most}), not {nodes.rank}")
    if nodes.most == 1 and nodes.spares:
        raise UsageError("--spare-nodes is for a run on several nodes; on one node --spares keeps warm workers")
    if nodes.most == 1:
        return
    if nodes.backend == "static" and nodes.least == nodes.most and nodes.rank is None:
        raise UsageError(
            f"--nnodes {nodes.most} needs --node-rank on each node (0 to {nodes.most - 1}) and --master-addr, "
            "or --rdzv-backend c10d, file, etcd or kubernetes with --rdzv-endpoint"
        )
    from ftrun.host.nodes.membership import open as rendezvous

    rendezvous.check(nodes, max_restarts)
