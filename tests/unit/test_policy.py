"""The policy: every row of the design's table of Xids, the order in which it is asked, and what a user may put in its place."""

from __future__ import annotations

import pytest

from ftrun.control import policy
from ftrun.control.device import xid
from ftrun.control.policy import Overrides
from ftrun.control.responses import Response as R
from ftrun.core.faults import Fault

# As in the design: class -> Xids, written out once more so that a slip in the table is seen.
ROWS = {
    R.REPLACE: "8 11 13 25 31 32 39 40 41 60 68 69 70 71 72 75 76 77 80 94 126 127 128 129 130 131 132 133 134 135",
    R.REPORT: "37 38 43 44 63 66 67 92 93 106 107 121 137 141 160 161 45 154",
    R.QUARANTINE: "46 48 62 64 95 109 110 119 120 136 140 143 155 156 158",
    R.FAIL_NODE: "79",
    R.LINKS: "74 144 145 146 147 148 149 150",
}
NONE = Overrides()


@pytest.mark.parametrize(("number", "wanted"), [(int(n), r) for r, ns in ROWS.items() for n in ns.split()])
def test_every_xid_of_the_table(number: int, wanted: R) -> None:
    assert policy.of_device(NONE, "xid", number, 0).response is wanted
    assert policy.of_device(NONE, "xid", number).response is wanted  # field 230 is not known
    assert xid.row(number).sources[0] == "catalogue"


def test_the_table_has_no_other_rows() -> None:
    assert sorted(xid.TABLE) == sorted(int(n) for numbers in ROWS.values() for n in numbers.split())


def test_an_unknown_xid_makes_the_device_suspect() -> None:
    verdict = policy.of_device(NONE, "xid", 999, 0)
    assert (verdict.response, verdict.counts) == (R.SUSPECT, True)
    assert xid.row(999).sources == ()


@pytest.mark.parametrize(
    ("recovery", "wanted"),
    [(1, R.QUARANTINE), (2, R.FAIL_NODE), (3, R.QUARANTINE), (4, R.QUARANTINE), (5, R.LINKS), (6, R.QUARANTINE)],
)
@pytest.mark.parametrize("number", [13, 43, 79, 154, 999])
def test_the_recovery_action_goes_before_the_table(recovery: int, wanted: R, number: int) -> None:
    assert policy.of_device(NONE, "xid", number, recovery).response is wanted


def test_the_user_goes_before_both() -> None:
    mine = Overrides((("ecc", "report"),), ((79, "quarantine"), (13, "report")))
    assert policy.of_device(mine, "xid", 79, 2).response is R.QUARANTINE
    assert policy.of_device(mine, "xid", 13).response is R.REPORT
    assert policy.of_device(mine, "xid", 48).response is R.QUARANTINE
    assert policy.of_device(mine, "ecc", 0, 1).response is R.REPORT


def test_only_what_is_the_devices_doing_is_charged_to_it() -> None:
    assert not policy.of_device(NONE, "xid", 31, 0).counts
    assert policy.of_device(NONE, "xid", 74, 0).counts
    assert policy.of_device(NONE, "xid", 31, 1).counts  # the driver wants a reset


def test_sources_disagree_and_say_so() -> None:
    assert xid.row(109).sources == ("catalogue", "the Kubernetes device plugin ignores it")
    assert xid.row(109).words == "Xid 109 (context switch timed out; the Kubernetes device plugin ignores it)"
    assert xid.row(74).words == "Xid 74 (NVLink error; DCGM fails on it)"
    assert [xid.row(n).words for n in (13, 48)] == [
        "Xid 13 (graphics engine exception)",
        "Xid 48 (double-bit ECC error)",
    ]
    assert xid.row(79).sources == ("catalogue", "DCGM fails on it")


DEFAULTS = {
    R.REPLACE: "exit signal oom frozen gil hang collective corrupt cuda drain gave-way cut-off",
    R.REDO: "exception nonfinite",
    R.LINKS: "link",
    R.QUARANTINE: "gpu-lost ecc",
    R.REPORT: "straggler disk-full memory-full",
    R.SUSPECT: "xid",
}


@pytest.mark.parametrize("fault", list(Fault))
def test_every_fault_has_a_row(fault: Fault) -> None:
    row = policy.TABLE[fault]
    assert fault.value in DEFAULTS[row.response].split()
    assert policy.of_worker(NONE, fault.value) is row.response
    assert row.response in row.choices or fault is Fault.XID


def test_a_dead_process_is_always_replaced_unless_the_user_says_otherwise() -> None:
    for fault in set(Fault) - set(policy.OF_DEVICES):
        assert policy.of_dead(NONE, fault.value) is R.REPLACE
    assert policy.of_dead(NONE, "") is R.REPLACE
    assert policy.of_dead(Overrides((("signal", "stop"),)), "signal") is R.STOP


def test_an_exit_code_alone_never_condemns_a_device() -> None:
    for fault in (Fault.EXIT, Fault.SIGNAL, Fault.OOM, Fault.EXCEPTION):
        assert R.QUARANTINE not in policy.TABLE[fault].choices

IGNORED, FAILED = {13, 31, 43, 45, 68, 109}, {48, 74, 79, 95, 119, 120, 140}
MEANINGS = """8 GPU stopped processing; 13 graphics engine exception; 31 memory page fault; 32 corrupted push buffer; 43 GPU stopped a
channel; 45 channel cleaned up; 46 GPU stopped processing; 48 double-bit ECC error; 62 micro-controller halted; 63 row remapping recorded;
64 row remapping failed; 68 video decoder exception; 69 graphics engine class error; 74 NVLink error; 79 GPU has fallen off the bus;
92 many single-bit ECC errors; 94 contained memory error; 95 uncontained memory error; 109 context switch timed out;
119 GSP does not answer; 120 GSP error; 121 C2C link error; 136 link training failed; 140 unrecovered ECC error;
143 GPU initialization failed; 144 NVLink error; 150 NVLink error; 154 recovery action changed"""


def test_what_every_xid_means_and_who_says_otherwise() -> None:
    meanings = {int(row.split()[0]): " ".join(row.split()[1:]) for row in MEANINGS.split(";")}
    meanings |= dict.fromkeys(range(144, 151), "NVLink error")
    for number, row in xid.TABLE.items():
        assert row.number == number and row.meaning == meanings.get(number, row.kind.value)
        assert (xid._IGNORED in row.sources, xid._FAILED in row.sources) == (number in IGNORED, number in FAILED)
    assert {n for n in range(200) if xid._IGNORED in xid.row(n).sources} == IGNORED
    assert {n for n in range(200) if xid._FAILED in xid.row(n).sources} == FAILED


def test_what_a_rule_says_unless_it_is_asked() -> None:
    assert policy.Ruling(R.REPORT, "why").counts
    assert policy.of_device(NONE, "xid").why == policy.of_device(NONE, "xid", 0, -1).why == "Xid 0 (not in the table)"
    assert policy.of_device(NONE, "xid", 13, 7).response is R.FAIL_NODE and policy.of_device(NONE, "xid", 13, 8).response is R.REPLACE
    assert str(R.FAIL_NODE) == "fail-node"
