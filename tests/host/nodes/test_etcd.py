"""Records in etcd: sent twice without harm, through any member, and what etcd refuses is told at once."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ftrun.core.errors import UsageError
from ftrun.host.nodes.carriers import etcd
from ftrun.host.nodes.carriers.carrier import CarrierLost, found_in_time
from tests.host.nodes.agents import Agents
from tests.host.nodes.etcds import OwnEtcd, RealEtcd, needs_etcd, refusal
from tests.host.nodes.test_failures import DIES_ONCE
from tests.host.nodes.test_worlds import check_world

T = TypeVar("T")


def carrier(endpoint: str, run_id: str = "one", **conf: str) -> etcd.Etcd:
    return etcd.Etcd(etcd.Gateway(etcd.terms(endpoint, conf, {}), 4.0), run_id)


@pytest.fixture
def own() -> Iterator[OwnEtcd]:
    server = OwnEtcd()
    yield server
    server.close()


@pytest.mark.parametrize("path", ["kv/put", "kv/txn", "kv/range"])
def test_a_lost_answer_is_asked_for_again(own: OwnEtcd, path: str) -> None:
    first = carrier(f"{own.endpoint},{own.endpoint}")
    first.put("agent.a", {"beat": 1})
    own.lost.add(path)
    first.put("agent.a", {"beat": 2})
    assert first.create("round.0", {"by": "a"}), "the lost answer was that of our own creation"
    second = carrier(own.endpoint)
    assert not second.create("round.0", {"by": "a"}), "the same words of somebody else"
    assert dict(second.view()) == dict(first.view()) == {"agent.a": {"beat": 2}, "round.0": {"by": "a"}}
    assert not own.lost


def test_a_look_reads_only_what_changed(own: OwnEtcd) -> None:
    first, seen = carrier(own.endpoint), []
    for number in range(20):
        first.create(f"round.{number}", {"text": "x" * 1000})
    assert len(first.view()) == 20
    own.before = lambda path, body: seen.append(len(own._range(body).get("kvs", ()))) if path == "kv/range" else None
    first.view()
    first.put("agent.a", {"beat": 1})
    assert len(first.view()) == 21
    assert seen == [0, 1]


def test_a_run_that_ended_is_not_joined(own: OwnEtcd) -> None:
    first = carrier(own.endpoint)
    first.create("round.0", {})
    assert set(carrier(own.endpoint).view()) == {"round.0"}
    first.create("over", {"code": 0})
    second = carrier(own.endpoint)
    assert not second.view() and "over" in first.view()
    second.create("over", {"code": 0})
    third = carrier(own.endpoint)
    third.create("over", {"code": 0})
    sessions = {etcd._text(key).split("/")[2] for key in own.keys}
    assert sessions == {"1", "2"}, "only the one before the present session is kept"
    assert not carrier(own.endpoint, "another").view()


def test_user_and_password() -> None:
    server = OwnEtcd("secret")
    try:
        first = carrier(server.endpoint, user="root:secret")
        first.put("agent.a", {"beat": 1})
        server.token = "second"  # as after a restart
        first.put("agent.a", {"beat": 2})
        assert carrier(server.endpoint, user="root", password="secret").view()["agent.a"] == {"beat": 2}
        for conf in ({}, {"user": "root:wrong"}):
            with pytest.raises(UsageError, match=r"etcd at .* refuses (user root|a request without a user .*): etcdserver: (auth|invalid)"):
                carrier(server.endpoint, **conf)
    finally:
        server.close()


def test_a_user_where_etcd_asks_for_none(own: OwnEtcd) -> None:
    carrier(own.endpoint, user="root:secret").put("agent.a", {})


def test_no_leader_and_no_room_are_for_now(own: OwnEtcd) -> None:
    first = carrier(own.endpoint)
    for text in ("etcdserver: no leader", "etcdserver: mvcc: database space exceeded"):
        own.before = lambda path, body, text=text: refusal(14, text, 503)  # type: ignore[misc]
        with pytest.raises(OSError, match=re.escape(f"etcd at {own.endpoint} does not answer: {text}")):
            first.put("agent.a", {})
    own.before = lambda path, body: (502, b"<html>Bad Gateway</html>")
    with pytest.raises(OSError, match=r"does not answer: HTTP 502 from 127.0.0.1"):
        first.put("agent.a", {})
    own.before = lambda path, body: None
    first.put("agent.a", {})


def test_what_is_no_etcd(own: OwnEtcd) -> None:
    own.before = lambda path, body: (404, b"Not Found")
    with pytest.raises(UsageError, match=r"does not answer as etcd 3\.4 or later does \(HTTP 404\)"):
        carrier(own.endpoint)


def test_an_etcd_that_was_set_up_anew(own: OwnEtcd) -> None:
    first = carrier(own.endpoint)
    first.put("agent.a", {})
    first.view()
    own.keys.clear()
    own.revision = 1
    with pytest.raises(CarrierLost, match="etcd went back from revision 2 to 1"):
        first.view()


def test_nobody_there() -> None:
    told: list[str] = []
    terms = etcd.terms("127.0.0.1:1", {}, {})
    with pytest.raises(CarrierLost, match=r"etcd at 127\.0\.0\.1:1 does not answer: Connection refused \(tried for 0\.6 s\)"):
        found_in_time(lambda: etcd.Etcd(etcd.Gateway(terms, 1.0), "one"), 0.6, lambda: False, told.append)
    assert told == ["etcd at 127.0.0.1:1 does not answer: Connection refused; trying for 0.6 s"]
    late = etcd.terms("no-such-name.invalid", {}, {})
    with pytest.raises(CarrierLost, match=r"does not answer: .*(known|resolution)"):
        found_in_time(lambda: etcd.Etcd(etcd.Gateway(late, 1.0), "one"), 0.0, lambda: False, told.append)
    assert found_in_time(lambda: etcd.Etcd(etcd.Gateway(terms, 1.0), "one"), 9.0, lambda: True, told.append) is None


def test_terms() -> None:
    terms = etcd.terms("a, [::1]:4001", {}, {})
    assert terms.members == (("a", 2379), ("::1", 4001)) and terms.tls is None
    assert etcd.terms("https://a", {}, {}).tls is not None
    assert etcd.terms("a", {"protocol": "https"}, {}).tls is not None
    assert etcd.terms("a", {}, {"ETCDCTL_USER": "me:pass:word"}).password == "pass:word"
    wrong = [
        ("", {}, "needs --rdzv-endpoint"),
        ("http://a,https://b", {}, "all http or all https"),
        ("ftp://a", {}, "all http or all https, not ftp"),
        ("http://a", {"cacert": "x.pem"}, "is http, but cacert or cert is set"),
        ("a", {"cacert": "/nowhere.pem"}, r"cannot use the certificates for etcd \(/nowhere.pem\)"),
        ("a:b", {}, "must be HOST or HOST:PORT"),
    ]
    for endpoint, conf, what in wrong:
        with pytest.raises(UsageError, match=what):
            etcd.terms(endpoint, conf, {})


# -- the real one ------------------------------------------------------------------------------------------------------


@needs_etcd
def test_three_members_one_of_which_is_killed_and_comes_back(tmp_path: Path) -> None:
    cluster = RealEtcd(tmp_path, 3)
    try:
        first, second = carrier(cluster.endpoint), carrier(",".join(reversed(cluster.endpoint.split(","))))
        first.put("agent.a", {"beat": 0})
        for number in range(3):
            cluster.kill(number)
            for carried, by in ((first, "a"), (second, "b")):
                _when_it_can(carried.put, f"agent.{by}", {"beat": number + 1})
            assert _when_it_can(first.create, f"round.{number}", {"by": "a"})
            assert not _when_it_can(second.create, f"round.{number}", {"by": "b"})
            cluster.start(number)
        assert dict(_when_it_can(second.view)) == dict(_when_it_can(first.view))
        assert len(first.view()) == 5
    finally:
        cluster.close()


def _when_it_can(do: Callable[..., T], *args: Any) -> T:
    deadline = time.monotonic() + 15.0
    while True:
        try:
            return do(*args)
        except OSError:  # a new leader is being elected
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@needs_etcd
def test_with_certificates(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-keyout", str(key),
         "-out", str(cert), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True,
    )  # fmt: skip
    server = RealEtcd(tmp_path, scheme="https", tls=("--cert-file", str(cert), "--key-file", str(key)))
    try:
        carrier(server.endpoint, cacert=str(cert)).put("agent.a", {"beat": 1})
        assert carrier(server.endpoint, **{"insecure-skip-tls-verify": "true"}).view()["agent.a"] == {"beat": 1}
        with pytest.raises(OSError, match=r"does not answer: .*(?i:certificate verify failed)"):
            carrier(server.endpoint)
    finally:
        server.close()


@needs_etcd
def test_two_nodes_restart_after_a_failure(agents: Agents, etcd_server: RealEtcd) -> None:
    nodes = meeting(etcd_server)
    for _ in range(2):
        agents.start(agents.script(DIES_ONCE.format(rank=2)), nodes, max_restarts=1)
    agents.wait(0, 0)
    check_world(agents, [2, 2], restarts=1)
    again = agents.start(agents.script(), {**nodes, "least": 1, "most": 1})
    assert again.wait() == 0, "a run of the same name, after that one"


@needs_etcd
def test_two_nodes_do_not_mind_a_restart_of_etcd(agents: Agents, etcd_server: RealEtcd) -> None:
    body = 'if rank == 0: up("here"); wait("go")\ndist.all_reduce(total.clone())'
    for _ in range(2):
        agents.start(agents.script(body), meeting(etcd_server))
    agents.wait_for("here")
    etcd_server.kill(0)
    time.sleep(1.0)
    etcd_server.start(0)
    (agents.out / "go").touch()
    agents.wait(0, 0)
    check_world(agents, [2, 2], restarts=0)


@needs_etcd
def test_an_etcd_that_stays_away_ends_the_run(agents: Agents, etcd_server: RealEtcd) -> None:
    body = 'up(f"here{rank}"); time.sleep(120)'
    for _ in range(2):
        agents.start(agents.script(body), meeting(etcd_server, conf={"keep_alive": "2"}))
    for rank in range(4):
        agents.wait_for(f"here{rank}")
    etcd_server.kill(0)
    agents.wait(1, 1)
    for run in agents.runs:
        assert "the rendezvous cannot be reached: etcd at http://127.0.0.1:" in run.stderr


def meeting(server: RealEtcd, **more: Any) -> dict[str, Any]:
    return {"least": 2, "most": 2, "backend": "etcd", "endpoint": server.endpoint, "local_addr": "127.0.0.1", **more}


@pytest.fixture
def etcd_server(tmp_path: Path) -> Iterator[RealEtcd]:
    server = RealEtcd(tmp_path)
    yield server
    server.close()
