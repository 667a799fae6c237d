"""Every file that a reading command takes, damaged in every way that chance thinks of: a sentence or the data, and an exit code.

Bits flipped, the end cut off, bytes in between, values of other types, huge numbers, keys that are not there. The seed is
fixed; FTRUN_DAMAGES says how many times each file is damaged, and FTRUN_DAMAGE_SEED draws other damages.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftrun.cli.main import execute
from ftrun.core.shared import notes
from ftrun.core.shared.world import world_path
from tests.view import boards

SEED = int(os.environ.get("FTRUN_DAMAGE_SEED", "24"))
FACTOR = float(os.environ.get("FTRUN_DAMAGES", "1"))
LONGEST = 5.0  # seconds that one command may take
COMMANDS = 3  # that look at one damage
NAME = "lab"
RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]")
READ_JOURNAL = (
    ["events", NAME],
    ["events", NAME, "--json"],
    ["timeline", NAME],
    ["timeline", NAME, "--incident", "1", "--json"],
    ["timeline", NAME, "--incident", "1", "--format", "svg"],
    ["timeline", NAME, "--incident", "2", "--format", "html"],
    ["timeline", NAME, "--format", "trace"],
)
READ_RUN = (["status", NAME, "--once"], ["status", NAME, "--json"], ["metrics", NAME], ["metrics", NAME, "--json"])
CODES = {0, 1, 2, 3, 4, 69, 78}

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, -(10**9), 3.7, 1e308, -1e308, 10**40, 10**400, float("nan"), float("inf"), 2**63, 2**64, "", "x",
    "\x1b[2J\x1b]0;t\x07", "a\nftrun: forged", "\r\x9b\u202e\x00", "9" * 40, "\ud800", [], {}, [[]], [None], {"": {}},
    ["x"] * 3, {"kind": "Died"}, [[[[[[[["deep"]]]]]]]],
)  # fmt: skip


def flip(data: bytes, dice: random.Random) -> bytes:
    bits = bytearray(data)
    for _ in range(dice.choice((1, 1, 8, 64))):
        bits[dice.randrange(len(bits))] ^= 1 << dice.randrange(8)
    return bytes(bits)


def cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data))]


def garbage(data: bytes, dice: random.Random) -> bytes:
    at, end = sorted(dice.randrange(len(data)) for _ in range(2))
    end = at if dice.random() < 0.5 else min(end, at + 200)
    junk = (
        b"\0" * 8,
        b"\xff\xfe",
        b"\x1b[31m",
        b"[" * 5000,
        b'{"a":' * 3000,
        b"9" * 5000,
        b"\n\n",
        b"\xc2\x9b",
        b"1e999",
    )
    return data[:at] + dice.choice((*junk, dice.randbytes(40))) + data[end:]


def doubled(data: bytes, dice: random.Random) -> bytes:
    at, end = sorted(dice.randrange(len(data)) for _ in range(2))
    return data[:end] + data[at:]


BYTES = (flip, cut, garbage, doubled)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def twisted(text: str, dice: random.Random) -> str:
    """One value of a JSON text replaced, left out, or put where another was."""
    value = json.loads(text)
    found = list(places(value)) or [([value], 0)]
    for _ in range(dice.choice((1, 1, 3))):
        container, key = dice.choice(found)
        other, at = dice.choice(found)
        with contextlib.suppress(KeyError, IndexError):  # what went before is in the way
            if dice.random() < 0.25:
                del container[key]
            elif dice.random() < 0.25:
                container[key] = json.loads(json.dumps(other[at]))
            else:
                container[key] = dice.choice(STRANGE)
    return json.dumps(value)


def damaged_json(data: bytes, dice: random.Random) -> bytes:
    """Of a file of JSON lines: bytes, or values in a line or two, most often in those that tell most."""
    if dice.random() < 0.3:
        return dice.choice(BYTES)(data, dice)
    lines = data.decode().splitlines()
    telling = [at for at, line in enumerate(lines) if len(line) > 400] or [0]
    for _ in range(dice.choice((1, 1, 4))):
        at = dice.choice(telling) if dice.random() < 0.7 else dice.randrange(len(lines))
        lines[at] = twisted(lines[at], dice)
    return ("\n".join(lines) + "\n").encode()


def damaged_board(data: bytes, dice: random.Random) -> bytes:
    """Words of the head and of cells in use, or bytes anywhere."""
    if dice.random() < 0.3:
        return dice.choice(BYTES)(data, dice)
    words = bytearray(data)
    for _ in range(dice.choice((1, 4, 200))):
        at = 8 * (
            dice.choice((dice.randrange(16), dice.randrange(64, 120)))
            if dice.random() < 0.15
            else 512 + dice.randrange(6 * boards.WORDS)
        )
        if boards.LOCKS.start <= at // 8 % boards.WORDS < boards.LOCKS.stop:
            continue
        value = dice.choice((0, 1, 7, 255, 2**31, 2**40, 2**63, 2**64 - 1, dice.getrandbits(64)))
        words[at : at + 8] = value.to_bytes(8, "little")
    return bytes(words)


def damaged_toml(data: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.5:
        return dice.choice(BYTES)(data, dice)
    lines = data.decode().splitlines()
    values = (
        '"x"', "-1", "1e400", "nan", "inf", "9" * 5000, "[]", "[[1], 2]", "{}", "{ a = { b = 1 } }", "true", '""', "1979-05-27",
        '"\\u0000"', '"\\u001b[2J"', "9223372036854775808", "[" * 2000 + "]" * 2000, "'''", '"a,b=c"', "0.0", '"../../x"',
    )  # fmt: skip
    for _ in range(dice.choice((1, 1, 3))):
        at = dice.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        if dice.random() < 0.2:
            del lines[at]
            lines = lines or ["#"]
        elif equals:
            lines[at] = f"{key}= {dice.choice(values)}"
        else:
            lines.insert(
                at, dice.choice(("\x00", "[policy]", "[[fault]]", "[fault]", "seed = []", '"\\u001b" = 1', "= 3"))
            )
    return ("\n".join(lines) + "\n").encode()


CONFIG = b"""spares = 2
nproc-per-node = 4
max-replacements = 5
hang-timeout = "auto"
heartbeat-timeout = 3.5
log-dir = "logs"
tee = "3"
local-ranks-filter = "0,1"
rdzv-conf = { timeout = 30, is_host = 1 }
snapshot-every = 10
standalone = true

