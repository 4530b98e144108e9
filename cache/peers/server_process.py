"""Find or start the server of this node's cache, watch it, and start another when it dies.

One server for each node, cache folder, address and secret serves all processes of the node. It runs
in a new process, because the training loop needs this process's GIL; a fork would lack its threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO

from penstock.cache.base import ByteLocks, Folder, Peers
from penstock.cache.errors import ConfigError, StalledError, WorkerError, log, warn
from penstock.cache.forks import check_process, watch
from penstock.cache.peers.protocol import ALIVE
from penstock.cache.peers.server import SERVERS_FOLDER, START_BYTE, listen, socket_path
from penstock.cache.peers.trust import SECRET_VARIABLE, PeerSecret, credentials_of, prove_server
from penstock.cache.processes import describe_exit
from penstock.cache.threads import Workers, end_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.disk import DiskCache

START_TIMEOUT_S = 60.0
_HELLO_S = 10.0
_LEAVE_S = 1.0
_MOST_PACKET = 2**16
_MOST_DEATHS, _DEATHS_WITHIN_S = 6, 120.0
"""A server that has died this often within this time isn't started again."""
_FIRST_PAUSE_S = 0.25
"""The pause before the second restart. Each further pause is twice as long; the first restart
follows at once."""
_MOST_STDERR, _STDERR_LINES = 4000, 3
"""Bytes and lines of a dead server's stderr that a message quotes."""
# It uses this process's import path, so that no module of the working folder is imported.
_PROGRAM = """
import json, socket, sys
sys.path[:], spec = json.load(sys.stdin.buffer)
from penstock.cache.peers.server import main
main(socket.socket(fileno=int(sys.argv[-1])), spec)
"""


def check_own_settings(settings: Peers) -> None:
    """Raise ConfigError for an unusable token_file, and for an address that isn't this node's.
    Starts no server; only a host's name is resolved."""
    if settings.token_file is not None:
        PeerSecret.of_file(settings.token_file)
    try:
        listen(settings.host, 0)[0].close()
    except OSError as error:
        raise address_error(settings, error.strerror or str(error)) from None


def address_error(settings: Peers, reason: str) -> ConfigError:
    """Return the error for an address at which this node can't listen."""
    return ConfigError(
        f"peers: the server of the cache can't listen at {settings.address} ({reason}). "
        "Pass an address of this node that the job's other nodes can reach."
    )


