"""Records in the Kubernetes API: sent twice without harm, by a pod's account, and what the API refuses is told at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrun.core.errors import UsageError
from ftrun.host.nodes.carriers import kubernetes
from ftrun.host.nodes.carriers.carrier import CarrierLost, found_in_time
from tests.host.nodes.agents import Agents
from tests.host.nodes.kube import NAMESPACE, OwnKubernetes, refusal
from tests.host.nodes.test_worlds import check_world

NOWHERE = Path("/nowhere")


@pytest.fixture
def own() -> Iterator[OwnKubernetes]:
    server = OwnKubernetes()
    yield server
    server.close()


def carrier(own: OwnKubernetes, run_id: str = "one", **conf: str) -> kubernetes.Kubernetes:
    terms = kubernetes.terms(own.endpoint, {"namespace": NAMESPACE, **conf}, {}, NOWHERE)
    return kubernetes.Kubernetes(kubernetes.Api(terms, 3.0), run_id)


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH"])
def test_a_lost_answer_is_asked_for_again(own: OwnKubernetes, method: str) -> None:
    first = carrier(own)
    first.put("agent.a", {"beat": 1})
    own.lost.add(method)
    first.put("agent.a", {"beat": 2})
    assert first.create("round.0", {"by": "a"}), "the lost answer was that of our own creation"
    second = carrier(own)
    assert not second.create("round.0", {"by": "a"}), "the same words of somebody else"
    assert dict(second.view()) == dict(first.view()) == {"agent.a": {"beat": 2}, "round.0": {"by": "a"}}
    assert not own.lost


def test_the_first_writing_of_a_record_whose_answer_is_lost(own: OwnKubernetes) -> None:
    first = carrier(own)
    own.lost.add("POST")
    first.put("agent.a", {"beat": 1})
    first.put("agent.a", {"beat": 2})
    assert first.view() == {"agent.a": {"beat": 2}} and len(own.leases) == 1


def test_a_run_that_ended_is_not_joined(own: OwnKubernetes) -> None:
    first = carrier(own)
    first.create("round.0", {})
    assert set(carrier(own).view()) == {"round.0"}
    first.create("over", {"code": 0})
    second = carrier(own)
    assert not second.view() and "over" in first.view()
    second.create("over", {"code": 0})
    carrier(own).create("over", {"code": 0})
    sessions = {lease["metadata"]["annotations"]["ftrun.dev/name"].partition("/")[0] for lease in own.leases.values()}
    assert sessions == {"1", "2"}, "only the one before the present session is kept"
    assert not carrier(own, "another").view()


def test_names_are_those_of_objects(own: OwnKubernetes) -> None:
    """Host names and runs may have letters that an object's name may not."""
    carrier(own, "My_run." + "x" * 90).put("agent.Node_7-12-ab", {})
    (name,) = own.leases
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 63
    (lease,) = own.leases.values()
    assert all(len(value) <= 63 for value in lease["metadata"]["labels"].values())


def test_objects_of_others_are_left_alone(own: OwnKubernetes) -> None:
    first = carrier(own)
    first.put("agent.a", {"beat": 1})
    (lease,) = own.leases.values()
    label = lease["metadata"]["labels"]
    own.leases["theirs"] = {"metadata": {"name": "theirs", "labels": label, "annotations": {"ftrun.dev/name": "0/agent.b"}}}
    own.leases["none"] = {"metadata": {"name": "none", "labels": label}}
    assert first.view() == {"agent.a": {"beat": 1}}


