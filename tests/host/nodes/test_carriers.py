"""Records in a folder and over TCP: written whole, created once, and who may serve or join them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftrun.core.errors import UsageError
from ftrun.host.base.settings import Nodes
from ftrun.host.nodes.carriers import addresses, client, etcd, folder, kubernetes
from ftrun.host.nodes.carriers.carrier import Carrier, CarrierLost
from ftrun.host.nodes.membership import open as opening
from ftrun.host.nodes.messages import MAX_FRAME, VERSION
from tests.conftest import wait_for
from tests.e2e.harness import free_port
from tests.host.nodes.etcds import OwnEtcd, RealEtcd, needs_etcd
from tests.host.nodes.kube import NAMESPACE, OwnKubernetes

Opener = Callable[[], Carrier]


def connect(port: int, run_id: str = "one", serve: bool | None = None, join_timeout: float = 5.0) -> client.Client:
    found = client.connect(
        "127.0.0.1", port, run_id, serve=serve, join_timeout=join_timeout, patience=5.0, stopped=lambda: False, on_trouble=_unexpected
    )
    assert found is not None
    return found


def _unexpected(why: str) -> None:
    raise AssertionError(why)


def of_etcd(endpoint: str) -> etcd.Etcd:
    return etcd.Etcd(etcd.Gateway(etcd.terms(endpoint, {}, {}), 5.0), "one")


def of_kubernetes(api: OwnKubernetes) -> kubernetes.Kubernetes:
    terms = kubernetes.terms(api.endpoint, {"namespace": NAMESPACE}, {}, Path("/nowhere"))
    return kubernetes.Kubernetes(kubernetes.Api(terms, 5.0), "one")


@pytest.fixture(params=["folder", "tcp", "etcd", "kubernetes", pytest.param("real etcd", marks=needs_etcd)])
def carriers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    opened: list[Carrier] = []
    kind: str = request.param
    server = OwnEtcd() if kind == "etcd" else RealEtcd(tmp_path) if kind == "real etcd" else None
    api = OwnKubernetes() if kind == "kubernetes" else None
    tmp_path.chmod(0o700)
    own = folder.prepare(str(tmp_path), "one", 5.0)
    port = free_port()

    def another() -> Carrier:
        if api is not None:
            opened.append(of_kubernetes(api))
            return opened[-1]
        opened.append(folder.Folder(own, 5.0) if kind == "folder" else of_etcd(server.endpoint) if server else connect(port))
        return opened[-1]

    yield another
    for carrier in reversed(opened):
        carrier.close()
    for one in (server, api):
        if one is not None:
            one.close()


def test_everyone_sees_what_one_writes(carriers: Opener) -> None:
    first, second = carriers(), carriers()
    first.put("agent.a", {"beat": 1})
    second.put("agent.b", {"beat": 7, "text": "ä\n" * 50_000})
    assert dict(first.view()) == dict(second.view())
    first.put("agent.a", {"beat": 2})
    assert second.view()["agent.a"] == {"beat": 2}
    assert len(second.view()["agent.b"]["text"]) == 100_000


@pytest.mark.parametrize("size", [40_000, MAX_FRAME // 4])
def test_more_records_than_fit_into_one_answer(size: int) -> None:
    """Many nodes, whose records are long while nothing moves."""
    port = free_port()
    first, second = connect(port), connect(port)
    records = {f"agent.{number}": {"beat": number, "text": "\n" * size} for number in range(2 * MAX_FRAME // size)}
    for name, record in records.items():
        first.put(name, record)
    first.put("agent.0", {"beat": 1})
    assert dict(second.view()) == {**records, "agent.0": {"beat": 1}}
    first.put("agent.1", {"beat": 2})
    assert second.view()["agent.1"] == {"beat": 2}
    second.close()
    first.close()


def test_created_once(carriers: Opener) -> None:
    several = [carriers() for _ in range(4)]
    won: list[int] = []

    def create(at: int) -> None:
        for number in range(20):
            if several[at].create(f"round.{number}", {"by": at}):
                won.append(number)

    threads = [threading.Thread(target=create, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(won) == list(range(20))
    assert len(several[0].view()) == 20


def test_a_closed_connection_is_seen_at_once() -> None:
    port = free_port()
    first, second = connect(port), connect(port)
    second.put("agent.b", {"beat": 1})
    second.create("round.0", {"members": []})
    second.hang_up()
    wait_for(lambda: first.view()["agent.b"].get("gone"), "the record to be marked", 5.0)
    assert first.view()["round.0"] == {"members": []}
    first.close()


def test_a_server_that_dies() -> None:
    port = free_port()
    first, second = connect(port), connect(port)
    assert first._server is not None
    first._server.stop(0.0)
    with pytest.raises(CarrierLost, match=f"the rendezvous server on 127.0.0.1:{port} is gone"):
        second.view()
    second.close()
    first.hang_up()


def test_another_runs_server() -> None:
    port = free_port()
    first = connect(port)
    with pytest.raises(CarrierLost, match="serves another run than 'two', or another version of ftrun"):
        connect(port, "two", serve=False)
    first.close()


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def hello(**facts: object) -> bytes:
    return frame(json.dumps({"op": "hello", "version": VERSION, "run": "brave-otter", **facts}).encode())


STRANGERS = {
    "silence": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(256)) * 40,
    "no object": frame(b"[1]"),
    "no json": frame(b"\xff\xfe\x00"),
    "deep": frame(b"[" * 4000),
    "deep object": frame(b'{"op":' * 600 + b"1" + b"}" * 600),
    "no words": frame(b"{}"),
    "no run": frame(b'{"op": "hello", "version": 1}'),
    "no version": frame(b'{"op": "hello", "run": "brave-otter"}'),
    "another run": hello(run="brave-otte"),
    "no text": hello(run=["brave-otter"]),
    "half a pair": hello(run="\ud800"),
    "no run at all": hello(run=None),
    "another version": hello(version=VERSION + 1),
    "no number": hello(version={}),
    "not greeted": frame(b'{"op": "changes", "since": -1}'),
    "not greeted, writing": frame(b'{"op": "put", "name": "agent.a", "record": {"forged": 1}}'),
    "a long one": (8 << 20).to_bytes(4, "big") + b"x" * (1 << 16),
    "greeted after a no": hello(run="x") + frame(b'{"op": "changes", "since": -1}'),
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_learns_nothing(said: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither the run's name nor the version nor a record; and the server serves on without a word."""
    port = free_port()
    first = connect(port, "brave-otter")
    first.put("agent.a", {"beat": 1})
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
        heard = b""
        with contextlib.suppress(OSError):  # the server hung up already
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            while data := stranger.recv(1 << 16):
                heard += data
    assert heard in (b"", frame(b'{"ok":false}')), heard
    assert dict(first.view()) == {"agent.a": {"beat": 1}}
    second = connect(port, "brave-otter", serve=False)
    assert dict(second.view()) == {"agent.a": {"beat": 1}}
    second.close()
    first.close()
    out, err = capfd.readouterr()
    assert not out + err