class ServerLine:
    """A user's end of the connection to a server, which receives the server's messages.

    port, pid: of the server.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.port = self.pid = 0

    @classmethod
    def find(cls, folder: Folder, name: str, secret: PeerSecret) -> ServerLine | None:
        """Connect to a running server; None if no server runs, it is ending, or another program
        answers. Raises StalledError if it doesn't answer."""
        line = cls(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        with contextlib.ExitStack() as stack:
            stack.callback(line.close)
            try:
                line._socket.connect(socket_path(folder, name))
                nonce = secrets.token_hex(16)
                line._socket.send(nonce.encode())
                hello = line.receive(timeout_s=_HELLO_S) or {}
                line.port, line.pid = int(hello["port"]), int(hello["pid"])
                # A name in the cache folder isn't trusted by itself.
                if hello["proof"] == prove_server(secret, nonce, str(line.port)):
                    stack.pop_all()
                    return line
            except TimeoutError:
                text = f"The server of the node's cache doesn't answer: {name}."
                raise StalledError(text) from None
            except (OSError, ValueError, KeyError, TypeError):
                pass
        return None

    def receive(self, *, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Wait for the server's next message; None if it has ended, or `end` was called. Raises
        TimeoutError, and ValueError for another program's message."""
        try:
            self._socket.settimeout(timeout_s)
            packet = self._socket.recv(_MOST_PACKET)
        except TimeoutError:
            raise
        except OSError:
            return None
        message = json.loads(packet) if packet else None
        return message if isinstance(message, dict | None) else {}

    def end(self) -> None:
        """Make `receive` return, from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._socket.close()


class PeerServer:
    """The node's server as one of its users, from the constructor to close() or the end of the
    process.

    cache: the cache to serve, which is opened. is_encrypted: True if the server uses TLS. moved:
    called with the new address, on another thread, if a restarted server doesn't get its former
    port.

    Raises ConfigError for an address that isn't this node's; WorkerError if the server doesn't
    start; StalledError; OSError if the cache can't be used.
    """

    def __init__(
        self,
        cache: DiskCache,
        peers: Peers,
        secret: PeerSecret,
        *,
        moved: Callable[[str], object] | None = None,
    ) -> None:
        self._peers, self._secret, self._moved = peers, secret, moved
        credentials = credentials_of(peers, secret)
        self.is_encrypted = credentials is not None
        # Processes with the same protocol, address, secret, encryption and user share a server.
        about = (ALIVE, peers.address, secret.job, repr(peers.tls), str(os.geteuid()))
        text = "\0".join(about).encode("utf-8", "surrogateescape")
        self._name = hashlib.sha256(text).hexdigest()[:16]
        folder = cache.use(lambda folder: folder.layout.top.folder(SERVERS_FOLDER, make=True))
        if folder is None:
            raise OSError(f"{cache.path}: the cache can't be used, so it isn't served to others.")
        self._root, self._folder = cache.path, folder
        self._spec = {
            "name": self._name,
            "root": cache.path,
            "mode": cache.mode,
            "host": peers.host,
            "secret": secret.value.decode("latin-1"),
            "credentials": None if credentials is None else asdict(credentials),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: BinaryIO | None = None
        self._ended = threading.Event()
        self._deaths: list[float] = []
        self._changing = threading.Lock()
        self._pid = os.getpid()
        self._line = self._find_or_start_patiently(peers.port)
        self._watcher = Workers(1, name="peer-server")
        self._watcher.submit(self._watch, None)
        end_at_exit(self)
        watch(self)

    @property
    def address(self) -> str:
        """The address for other nodes: "HOST:PORT"."""
        return f"{self._peers.address.rpartition(':')[0]}:{self._line.port}"

    @property
    def pid(self) -> int:
        """The pid of the server's process."""
        return self._line.pid

    # -- finding and starting

    def _find_or_start_patiently(self, port: int, died: str | None = None) -> ServerLine:
        """Find a server or start one, again if it dies. died: a description of how the previous
        server ended; if it is given, other failures are retried, too. Raises as the class does, and
        WorkerError after too many deaths."""
        retried = WorkerError if died is None else (OSError, ConfigError, WorkerError)
        while True:
            if died is not None:
                self._note_death(died)
            try:
                return self._find_or_start(port)
            except retried as error:
                died = str(error)

    def _note_death(self, died: str) -> None:
        """Count a death, and pause before the next start. Raises WorkerError after too many deaths,
        and after `end`."""
        now_s = time.monotonic()
        deaths = [at_s for at_s in self._deaths if now_s - at_s <= _DEATHS_WITHIN_S]
        self._deaths = [*deaths, now_s]
        count = len(self._deaths)
        if count >= _MOST_DEATHS:
            raise WorkerError(
                f"{died} It is not started again, because {count} servers died within "
                f"{_DEATHS_WITHIN_S:.0f} s: other nodes can't use this node's cache."
            )
        if self._ended.wait(0.0 if count == 1 else _FIRST_PAUSE_S * 2.0 ** (count - 2)):
            raise WorkerError(died)

    def _find_or_start(self, port: int) -> ServerLine:
        if (found := ServerLine.find(self._folder, self._name, self._secret)) is not None:
            return found
        locks = ByteLocks(self._folder.open_or_create(f"{self._name}.lock"))
        what = f"{self._root}: starting the server of the cache"
        with (
            contextlib.closing(locks),
            locks.holding(START_BYTE, timeout_s=START_TIMEOUT_S, what=what),
        ):
            found = ServerLine.find(self._folder, self._name, self._secret)
            return found or self._start(port)

    def _start(self, port: int) -> ServerLine:
        """Start the process, which the new connection then keeps alive."""
        # The server's environment must not contain the secret.
        command = ["env", "-u", SECRET_VARIABLE, sys.executable, "-P", "-c", _PROGRAM]
        command += ["penstock-peer-server", self._peers.address]
        self._stderr = os.fdopen(os.memfd_create("penstock-peer-server", os.MFD_CLOEXEC), "rb")
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        assert process.stdin is not None
        paths = [path for path in sys.path if isinstance(path, str)]
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps([paths, self._spec | {"port": port}]).encode())
        line = ServerLine(mine)
        try:
            report = line.receive(timeout_s=START_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            line.close()
            self._reap()
            raise StalledError(
                f"{self._root}: the server of the cache (pid {process.pid}) didn't begin within "
                f"{START_TIMEOUT_S:.0f} s and was killed. Check if this machine is overloaded."
            ) from None
        if report is None or "error" in report:
            line.close()
        if report is None:
            raise self._death("while it started")
        if "error" in report:
            self._reap()
            if report["is_address"]:
                raise address_error(self._peers, report["error"])
            raise OSError(f"{self._root}: the server of the cache can't serve: {report['error']}.")
        line.port, line.pid = report["port"], report["pid"]
        if report["is_taken"]:
            warn(
                f"peers: port {port} of {self._peers.host} is taken, by another job's server or "
                f"another program, so this job's listens at {line.port}. Pass port 0 for any free "
                "port, or the same token_file to jobs that should share a server.",
                stacklevel=4,
            )
        return line

    def _reap(self) -> tuple[int | None, str]:
        """Wait for a server that this process started, if it has ended; return its exit status,
        None if unknown, and its last output."""
        process, self._process = self._process, None
        if process is None or self._stderr is None:
            return None, ""
        with self._stderr as stderr:
            try:
                code: int | None = process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                process.returncode = 0  # other processes use it; this prevents Popen's warning
                return None, ""
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MOST_STDERR))
            lines = stderr.read().decode("utf-8", "replace").splitlines()
        return code, " | ".join([line.strip() for line in lines if line.strip()][-_STDERR_LINES:])

    def _death(self, when: str) -> WorkerError:
        """Return the error for a server that has ended; it quotes the stderr of a server that this
        process started."""
        pid = self._line.pid if self._process is None else self._process.pid
        code, output = self._reap()
        how = "ended" if code is None else describe_exit(code)
        text = f"{self._root}: the server of the cache (pid {pid}) {how} {when}."
        if code == -signal.SIGKILL:
            text += " If you didn't kill it, the machine may lack memory: see `dmesg`."
        return WorkerError(f"{text} Its last output: {output}" if output else text)

    # -- watching

    def _watch(self, _: None) -> None:
        """Log the server's messages, and start another server when it has ended."""
        while not self._ended.is_set():
            try:
                message = self._line.receive()
            except ValueError:
                continue
            if message is None:
                if self._ended.is_set() or not self._start_again():
                    return
            elif isinstance(message.get("log"), str) and isinstance(message.get("level"), int):
                log.log(message["level"], "%s", message["log"])

    def _start_again(self) -> bool:
        before = self._line
        died = str(self._death("while it served"))
        try:
            line = self._find_or_start_patiently(before.port, died)
        except WorkerError as error:
            if not self._ended.is_set():
                log.warning("%s", error)
            return False
        with self._changing:
            before.close()
            self._line = line
            if self._ended.is_set():
                line.close()
        log.warning("%s Another server has replaced it (pid %d).", died, line.pid)
        if line.port != before.port and self._moved is not None:
            self._moved(self.address)
        return True

    # -- ending

    def end(self) -> None:
        """End the watching thread at once."""
        self._ended.set()
        with self._changing:
            self._line.end()

    def close(self) -> None:
        """Stop using the server, which ends with its last user. Safe to call twice."""
        check_process(self._pid, "The server of the cache")
        self.end()
        self._watcher.close(timeout_s=_LEAVE_S)
        self._line.close()
        self._reap()

    def disown(self) -> None:
        """Stop being a user in a forked child, so that the server can end before the child."""
        self._ended.set()
        self._line.close()
