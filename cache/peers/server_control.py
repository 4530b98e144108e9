"""Configure a node's server, and connect it to the processes of its node that use it.

The secret, the certificates and the node's own address are checked first. The spec is sent over a
pipe, because it contains secrets.

A user is a process that holds a connection to the server's socket in the cache folder. The system
closes the connection when the process ends, however it dies: the server ends after its last user,
and a user notices the server's death in the same way. Over this connection the server sends its
port, a proof that it knows the secret, and its log messages, each as a packet of JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import selectors
import socket
import struct
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cache.base import TlsFiles
from penstock.cache.errors import ConfigError, StalledError
from penstock.cache.peers.certificates import Credentials, credentials_of
from penstock.cache.peers.protocol import ALIVE
from penstock.cache.peers.tokens import PeerSecret, prove_server

if TYPE_CHECKING:
    from penstock.cache.base import Folder, Peers


def check_own_settings(settings: Peers) -> None:
    """Raise ConfigError for an unusable token_file or TlsFiles, and for an address that isn't this
    node's. Starts no server; only a host's name is resolved."""
    if settings.token_file is not None:
        PeerSecret.of_file(settings.token_file)
    if isinstance(settings.tls, TlsFiles):
        credentials_of(settings, PeerSecret.draw())
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            settings.host, 0, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)  # any port; it doesn't listen
    except OSError as error:
        raise address_error(settings, error.strerror or str(error)) from None


def address_error(settings: Peers, reason: str) -> ConfigError:
    """Return the error for an address at which this node can't listen."""
    return ConfigError(
        f"peers: the server of the cache can't listen at {settings.address} ({reason}). "
        "Pass an address of this node that the job's other nodes can reach."
    )


SERVERS_FOLDER = "peers"
"""The subfolder of a cache that holds the lock and the socket of each server."""
LIFE_BYTE, START_BYTE = 0, 1
"""Bytes of a server's lock file. A running server locks the first, and a process that starts a
server the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """The configuration of a server.

    name: of its files, see `server_name`. root, mode: the path and the permission bits of the cache
    folder. host, port: the address at which the server listens; port 0 stands for any free port.
    """

    name: str
    root: str
    mode: int
    host: str
    port: int
    secret: PeerSecret
    credentials: Credentials | None = field(repr=False)

    def dump(self) -> bytes:
        """Return the spec as a line of JSON."""
        spec = asdict(self) | {"secret": self.secret.value.decode("latin-1")}
        return json.dumps(spec).encode() + b"\n"

    @classmethod
    def load(cls, line: bytes) -> ServerSpec:
        """Parse a line of `dump`."""
        spec: dict[str, Any] = json.loads(line)
        secret, tls = PeerSecret(spec.pop("secret").encode("latin-1")), spec.pop("credentials")
        return cls(**spec, secret=secret, credentials=None if tls is None else Credentials(**tls))


def server_name(peers: Peers, secret: PeerSecret) -> str:
    """Return the name of a server's files in the cache folder. Processes with the same protocol,
    address, secret, encryption and user share a server."""
    about = (ALIVE, peers.address, secret.job, repr(peers.tls), str(os.geteuid()))
    return hashlib.sha256("\0".join(about).encode("utf-8", "surrogateescape")).hexdigest()[:16]


_MOST_PACKET, _MOST_LOG = 2**16, 2000
_HELLO_S = 10.0
_CREDENTIALS = struct.Struct("3i")


def socket_path(folder: Folder, name: str) -> str:
    """Return the path of a server's socket, which is short even in a folder with a long path."""
    return f"/proc/self/fd/{folder.fd}/{name}.sock"


class Users(logging.Handler):
    """The server's ends of its users' connections. As a log handler, it sends messages to the
    oldest user, which logs them.

    spec: of the server, whose former process is dead. selector: calls this object when a connection
    is readable. have_left: True after the last user has left.
    """

    def __init__(
        self, folder: Folder, spec: ServerSpec, *, port: int, selector: selectors.BaseSelector
    ) -> None:
        super().__init__(logging.INFO)
        self._folder, self._file = folder, f"{spec.name}.sock"
        self._secret, self._port = spec.secret, port
        self._selector = selector
        self._users: list[socket.socket] = []
        self.have_left = False
        folder.remove(self._file)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = os.umask(0o177)
        try:
            self._listener.bind(socket_path(folder, spec.name))
        finally:
            os.umask(before)
        self._listener.listen()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def count(self) -> int:
        """The number of users."""
        return len(self._users)

    def _accept(self, listener: socket.socket) -> None:
        user, _ = listener.accept()
        found = user.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(found)
        if uid not in (0, os.geteuid()):
            user.close()
            return
        user.setblocking(False)
        self._users.append(user)
        self._selector.register(user, selectors.EVENT_READ, self._receive)

    def _receive(self, user: socket.socket) -> None:
        """Answer a new user, or remove one that has left."""
        try:
            nonce = user.recv(100).decode("ascii", "replace")
        except OSError:
            nonce = ""
        if nonce:
            proof = prove_server(self._secret, nonce, str(self._port))
            _send(user, {"port": self._port, "pid": os.getpid(), "proof": proof})
            return
        self._selector.unregister(user)
        self._users.remove(user)
        self.have_left = not self._users
        user.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a log message to the oldest user."""
        for user in self._users[:1]:
            text = self.format(record)[:_MOST_LOG]
            _send(user, {"level": record.levelno, "log": text})

    def close(self) -> None:
        """Accept no users any more."""
        self._folder.remove(self._file)
        self._listener.close()
        super().close()


def _send(user: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it doesn't read, or has left
        user.send(json.dumps(message).encode())


class ServerLine:
    """A user's end of the connection, which receives the server's messages.

    port, pid: of the server. Raises OSError if no server runs, StalledError if it doesn't answer,
    and ValueError if another program answers.
    """

    def __init__(self, folder: Folder, name: str, secret: PeerSecret) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(_HELLO_S)
            self._socket.connect(socket_path(folder, name))
            nonce = secrets.token_hex(16)
            self._socket.send(nonce.encode())
            hello = self.receive()
            if hello is None:
                raise ConnectionResetError("the server is ending")
            self.port, self.pid = int(hello["port"]), int(hello["pid"])
            if hello["proof"] != prove_server(secret, nonce, str(self.port)):
                raise ValueError("the server doesn't know the secret")
            self._socket.settimeout(None)
        except TimeoutError:
            self.close()
            raise StalledError(f"The server of the node's cache doesn't answer: {name}.") from None
        except (KeyError, TypeError) as error:
            self.close()
            raise ValueError("another program answers") from error
        except BaseException:
            self.close()
            raise

    def receive(self) -> dict[str, Any] | None:
        """Wait for the server's next message; None if it has ended, or `end` was called."""
        try:
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