def test_a_member_that_talks_nonsense_is_dropped_alone(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    first = connect(port, "brave-otter")
    for said in (
        b'{"op": "changes", "since": 1e999}',
        b'{"op": "changes", "since": []}',
        b'{"op": "put", "name": 1, "record": 2}',
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as member:
            member.sendall(hello() + frame(said))
            member.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while member.recv(1 << 16):
                    pass
    assert dict(first.view()) == {}
    first.close()
    assert not "".join(capfd.readouterr())


def test_the_server_of_a_run_that_has_ended_is_not_joined() -> None:
    port = free_port()
    first, second = connect(port), connect(port)
    first.create("over", {"code": 0})
    closing = threading.Thread(target=first.close)  # waits for the second one
    closing.start()
    later: list[client.Client] = []
    joining = threading.Thread(target=lambda: later.append(connect(port, join_timeout=20.0)))
    joining.start()
    assert "over" in second.view()
    second.close()
    joining.join(20.0)
    closing.join(10.0)
    assert not closing.is_alive() and "over" not in later[0].view()
    later[0].close()


def test_strangers_do_no_harm() -> None:
    port = free_port()
    first = connect(port)
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2{}", b"\0\0\0\2[]", b'\0\0\0\x11{"op": "changes"}', b"\0\0"):
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as stranger:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    first.put("agent.a", {"beat": 1})
    assert set(first.view()) == {"agent.a"}
    first.close()


def test_endpoints() -> None:
    assert addresses.split_endpoint("node0", 29400) == ("node0", 29400)
    assert addresses.split_endpoint("node0:1234", 29400) == ("node0", 1234)
    assert addresses.split_endpoint("[::1]:1234", 29400) == ("::1", 1234)
    assert addresses.split_endpoint("[fe80::2]", 29400) == ("fe80::2", 29400)
    assert addresses.split_endpoint("fe80::2", 29400) == ("fe80::2", 29400)
    for wrong in ("", ":29400", "node0:x", "node0:70000"):
        with pytest.raises(UsageError, match="must be HOST or HOST:PORT"):
            addresses.split_endpoint(wrong, 29400)


def test_a_port_that_another_program_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1, where this node should serve"):
            client.listen("127.0.0.1", port, certain=True)
        assert client.listen("127.0.0.1", port, certain=False) is None


def test_a_stranger_on_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        with pytest.raises(CarrierLost, match=r"no rendezvous server on .*does not answer as ftrun does"):
            client.connect(
                "127.0.0.1",
                other.getsockname()[1],
                "one",
                serve=None,
                join_timeout=0.0,
                patience=1.0,
                stopped=lambda: False,
                on_trouble=_unexpected,
            )


def test_a_name_that_is_loopback_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    listener = client.listen("node0", port, certain=False)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_an_address_of_another_machine() -> None:
    assert client.listen("192.0.2.1", free_port(), certain=False) is None


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_missing_or_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is it mounted here"):
        folder.prepare(str(tmp_path / "nowhere"), "one", 5.0)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a directory"):
        folder.prepare(str(tmp_path / "file"), "one", 5.0)


def test_a_folder_that_others_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match=r"can be written by others \(mode 777\).*chmod go-w"):
        folder.prepare(str(tmp_path), "one", 5.0)
    tmp_path.chmod(0o1777)
    own = folder.prepare(str(tmp_path), "one", 5.0)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o770)
    with pytest.raises(UsageError, match="can be written by others"):
        folder.prepare(str(tmp_path), "one", 5.0)


