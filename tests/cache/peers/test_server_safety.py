"""Test that the peers' port serves no client without the secret, and that none can block others."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import selectors
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

import pytest

from penstock.cache.base import Peers
from penstock.cache.peers import (
    HeldFiles,
    NodeServer,
    PeerSecret,
    Question,
    Responder,
    ServerLimits,
    authorize,
    dispatch,
    listen,
    make_credentials,
    protocol,
)
from tests.cache.peers.serving import PATIENCE_S, Served, content, key_of, put, read_answer, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE = 16 * 2**20
FLAT_BYTES = 16e6
"""What a server's memory may move by: 200 connections have their buffers."""
SLOW = 200
KEY = key_of("whole")
PATH = protocol.blob_path(KEY)


@pytest.fixture(scope="module")
def served(served: Served) -> Iterator[Served]:
    """The server, whose cache contains a blob; it serves that before and after the tests."""
    put(served.cache, "whole", SIZE)
    assert_alive(served)
    yield served
    assert_alive(served)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("cache")) as found:
        put(found.cache, "whole", SIZE)
        pid = found.server.pid
        yield found
        assert_alive(found)
        assert found.server.pid == pid


def assert_alive(served: Served) -> None:
    answer = served.ask(PATH, (5, 50_005))
    assert answer.body == content("whole", SIZE)[5:50_005]


def all_that_comes(sock: socket.socket) -> bytes:
    """Return all bytes from the server until it ends the connection."""
    parts = []
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := sock.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def refused(served: Served, request: bytes) -> int:
    """Return the status of the answer to an invalid request, which contains nothing else. The
    connection ends after it; 0: it ended without an answer."""
    with contextlib.closing(served.dial()) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(request)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_WR)  # below TLS, too
        said = all_that_comes(sock)
    if not said:
        return 0
    head, _, body = said.partition(b"\r\n\r\n")
    assert not body
    assert b"Content-Length: 0" in head
    assert b"Penstock" not in head
    return int(head.split()[1])


# -- what isn't this protocol


def malformed(served: Served) -> dict[str, bytes]:
    right = served.head(PATH, (0, 100))
    line, rest = right.split(b"\r\n", 1)
    return {
        "no request": b"\r\n\r\n",
        "lf only": right.replace(b"\r\n", b"\n") + b"\r\n\r\n",
        "old": right.replace(b"HTTP/1.1", b"HTTP/1.0"),
        "newer": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "absolute": line.replace(b"GET ", b"GET http://x") + b"\r\n" + rest,
        "nul": line.replace(b"/v4", b"/\0v2") + b"\r\n" + rest,
        "unicode": line.replace(b"/v4", "/ü".encode()) + b"\r\n" + rest,
        "long path": b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n" + rest,
        "chunked": served.head(PATH, (0, 100), more="Transfer-Encoding: chunked\r\n")
        + b"5\r\nabcde",
        "a body": served.head(PATH, (0, 100), more="Content-Length: 5\r\n") + b"abcde",
        "two tokens": served.head(PATH, (0, 100), more="Authorization: x\r\n"),
        "two ranges": served.head(PATH, (0, 100), more="Range: bytes=0-1\r\n"),
        "upgrade": served.head(PATH, (0, 100), more="Upgrade: h2c\r\nConnection: Upgrade\r\n"),
        "expect": served.head(PATH, (0, 100), more="Expect: 100-continue\r\n"),
        "folded": served.head(PATH, (0, 100), more="X: a\r\n b\r\n"),
        "a name with a space": served.head(PATH, (0, 100), more="Host : y\r\n"),
        "many headers": served.head(PATH, (0, 100), more="X: a\r\n" * 100),
        "a long header": served.head(PATH, (0, 100), more=f"X: {'a' * 2000}\r\n"),
        "a head without end": right[:-2] + b"X: " + b"a" * 5000,
        "a client's hello": bytes.fromhex("1603010200010001fc0303") + os.urandom(500),
    }


def test_requests_outside_the_protocol_get_no_answer(served: Served) -> None:
    for name, request in malformed(served).items():
        assert refused(served, request) in (0, 400, 401), name


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_get_nothing(served: Served, method: str) -> None:
    right = served.head(PATH, (0, 100))
    assert refused(served, right.replace(b"GET", method.encode())) == 401  # signed for GET