[policy]
signal = "stop"
device-faults = 5
window = 3600

[policy.xid]
79 = "quarantine"
"144-150" = "report"
"""
PLAN = b"""seed = 1

[[fault]]
kind = "kill"
rank = 2
step = 5
at = "backward"
times = 1

[[fault]]
kind = "slow:2.5"
rank = 1
for = 2.5

[[fault]]
kind = "xid:79"
rank = 0
step = 3
"""
XIDS = b"""[xid]
79 = "quarantine"
"144-150" = "report"
31 = "report"
"""


def world(path: Path) -> Path:
    return world_path(path, json.loads(boards.RECORDED.read_text())["generation"])


class Lab:
    """One run as it was recorded, on a mesh, and files beside it; each may be damaged and is put back."""

    def __init__(self, base: Path) -> None:
        self.base = base
        root = base / "runs"
        root.mkdir(mode=0o700)
        boards.put(root, NAME)
        self.run = root / NAME
        recorded = json.loads(boards.RECORDED.read_text())["journal"]
        (self.run / "journal.jsonl").write_text(boards.journal_text(boards.on_mesh(recorded)))
        device = {
            "index": 0,
            "uuid": "GPU-1",
            "name": "H",
            "utilisation": 3,
            "temperature": 40,
            "memory_used": 1,
            "rank": 0,
        }
        device |= {"memory_total": 2, "throttle": ["hot"], "quarantined": None}
        (self.run / "devices.json").write_text(json.dumps([device, {**device, "rank": 1, "quarantined": "it burns"}]))
        for cell in range(8):
            notes.write(self.run, notes.ParkedNote(cell, "train.py:3"))
        for name, content in (("config.toml", CONFIG), ("plan.toml", PLAN), ("xids.toml", XIDS)):
            (base / name).write_bytes(content)
        (base / "train.py").write_text("pass\n")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("FTRUN_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    for name in ("PET_LOG_DIR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return Lab(tmp_path)


def run(argv: list[str]) -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr, seconds."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", newline=""), io.StringIO()
    began = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = execute(argv)
    out.flush()
    raw = out.buffer.getvalue()  # type: ignore[attr-defined]
    return code, raw.decode(), err.getvalue(), time.monotonic() - began


def check(argv: list[str], found: str) -> None:
    """Nothing is raised, nothing is raw, nothing takes long; an error is one sentence of ours."""
    try:
        code, out, err, seconds = run(list(argv))
    except BaseException:
        raise AssertionError(f"{argv}: {traceback.format_exc()}\n{found}") from None
    assert code in CODES, (argv, code, err, found)
    assert seconds < LONGEST, (argv, seconds, found)
    assert "Traceback" not in out + err, (argv, err, found)
    assert not RAW.search(out + err), (argv, RAW.search(out + err), found)
    assert all(line.startswith("ftrun: ") for line in err.splitlines()), (argv, err, found)
    assert out or err or argv[0] == "events", (argv, "nothing was said", found)


RUNS: tuple[
    tuple[str, Callable[[Lab], Path], Callable[[bytes, random.Random], bytes], int, tuple[list[str], ...]], ...
] = (
    ("journal", lambda lab: lab.run / "journal.jsonl", damaged_json, 900, (*READ_JOURNAL, *READ_RUN)),
    ("board", lambda lab: lab.run / "board", damaged_board, 400, READ_RUN),
    ("world", lambda lab: world(lab.run), damaged_json, 200, READ_RUN),
    ("run", lambda lab: lab.run / "run.json", damaged_json, 150, (["runs"], ["runs", "--json"], *READ_RUN)),
    ("devices", lambda lab: lab.run / "devices.json", damaged_json, 150, READ_RUN),
    ("parked", lambda lab: lab.run / "notes" / "parked-5.json", damaged_json, 50, READ_RUN[:2]),
)
DRY = ["run", "--dry-run", "--nproc-per-node", "4"]
FILES = (
    ("config.toml", 50, [*DRY, "--config", "config.toml", "train.py"]),
    ("plan.toml", 50, [*DRY, "--fault-plan", "plan.toml", "train.py"]),
    ("xids.toml", 50, [*DRY, "--xid-policy", "xids.toml", "train.py"]),
)


def test_whole_files_are_read(lab: Lab) -> None:
    """What is damaged below is what these commands take."""
    for argv in (*READ_JOURNAL, *READ_RUN, ["runs"], ["runs", "--json"], *(argv for _, _, argv in FILES)):
        code, out, err, _ = run(list(argv))
        assert code in (0, 1) and out and not err, (argv, code, err)
    assert "train.py:3" in run(["status", NAME, "--json"])[1] and "it burns" in run(["status", NAME, "--once"])[1]


@pytest.mark.parametrize(
    ("name", "path", "how", "times", "commands"),
    [pytest.param(*one, id=one[0], marks=pytest.mark.slow if one[0] in ("journal", "board") else ()) for one in RUNS],
)
def test_damaged_run(
    lab: Lab,
    name: str,
    path: Callable[[Lab], Path],
    how: Callable[[bytes, random.Random], bytes],
    times: int,
    commands: tuple[list[str], ...],
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = path(lab)
    whole = file.read_bytes()
    for number in range(round(times * FACTOR)):
        dice = random.Random(f"{SEED} {name} {number}")
        file.write_bytes(how(whole, dice))
        for argv in dice.sample(commands, min(COMMANDS, len(commands))):
            check(argv, f"{name} {number}")
    file.write_bytes(whole)
    assert len(os.listdir("/proc/self/fd")) - before < 20, "descriptors are left open"


@pytest.mark.parametrize(("name", "times", "argv"), FILES, ids=[name for name, *_ in FILES])
def test_damaged_toml(lab: Lab, name: str, times: int, argv: list[str]) -> None:
    whole = (lab.base / name).read_bytes()
    for number in range(round(times * FACTOR)):
        dice = random.Random(f"{SEED} {name} {number}")
        (lab.base / name).write_bytes(damaged_toml(whole, dice))
        check(argv, f"{name} {number}")
