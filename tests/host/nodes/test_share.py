"""Records, and runs of several real launchers, in a shared folder that is stale, slow, full, read-only or does not answer."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ftrun.core.errors import UsageError
from ftrun.core.system.procfs import process_start
from ftrun.doctor import network
from ftrun.host.nodes.carriers.carrier import CarrierLost
from ftrun.host.nodes.carriers.folder import Folder, prepare
from tests.conftest import wait_for
from tests.host.nodes.agents import Agents
from tests.host.nodes.share import Share, needs_fuse
from tests.host.nodes.test_worlds import check_world

pytestmark = needs_fuse

Shares = Callable[..., Share]
NO_ROOM, READ_ONLY = errno.ENOSPC, errno.EROFS
MENDS = [(NO_ROOM, "No space left on device; make room there"), (READ_ONLY, "Read-only file system; mount it writable")]


def both(share: Share, patience: float = 10.0) -> list[Folder]:
    """A carrier on each mount."""
    return [Folder(prepare(str(mount), "one", patience), patience) for mount in share.mounts]


# -- records -----------------------------------------------------------------------------------------------------------


def test_created_once_where_nobody_sees_what_the_other_one_did(shares: Shares) -> None:
    """Each node has looked, found no such record, and sees for ten seconds what it saw."""
    share = shares(stale=10.0)
    carriers = both(share)
    names = [f"round.{number}" for number in range(20)]
    for mount in share.mounts:
        assert not any((mount / "ftrun-one" / "0" / f"{name}.json").exists() for name in names)
    won: list[tuple[str, int]] = []

    def create(at: int) -> None:
        won.extend((name, at) for name in names if carriers[at].create(name, {"by": at}))

    threads = [threading.Thread(target=create, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(name for name, _ in won) == sorted(names), "each once"
    share.close()
    found = Folder(prepare(str(share.backing), "one", 5.0), 5.0).view()
    assert {name: record["by"] for name, record in found.items()} == dict(won)


def test_everyone_sees_everything_at_last(shares: Shares) -> None:
    share = shares(stale=2.0)
    first, second = both(share)
    first.put("agent.a", {"beat": 1})
    wait_for(lambda: second.view() == {"agent.a": {"beat": 1}}, "the first record", 10.0)
    began = time.monotonic()
    first.put("agent.a", {"beat": 2, "text": "longer"})
    first.create("round.0", {"members": []})
    wait_for(lambda: second.view() == first.view() and len(second.view()) == 2, "the same records", 10.0)
    assert second.view()["agent.a"]["beat"] == 2
    assert 0.5 < time.monotonic() - began < 4.0, "it was stale, and no longer than that"


def test_a_record_is_seen_whole_or_not_at_all(shares: Shares) -> None:
    share = shares(stale=0.2)
    share.trouble(delay=0.001)
    first, second = both(share)
    done = threading.Event()

    def write() -> None:
        for number in range(300):
            first.put("agent.a", {"beat": number, "text": "x" * (number * 7919 % 9000)})
        done.set()

    writing = threading.Thread(target=write)
    writing.start()
    seen = set()
    while not done.is_set():
        for record in second.view().values():
            assert len(record["text"]) == record["beat"] * 7919 % 9000
            seen.add(record["beat"])
    writing.join()
    assert len(seen) > 3


@pytest.mark.parametrize(("number", "said"), MENDS, ids=["full", "read-only"])
def test_a_record_that_cannot_be_written_stays_as_it_was(number: int, said: str, shares: Shares) -> None:
    share = shares()
    first, second = both(share)
    first.put("agent.a", {"beat": 1, "text": "x" * 5000})
    share.trouble(error=number)
    for write in (lambda: first.put("agent.a", {"beat": 2}), lambda: first.create("round.0", {})):
        with pytest.raises(OSError, match=said) as raised:
            write()
        assert raised.value.errno == number and f"rendezvous folder {share.mounts[0]}: " in str(raised.value)
    assert first.view() == second.view() == {"agent.a": {"beat": 1, "text": "x" * 5000}}
    share.trouble()
    first.put("agent.a", {"beat": 3})
    assert first.create("round.0", {})
    assert second.view() == {"agent.a": {"beat": 3}, "round.0": {}}


def test_operations_that_fail_now_and_then(shares: Shares) -> None:
    share = shares()
    carriers = both(share)
    share.trouble(fails=0.05)
    won: list[str] = []
    failed = 0

    def until_it_works(do: Callable[[], Any]) -> Any:
        nonlocal failed
        while True:
            try:
                return do()
            except OSError:
                failed += 1

    for number in range(40):
        for at, carrier in enumerate(carriers):
            name = f"round.{number}"
            won += [name] * until_it_works(lambda c=carrier, n=name, a=at: c.create(n, {"by": a}))  # type: ignore[misc]
            until_it_works(lambda c=carrier, n=number, a=at: c.put(f"agent.{a}", {"beat": n}))  # type: ignore[misc]
            until_it_works(carrier.view)
    share.trouble()
    assert failed > 10
    assert len(set(won)) == len(won), "one that fails may have made its record, and no two make one"
    assert carriers[0].view() == carriers[1].view()
    assert len(carriers[0].view()) == 42
    assert carriers[0].view()["agent.1"] == {"beat": 39}


def test_a_folder_that_does_not_answer(shares: Shares) -> None:
    share = shares()
    first = Folder(prepare(str(share.mounts[0]), "one", 5.0), 0.5)
    share.trouble(hang=True)
    began = time.monotonic()
    with pytest.raises(CarrierLost, match=f"the rendezvous folder {share.mounts[0]} has not answered for 0.5 s; does its file server run"):
        first.put("agent.a", {})
    with pytest.raises(UsageError, match=f"rendezvous folder {share.mounts[1]} has not answered for 0.5 s"):
        prepare(str(share.mounts[1]), "one", 0.5)
    assert time.monotonic() - began < 4.0


def test_a_folder_without_hard_links_is_refused(shares: Shares) -> None:
    share = shares()
    assert {one.name: one.state for one in network.rendezvous(str(share.mounts[0]))}["hard links"] == "ok"
    share.trouble(links=False)
    with pytest.raises(UsageError, match=f"{share.mounts[0]}: its file system makes no hard links, by which nodes agree; use another"):
        prepare(str(share.mounts[0]), "one", 5.0)
    assert {one.name: one.state for one in network.rendezvous(str(share.mounts[0]))}["hard links"] == "broken"
    share.trouble(error=READ_ONLY)
    with pytest.raises(UsageError, match=r"cannot write to the rendezvous folder .*: Read-only file system; mount it writable"):
        prepare(str(share.mounts[1]), "two", 5.0)
    assert {one.name: one.state for one in network.rendezvous(str(share.mounts[0]))}["hard links"] == "broken"


# -- runs --------------------------------------------------------------------------------------------------------------

# tell that it is there, wait for what happens to the folder
HOLDS = """
if dist.get_world_size() == 4:
    up(f"up{rank}")
    wait("go", 100)