def test_paths_that_look_elsewhere_find_nothing_even_signed(plain: Served) -> None:
    root = plain.cache.path
    secret = "the file of another"
    for place in (
        f"{root}/{'1' * 40}",
        f"{root}/unverified/{'2' * 40}",
        f"{root}/trash/{'3' * 40}",
    ):
        with open(place, "w", encoding="ascii") as file:
            file.write(secret)
    os.symlink(f"{root}/{'1' * 40}", f"{root}/blobs/{'4' * 40}")
    os.symlink(f"{root}/{'1' * 40}", f"{root}/fills/{'5' * 40}.part")
    os.mkfifo(f"{root}/blobs/{'6' * 40}")
    os.mkdir(f"{root}/blobs/{'7' * 40}")
    open(f"{root}/blobs/{'8' * 40}", "w", encoding="ascii").close()
    paths = [protocol.blob_path(str(n) * 40) for n in range(1, 9)]
    paths += [
        f"/v4/blobs/../blobs/{KEY}",
        f"/v4/blobs/%2e%2e/blobs/{KEY}",
        f"/v4/blobs/./{KEY}",
        f"/v4/blobs//{KEY}",
        f"//v4/blobs/{KEY}",
        f"/v4/blobs/{KEY}/",
        f"/v4/blobs/{KEY}.part",
        f"/v4/blobs/{KEY}%00",
        f"/v4/blobs/{KEY}?x",
        f"/v4/blobs/{KEY}#x",
        f"/v4/blobs/{KEY.upper()}",
        f"/v4/blobs/{KEY[:-1]}",
        "/v4/blobs/../format.json",
        "/v4/blobs/../catalogue.db",
        "/v4/blobs/..%2fcatalogue.db",
        "/v4/blobs/\\..\\catalogue.db",
        "/v4/held/../blobs/" + KEY,
        "/v4/held/*",
        "/etc/passwd",
        "/",
        "*",
    ]
    for path in paths:
        answer = plain.ask(path, (0, 10))
        assert (answer.status, answer.body) == (404, b""), path
    for name in "68":
        os.unlink(f"{root}/blobs/{name * 40}")


@pytest.mark.parametrize(
    "text",
    ["", "bytes=0-", "bytes=-1", "bytes=5-6,0-1", "bytes=0-5,5-6", "bytes=0-1,", "bytes=9-1", "x"],
)
def test_ranges_that_arent_one_get_nothing_even_signed(plain: Served, text: str) -> None:

    token = authorize(plain.secret, Question("GET", PATH, text), now_s=time.time())
    asked = f"Range: {text}\r\n" if text else ""
    with contextlib.closing(plain.dial()) as sock:
        sock.sendall(f"GET {PATH} HTTP/1.1\r\nAuthorization: {token}\r\n{asked}\r\n".encode())
        answer = read_answer(sock)[0]
    assert (answer.status, answer.body) == (400, b"")


# -- much of it


def garbage(number: int, right: bytes) -> bytes:
    """Return a request of a foreign program: random bytes, or a damaged valid request."""
    rng = random.Random(number)
    kind = number % 4
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 3000)) + b"\r\n\r\n"
    if kind == 1:
        return "".join(rng.choices("GET /v1blobs.%20:\r\n\t0123456789abcdef", k=300)).encode() + (
            b"\r\n\r\n"
        )
    damaged = bytearray(right)
    for _ in range(rng.randrange(1, 6)):
        damaged[rng.randrange(len(damaged) - 4)] = rng.randrange(256)
    return bytes(damaged) if kind == 2 else bytes(damaged[: rng.randrange(len(damaged))])


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.grid)])
def test_garbage_gets_no_data_and_takes_no_memory(plain: Served, count: int) -> None:
    right = plain.head(PATH, (0, 100_000))
    for number in range(100):
        refused(plain, garbage(number, right))
    before = plain.rss_bytes()
    said: dict[int, int] = {}
    for number in range(100, 100 + count):
        request = garbage(number, right)
        if request == right:
            continue
        try:
            status = refused(plain, request)
        except AssertionError:
            # Damage to an unused header: the request is still valid.
            assert b"Host: x" not in request
            continue
        said[status] = said.get(status, 0) + 1
    assert set(said) <= {0, 400, 401}
    assert abs(plain.rss_bytes() - before) < FLAT_BYTES / 4
    assert_alive(plain)


def test_a_head_that_never_ends_is_cut_and_takes_no_memory(plain: Served) -> None:
    before = plain.rss_bytes()
    for _ in range(20):
        with contextlib.closing(plain.dial()) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(b"GET / HTTP/1.1\r\nX: ")
            for _ in range(64):
                sock.sendall(b"a" * 2**16)
            all_that_comes(sock)
    assert plain.rss_bytes() - before < FLAT_BYTES / 4


