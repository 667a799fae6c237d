"""The mistakes that people make, with the whole sentence that each one gets: what is wrong, whose it is, and what next.

One table, read in this process; nothing is started. What only a run finds out stands below it.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from ftrun.cli.catalog import COMMANDS
from ftrun.cli.main import execute
from tests.conftest import Ftrun

USAGE = ("F101", "F104", "F105")  # codes of what is wrong with a command line
KINDS = (
    "kill, term, segv, abort, exit, exception, oom, freeze, hang, gil, slow, nan, bitflip, comm, xid, gpu-lost, ecc, "
    "launcher-kill, node-kill"
)
PHASES = "forward, backward, gate, update, idle, stop, reset, restore"
NO_SCRIPT = "there is no script: say which, as in ftrun --nproc-per-node 4 train.py; see: ftrun --help"
LEFT_NO_JOURNAL = (
    ": it does not run, and is not among those that ended (ftrun runs --all); name the folder of its logs instead"
)
NO_RUN = "no live run; those that ended: ftrun runs --all"

FILES = {
    "train.py": "print('trained')\n",
    "broken.py": "print('trained'\n",
    "tab.py": "if True:\n\tx = 1\n        y = 2\n",
    "bytes.py": "x = 1\0\n",
    "latin.py": b"x = '\xff'\n",
    "bad.toml": "spares = \n",
    "latin.toml": b"# \xff\n",
    "unknown.toml": "\nspare = 1\n",
    "typed.toml": 'spares = "two"\n',
    "twice.toml": "spares = 1\nspares = 2\n",
    "line.toml": "dry-run = true\n",
    "answer.toml": '[policy]\nsignal = "explode"\n',
    "fault.toml": '[policy]\nsignall = "stop"\n',
    "xid.toml": '79 = "burn"\n',
    "xids.toml": 'abc = "report"\n',
    "none.plan": "seed = 1\n",
    "kind.plan": '[[fault]]\nkind = "kil"\nrank = 0\n',
    "rank.plan": '[[fault]]\nkind = "kill"\nrank = 9\n',
    "norank.plan": '[[fault]]\nkind = "kill"\n',
    "key.plan": '[[fault]]\nkind = "kill"\nrank = 0\nstpe = 3\n',
    "at.plan": '[[fault]]\nkind = "kill"\nrank = 0\nat = "backwards"\n',
    "phase.plan": '[[fault]]\nkind = "nan"\nrank = 0\nat = "update"\n',
    "argument.plan": '[[fault]]\nkind = "exit"\nrank = 0\n',
    "table.plan": '[fault]\nkind = "kill"\nrank = 0\n',
    "times.plan": '[[fault]]\nkind = "kill"\nrank = 0\ntimes = 0\n',
    "top.plan": '[[fualt]]\nkind = "kill"\nrank = 0\n',
}

# (command line, exit code, what is said); {here} is the folder, {python} the version
MISTAKES: list[tuple[str, int, str]] = [
    # flags
    ("--no-pythn train.py", 2, "there is no option --no-pythn; did you mean --no-python?"),
    ("--spares 2 --sparess train.py", 2, "there is no option --sparess; did you mean --spares?"),
    ("-x train.py", 2, "there is no option -x; all options: ftrun run --help"),
    ("--spares", 2, "--spares needs a value (K)"),
    ("--spares --standalone train.py", 2, "--spares needs a value (K)"),
    ("--standalone=1 train.py", 2, "--standalone takes no value, and got '1'"),
    ("--rdzv x train.py", 2, "--rdzv could be --rdzv-backend, --rdzv-conf, --rdzv-endpoint or --rdzv-id"),
    ("--spares many train.py", 2, "--spares must be a whole number, not 'many'"),
    ("--spares -1 train.py", 2, "--spares must not be negative, not -1"),
    ("--spares=1.5 train.py", 2, "--spares must be a whole number, not '1.5'"),
    ("--nproc-per-node 0 train.py", 2, "--nproc-per-node must be between 1 and 4096, not 0"),
    ("--nproc-per-node 99999 train.py", 2, "--nproc-per-node must be between 1 and 4096, not 99999"),
    ("--nproc-per-node two train.py", 2, "--nproc-per-node must be a number, auto, cpu, gpu, gpu:0,1 or xpu, not 'two'"),
    ("--nproc-per-node= train.py", 2, "--nproc-per-node must be a number, auto, cpu, gpu, gpu:0,1 or xpu, not ''"),
    ("--hang-timeout soon train.py", 2, "--hang-timeout must be auto or a number of seconds above 0, not 'soon'"),
    ("--heartbeat-interval 0 train.py", 2, "--heartbeat-interval must be a number of seconds from 0.01 to 60, not 0"),
    ("--inexact ignore train.py", 2, "--inexact must be go-on or stop, not 'ignore'"),
    ("--worker-start thread train.py", 2, "--worker-start must be forkserver or exec, not 'thread'"),
    (
        "--on-exhausted shrink train.py", 2,
        "--on-exhausted shrink is not yet supported: a smaller world ends on other weights; use fail or wait",
    ),
    ("--metrics-port 99999 train.py", 2, "--metrics-port must be a port between 0 and 65535, not '99999'"),
    ("--log-dir train.py train.py", 2, "--log-dir train.py is a file; name a folder (it is made if it is missing)"),
    (
        "--random-faults 3 train.py", 2,
        "--random-faults is how likely a step has a fault, 0 to 1 (0.02: one step in 50), not 3",
    ),
    (
        "--redirects 4 train.py", 2,
        "--redirects must be 0 (none), 1 (stdout), 2 (stderr), 3 (both), or such a number for each local rank as in 0:3,1:1; "
        "not '4'",
    ),
    (
        "--signals-to-handle NOPE train.py", 2,
        "--signals-to-handle: 'NOPE' is no signal; name signals as in SIGTERM,USR1",
    ),
    ("--json train.py", 2, "--json goes with --dry-run"),
    ("--no-python -m train", 2, "--no-python and --module do not go together: a module is run by Python"),
    # names
    (
        "--run-id a/b train.py", 2,
        "run id 'a/b' must be letters, digits, '.', '_' or '-', start with a letter or digit, and have at most 100",
    ),
    ("--run-id train.py", 2, NO_SCRIPT),
    # scripts
    ("--dry-run", 2, NO_SCRIPT),
    ("missing.py", 2, "script missing.py does not exist"),
    ("trian.py", 2, "script trian.py does not exist; did you mean train.py?"),
    ("statsu", 2, "script statsu does not exist; did you mean the command: ftrun status?"),
    ("folder", 2, "folder is a directory, not a script (and has no __main__.py)"),
    ("pipe", 2, "script pipe is a pipe or a device; every worker has to read it, so give a file"),
    ("broken.py", 2, "script broken.py:1 is not Python {python}: '(' was never closed"),
    ("-m train.py", 2, "-m takes the name of a module: say -m train, or leave out -m"),
    (
        "-m no_such", 2,
        "there is no module no_such: not in this folder, on PYTHONPATH, or installed for {exe}",
    ),
    ("--no-python no-such", 2, "program no-such does not exist on the PATH"),
    ("--no-python ./train.py", 2, "program ./train.py may not be executed; run: chmod +x ./train.py"),
    (
        "--no-python train.py", 2,
        "program train.py is not on the PATH; a program in this folder is named ./train.py",
    ),
    ("--no-python folder", 2, "folder is a directory, not a program"),
    # configuration files
    ("--config no.toml train.py", 78, "no.toml: cannot read the configuration: No such file or directory"),
    ("--config folder train.py", 78, "folder: cannot read the configuration: Is a directory"),
    ("--config latin.toml train.py", 78, "latin.toml: cannot read the configuration: it is not UTF-8 text"),
    ("--config unknown.toml train.py", 78, "unknown.toml:2: there is no option 'spare'; did you mean spares?"),
    ("--config typed.toml train.py", 78, "typed.toml:1: spares must be a whole number, not 'two'"),
    ("--config line.toml train.py", 78, "line.toml:1: dry-run belongs on the command line, not into a file"),
    (
        "--config answer.toml train.py", 78,
        "answer.toml:2: signal = 'explode': there is no such answer; there are replace, roll-back, stop",
    ),
    ("--config fault.toml train.py", 78, "fault.toml:2: there is no fault 'signall'; did you mean signal?"),
    (
        "--xid-policy xids.toml train.py", 78,
        "xids.toml:1: 'abc' is no Xid; write a number, or a range as in \"144-150\"",
    ),
    # plans
    ("--fault-plan no.plan train.py", 78, "{here}/no.plan: cannot read the fault plan: No such file or directory"),
    ("--fault-plan none.plan train.py", 78, "{here}/none.plan: there is no [[fault]] in it, so nothing would be injected"),
    ("--fault-plan kind.plan train.py", 78, f"{{here}}/kind.plan:2: unknown fault kind 'kil', did you mean kill? (known: {KINDS})"),
    ("--fault-plan rank.plan train.py", 78, "{here}/rank.plan:1: rank 9, but the run has ranks 0 to 0"),
    ("--fault-plan norank.plan train.py", 78, "{here}/norank.plan:1: [[fault]] needs rank, as in rank = 0"),
    (
        "--fault-plan key.plan train.py", 78,
        "{here}/key.plan:4: unknown key 'stpe' in [[fault]] (known: kind, rank, epoch, step, at, times, for)",
    ),
    ("--fault-plan at.plan train.py", 78, f"{{here}}/at.plan:4: unknown phase 'backwards', did you mean backward? (known: {PHASES})"),
    (
        "--fault-plan phase.plan train.py", 78,
        "{here}/phase.plan:4: nan is possible in forward and backward, not in update (one value of the loss or of a gradient is NaN)",
    ),
    ("--fault-plan argument.plan train.py", 78, "{here}/argument.plan:2: exit needs its CODE: write exit:CODE"),
    (
        "--fault-plan table.plan train.py", 78,
        "{here}/table.plan:1: write each fault as a table of its own, with two brackets: [[fault]]",
    ),
    ("--fault-plan times.plan train.py", 78, "{here}/times.plan:4: times must be an integer of at least 1, not 0"),
    ("--fault-plan top.plan train.py", 78, "{here}/top.plan:1: unknown key 'fualt' at the top of a plan (known: seed, fault)"),
    # several nodes
    ("--nnodes 0 train.py", 2, "--nnodes must be at least 1, and MIN not above MAX, not '0'"),
    (
        "--nnodes 2 train.py", 2,
        "--nnodes 2 needs --node-rank on each node (0 to 1) and --master-addr, or --rdzv-backend c10d, file, etcd or kubernetes with "
        "--rdzv-endpoint",
    ),
    ("--nnodes 2 --node-rank 2 train.py", 2, "--node-rank must be below the number of nodes (2), not 2"),
    (
        "--nnodes 2 --rdzv-backend zeus train.py", 2,
        "--rdzv-backend zeus is not supported, use c10d, file, etcd or kubernetes (or static, with --node-rank)",
    ),
    (
        "--nnodes 2 --rdzv-backend etcd train.py", 2,
        "--rdzv-backend etcd needs --rdzv-endpoint HOST[:PORT][,HOST[:PORT]...], the members of an etcd",
    ),
    (
        "--nnodes 2 --rdzv-backend c10d train.py", 2,
        "--rdzv-backend c10d needs --rdzv-endpoint HOST[:PORT], the same on every node",
    ),
    (
        "--rdzv-endpoint host:99999 train.py", 2,
        "--rdzv-endpoint: the port must be a port between 0 and 65535, not '99999'",
    ),
    # commands about runs
    ("status nobody", 4, f"no run named nobody{LEFT_NO_JOURNAL}"),
    ("status a b", 2, "ftrun status: b is too much; see: ftrun status --help"),
    ("status --colour", 2, "ftrun status has no option --colour; see: ftrun status --help"),
    ("status --interval x", 2, "--interval must be a number, not 'x'"),
    ("stop", 4, NO_RUN),
    ("stop nobody --yes", 4, "no live run named nobody; those that live: ftrun runs"),
    ("stop --wait -1", 2, "--wait is a number of seconds, 0 or more"),
    ("drain", 2, "ftrun drain needs --rank R or --node N; see: ftrun drain --help"),
    ("drain --rank 1 --node 1", 2, "ftrun drain needs --rank R or --node N; see: ftrun drain --help"),
    ("drain --node x", 2, "--node must be a whole number, not 'x'"),
    ("drain --rank x", 2, "--rank must be a whole number, not 'x'"),
    ("inject-fault", 2, f"say which fault: ftrun inject-fault KIND [RUN] (KIND is one of {KINDS})"),
    ("inject-fault kil", 2, f"unknown fault kind 'kil', did you mean kill? (known: {KINDS})"),
    ("inject-fault kill --at backwards", 2, f"unknown phase 'backwards', did you mean backward? (known: {PHASES})"),
    ("inject-fault kill:3", 2, "kill takes no argument: leave out :3"),
    ("inject-fault exit", 2, "exit needs its CODE: write exit:CODE"),
    ("inject-fault kill --for 2", 2, "kill has no duration; only these do: freeze, hang, gil, slow"),
    ("inject-fault kill --step -1", 2, "--step must not be negative, not -1"),
    (
        "inject-fault --random 0.1 --rank 2", 2,
        "--random draws rank and phase itself: --rank, --at, --epoch and --for do not go with it",
    ),
    ("timeline ./nowhere", 4, f"no run named ./nowhere{LEFT_NO_JOURNAL}"),
    ("timeline --format gif", 2, "--format must be one of text, svg, html, trace, not 'gif'"),
    ("verify train.py", 2, "say which faults: either --faults FILE or --kill-every-phase"),
    ("verify --kill-every-phase", 2, NO_SCRIPT),
    ("doctor extra", 2, "ftrun doctor: extra is too much; see: ftrun doctor --help"),
    ("completions tcsh", 2, "there are completions for bash, zsh, fish, not for 'tcsh'"),
]  # fmt: skip

# (variables, exit code, what is said) for `ftrun train.py`
VARIABLES: list[tuple[dict[str, str], int, str]] = [
    ({"FTRUN_SPARES": "many"}, 2, "--spares must be a whole number, not 'many' (from FTRUN_SPARES)"),
    ({"PET_NPROC_PER_NODE": "0"}, 2, "--nproc-per-node must be between 1 and 4096, not 0 (from PET_NPROC_PER_NODE)"),
    ({"PET_STANDALONE": "perhaps"}, 2, "--standalone must be 0 or 1, not 'perhaps' (from PET_STANDALONE)"),
    ({"FTRUN_RUN_ID": "a b"}, 2, "run id 'a b' must be letters, digits, '.', '_' or '-', start with a letter or digit, and have at "
     "most 100 (from FTRUN_RUN_ID)"),
    ({"FTRUN_CONFIG": "no.toml"}, 78, "no.toml: cannot read the configuration: No such file or directory"),
]  # fmt: skip


@pytest.fixture
def files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "runs").mkdir(mode=0o700)
    monkeypatch.setenv("FTRUN_RUNS_ROOT", str(folder / "runs"))
    return folder


def said(line: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and sentence of a command line; a run is only planned, should it be accepted."""
    code = execute(line if line[0] in COMMANDS or "--json" in line else ["--dry-run", *line])
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, printed
    found = re.fullmatch(r"ftrun: error: (.*) \[ftrun explain (F\d+)\]\n", printed.err)
    assert found, printed.err
    assert {78: found[2] == "F102", 4: found[2] == "F103", 2: found[2] in USAGE}[code], printed.err
    return code, found[1]


