"""Pass a node's server what it serves, and connect it to the processes of its node that use it.

The settings are checked as far as one node alone can: secret, certificates and own address. The
spec goes over a pipe, as it holds secrets.

A user is a process that holds a connection to the server's socket in the cache folder. The
connection ends with its process, however that dies, so nobody counts and nobody asks around: the
server ends when the last user is gone, and a user notices the server's death in the same way. Over
it the server says its port, proves that it knows the secret, and sends what it has to log.
"""

from __future__ import annotations

import asyncio
import base64
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
    """Raise ConfigError for a token_file or TlsFiles that can't be used, and for an address that
    isn't this node's. Nothing listens, and nobody is asked but the resolver of a host's name."""
    if settings.token_file is not None:
        PeerSecret.of_file(settings.token_file)
    if isinstance(settings.tls, TlsFiles):
        credentials_of(settings, PeerSecret.draw())
    try:
        _check_local(settings.host)
    except OSError as error:
        raise not_local(settings, error.strerror or str(error)) from None


def not_local(settings: Peers, reason: str) -> ConfigError:
    """The error for an address at which this node can't listen."""
    return ConfigError(
        f"peers: the server of the cache can't listen at {settings.address} ({reason}). "
        "Pass an address of this node itself, by which the job's other nodes reach it."
    )


def _check_local(host: str) -> None:
    family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(place)  # of any port, and nobody is let in


SERVERS_FOLDER = "peers"
"""Of a cache folder: the lock and the socket of each server."""
LIFE_BYTE, START_BYTE = 0, 1
"""Of a server's lock file: held by the server while it lives, and by who starts one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What a server serves, where, and to whom.

    root, mode: of the cache folder. host, port: where it listens, port 0 for any that is free.
    """

    root: str
    mode: int
    host: str
    port: int
    secret: PeerSecret
    credentials: Credentials | None = field(repr=False)

    def dump(self) -> bytes:
        """The spec as a line."""
        tls = self.credentials
        told = {
            "root": self.root,
            "mode": self.mode,
            "host": self.host,
            "port": self.port,
            "secret": base64.b64encode(self.secret.value).decode(),
            "tls": None if tls is None else [tls.certificate, tls.key, tls.authority],
        }
        return json.dumps(told).encode() + b"\n"

    @classmethod
    def load(cls, line: bytes) -> ServerSpec:
        """The spec that a line holds."""
        told: dict[str, Any] = json.loads(line)
        tls = told["tls"]
        if tls is not None:
            tls = Credentials(certificate=tls[0], key=tls[1], authority=tls[2])
        return cls(
            root=told["root"],
            mode=told["mode"],
            host=told["host"],
            port=told["port"],
            secret=PeerSecret(base64.b64decode(told["secret"])),
            credentials=tls,
        )


def server_name(peers: Peers, secret: PeerSecret) -> str:
    """The name of a server's files in the cache folder: one for each address, secret, kind of
    encryption and user, so that all who agree on these share one."""
    about = (peers.address, secret.job, repr(peers.tls), str(os.geteuid()))
    return hashlib.sha256("\0".join(about).encode("utf-8", "surrogateescape")).hexdigest()[:16]


_MOST_LINE = 2**16
_HELLO_S = 10.0
_CREDENTIALS = struct.Struct("3i")


def socket_path(folder: Folder, name: str) -> str:
    """The path of a server's socket: short, however long the folder's is."""
    return f"/proc/self/fd/{folder.fd}/{name}.sock"


class UserConnection(asyncio.Protocol):
    """The server's end of a user's connection. hello: what is told to every user."""

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
            self.tell(self._users.hello(line.decode("ascii", "replace")))
            self._line.clear()

    def tell(self, what: dict[str, Any]) -> None:
        """Send a line, unless a user doesn't listen."""
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() < _MOST_LINE:
            transport.write(json.dumps(what).encode() + b"\n")

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._users.leave(self)


class Users:
    """The users of this process. gone: called when the last one has left."""

    def __init__(self, secret: PeerSecret, *, port: int, gone: Callable[[], object]) -> None:
        self._secret, self._port, self._gone = secret, port, gone
        self._users: dict[UserConnection, None] = {}

    def hello(self, nonce: str) -> dict[str, Any]:
        """What a user is told at first."""
        proof = prove_server(self._secret, nonce, str(self._port))
        return {"port": self._port, "pid": os.getpid(), "proof": proof}

    def enter(self, user: UserConnection) -> None:
        """Count a user."""
        self._users[user] = None

    def leave(self, user: UserConnection) -> None:
        """Count one less."""
        self._users.pop(user, None)
        if not self._users:
            self._gone()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._users)

    def log(self, level: int, text: str) -> None:
        """Have the longest user log something, by the rules of his process."""
        if user := next(iter(self._users), None):
            user.tell({"level": level, "log": text})


class LogToUsers(logging.Handler):
    """Sends what this process logs to a user of it."""

    def __init__(self, users: Users) -> None:
        super().__init__(logging.INFO)
        self._users = users

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record."""
        self._users.log(record.levelno, self.format(record)[:2000])


class ServerLine:
    """A user's end of the connection: port and pid of the server, and then what it says.

    Raises OSError where nobody serves, StalledError, ValueError (somebody else answers).
    """

    def __init__(self, folder: Folder, name: str, secret: PeerSecret) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._left = b""
        try:
            self._socket.settimeout(_HELLO_S)
            self._socket.connect(socket_path(folder, name))
            nonce = secrets.token_hex(16)
            self._socket.sendall(nonce.encode() + b"\n")
            hello = self.hear()
            if hello is None:
                raise ConnectionResetError("the server is ending")
            self.port, self.pid = int(hello["port"]), int(hello["pid"])
            if hello["proof"] != prove_server(secret, nonce, str(self.port)):
                raise ValueError("the server doesn't know the secret")
            self._socket.settimeout(None)
        except TimeoutError:
            self.close()
            raise StalledError(f"The server of the node's cache says nothing: {name}.") from None
        except (KeyError, TypeError) as error:
            self.close()
            raise ValueError("no server of ours answers") from error
        except BaseException:
            self.close()
            raise

    def hear(self) -> dict[str, Any] | None:
        """Wait for what the server says next; None when it is gone, or `end` was called."""
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
        told = json.loads(line)
        return told if isinstance(told, dict) else {}

    def end(self) -> None:
        """Let `hear` return, from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Be no user any more. Safe to call twice."""
        self._socket.close()
