"""Test that a node's server lives as long as any process uses it, however processes
start and end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import ConfigError, PenstockWarning, WorkerError
from penstock.cache.base import Peers
from penstock.cache.disk import DiskCache
from penstock.cache.peers import (
    Peer,
    PeerClient,
    PeerSecret,
    PeerServer,
    make_credentials,
    protocol,
    server_process,
)
from tests.cache.peers.serving import PATIENCE_S, Served, content, key_of, put, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "cache") as found:
        yield found


def user(root: Path | str, secret: PeerSecret, address: str = "127.0.0.1:0") -> Any:
    """Start a process that uses a server; return it and its output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cache.peers.peer_user"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    report = {"root": str(root), "secret": secret.text, "address": address, "tls": None}
    process.stdin.write(json.dumps(report) + "\n")
    process.stdin.flush()
    return process, json.loads(process.stdout.readline())


def end(process: Any) -> None:
    process.kill()
    process.wait(PATIENCE_S)
    process.stdin.close()
    process.stdout.close()


@contextlib.contextmanager
def ending(pid: int) -> Iterator[None]:
    """Wait for a process's end after the block."""
    fd = os.pidfd_open(pid)
    try:
        yield
        assert select.select([fd], [], [], PATIENCE_S)[0], "it lives on"
    finally:
        os.close(fd)


@contextlib.contextmanager
def logging_of(text: str) -> Iterator[threading.Event]:
    """An event that a log line of Penstock's sets."""
    said = threading.Event()
    log = logging.getLogger("penstock")

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                said.set()

    ear = Ear()
    log.addHandler(ear)
    try:
        yield said
    finally:
        log.removeHandler(ear)


def test_processes_of_a_node_share_one_server(served: Served, tmp_path: Path) -> None:
    process, report = user(tmp_path / "cache", served.secret)
    assert report == {"pid": served.server.pid, "address": served.server.address}
    end(process)
    assert served.ask(protocol.ALIVE).status == 200


def test_it_ends_with_its_last_user_however_that_ends(tmp_path: Path) -> None:
    secret = PeerSecret.draw()
    first, report = user(tmp_path / "cache", secret)
    second, again = user(tmp_path / "cache", secret)
    assert report == again
    with ending(report["pid"]):
        end(first)  # who started it; the other uses it
        host, _, port = report["address"].rpartition(":")
        socket.create_connection((host, int(port)), timeout=PATIENCE_S).close()
        end(second)
    # Its leftovers aren't taken for a server.
    third, other = user(tmp_path / "cache", secret)
    assert other["pid"] != report["pid"]
    with ending(other["pid"]):
        end(third)


def test_a_server_that_is_killed_is_started_again_at_its_place(served: Served) -> None:
    put(served.cache, "kept", 1000)
    before, address = served.server.pid, served.server.address
    with logging_of("Another server has replaced it") as said:
        os.kill(before, signal.SIGKILL)
        assert said.wait(PATIENCE_S)
    assert served.server.pid != before
    assert served.server.address == address
    assert served.ask(protocol.blob_path(key_of("kept")), (0, 1000)).status == 206


def test_the_one_who_is_left_starts_it_again(tmp_path: Path) -> None:
    """Not only the process that started it."""
    secret = PeerSecret.draw()
    process, _ = user(tmp_path / "cache", secret)
    with serving(tmp_path / "cache", secret=secret) as served:
        end(process)
        with logging_of("Another server has replaced it") as said:
            os.kill(served.server.pid, signal.SIGKILL)
            assert said.wait(PATIENCE_S)
        assert served.ask(protocol.ALIVE).status == 200


def test_one_that_dies_again_and_again_is_left_dead(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "_FIRST_PAUSE_S", 0.001)
    for _ in range(5):
        with logging_of("was killed by SIGKILL while it served") as said:
            os.kill(served.server.pid, signal.SIGKILL)
            assert said.wait(PATIENCE_S)
        assert served.ask(protocol.ALIVE).status == 200
    with logging_of("is not started again, because 6 servers died") as said:
        os.kill(served.server.pid, signal.SIGKILL)
        assert said.wait(PATIENCE_S)