def test_a_link_where_the_runs_folder_should_be(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ftrun-one").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is not a directory of yours"):
        folder.prepare(str(tmp_path), "one", 5.0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_somebody_elses_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(UsageError, match="belongs to user 65534"):
        folder.prepare(str(tmp_path), "one", 5.0)


def test_each_run_has_a_session_of_its_own(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    own = folder.prepare(str(tmp_path), "one", 5.0)
    for _ in range(4):
        first, second = folder.Folder(own, 5.0), folder.Folder(own, 5.0)
        assert not first.view()
        first.put("agent.a", {"beat": 1})
        assert "agent.a" in second.view()
        second.create("over", {"code": 0})
    assert sorted(p.name for p in own.iterdir()) == ["2", "3"]


# -- options ---------------------------------------------------------------------------------------------------------


def test_one_node_meets_nobody() -> None:
    assert opening.arrange(Nodes(), "one", 2, 0) is None
    assert opening.arrange(Nodes(most=4, standalone=True), "one", 2, 0) is None


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (Nodes(2, 2, backend="zeus"), "is not supported; use static, c10d, file, etcd or kubernetes"),
        (Nodes(2, 2, backend="c10d"), "needs --rdzv-endpoint HOST"),
        (Nodes(2, 2, backend="file"), "needs --rdzv-endpoint FOLDER"),
        (Nodes(1, 2), "node ranks are fixed with static"),
        (Nodes(2, 2, rank=2), "--node-rank 2 must be from 0 to 1"),
        (Nodes(3, 2, backend="c10d", endpoint="x"), "the smaller number comes first"),
        (Nodes(2, 2, conf={"tiemout": "3"}), "unknown rendezvous setting tiemout"),
        (Nodes(2, 2, conf={"timeout": "soon"}), "timeout must be a number of seconds, not 'soon'"),
        (Nodes(2, 2, conf={"join": "maybe"}), "join must be late or never"),
        (Nodes(2, 2, backend="c10d", endpoint="x", conf={"is_host": "perhaps"}), "is_host must be true or false"),
    ],
)
def test_options_that_cannot_be(nodes: Nodes, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        opening.arrange(nodes, "one", 2, 0)


def test_settings_of_torchrun_are_understood() -> None:
    conf = {"timeout": "900", "last_call_timeout": "5", "close_timeout": "3", "read_timeout": "60"}
    meeting = opening.arrange(Nodes(2, 4, backend="c10d", endpoint="x", conf=conf), None, 2, 3)
    assert meeting is not None and meeting.run_id == "none"
    assert (meeting.terms.join_timeout, meeting.terms.last_call, meeting.terms.max_restarts) == (900.0, 5.0, 3)
