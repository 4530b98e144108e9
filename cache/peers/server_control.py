"""Configure a node's server, and connect it to the processes of its node that use it.

The secret, the certificates and the node's own address are checked first. The spec is sent over a
pipe, because it contains secrets.

A user is a process that holds a connection to the server's socket in the cache folder. The system
closes the connection when the process ends, however it dies: the server ends after its last user,
and a user notices the server's death in the same way. Over this connection the server sends its
port, a proof that it knows the secret, and its log messages.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from penstock.cache.base import TlsFiles
from penstock.cache.errors import ConfigError, StalledError
from penstock.cache.peers.certificates import Credentials, credentials_of
from penstock.cache.peers.tokens import PeerSecret, prove_server

if TYPE_CHECKING:
    from collections.abc import Callable

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

    root, mode: the path and the permission bits of the cache folder. host, port: the address at
    which the server listens; port 0 stands for any free port.
    """

    root: str
    mode: int
    host: str
    port: int
    secret: PeerSecret
    credentials: Credentials | None = field(repr=False)

    def dump(self) -> bytes:
        """Return the spec as a line of JSON."""
        tls = self.credentials
        spec = {
            "root": self.root,
            "mode": self.mode,
            "host": self.host,
            "port": self.port,
            "secret": base64.b64encode(self.secret.value).decode(),
            "tls": None if tls is None else [tls.certificate, tls.key, tls.authority],
        }
        return json.dumps(spec).encode() + b"\n"

    @classmethod
    def load(cls, line: bytes) -> ServerSpec:
        """Parse a line of `dump`."""
        spec: dict[str, Any] = json.loads(line)
        secret, tls = PeerSecret(base64.b64decode(spec.pop("secret"))), spec.pop("tls")
        if tls is not None:
            tls = Credentials(certificate=tls[0], key=tls[1], authority=tls[2])
        return cls(**spec, secret=secret, credentials=tls)


def server_name(peers: Peers, secret: PeerSecret) -> str:
    """Return the name of a server's files in the cache folder. Processes with the same address,
    secret, encryption and user share a server."""
    about = (peers.address, secret.job, repr(peers.tls), str(os.geteuid()))
    return hashlib.sha256("\0".join(about).encode("utf-8", "surrogateescape")).hexdigest()[:16]


_MOST_LINE = 2**16
_HELLO_S = 10.0
_CREDENTIALS = struct.Struct("3i")


def socket_path(folder: Folder, name: str) -> str:
    """Return the path of a server's socket, which is short even in a folder with a long path."""
    return f"/proc/self/fd/{folder.fd}/{name}.sock"


class UserConnection(asyncio.Protocol):
    """The server's end of a user's connection."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self._transport: asyncio.Transport | None = None
        self._line = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        _, uid, _ = _CREDENTIALS.unpack(
            transport.get_extra_info("socket").getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
        )
        if uid not in (0, os.geteuid()):
            self._transport.abort()
            return
        self._users.enter(self)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._line += data
        line, found, _ = self._line.partition(b"\n")
        if len(self._line) > 200:
            self._transport.abort()
        elif found:
            self.send(self._users.hello(line.decode("ascii", "replace")))
            self._line.clear()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, unless the user doesn't read."""
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() < _MOST_LINE:
            transport.write(json.dumps(message).encode() + b"\n")

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._users.leave(self)


class Users:
    """The users of this process. gone: called after the last user has left."""

    def __init__(self, secret: PeerSecret, *, port: int, gone: Callable[[], object]) -> None:
        self._secret, self._port, self._gone = secret, port, gone
        self._users: dict[UserConnection, None] = {}

    def hello(self, nonce: str) -> dict[str, Any]:
        """Return the first message to a user."""
        proof = prove_server(self._secret, nonce, str(self._port))
        return {"port": self._port, "pid": os.getpid(), "proof": proof}

    def enter(self, user: UserConnection) -> None:
        """Add a user."""
        self._users[user] = None

    def leave(self, user: UserConnection) -> None:
        """Remove a user; call `gone` after the last one."""
        self._users.pop(user, None)
        if not self._users:
            self._gone()

    @property
    def count(self) -> int:
        """The number of users."""
        return len(self._users)

    def log(self, level: int, text: str) -> None:
        """Send a log message to the oldest user, which logs it."""
        if user := next(iter(self._users), None):
            user.send({"level": level, "log": text})


class LogToUsers(logging.Handler):
    """A log handler that sends the messages of this process to one of its users."""

    def __init__(self, users: Users) -> None:
        super().__init__(logging.INFO)
        self._users = users

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record."""
        self._users.log(record.levelno, self.format(record)[:2000])


class ServerLine:
    """A user's end of the connection, which receives the server's messages.

    port, pid: of the server. Raises OSError if no server runs, StalledError if it doesn't answer,
    and ValueError if another program answers.
    """

    def __init__(self, folder: Folder, name: str, secret: PeerSecret) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._left = b""
        try:
            self._socket.settimeout(_HELLO_S)
            self._socket.connect(socket_path(folder, name))
            nonce = secrets.token_hex(16)
            self._socket.sendall(nonce.encode() + b"\n")
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
        while b"\n" not in self._left:
            try:
                data = self._socket.recv(2**14)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not data or len(self._left) > _MOST_LINE:
                return None
            self._left += data
        line, _, self._left = self._left.partition(b"\n")
        message = json.loads(line)
        return message if isinstance(message, dict) else {}

    def end(self) -> None:
        """Make `receive` return, from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._socket.close()