DYING = """
import os, signal, sys
if "penstock-peer-server" in sys.orig_argv:
    here = os.path.dirname(__file__)
    left = int(open(here + "/left").read())
    seen = 0
    def watch(event, args):
        global seen
        if event != EVENT or not left:
            return
        seen += 1
        if seen == NUMBER:
            open(here + "/left", "w").write(str(left - 1))
            DIE
    sys.addaudithook(watch)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Have the next servers die at a moment of their start; returns the file with how many do."""
    monkeypatch.setattr(server_process, "_FIRST_PAUSE_S", 0.001)

    def prepare(event: str, number: int, times: int, die: str = KILL) -> Path:
        folder = tmp_path / "site"
        folder.mkdir(exist_ok=True)
        text = DYING.replace("EVENT", repr(event)).replace("NUMBER", str(number))
        (folder / "sitecustomize.py").write_text(text.replace("DIE", die))
        (folder / "left").write_text(str(times))
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        return folder / "left"

    return prepare


MOMENTS = [("import", 1), ("socket.bind", 1), ("socket.bind", 2)]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("moment", MOMENTS)
def test_one_that_is_killed_while_it_starts_is_started_again(
    tmp_path: Path, dying: Callable[..., Path], moment: tuple[str, int], times: int
) -> None:
    left = dying(*moment, times)
    with serving(tmp_path / "cache") as served:
        assert left.read_text() == "0"
        assert served.ask(protocol.ALIVE).status == 200


@pytest.mark.parametrize("moment", MOMENTS)
def test_one_that_is_killed_while_it_starts_again_is_started_once_more(
    served: Served, dying: Callable[..., Path], moment: tuple[str, int]
) -> None:
    left, address = dying(*moment, 2), served.server.address
    with logging_of("Another server has replaced it") as said:
        os.kill(served.server.pid, signal.SIGKILL)
        assert said.wait(PATIENCE_S)
    assert left.read_text() == "0"
    assert served.server.address == address
    assert served.ask(protocol.ALIVE).status == 200


@pytest.mark.parametrize(
    ("die", "said"),
    [
        (KILL, r"\(pid \d+\) was killed by SIGKILL while it started.*memory"),
        ('sys.stderr.write("no\\nroom left\\n"), os._exit(7)', "with status 7 .*no | room left"),
        ('raise ImportError("half of it")', "status 1 while it started.*ImportError: half of it"),
    ],
)
def test_one_that_always_dies_while_it_starts_is_an_error_that_reports_why(
    tmp_path: Path, dying: Callable[..., Path], die: str, said: str
) -> None:
    dying("socket.bind", 1, 99, die)
    cache = DiskCache(tmp_path / "cache", max_bytes="1MiB")
    with pytest.raises(WorkerError, match=said) as caught:
        PeerServer(cache, Peers("127.0.0.1:0", tls=False), PeerSecret.draw())
    assert "127.0.0.1" not in str(caught.value)  # the address isn't to blame
    cache.close()


def test_jobs_with_secrets_of_their_own_have_servers_of_their_own(tmp_path: Path) -> None:
    """Side by side on one cache, also where they name one port."""
    with serving(tmp_path / "cache") as one:
        put(one.cache, "shared", 1000)
        address = one.server.address
        with contextlib.ExitStack() as stack:
            with pytest.warns(PenstockWarning, match="is taken"):
                other = stack.enter_context(serving(tmp_path / "cache", Peers(address)))
            assert other.server.pid != one.server.pid
            assert other.server.address != address
            path = protocol.blob_path(key_of("shared"))
            for served, stranger in ((one, other), (other, one)):
                assert served.ask(path, (0, 9)).status == 206
                assert served.ask(path, (0, 9), secret=stranger.secret).status == 401


def test_caches_that_share_a_secret_serve_each_its_own(tmp_path: Path) -> None:
    secret = PeerSecret.draw()
    with serving(tmp_path / "a", secret=secret) as a, serving(tmp_path / "b", secret=secret) as b:
        put(a.cache, "of-a", 1000)
        path = protocol.blob_path(key_of("of-a"))
        assert a.ask(path, (0, 9)).status == 206
        assert b.ask(path, (0, 9)).status == 404


