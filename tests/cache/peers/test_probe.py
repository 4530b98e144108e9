"""Test reports on the connection to another node's server, stage by stage, with real servers."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from penstock.cache import Workers
from penstock.cache.base import Peers, TrafficMeter
from penstock.cache.peers import (
    RANGE_BYTES,
    Peer,
    PeerClient,
    PeerDirectory,
    PeerSecret,
    PeerStore,
    ProbeSettings,
    credentials_of,
    probe,
    protocol,
    prove_server,
)
from penstock.cache.peers import peer_diagnosis as probe_module
from tests.cache.peers.serving import Served, put, serving
from tests.servers.scripted import scripted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.scripted import Asked, Talk

SMALL = 100_000


def asking(peers: Peers, secret: PeerSecret | None) -> ProbeSettings:
    credentials = credentials_of(peers, secret or PeerSecret.draw())
    return ProbeSettings(secret, None if credentials is None else credentials.client_context)


def other(served: Served) -> Peers:
    """Return settings with plain text if the server encrypts, and with TLS if not."""
    return replace(served.peers, tls=not served.peers.tls)


def test_one_of_the_job_learns_all(served: Served) -> None:
    ask = asking(served.peers, served.secret)
    empty = probe(served.server.address, ask)
    speaks = "tls" if served.peers.tls else "plain"
    assert (empty.failure, empty.speaks, empty.identity) == (None, speaks, "same")
    assert (empty.tls == "TLSv1.3") is bool(served.peers.tls)
    assert abs(empty.ahead_s) < 60
    assert empty.request_s is not None
    assert empty.size_bytes == 0
    put(served.cache, "small", SMALL)
    assert probe(served.server.address, ask).size_bytes == SMALL
    put(served.cache, "large", RANGE_BYTES + 5)
    full = probe(served.server.address, ask)
    assert full.size_bytes == RANGE_BYTES
    assert full.range_s > 0


def test_clocks_that_differ_by_an_hour(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    facts = probe(served.server.address, asking(served.peers, served.secret))
    assert facts.identity == "same"
    assert abs(facts.ahead_s - 3600) < 60
    assert facts.size_bytes is not None


@pytest.mark.parametrize("secret", [PeerSecret.draw(), None], ids=["another", "none"])
def test_a_stranger_learns_how_it_speaks(served: Served, secret: PeerSecret | None) -> None:
    facts = probe(served.server.address, asking(served.peers, secret))
    assert facts.speaks == ("tls" if served.peers.tls else "plain")
    assert facts.identity == ("unchecked" if secret is None else "another")
    assert facts.request_s is None


def test_a_client_of_another_protocol_gets_a_reason(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not served.peers.tls:  # it doesn't answer a handshake
        monkeypatch.setattr(probe_module, "_HANDSHAKE_S", 0.1)
    facts = probe(served.server.address, asking(other(served), served.secret))
    assert facts.speaks == ("tls" if served.peers.tls else "plain")
    assert facts.wants_tls is not served.peers.tls
    assert facts.identity == "unchecked"


@contextlib.contextmanager
def saying(words: bytes) -> Iterator[str]:
    """Serve these bytes to every connection; return the address."""

    class Speaker(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.sendall(words)
                while self.request.recv(4096):
                    pass

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Speaker) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        b"SSH-2.0-server\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"x" * 100_000,
    ],
)
def test_a_port_of_another_program(words: bytes, tls: bool) -> None:
    with saying(words) as address:
        facts = probe(address, asking(Peers(address, tls=tls), PeerSecret.draw()))
    assert (facts.failure, facts.speaks, facts.identity) == (None, "other", "unchecked")


@pytest.mark.parametrize("tls", [False, True])
def test_a_silent_port(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_HANDSHAKE_S", 0.1)
    monkeypatch.setattr(probe_module, "_ANSWER_S", 0.1)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        facts = probe(address, asking(Peers(address, tls=tls), PeerSecret.draw()))
    assert (facts.failure, facts.speaks) == (None, "silence")


def test_a_closed_port() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    facts = probe(f"127.0.0.1:{port}", ProbeSettings(None, None))
    assert isinstance(facts.failure, ConnectionRefusedError)


def test_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert isinstance(probe("nobody:7077", ProbeSettings(None, None)).failure, socket.gaierror)


def test_a_server_of_the_job_that_is_slow_with_each_answer_ends_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nine answers of five seconds each would be longer than is promised."""
    secret, waits = PeerSecret.draw(), [0.0]
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + waits[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now() + waits[0])

    def act(talk: Talk, asked: Asked) -> None:
        waits[0] += 4.0
        token, date = asked.headers["authorization"], protocol.date_text(time.time())
        talk.write(
            f"HTTP/1.1 {200 if asked.path == protocol.ALIVE else 404} X\r\nDate: {date}\r\n"
            f"{protocol.PROOF_HEADER}: {prove_server(secret, token, date)}\r\n"
            "Content-Length: 0\r\n\r\n".encode()
        )

    with scripted(act) as server:
        facts = probe(server.url.removeprefix("http://"), ProbeSettings(secret, None))
    assert (facts.identity, facts.size_bytes) == ("same", 0)
    assert facts.request_s is not None
    assert facts.request_s >= 4
    assert waits[0] < 30


OTHER = PeerSecret(b"another secret of another job")


@pytest.mark.parametrize(
    ("theirs", "ours", "is_of_job", "said"),
    [
        (True, True, True, None),
        (False, False, True, None),
        (True, False, True, "it uses TLS, but this side uses plain HTTP"),
        (False, True, True, "it uses plain HTTP, but this side uses TLS"),
        (True, True, False, "it has another secret"),
        (False, False, False, "it has another secret"),
        (True, False, False, "it uses TLS, but this side uses plain HTTP"),
        (False, True, False, "it uses plain HTTP, but this side uses TLS"),
    ],
)
def test_the_asking_side_learns_at_once_what_is_wrong(
    tmp_path: Path, theirs: bool, ours: bool, is_of_job: bool, said: str | None
) -> None:
    """Within the time that a peer may be silent, and as a sentence of its own."""
    with serving(tmp_path / "cache", Peers("127.0.0.1:0", tls=theirs)) as served:
        secret = served.secret if is_of_job else OTHER
        credentials = credentials_of(Peers("127.0.0.1:0", tls=ours), secret)
        tls = None if credentials is None else credentials.client_context
        client, peer = PeerClient(secret, tls=tls), Peer(0, served.server.address)
        directory = PeerDirectory()
        directory.set_peers([peer])
        store = PeerStore(directory, client, Workers(1, name="lists"), meter=TrafficMeter())
        store.fetch_list(peer)
        report = directory.record(peer).fault
        assert (directory.record(peer).marks is not None) is (said is None)
        assert report is None if said is None else report is not None and report.startswith(said)
        store.close()


@pytest.mark.parametrize("status", ["404 Not Found", "200 OK", "302 Found", "500 No"])
def test_another_programs_web_server_is_no_node(status: str) -> None:
    with saying(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nhi".encode()) as address:
        client, peer = PeerClient(OTHER), Peer(0, address)
        directory = PeerDirectory()
        directory.set_peers([peer])
        store = PeerStore(directory, client, Workers(1, name="lists"), meter=TrafficMeter())
        store.fetch_list(peer)
        assert directory.record(peer).marks is None
        assert "Another program has that port" in str(directory.record(peer).fault)
        store.close()