"""


def begin(agents: Agents, share: Share, keep_alive: float, body: str = HOLDS, **more: Any) -> None:
    """Start a node on each mount, and wait until every rank is there."""
    for mount in share.mounts:
        endpoint = {"backend": "file", "endpoint": str(mount), "local_addr": "127.0.0.1"}
        conf = {"keep_alive": str(keep_alive), "last_call_timeout": "30"}
        agents.start(agents.script(body), {"least": 2, "most": 2, "conf": conf, **endpoint, **more})
    for rank in range(4):
        agents.wait_for(f"up{rank}")


def go_on(agents: Agents) -> None:
    (agents.out / "go").touch()
    agents.wait(0, 0)
    check_world(agents, [2, 2])
    for run in agents.runs:
        assert run.stderr.count("world of 4 workers on 2 nodes") == 1, run.stderr


def workers(agents: Agents) -> list[list[int]]:
    """The ranks of each node."""
    return [run.pids("ftrun rank") for run in agents.runs]


@pytest.mark.slow
def test_a_run_over_a_stale_folder(agents: Agents, shares: Shares) -> None:
    begin(agents, shares(stale=3.0), 10.0)
    time.sleep(12.0)  # longer than keep_alive
    go_on(agents)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "trouble"),
    [
        (20.0, {"delay": 0.2}),
        (6.0, {"delay": 2.0}),
        (5.0, {"error": READ_ONLY}),
        (5.0, {"error": NO_ROOM}),
        (5.0, {"hang": True}),
        (20.0, {"fails": 0.1}),
    ],
    ids=["slow", "very slow", "read-only", "full", "hangs", "fails"],
)
def test_a_run_goes_on_after_trouble(seconds: float, trouble: Any, agents: Agents, shares: Shares) -> None:
    share = shares(stale=1.0)
    begin(agents, share, 10.0)
    before = workers(agents)
    assert [len(pids) for pids in before] == [2, 2]
    share.trouble(**trouble)
    time.sleep(seconds)
    share.trouble()
    time.sleep(3.0)  # what the trouble did shows
    assert workers(agents) == before
    go_on(agents)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ({"error": READ_ONLY}, "the rendezvous cannot be reached: rendezvous folder {}: Read-only file system; mount it writable"),
        ({"error": NO_ROOM}, "the rendezvous cannot be reached: rendezvous folder {}: No space left on device; make room there"),
        ({"hang": True}, "the rendezvous folder {} has not answered for 4 s; does its file server run"),
    ],
    ids=["read-only", "full", "hangs"],
)
def test_a_run_ends_on_every_node(trouble: Any, said: str, agents: Agents, shares: Shares) -> None:
    share = shares()
    begin(agents, share, 4.0)
    share.trouble(**trouble)
    for run, mount in zip(agents.runs, share.mounts, strict=True):
        wait_for(lambda r=run: "the run ends: " in r.stderr, "the end", 30.0)  # type: ignore[misc]
        assert said.format(mount) in run.stderr, run.stderr
        fenced = run.stderr.index("its workers were ended before that")
        assert fenced < run.stderr.index("the run ends: "), run.stderr
    share.trouble()  # an operation that hangs in a FUSE file system keeps its process
    agents.wait(1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [{"error": READ_ONLY}, {"hang": True}], ids=["read-only", "hangs"])
def test_a_node_whose_mount_fails_is_lost(trouble: Any, agents: Agents, shares: Shares) -> None:
    """The others go on without it, when its workers have ended."""
    share = shares()
    begin(agents, share, 4.0, least=1)
    lost = next(number for number, run in enumerate(agents.runs) if "this is node 1" in run.stderr)
    pids = workers(agents)[lost]
    assert len(pids) == 2
    share.trouble(lost, **trouble)
    other = agents.runs[1 - lost]
    wait_for(lambda: "world of 2 workers on 1 node" in other.stderr, "the smaller world", 30.0)
    assert not any(map(process_start, pids)), "they end before"
    assert other.wait(30.0) == 0
    wait_for(lambda: "the run ends: " in agents.runs[lost].stderr, "the other end", 30.0)
    share.trouble()
    assert agents.runs[lost].wait(30.0) == 1
    check_world(agents, [2])