def test_it_listens_at_its_address_alone_and_has_no_secret_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = PeerSecret(b"that-nobody-must-see-anywhere")
    monkeypatch.setenv("PENSTOCK_PEER_TOKEN", secret.text)
    with serving(tmp_path / "cache", Peers("127.0.0.2:0", tls=True), secret=secret) as served:
        pid = served.server.pid
        with open(f"/proc/{pid}/net/tcp", encoding="ascii") as file:
            found = [line.split() for line in file.readlines()[1:]]
        port = f":{served.place[1]:04X}"
        listening = [one[1] for one in found if one[3] == "0A" and one[1].endswith(port)]
        assert listening == [f"0200007F:{served.place[1]:04X}"]
        for seen in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{seen}", "rb") as file:
                assert secret.value not in file.read()
        written = [
            path.read_bytes()
            for path in (tmp_path / "cache").rglob("*")
            if path.is_file() and not path.is_symlink()
        ]
        assert not any(secret.value in data or b"PRIVATE KEY" in data for data in written)
        for path in (tmp_path / "cache" / "peers").iterdir():
            assert path.stat().st_mode & 0o077 == 0


def test_it_is_small(served: Served) -> None:
    put(served.cache, "any", 100)
    assert served.ask(protocol.blob_path(key_of("any")), (0, 100)).status == 206
    assert served.rss_bytes() < 60e6
    with open(f"/proc/{served.server.pid}/maps", encoding="ascii") as file:
        loaded = file.read()
    assert not any(name in loaded for name in ("numpy", "torch", "dali", "cryptography"))


def test_an_address_of_ipv6_is_one(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(tmp_path / "cache", Peers("[::1]:0", tls=True)) as served:
        put(served.cache, "any", 1000)
        context = make_credentials(served.secret).client_context()
        client = PeerClient(served.secret, tls=lambda: context)
        peer = Peer(0, served.server.address)
        (found,) = client.blob(peer, key_of("any"), [(0, 1000)], 1000)
        assert found is not None
        assert bytes(found) == content("any", 1000)
        client.abort()


@pytest.mark.parametrize("address", ["192.0.2.7:0", "nowhere.invalid:0"])
def test_an_address_that_isnt_this_nodes_is_an_error(tmp_path: Path, address: str) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes="1MiB")
    with pytest.raises(ConfigError, match="can't listen"):
        PeerServer(cache, Peers(address, tls=False), PeerSecret.draw())
    cache.close()


def test_who_holds_the_socket_without_the_secret_is_no_server(tmp_path: Path) -> None:
    """A name in the cache folder is never trusted by itself."""
    with serving(tmp_path / "cache") as served:
        name = next((tmp_path / "cache" / "peers").glob("*.sock")).name
        secret = served.secret
    impostor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    impostor.bind(str(tmp_path / "cache" / "peers" / name))
    impostor.listen()
    said = []

    def lie() -> None:
        for _ in range(2):  # before and behind the start's lock
            met, _ = impostor.accept()
            with met:
                said.append(met.recv(100))
                met.send(json.dumps({"port": 1, "pid": 1, "proof": "0" * 64}).encode())

    thread = threading.Thread(target=lie)
    thread.start()
    try:
        with serving(tmp_path / "cache", secret=secret) as served:
            assert served.ask(protocol.ALIVE).status == 200
    finally:
        thread.join(PATIENCE_S)
        impostor.close()
    assert len(said) == 2


def test_a_forked_child_is_no_user(tmp_path: Path) -> None:
    with serving(tmp_path / "cache") as served:
        pid = served.server.pid
        begun, ended = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:  # pragma: no cover
            os.write(begun[1], b"x")
            os.close(ended[1])
            os.read(ended[0], 1)
            os._exit(0)
        os.read(begun[0], 1)
        with ending(pid):
            served.server.close()
        os.write(ended[1], b"x")
        os.waitpid(child, 0)
        for fd in (*begun, *ended):
            os.close(fd)