def test_each_mistake_gets_its_sentence(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(MISTAKES) >= 60
    wrong = []
    for line, code, sentence in MISTAKES:
        wanted = sentence.format(here=files, exe=sys.executable, python="{}.{}".format(*sys.version_info))
        found = said(line.split(), capsys)
        if found != (code, wanted):
            wrong.append(f"ftrun {line}\n  wanted {code}: {wanted}\n  got    {found[0]}: {found[1]}")
    assert not wrong, "\n".join(wrong)


def test_each_variable_gets_its_sentence(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variables, code, sentence in VARIABLES:
        with monkeypatch.context() as here:
            for name, value in variables.items():
                here.setenv(name, value)
            assert said(["train.py"], capsys) == (code, sentence)


@pytest.mark.parametrize("script", ["tab.py", "bytes.py", "latin.py"])
def test_a_script_that_is_not_python(files: Path, capsys: pytest.CaptureFixture[str], script: str) -> None:
    """What Python says of these differs from version to version."""
    code, sentence = said([script], capsys)
    assert code == 2 and sentence.startswith(f"script {script}") and " is not Python 3." in sentence


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_script_that_may_not_be_read(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "train.py").chmod(0)
    assert said(["train.py"], capsys) == (2, "script train.py cannot be read (permission denied)")


def test_the_last_of_two_equal_options_counts(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in torchrun."""
    assert execute(["--dry-run", "--spares", "1", "--spares=3", "train.py"]) == 0
    assert "1 per node, 3 spares" in capsys.readouterr().out


def test_what_is_found_at_the_start_of_a_run(ftrun: Ftrun) -> None:
    script = ftrun.script("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--master-port", "--metrics-port"):
            refused = ftrun.call(option, port, script)
            assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
            assert option in refused.stderr and "Address already in use" in refused.stderr
            assert str(port) in refused.stderr and "choose another one" in refused.stderr
    refused = ftrun.call("--metrics-file", "none/m", script)
    sentence = f"ftrun: error: --metrics-file: there is no folder {ftrun.base}/none; make it first [ftrun explain F101]\n"
    assert (refused.returncode, refused.stderr) == (2, sentence)