def test_a_pods_account_is_used_and_its_new_token_too(tmp_path: Path) -> None:
    own = OwnKubernetes("first")
    try:
        for name, text in (("token", "first\n"), ("namespace", NAMESPACE)):
            (tmp_path / name).write_text(text)
        host, _, port = own.endpoint.removeprefix("http://").partition(":")
        terms = kubernetes.terms("http://" + host + ":" + port, {}, {}, tmp_path)
        assert terms.namespace == NAMESPACE
        one = kubernetes.Kubernetes(kubernetes.Api(terms, 3.0), "one")
        one.put("agent.a", {"beat": 1})
        own.token = "second"
        (tmp_path / "token").write_text("second\n")
        one.put("agent.a", {"beat": 2})
        (tmp_path / "token").write_text("")  # it is just being written
        one.put("agent.a", {"beat": 2})
        own.token = "third"
        with pytest.raises(UsageError, match="refuses PATCH on leases: Unauthorized; the service account needs a role with get, list"):
            one.put("agent.a", {"beat": 3})
    finally:
        own.close()


def test_what_is_for_now_and_what_is_no_such_api(own: OwnKubernetes) -> None:
    first = carrier(own)
    for answer, words in (
        (refusal(429, "too many requests"), "too many requests"),
        ((502, b"<html>"), "HTTP 502"),
        (refusal(500, "etcdserver: request timed out"), "etcdserver: request timed out"),
    ):
        own.before = lambda method, path, answer=answer: answer  # type: ignore[misc]
        with pytest.raises(OSError, match=rf"the Kubernetes API at 127\.0\.0\.1:\d+ \(namespace training\) does not answer: {words}"):
            first.view()
    for answer in ((200, b"hello"), refusal(404, "the server could not find the requested resource")):
        own.before = lambda method, path, answer=answer: answer  # type: ignore[misc]
        with pytest.raises(UsageError, match=r"has no coordination\.k8s\.io/v1: "):
            carrier(own)
    own.before = lambda method, path: refusal(403, 'leases is forbidden: User "system:serviceaccount:x" cannot list')
    with pytest.raises(UsageError, match="cannot list; the service account needs a role"):
        carrier(own)


def test_nobody_there() -> None:
    told: list[str] = []
    terms = kubernetes.terms("http://127.0.0.1:1", {"namespace": "x"}, {}, NOWHERE)
    with pytest.raises(CarrierLost, match=r"does not answer: Connection refused \(tried for 0\.6 s\)"):
        found_in_time(lambda: kubernetes.Kubernetes(kubernetes.Api(terms, 1.0), "one"), 0.6, lambda: False, told.append)
    assert len(told) == 1


def test_terms(tmp_path: Path) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    (tmp_path / "namespace").write_text("mine\n")
    terms = kubernetes.terms("", {}, pod, tmp_path)
    assert (terms.host, terms.port, terms.namespace, terms.token) == ("10.0.0.1", 6443, "mine", None) and terms.tls is not None
    assert kubernetes.terms("api:6443", {"namespace": "other"}, {}, tmp_path).namespace == "other"
    assert kubernetes.terms("http://127.0.0.1:8001", {}, {}, tmp_path).tls is None
    wrong = [
        ("", {}, {}, "finds the API by itself in a pod only"),
        ("http://a", {"namespace": "a/b"}, {}, "'a/b' is no name of a namespace"),
        ("ftp://a", {}, {}, "must be http or https, not ftp"),
        ("http://a", {"token": "/nowhere"}, {}, "there is no token in /nowhere"),
        ("https://a", {"cacert": "/nowhere.crt"}, {}, r"cannot use the certificates for the Kubernetes API \(/nowhere.crt\)"),
    ]
    for endpoint, conf, environ, what in wrong:
        with pytest.raises(UsageError, match=what):
            kubernetes.terms(endpoint, conf, environ, tmp_path)
    with pytest.raises(UsageError, match="needs --rdzv-conf namespace=NAME"):
        kubernetes.terms("http://a", {}, {}, NOWHERE)


def test_two_nodes_meet(own: OwnKubernetes, agents: Agents) -> None:
    where = {"least": 2, "most": 2, "backend": "kubernetes", "endpoint": own.endpoint, "conf": {"namespace": NAMESPACE}}
    for _ in range(2):
        agents.start(agents.script(), nodes=where)
    agents.wait(0, 0)
    check_world(agents, [2, 2])