def test_requests_ahead_of_their_turn_take_no_memory(plain: Served) -> None:
    """The client sends a pipeline of requests and reads no answers."""
    before = plain.rss_bytes()
    request = plain.head(PATH, (0, SIZE))
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            sock = stack.enter_context(contextlib.closing(plain.dial()))
            sock.settimeout(0.05)
            with contextlib.suppress(TimeoutError, ConnectionError):
                for _ in range(50_000):
                    sock.sendall(request)
        assert plain.rss_bytes() - before < FLAT_BYTES
        assert_alive(plain)


def test_200_silent_connections_block_no_others(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(SLOW):
            sock = socket.create_connection(served.place, timeout=PATIENCE_S)
            stack.enter_context(contextlib.closing(sock))
            sock.sendall(b"GET /v4/blobs/"[: number % 10])
        for _ in range(20):
            assert_alive(served)


def test_200_who_dont_read_what_they_ask_for_take_no_memory(served: Served) -> None:
    """Of the job, or with a token that they overheard."""
    before = served.rss_bytes()
    request = served.head(PATH, (0, SIZE))
    with contextlib.ExitStack() as stack:
        slow = []
        for _ in range(SLOW):
            sock = stack.enter_context(contextlib.closing(served.dial()))
            sock.sendall(request)
            slow.append(sock)
        for sock in slow:
            assert sock.recv(4) == b"HTTP"
        for _ in range(10):
            assert_alive(served)
        most = FLAT_BYTES if served.client_context() is None else 4 * FLAT_BYTES
        assert served.rss_bytes() - before < most


# -- encryption


def test_plain_text_where_tls_is_required_gets_nothing(tmp_path: Path) -> None:
    with serving(tmp_path / "cache", Peers("127.0.0.1:0", tls=True)) as served:
        put(served.cache, "whole", 1000)
        sock = socket.create_connection(served.place, timeout=PATIENCE_S)
        with contextlib.closing(sock):
            sock.sendall(served.head(PATH, (0, 100)))
            said = all_that_comes(sock)
        assert b"HTTP" not in said
        assert len(said) < 16  # an alert of TLS, at most


def test_who_shows_no_certificate_of_the_job_gets_nothing(tmp_path: Path) -> None:
    with serving(tmp_path / "cache", Peers("127.0.0.1:0", tls=True)) as served:
        put(served.cache, "whole", 1000)
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.load_verify_locations(cadata=make_credentials(served.secret).certificate)
        old = make_credentials(served.secret).client_context()
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        others = make_credentials(PeerSecret.draw()).client_context()
        others.check_hostname, others.verify_mode = False, ssl.CERT_NONE  # the thief's own choice
        thieves: tuple[ssl.SSLContext, ...] = (bare, old, others)
        for thief in thieves:
            sock = socket.create_connection(served.place, timeout=PATIENCE_S)
            with (
                contextlib.suppress(OSError),
                thief.wrap_socket(sock, server_hostname="127.0.0.1") as secured,
            ):
                secured.sendall(served.head(PATH, (0, 100)))
                assert all_that_comes(secured) == b""
            sock.close()
        assert served.ask(PATH, (0, 100)).status == 206


def test_a_server_of_another_job_isnt_believed(tmp_path: Path) -> None:
    with serving(tmp_path / "cache", Peers("127.0.0.1:0", tls=True)) as served:
        context = make_credentials(PeerSecret.draw()).client_context()
        sock = socket.create_connection(served.place, timeout=PATIENCE_S)
        with contextlib.closing(sock), pytest.raises(ssl.SSLCertVerificationError):
            context.wrap_socket(sock, server_hostname="127.0.0.1")


# -- limits in time: a server inside of this process, whose limits are short


@contextlib.contextmanager
def short_of_time(
    served: Served, limits: ServerLimits, tls: ssl.SSLContext | None = None
) -> Iterator[tuple[int, NodeServer]]:
    held = HeldFiles(served.cache.path, mode=0o700)
    replies = Responder(held, served.secret)
    listener, _ = listen("127.0.0.1", 0)
    selector = selectors.DefaultSelector()
    server = NodeServer(listener, replies, selector=selector, limits=limits, tls=tls)
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            dispatch(selector, 0.02)
            server.end_late(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield listener.getsockname()[1], server
    finally:
        is_over.set()
        thread.join(PATIENCE_S)
        server.close()
        selector.close()
        held.close()


def until_empty(server: NodeServer) -> None:
    """Wait until all connections have ended."""
    deadline_s = time.monotonic() + PATIENCE_S
    while server.count:
        assert time.monotonic() < deadline_s


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


@pytest.mark.parametrize("begun", [b"", b"GET /v4/alive HT"])
@pytest.mark.parametrize("is_secured", [False, True])
def test_who_doesnt_come_to_the_point_is_cut(plain: Served, begun: bytes, is_secured: bool) -> None:
    tls = make_credentials(plain.secret).server_context() if is_secured else None
    with short_of_time(plain, ServerLimits(head_s=0.1), tls) as (port, server):
        with dial(port) as sock:
            sock.sendall(begun)
            assert all_that_comes(sock)[:4] in (b"", TLS_ALERT)
        until_empty(server)


TLS_ALERT = b"\x15\x03\x03\x00"


def test_who_is_idle_or_reads_too_slowly_is_cut_and_holds_no_file(plain: Served) -> None:
    with short_of_time(plain, ServerLimits(idle_s=0.1, write_s=0.1)) as (port, server):
        with dial(port) as sock:
            sock.sendall(plain.head(protocol.ALIVE))
            assert all_that_comes(sock).startswith(b"HTTP/1.1 200")
        until_empty(server)
        with dial(port) as sock:
            sock.sendall(plain.head(PATH, (0, SIZE)))
            assert sock.recv(4) == b"HTTP"
            until_empty(server)  # some of it is in the kernel, and the rest isn't read
            assert len(all_that_comes(sock)) < SIZE


def test_places_are_limited_and_strangers_go_first(plain: Served) -> None:
    limits = ServerLimits(connections=6, of_one_address=5)
    with contextlib.ExitStack() as stack, short_of_time(plain, limits) as (port, server):

        def come(*, is_known: bool) -> socket.socket:
            sock = stack.enter_context(dial(port))
            if is_known:
                sock.sendall(plain.head(protocol.ALIVE))
                assert read_answer(sock)[0].status == 200
            return sock

        for _ in range(4):
            come(is_known=True)
        stranger = come(is_known=False)
        come(is_known=True)
        assert all_that_comes(stranger) == b""
        assert server.count == 5
        assert all_that_comes(come(is_known=False)) == b""  # all are of the job


@pytest.mark.parametrize("is_secured", [False, True])
def test_closing_ends_every_connection(plain: Served, is_secured: bool) -> None:
    credentials = make_credentials(plain.secret)
    tls = credentials.server_context() if is_secured else None
    with contextlib.ExitStack() as stack:
        with short_of_time(plain, ServerLimits(), tls) as (port, server):
            socks = [stack.enter_context(dial(port)) for _ in range(6)]
            socks[0].sendall(b"G")  # of a head, or of no handshake
            for n in (1, 2, 3):
                if is_secured:
                    context = credentials.client_context()
                    secured = context.wrap_socket(socks[n], server_hostname="127.0.0.1")
                    socks[n] = stack.enter_context(secured)
            socks[1].sendall(b"GET /v4/alive HT")
            for n in (2, 3):  # nobody reads the body
                socks[n].sendall(plain.head(PATH, (0, SIZE) if n == 2 else (5, SIZE)))
                assert socks[n].recv(4) == b"HTTP"
        assert not server.count
        for sock in socks:
            assert len(all_that_comes(sock)) < SIZE


def test_who_leaves_an_encrypted_body_is_sent_nothing_more(
    plain: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = make_credentials(PeerSecret.draw())
    reads = list[int]()
    read = os.pread

    def pread(fd: int, size: int, at: int) -> bytes:
        if size == 2**16:
            reads.append(at)
            if len(reads) == 3:
                client.close()  # with an answer begun and not read: a reset
        return read(fd, size, at)

    monkeypatch.setattr(os, "pread", pread)
    tls = credentials.server_context()
    with short_of_time(plain, ServerLimits(), tls) as (port, server):
        client = credentials.client_context().wrap_socket(dial(port), server_hostname="127.0.0.1")
        client.sendall(plain.head(PATH, (0, SIZE)))
        until_empty(server)
    assert 3 <= len(reads) < SIZE // 2**16 // 2
    assert not caplog.records


def test_handshakes_that_are_broken_off_leave_nothing(plain: Served) -> None:
    tls = make_credentials(PeerSecret.draw()).server_context()
    gc.collect()
    gc.disable()
    try:
        with short_of_time(plain, ServerLimits(), tls) as (port, server):
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"G"):
                for _ in range(5):
                    with dial(port) as sock:
                        sock.sendall(said)
            until_empty(server)
        # Not isinstance: it asks what other libraries deprecate.
        assert not [one for one in gc.get_objects() if type(one) is ssl.SSLSocket]
    finally:
        gc.enable()
